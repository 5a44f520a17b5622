"""vLLM's `SamplingParams` and `BeamSearchParams`, of version 0.4 to today.

In: a client's fields. Out: the parameters of `llama.requests`. A field that means nothing here is
an error that names it, unless the value given asks for nothing. It loads nothing and runs nothing.
"""

import copy
import enum
import functools
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, TypeVar

from llama.checks import brief
from llama.requests.beam_search import BeamParams
from llama.sampling_params import SamplingParams as LlamaParams
from llama.sampling_params import StructuredOutput

_Class = TypeVar("_Class", bound=type)

# With these values they ask for nothing; any other value would.
_ONLY_SAMPLING = {"flat_logprobs": (False,), "skip_clone": (False, True), "watermarking": (False,)}
_BEAM_FIELDS = frozenset({  # of SamplingParams: those that a beam search follows
    "n", "best_of", "temperature", "max_tokens", "stop_token_ids", "ignore_eos", "seed",
    "skip_special_tokens",
})  # fmt: skip
_UTILIZATION = (
    "gpu_memory_utilization has no effect: the KV cache takes what max_num_seqs sequences of "
    "max_model_len tokens need, as far as memory is free; kv_cache_memory_bytes sets its size"
)


def refuse(place: str, given: Mapping[str, Any], only: Mapping[str, tuple] = {}) -> None:
    """TypeError that names a field whose value asks for something; `only`: values that do not."""
    for name, value in given.items():
        if value is not None and not any(value is x or value == x for x in only.get(name, ())):
            allowed = " or ".join(map(repr, only.get(name, ()))) or "nothing"
            raise TypeError(
                f"{place} cannot do {name}={brief(value)}: leave it out (allowed: {allowed})"
            )


def refusing(
    only: Mapping[str, tuple], no_effect: frozenset[str] = frozenset()
) -> Callable[[_Class], _Class]:
    """A dataclass whose constructor refuses the fields that it does not have, by name."""

    def decorate(cls: _Class) -> _Class:
        plain_init = cls.__init__  # type: ignore[misc]
        known = {f.name for f in fields(cls)}

        @functools.wraps(plain_init)
        def init(self: Any, *args: Any, **given: Any) -> None:
            others = {name: given.pop(name) for name in list(given) if name not in known}
            asked = {name: value for name, value in others.items() if name not in no_effect}
            refuse(type(self).__name__, asked, only)
            if others.get("gpu_memory_utilization") is not None:
                warnings.warn(_UTILIZATION, stacklevel=2)
            plain_init(self, *args, **given)

        cls.__init__ = init  # type: ignore[misc]
        return cls

    return decorate


class RequestOutputKind(enum.Enum):
    """What an output holds: all so far, what is new, or nothing before the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@refusing(_ONLY_SAMPLING)
@dataclass(frozen=True, kw_only=True)
class SamplingParams(LlamaParams):
    """vLLM's parameters of a request; they may be changed until it is submitted.

    What `llama.SamplingParams` has means the same. Beyond it:

    structured_outputs: vLLM's name of structured_output.
    use_beam_search, length_penalty, early_stopping: of vLLM before 0.6.3. best_of is the number of
        beams and n of them are returned; temperature must be 0. See `BeamParams`.
    skip_special_tokens: the text has no special tokens. detokenize: False leaves the text empty.
    spaces_between_special_tokens: both values give the same text; Llama's tokens carry spaces.
    truncate_prompt_tokens: only the last so many tokens of the prompt; of a text, begin_of_text
        is kept as one of them.
    output_kind: what the outputs of LLMEngine and AsyncLLMEngine hold.
    """

    skip_special_tokens: bool = True
    structured_outputs: StructuredOutput | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    detokenize: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE

    def __post_init__(self) -> None:
        self._read_vllms_values()
        super().__post_init__()
        for name in ("use_beam_search", "detokenize", "spaces_between_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={brief(getattr(self, name))} must be True or False")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise TypeError(f"output_kind={brief(self.output_kind)} must be a RequestOutputKind")
        if self.stop and not self.detokenize:
            raise ValueError("stop needs detokenize=True: it is looked for in the text")
        if self.use_beam_search:
            self.beam_params()
        elif (self.length_penalty, self.early_stopping) != (1.0, False):
            raise ValueError("length_penalty and early_stopping need use_beam_search=True")

    def _read_vllms_values(self) -> None:
        """Where vLLM has another value, or name, for the same."""
        for name in ("stop", "stop_token_ids", "bad_words"):
            if getattr(self, name) is None:
                self._set(name, ())
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is True:
                self._set(name, 1)
        if self.seed == -1:
            self._set("seed", None)
        self._set("structured_output", self.structured_outputs)

    @staticmethod
    def from_optional(**given: Any) -> "SamplingParams":
        """The parameters, where None is vLLM's default; keys of logit_bias may be strings."""
        named = {k: v for k, v in given.items() if v is not None or k == "max_tokens"}
        if "logit_bias" in named:
            try:
                named["logit_bias"] = {
                    int(k): min(100.0, max(-100.0, v)) for k, v in named["logit_bias"].items()
                }
            except (TypeError, ValueError, AttributeError):
                raise ValueError(
                    f"logit_bias={brief(named['logit_bias'])} must map token ids to numbers"
                ) from None
        return SamplingParams(**named)

    def clone(self) -> "SamplingParams":
        return copy.deepcopy(self)

    def engine_params(self) -> LlamaParams:
        """What the engine takes, checked now. Of a beam search: what holds for the prompt."""
        self.__post_init__()  # it may have been changed
        values = {f.name: getattr(self, f.name) for f in fields(LlamaParams)}
        return LlamaParams(**values | ({"n": 1, "best_of": None} if self.use_beam_search else {}))

    def beam_params(self) -> BeamParams:
        """Of a beam search; ValueError names a field that it cannot follow."""
        width = self.n if self.best_of is None else self.best_of
        if width < 2:
            raise ValueError(
                f"use_beam_search needs best_of={brief(self.best_of)}, its number of beams, to be "
                f"at least 2 and at least n={brief(self.n)}"
            )
        if self.temperature != 0:
            raise ValueError(f"use_beam_search needs temperature=0, not {self.temperature}")
        default = LlamaParams()
        for f in fields(LlamaParams):
            value = getattr(self, f.name)
            if f.name == "top_k" and value == -1:  # all of them, as 0
                continue
            if f.name not in _BEAM_FIELDS and value != getattr(default, f.name):
                raise ValueError(f"use_beam_search cannot follow {f.name}={brief(value)}")
        return BeamParams(width, self.length_penalty, self.early_stopping)


# A subclass of what is frozen must be frozen too; clients of vLLM change theirs.
SamplingParams.__setattr__ = object.__setattr__  # type: ignore[method-assign]


@refusing({"temperature": (0, 0.0), "watermarking": (False,)})
@dataclass
class BeamSearchParams:
    """Of `LLM.beam_search`, as in vLLM from 0.6.3 on."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
