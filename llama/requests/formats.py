"""The formats of answers, as data, and the constraints that enforce them.

In: the format of the content and the rule of the reasoning before it. Out: a `Constraint` for each
sequence. The format can be sent to another process, and a constraint cannot.
"""

import json
from dataclasses import asdict, dataclass
from typing import Protocol

import numpy as np

from llama.engine.request import Constraint
from llama.requests.grammar import GrammarCompiler
from llama.requests.thinking import ReasoningConstraint
from llama.sampling_params import ReasoningRule, StructuredOutput
from llama.tokenizer import Tokenizer


@dataclass(frozen=True)
class AnswerFormat:
    """The format of an answer, of which its constraint is made; one of the first two is given.

    Attributes:
        output: The format of the content.
        rule: The marks and the budget of the reasoning before it.
        is_open: Whether the prompt ends with the start mark of the reasoning.
    """

    output: StructuredOutput | None = None
    rule: ReasoningRule | None = None
    is_open: bool = False

    def to_json(self) -> str:
        """Return the format as JSON in ASCII, which lone surrogates are no exception to."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "AnswerFormat":
        """Return the format that `to_json` wrote."""
        fields = json.loads(text)
        output, rule = fields["output"], fields["rule"]
        return cls(
            None if output is None else StructuredOutput(**output),
            None if rule is None else ReasoningRule(**rule),
            fields["is_open"],
        )


class ConstraintMaker(Protocol):
    """Makes the constraints of answers."""

    def constraint(self, answer_format: AnswerFormat, root: bytes) -> Constraint:
        """Return the constraint of one answer at its beginning.

        Args:
            answer_format: The format.
            root: The root of the prefix hashes; see `GrammarCompiler.matcher`.

        Raises:
            FieldError: The format cannot be compiled.
        """


class FormatCompiler:
    """Makes constraints in this process, for any thread."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.grammars = GrammarCompiler(tokenizer)
        self._tokenizer = tokenizer

    def constraint(self, answer_format: AnswerFormat, root: bytes) -> Constraint:
        """Return the constraint of one answer; see `ConstraintMaker`."""
        content: Constraint | None = None
        if answer_format.output is not None:
            content = self.grammars.matcher(answer_format.output, root)
        if answer_format.rule is None:
            assert content is not None
            return content
        return ReasoningConstraint(
            answer_format.rule,
            self._tokenizer.stop_tokens,
            content,
            is_open=answer_format.is_open,
        )


@dataclass(eq=False)
class RemoteConstraint:
    """The constraint of a sequence that another process computes.

    Attributes:
        answer_format: What that process makes its constraint of.
        failure: Why it can be followed no longer.
    """

    answer_format: AnswerFormat
    failure: str | None = None

    def fill_allowed(
        self, tokens: list[int], first: int, drafts: list[int], bits: np.ndarray
    ) -> None:
        """Raise an error: no step of this process has the sequence."""
        raise NotImplementedError("the process of the engine computes masks")

    def draft(self, output: list[int], draft: list[int]) -> tuple[list[int], bool]:
        """Raise an error: no step of this process has the sequence."""
        raise NotImplementedError("the process of the engine computes drafts")


class RemoteFormats:
    """Makes constraints that the process of the engine enforces."""

    def constraint(self, answer_format: AnswerFormat, root: bytes) -> Constraint:
        """Return what stands for the constraint; the other process compiles the format."""
        return RemoteConstraint(answer_format)
