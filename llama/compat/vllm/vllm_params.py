"""vLLM's `SamplingParams` and `BeamSearchParams`: the fields of a client, checked.

A field that is not supported is an error that names it, unless its value asks for nothing.
"""

import copy
import enum
import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar

from pydantic import BeforeValidator

from llama.common.checks import brief
from llama.common.validation import checked_dataclass, with_message
from llama.sampling_params import AnswerFormat, LogprobCount, Seed, StructuredOutput, Switch
from llama.sampling_params import SamplingParams as LlamaParams

_Class = TypeVar("_Class", bound=type)
_Allowed = Mapping[str, tuple[Any, ...]]  # argument -> values that ask for nothing

_ALLOWED_IN_SAMPLING: _Allowed = {
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "flat_logprobs": (False,),
    "skip_clone": (False, True),
    "watermarking": (False,),
}
_ALLOWED_IN_BEAM_SEARCH: _Allowed = {
    "temperature": (0,),
    "include_stop_str_in_output": (False,),
    "watermarking": (False,),
}


def refuse(caller: str, arguments: Mapping[str, Any], allowed: _Allowed | None = None) -> None:
    """Refuse arguments that are not supported.

    Args:
        caller: What was called, for the message.
        arguments: The arguments. None asks for nothing.
        allowed: Other values that ask for nothing.

    Raises:
        TypeError: An argument asks for something; the message names it.
    """
    for name, value in arguments.items():
        values = (allowed or {}).get(name, ())
        if value is None or any(value is x or value == x for x in values):
            continue
        choices = " or ".join(map(repr, values)) or "nothing"
        raise TypeError(
            f"{caller} does not support {name}={brief(value)}: leave it out (allowed: {choices})"
        )


def refusing(
    allowed: _Allowed, no_effect: frozenset[str] = frozenset()
) -> Callable[[_Class], _Class]:
    """Decorate a class so that its constructor refuses unknown arguments by name.

    Args:
        allowed: The values with which an unknown argument asks for nothing.
        no_effect: Unknown arguments that are accepted with any value.
    """

    def decorate(cls: _Class) -> _Class:
        plain_init = cls.__init__  # type: ignore[misc]
        known = inspect.signature(cls).parameters

        @functools.wraps(plain_init)
        def init(self: Any, *args: Any, **given: Any) -> None:
            supported = {name: value for name, value in given.items() if name in known}
            others = {name: given[name] for name in given.keys() - known.keys() - no_effect}
            refuse(type(self).__name__, others, allowed)
            plain_init(self, *args, **supported)

        cls.__init__ = init  # type: ignore[misc]
        return cls

    return decorate


class RequestOutputKind(enum.Enum):
    """The content of an output: everything so far, what is new, or nothing before the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


_LogprobCount = Annotated[LogprobCount, BeforeValidator(lambda x: 1 if x is True else x)]
_Seed = Annotated[Seed, BeforeValidator(lambda x: None if x == -1 else x)]


@checked_dataclass
class _CheckedParams(LlamaParams):
    """The fields of `SamplingParams`, which are checked when an object is made."""

    logprobs: _LogprobCount = None
    prompt_logprobs: _LogprobCount = None
    seed: _Seed = None
    skip_special_tokens: Switch = True
    structured_outputs: AnswerFormat = None  # vLLM's name of structured_output
    structured_output: StructuredOutput | None = field(init=False, default=None)
    detokenize: Switch = True
    spaces_between_special_tokens: Switch = True
    output_kind: Annotated[
        RequestOutputKind, with_message("={value} must be a RequestOutputKind")
    ] = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        """Check the fields that depend on one another."""
        object.__setattr__(self, "structured_output", self.structured_outputs)
        super().__post_init__()
        if self.stop and not self.detokenize:
            raise ValueError("stop needs detokenize=True, because it is looked for in the text")


@refusing(_ALLOWED_IN_SAMPLING)
class SamplingParams(_CheckedParams):
    """vLLM's parameters of a request. Fields of `llama.SamplingParams` have the same meaning.

    Unlike those, they may be changed until the request is submitted, which checks them again.

    Attributes:
        detokenize: False leaves the text empty.
        spaces_between_special_tokens: Has no effect, because Llama's tokens contain their spaces.
        output_kind: The content of each output.
    """

    def __setattr__(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # The checked fields are those of a frozen class.

    def clone(self) -> "SamplingParams":
        """Return a deep copy."""
        return copy.deepcopy(self)


@refusing(_ALLOWED_IN_BEAM_SEARCH)
@dataclass
class BeamSearchParams:
    """The parameters of `LLM.beam_search`, as in vLLM from 0.6.3 on."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    skip_special_tokens: bool = True
