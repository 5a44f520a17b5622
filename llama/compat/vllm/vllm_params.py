"""vLLM's `SamplingParams` and `BeamSearchParams`: a client's fields in, checked parameters out.

A field that means nothing here is an error that names it, unless its value asks for nothing.
"""

import copy
import enum
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator

from llama.checks import brief
from llama.sampling_params import AnswerFormat, LogprobCount, Seed, StructuredOutput, Switch
from llama.sampling_params import SamplingParams as LlamaParams
from llama.validation import checked_dataclass, with_message

_Class = TypeVar("_Class", bound=type)

# With these values they ask for nothing; any other value would.
_ONLY_SAMPLING = {
    "use_beam_search": (False,), "length_penalty": (1,), "early_stopping": (False,),
    "flat_logprobs": (False,), "skip_clone": (False, True), "watermarking": (False,),
}  # fmt: skip


def refuse(place: str, given: Mapping[str, Any], only: Mapping[str, tuple[Any, ...]] = {}) -> None:
    """TypeError that names a field whose value asks for something; `only`: values that do not."""
    for name, value in given.items():
        if value is not None and not any(value is x or value == x for x in only.get(name, ())):
            allowed = " or ".join(map(repr, only.get(name, ()))) or "nothing"
            words = f"leave it out (allowed: {allowed})"
            raise TypeError(f"{place} cannot do {name}={brief(value)}: {words}")


def refusing(
    only: Mapping[str, tuple[Any, ...]], no_effect: frozenset[str] = frozenset()
) -> Callable[[_Class], _Class]:
    """A dataclass whose constructor refuses the fields that it does not have, by name."""

    def decorate(cls: _Class) -> _Class:
        plain_init = cls.__init__  # type: ignore[misc]
        known = inspect.signature(cls).parameters

        @functools.wraps(plain_init)
        def init(self: Any, *args: Any, **given: Any) -> None:
            own = {name: value for name, value in given.items() if name in known}
            others = {name: given[name] for name in given.keys() - known.keys() - no_effect}
            refuse(type(self).__name__, others, only)
            plain_init(self, *args, **own)

        cls.__init__ = init  # type: ignore[misc]
        return cls

    return decorate


class RequestOutputKind(enum.Enum):
    """What an output holds: all so far, what is new, or nothing before the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


_LogprobCount = Annotated[LogprobCount, BeforeValidator(lambda x: 1 if x is True else x)]
_Seed = Annotated[Seed, BeforeValidator(lambda x: None if x == -1 else x)]


@refusing(_ONLY_SAMPLING)
@checked_dataclass
class SamplingParams(LlamaParams):
    """vLLM's parameters of a request; they may be changed until it is submitted. What
    `llama.SamplingParams` has means the same."""

    logprobs: _LogprobCount = None
    prompt_logprobs: _LogprobCount = None
    seed: _Seed = None
    skip_special_tokens: Switch = True
    structured_outputs: AnswerFormat = None  # vLLM's name of the next
    structured_output: StructuredOutput | None = field(init=False, default=None)
    detokenize: Switch = True  # False leaves the text empty
    spaces_between_special_tokens: Switch = True  # without effect: Llama's tokens carry spaces
    output_kind: Annotated[
        RequestOutputKind, with_message("={value} must be a RequestOutputKind")
    ] = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        object.__setattr__(self, "structured_output", self.structured_outputs)
        super().__post_init__()
        if self.stop and not self.detokenize:
            raise ValueError("stop needs detokenize=True: it is looked for in the text")

    def clone(self) -> "SamplingParams":
        return copy.deepcopy(self)


# A subclass of what is frozen must be frozen too; clients of vLLM change theirs.
SamplingParams.__setattr__ = object.__setattr__  # type: ignore[method-assign]


@refusing({"temperature": (0,), "include_stop_str_in_output": (False,), "watermarking": (False,)})
@dataclass
class BeamSearchParams:
    """Of `LLM.beam_search`, as in vLLM from 0.6.3 on."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    skip_special_tokens: bool = True
