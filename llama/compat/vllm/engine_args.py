"""vLLM's `EngineArgs`: vLLM's names of how to load a model become arguments of `Llama.build`.

An argument that is not supported is an error that names it, unless its value asks for nothing.
"""

import argparse
import contextlib
import json
import sys
import warnings
from dataclasses import Field, InitVar, dataclass, fields
from pathlib import Path
from typing import Any

from llama.api import QUANTIZED, Llama
from llama.build_args import BuildArgs
from llama.common.checks import FieldError, brief
from llama.compat.vllm.vllm_params import SamplingParams, refusing
from llama.storage.hub import model_folder

# Arguments that do not change an answer, whatever their value: what to log, how to schedule, what
# to compile.
_NO_EFFECT = frozenset(
    {
        "async_scheduling",
        "block_size",
        "disable_cascade_attn",
        "disable_custom_all_reduce",
        "disable_log_requests",
        "disable_log_stats",
        "enable_chunked_prefill",
        "enable_log_requests",
        "enable_lora",
        "enable_prefix_caching",
        "enforce_eager",
        "limit_mm_per_prompt",
        "lora_dtype",
        "max_context_len_to_capture",
        "max_cpu_loras",
        "max_lora_rank",
        "max_loras",
        "max_parallel_loading_workers",
        "max_seq_len_to_capture",
        "num_scheduler_steps",
        "served_model_name",
        "swap_space",
        "trust_remote_code",
        "use_tqdm_on_load",
        "use_v2_block_manager",
    }
)
# Arguments that are not supported, with the values that ask for nothing.
_ONLY: dict[str, tuple[Any, ...]] = {
    "config_format": ("auto",),
    "cpu_offload_gb": (0,),
    "data_parallel_size": (1,),
    "distributed_executor_backend": ("external_launcher",),
    "enable_prompt_embeds": (False,),
    "engine_use_ray": (False,),
    "load_format": ("auto",),
    "max_logprobs": (20,),
    "model_impl": ("auto",),
    "runner": ("auto", "generate", "pooling"),
    "scheduling_policy": ("fcfs",),
    "skip_tokenizer_init": (False,),
    "task": ("auto", "generate", "embed", "classify", "score", "reward"),
    "tokenizer_mode": ("auto",),
    "tokenizer_pool_size": (0,),
    "worker_use_ray": (False,),
}
# Parts of the names of those arguments that are switches on a command line.
_SWITCHES = ("async_", "disable_", "enable_", "enforce_", "skip_", "trust_", "use_")
_UTILIZATION = (
    "gpu_memory_utilization has no effect: the KV cache takes what max_num_seqs sequences of "
    "max_model_len tokens need, as far as memory is free; kv_cache_memory_bytes sets its size"
)
# The arguments of `Llama.build` for which vLLM has other names.
_BUILD_NAMES = {
    "model": "ckpt_dir",
    "tokenizer": "tokenizer_path",
    "max_model_len": "max_seq_len",
    "max_num_seqs": "max_batch_size",
    "tensor_parallel_size": "model_parallel_size",
    "quantization": "quantize",
    "distributed_timeout_seconds": "timeout_s",
    "num_speculative_tokens": "speculate_tokens",
}
_VLLM_NAMES = {build_name: name for name, build_name in _BUILD_NAMES.items()}
# The fields of a generation_config.json that are defaults of sampling parameters.
_DEFAULTS = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")
_NUM_SPECULATIVE_TOKENS = 7  # default


def _speculation(config: Any) -> dict[str, Any]:
    """Return the arguments of `Llama.build` for vLLM's speculative_config.

    Args:
        config: A dict, the same as JSON, or None.
    """
    if isinstance(config, str):
        with contextlib.suppress(ValueError):
            config = json.loads(config)
    if config is None:
        return {}
    given = config if isinstance(config, dict) else {}
    method = given.get("method")
    draft = given.get("model")
    if method in ("ngram", "suffix"):
        draft = "lookup"
    elif method not in (None, "draft_model") or not isinstance(draft, str):
        raise ValueError(
            f"speculative_config={brief(config)}: give the model that drafts, or the method "
            "'ngram' or 'suffix', which are both look-up here"
        )
    num_tokens = given.get("num_speculative_tokens", _NUM_SPECULATIVE_TOKENS)
    return {"speculate": draft, "speculate_tokens": num_tokens}


def _pooling(config: Any) -> dict[str, Any]:
    """Return the arguments of `Llama.build` for vLLM's pooler_config.

    Args:
        config: A dict, the same as JSON, or None. Only the pooling_type is honoured.
    """
    if isinstance(config, str):
        with contextlib.suppress(ValueError):
            config = json.loads(config)
    if config is None:
        return {}
    known = {"LAST": "last", "MEAN": "mean"}
    name = config.get("pooling_type") if isinstance(config, dict) else None
    if not isinstance(config, dict) or config.keys() != {"pooling_type"} or name not in known:
        raise ValueError(
            f"pooler_config={brief(config)}: give {{'pooling_type': 'LAST'}} or 'MEAN' alone"
        )
    return {"pooling": known[name]}


@refusing(_ONLY, _NO_EFFECT)
@dataclass
class EngineArgs:
    """The arguments of `Llama.build` under vLLM's names and with vLLM's defaults.

    Attributes:
        tokenizer: A tokenizer file, or a folder that has one.
        generation_config: "auto" takes the parameters of calls that give none from the model's
            generation_config.json, "vllm" does not.
        chat_template: A file, or "llama3" for Meta's format.
        pooler_config: {"pooling_type": "LAST"} or "MEAN"; by default the model's files say it.
        gpu_memory_utilization: Has no effect except a warning.
    """

    model: str
    tokenizer: str | None = None
    dtype: Any = "auto"
    seed: int | None = 0
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str = "auto"
    distributed_timeout_seconds: float | None = None
    device: str = "auto"
    generation_config: str = "auto"
    quantization: str | None = None
    speculative_config: Any = None
    chat_template: str | None = None
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    pooler_config: Any = None
    gpu_memory_utilization: InitVar[float | None] = None

    def __post_init__(self, gpu_memory_utilization: float | None) -> None:
        """Check the arguments that `Llama.build` does not know."""
        _speculation(self.speculative_config)
        _pooling(self.pooler_config)
        if gpu_memory_utilization is not None:
            warnings.warn(_UTILIZATION, stacklevel=3)
        if self.quantization not in (None, *QUANTIZED):
            known = ", ".join(QUANTIZED)
            given = brief(self.quantization)
            raise ValueError(f"quantization={given}: give one of {known}, or None")
        if self.generation_config not in ("auto", "vllm"):
            given = brief(self.generation_config)
            raise ValueError(f"generation_config={given} must be 'auto' or 'vllm'")

    def build(self) -> Llama:
        """Load the model.

        Raises:
            TypeError, ValueError, OSError: See `Llama.build`. The message has vLLM's name of an
                argument.
        """
        known = {argument.name for argument in fields(BuildArgs)}
        arguments: dict[str, Any] = {"seed": 0}
        for name, value in vars(self).items():
            build_name = _BUILD_NAMES.get(name, name)
            if build_name in known and value not in (None, "", "auto"):
                arguments[build_name] = value
        arguments["tokenizer_path"] = _tokenizer_file(self.tokenizer, self.model)
        try:
            more = _speculation(self.speculative_config) | _pooling(self.pooler_config)
            return Llama.build(**arguments, **more)
        except FieldError as e:
            raise e.at(_VLLM_NAMES.get(e.field, e.field)) from None

    def default_params(self) -> SamplingParams:
        """Return the parameters of calls that give none.

        As in vLLM, they are those of the model's generation_config.json.
        """
        path = model_folder(self.model) / "generation_config.json"
        if self.generation_config == "vllm" or not path.is_file():
            return SamplingParams()
        try:
            config = json.loads(path.read_bytes())
            given = {name: config[name] for name in _DEFAULTS if config.get(name) is not None}
            return SamplingParams(**given, max_tokens=config.get("max_new_tokens", 16))
        except (TypeError, ValueError) as error:
            remedy = "correct it, or give generation_config='vllm'"
            raise ValueError(f"{path}: {error}: {remedy}") from None

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """Add an option for each field, such as --max-model-len for max_model_len.

        Options that have no effect, or that may ask for nothing, are added too.
        """
        for field in fields(cls):
            parser.add_argument(
                _option(field.name),
                type=_option_type(field),
                required=field.name == "model",
                default=getattr(cls, field.name, None),
            )
        for name in sorted(_NO_EFFECT | _ONLY.keys()):
            if any(part in name for part in _SWITCHES):
                parser.add_argument(
                    _option(name),
                    default=argparse.SUPPRESS,
                    action=argparse.BooleanOptionalAction,
                )
            else:
                parser.add_argument(_option(name), default=argparse.SUPPRESS, type=_number_or_text)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        """Return the arguments that a parser with the options of `add_cli_args` has read."""
        names = {field.name for field in fields(cls)} | _NO_EFFECT | _ONLY.keys()
        return cls(**{name: value for name, value in vars(args).items() if name in names})


class FlexibleArgumentParser(argparse.ArgumentParser):
    """An argument parser to which --max-model-len and --max_model_len are the same option."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse arguments; see `argparse.ArgumentParser`."""
        options = {option.replace("_", "-"): option for option in self._option_string_actions}
        spelled = []
        for argument in sys.argv[1:] if args is None else args:
            name, equals, value = argument.partition("=")
            spelled.append(options.get(name.replace("_", "-"), name) + equals + value)
        return super().parse_known_args(spelled, namespace)


AsyncEngineArgs = EngineArgs  # the name that clients of AsyncLLMEngine import


def _option(name: str) -> str:
    return "--" + name.replace("_", "-")


def _option_type(field: Field[Any]) -> type:
    declared = str(field.type)
    if "int" in declared:
        return int
    return float if "float" in declared else str


def _number_or_text(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _tokenizer_file(tokenizer: str | None, model: str) -> str | None:
    """Return the tokenizer file of a folder. Clients name a folder; `Llama.build` takes the file.

    Returns:
        The file; `tokenizer` itself if it is no such folder; None for the model's own tokenizer.
    """
    if tokenizer is None or str(tokenizer) == str(model):
        return None
    for name in ("tokenizer.json", "tokenizer.model"):
        path = Path(tokenizer, name)
        if path.is_file():
            return str(path)
    return str(tokenizer)
