"""The marks of a model's reasoning: where its answers think aloud before they say something.

In: a tokenizer, the text of a chat template, and the name that a user gives. Out: the marks, as
tokens or as plain text, and the rule of `SamplingParams` that follows from them.
"""

from dataclasses import dataclass

from llama.common.checks import FieldError, brief
from llama.sampling_params import ReasoningRule
from llama.tokenizer import Tokenizer

PARSERS = ("auto", "deepseek_r1", "none")  # vLLM's names of the notations of reasoning
# Names of the field of a message that has the reasoning. An answer has one of them, because clients
# that read both would show the text twice. vLLM has the second one.
REASONING_FIELDS = ("reasoning_content", "reasoning")
_START = "<think>"
_END = "</think>"


@dataclass(frozen=True)
class ReasoningMarks:
    """The texts or tokens that a model writes before and after its reasoning.

    Attributes:
        start: the text of the mark that begins the reasoning.
        end: the text of the mark that ends it.
        start_id: the token of the start mark; None where both marks are plain text.
        end_id: the token of the end mark; None where both marks are plain text.
    """

    start: str = _START
    end: str = _END
    start_id: int | None = None
    end_id: int | None = None

    def describe(self) -> str:
        """Return a part of a line for people that says where the reasoning is."""
        kind = "plain text" if self.end_id is None else "tokens"
        return f"reasoning between {self.start} and {self.end} ({kind})"

    def rule(self, budget: int | None) -> ReasoningRule:
        """Return the rule of an answer whose reasoning has at most `budget` tokens.

        Raises:
            FieldError: the marks are plain text, which a budget cannot enforce.
        """
        if self.end_id is not None:
            return ReasoningRule(start_id=self.start_id, end_id=self.end_id, budget=budget)
        if budget is not None:
            text = f": this model writes {self.end} as plain text, so its reasoning has no budget"
            raise FieldError.of("thinking_token_budget", f"{text}: leave it out")
        return ReasoningRule(start_text=self.start, end_text=self.end)


def find_marks(
    tokenizer: Tokenizer, template: str | None = None, parser: str = "auto"
) -> ReasoningMarks | None:
    """Return the marks of a model's reasoning, or None for a model that does not reason.

    Args:
        tokenizer: the tokenizer of the model. Marks that are tokens of it are found by these.
        template: the text of its chat template. Marks that are plain text are found where it names
            the end mark, as templates do that remove reasoning from earlier turns.
        parser: "auto"; "deepseek_r1" if the model writes <think> and </think> in any case; or
            "none" if the text of an answer is left as the model writes it.

    Raises:
        FieldError: the name of the parser is unknown.
    """
    if parser not in PARSERS:
        text = f"={brief(parser)} must be one of {', '.join(PARSERS)}"
        raise FieldError.of("reasoning_parser", text)
    if parser == "none":
        return None
    start_id = tokenizer.special_tokens.get(_START)
    end_id = tokenizer.special_tokens.get(_END)
    if start_id is not None and end_id is not None:
        return ReasoningMarks(start_id=start_id, end_id=end_id)
    if parser == "deepseek_r1" or (template is not None and _END in template):
        return ReasoningMarks()
    return None


def effort_options(effort: str | None) -> dict[str, bool | str]:
    """Return the fields of `PromptOptions` that the effort of a request stands for."""
    if effort is None:
        return {}
    return {"enable_thinking": False} if effort == "none" else {"reasoning_effort": effort}
