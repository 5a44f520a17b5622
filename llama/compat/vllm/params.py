"""What a client of vLLM configures: `EngineArgs`, `SamplingParams`, `BeamSearchParams`.

In: vLLM's names, of version 0.4 to today. Out: the arguments of `Llama.build`, and the parameters
of `llama.requests`. A field that means nothing here is an error that names it, unless the value
given asks for nothing. It loads nothing and runs nothing.
"""

import argparse
import copy
import enum
import functools
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

from llama.checks import brief
from llama.generation import Llama
from llama.requests.beam_search import BeamParams
from llama.sampling_params import SamplingParams as LlamaParams
from llama.structured_output import StructuredOutput

_Class = TypeVar("_Class", bound=type)

# Any value of these leaves the answers as they are: what to log, how to schedule, what to compile.
_NO_EFFECT = frozenset({
    "async_scheduling", "block_size", "disable_cascade_attn", "disable_custom_all_reduce",
    "disable_log_requests", "disable_log_stats", "enable_chunked_prefill", "enable_log_requests",
    "enable_prefix_caching", "enforce_eager", "gpu_memory_utilization",
    "max_context_len_to_capture", "max_num_batched_tokens", "max_parallel_loading_workers",
    "max_seq_len_to_capture", "num_scheduler_steps", "served_model_name", "swap_space",
    "trust_remote_code", "use_tqdm_on_load", "use_v2_block_manager",
})  # fmt: skip
# With these values they ask for nothing; any other value would.
_ONLY = {
    "config_format": ("auto",), "cpu_offload_gb": (0,), "data_parallel_size": (1,),
    "distributed_executor_backend": ("external_launcher",), "enable_lora": (False,),
    "enable_prompt_embeds": (False,), "engine_use_ray": (False,), "kv_cache_dtype": ("auto",),
    "load_format": ("auto",), "max_logprobs": (20,), "model_impl": ("auto",),
    "pipeline_parallel_size": (1,), "runner": ("auto", "generate"), "scheduling_policy": ("fcfs",),
    "skip_tokenizer_init": (False,), "task": ("auto", "generate"), "tokenizer_mode": ("auto",),
    "tokenizer_pool_size": (0,), "worker_use_ray": (False,),
}  # fmt: skip
# Of SamplingParams
_ONLY_SAMPLING = {"flat_logprobs": (False,), "skip_clone": (False, True), "watermarking": (False,)}


LABELS = frozenset({"usage_context", "stat_loggers", "start_engine_loop"})  # of from_engine_args


def refuse(place: str, given: Mapping[str, Any], only: Mapping[str, tuple] = {}) -> None:
    """TypeError that names a field whose value asks for something; `only`: values that do not."""
    for name, value in given.items():
        if value is not None and not any(value is x or value == x for x in only.get(name, ())):
            allowed = " or ".join(map(repr, only.get(name, ()))) or "nothing"
            raise TypeError(
                f"{place} cannot do {name}={brief(value)}: leave it out (allowed: {allowed})"
            )


def _refusing(
    only: Mapping[str, tuple], no_effect: frozenset[str] = frozenset()
) -> Callable[[_Class], _Class]:
    """A dataclass whose constructor refuses the fields that it does not have, by name."""

    def decorate(cls: _Class) -> _Class:
        plain_init = cls.__init__  # type: ignore[misc]
        known = {f.name for f in fields(cls)}

        @functools.wraps(plain_init)
        def init(self: Any, *args: Any, **given: Any) -> None:
            others = {k: v for k, v in given.items() if k not in known}
            refuse(
                type(self).__name__, {k: v for k, v in others.items() if k not in no_effect}, only
            )
            if others.get("gpu_memory_utilization") is not None:
                warnings.warn(
                    "gpu_memory_utilization has no effect: the KV cache takes what max_num_seqs "
                    "sequences of max_model_len tokens need, as far as memory is free; "
                    "kv_cache_memory_bytes sets its size",
                    stacklevel=2,
                )
            plain_init(self, *args, **{k: v for k, v in given.items() if k in known})

        cls.__init__ = init  # type: ignore[misc]
        return cls

    return decorate


@_refusing(_ONLY, _NO_EFFECT)
@dataclass
class EngineArgs:
    """How to load a model; names and defaults of vLLM.

    model: the folder of the weights. tokenizer: a tokenizer file, or a folder that has one; by
    default the model's. dtype: "auto" is bf16 where the device has it. seed: of requests that give
    none. max_model_len: the most tokens of prompt and answer. tensor_parallel_size: ranks that
    share the model; more than one are started with torchrun. max_num_seqs: sequences that run at
    once. device: "auto", "cuda", "mps" or "cpu". generation_config: "auto" takes the defaults of
    calls without sampling parameters from the model's generation_config.json, "vllm" does not.
    """

    model: str
    tokenizer: str | None = None
    dtype: Any = "auto"
    seed: int | None = 0
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    max_num_seqs: int | None = None
    kv_cache_memory_bytes: int | None = None
    distributed_timeout_seconds: float | None = None
    device: str = "auto"
    generation_config: str = "auto"
    quantization: str | None = None

    def __post_init__(self) -> None:
        if self.generation_config not in ("auto", "vllm"):
            raise ValueError(
                f"generation_config={brief(self.generation_config)} must be 'auto' or 'vllm'"
            )

    def build(self) -> Llama:
        """The model, loaded by `Llama.build`, whose errors these are."""
        seconds = self.distributed_timeout_seconds
        limits: dict[str, Any] = {} if seconds is None else {"timeout_s": seconds}
        return Llama.build(
            self.model,
            _tokenizer_file(self.tokenizer, self.model),
            self.max_model_len,
            self.max_num_seqs,
            self.tensor_parallel_size,
            0 if self.seed is None else self.seed,
            device=None if self.device == "auto" else self.device,
            dtype=self.dtype,
            quantize=self.quantization,
            kv_cache_memory_bytes=self.kv_cache_memory_bytes,
            **limits,
        )

    def default_params(self) -> "SamplingParams":
        """For calls that give none: what the model's generation_config.json says, as in vLLM."""
        path = Path(self.model) / "generation_config.json"
        if self.generation_config == "vllm" or not path.is_file():
            return SamplingParams()
        try:
            said = json.loads(path.read_bytes())
            named = {name: said[name] for name in _GENERATION_CONFIG if name in said}
            return SamplingParams.from_optional(
                **named,
                **({"max_tokens": said["max_new_tokens"]} if "max_new_tokens" in said else {}),
            )
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"{path}: {error}: mend it, or give generation_config='vllm'"
            ) from None

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """An option for each field: --max-model-len for max_model_len."""
        for f in fields(cls):
            kind = int if "int" in str(f.type) else float if "float" in str(f.type) else str
            flag = "--" + f.name.replace("_", "-")
            parser.add_argument(
                flag,
                type=kind,
                required=f.default is MISSING,
                default=None if f.default is MISSING else f.default,
            )
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        return cls(**{f.name: getattr(args, f.name) for f in fields(cls) if hasattr(args, f.name)})


class AsyncEngineArgs(EngineArgs):
    """`EngineArgs` under the name that clients of AsyncLLMEngine import."""


_GENERATION_CONFIG = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")


def _tokenizer_file(tokenizer: str | None, model: str) -> str | None:
    """Hosts name a folder; `Llama.build` takes the file."""
    if tokenizer is None or str(tokenizer) == str(model):
        return None
    for name in ("tokenizer.model", "tokenizer.json"):
        if (Path(tokenizer) / name).is_file():
            return str(Path(tokenizer) / name)
    return tokenizer


class RequestOutputKind(enum.Enum):
    """What an output holds: all so far, what is new, or nothing before the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@_refusing(_ONLY_SAMPLING)
@dataclass(kw_only=True)
class SamplingParams:
    """vLLM's parameters of a request; they may be changed until it is submitted.

    What `llama.SamplingParams` has means the same. Beyond it:

    use_beam_search, length_penalty, early_stopping: of vLLM before 0.6.3. best_of is the number of
        beams and n of them are returned; temperature must be 0. See `BeamParams`.
    skip_special_tokens: the text has no special tokens. detokenize: False leaves the text empty.
    spaces_between_special_tokens: both values give the same text; Llama's tokens carry spaces.
    truncate_prompt_tokens: only the last so many tokens of the prompt; of a text, begin_of_text
        is kept as one of them.
    output_kind: what the outputs of LLMEngine and AsyncLLMEngine hold.
    """

    n: int = 1
    best_of: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    use_beam_search: bool = False
    length_penalty: float = 1.0
    early_stopping: bool | str = False
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    bad_words: Sequence[str] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    logit_bias: Mapping[int, float] | None = None
    structured_outputs: StructuredOutput | None = None

    def __post_init__(self) -> None:
        self.engine_params()  # an error comes here, and not later
        if self.use_beam_search:
            self.beam_params()

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
        """What the engine takes, checked. Of a beam search: what holds for the prompt."""
        for name in ("use_beam_search", "detokenize", "spaces_between_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name}={brief(getattr(self, name))} must be True or False")
        if not isinstance(self.output_kind, RequestOutputKind):
            raise TypeError(f"output_kind={brief(self.output_kind)} must be a RequestOutputKind")
        if self.stop and not self.detokenize:
            raise ValueError("stop needs detokenize=True: it is looked for in the text")
        if not self.use_beam_search and (self.length_penalty, self.early_stopping) != (1.0, False):
            raise ValueError("length_penalty and early_stopping need use_beam_search=True")
        values = {f.name: getattr(self, f.name) for f in fields(LlamaParams) if f.name != _FORM}
        values[_FORM] = self.structured_outputs
        for name in ("stop", "stop_token_ids", "bad_words"):
            values[name] = () if values[name] is None else values[name]
        for name in ("logprobs", "prompt_logprobs"):
            values[name] = 1 if values[name] is True else values[name]
        values["seed"] = None if self.seed == -1 else self.seed
        if self.use_beam_search:
            values |= {"n": 1, "best_of": None}
        return LlamaParams(**values)

    def beam_params(self) -> BeamParams:
        """Of a beam search; ValueError names a field that it cannot follow."""
        width = self.n if self.best_of is None else self.best_of
        if not (isinstance(width, int) and 1 <= self.n <= width and width > 1):
            raise ValueError(
                f"use_beam_search needs best_of={brief(self.best_of)}, its number of beams, to be "
                f"at least 2 and at least n={brief(self.n)}"
            )
        if self.temperature != 0:
            raise ValueError(f"use_beam_search needs temperature=0, not {self.temperature}")
        default, given = LlamaParams(), self.engine_params()
        for f in fields(LlamaParams):
            value = getattr(given, f.name)
            if f.name == "top_k" and value == -1:  # all of them, as 0
                continue
            if f.name not in _BEAM_FIELDS and value != getattr(default, f.name):
                raise ValueError(f"use_beam_search cannot follow {f.name}={brief(value)}")
        return BeamParams(width, self.length_penalty, self.early_stopping)


_FORM = "structured_output"  # vLLM's name has an s more
_BEAM_FIELDS = frozenset({
    "temperature", "max_tokens", "stop_token_ids", "ignore_eos", "seed", "skip_special_tokens",
})  # fmt: skip


@_refusing({"temperature": (0, 0.0), "watermarking": (False,)})
@dataclass
class BeamSearchParams:
    """Of `LLM.beam_search`, as in vLLM from 0.6.3 on."""

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    length_penalty: float = 1.0
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
