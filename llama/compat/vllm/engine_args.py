"""vLLM's `EngineArgs`: vLLM's names of how to load a model in, the arguments of `Llama.build` out.

An argument that means nothing here is an error that names it, unless its value asks for nothing.
"""

import argparse
import contextlib
import json
import sys
import warnings
from dataclasses import InitVar, dataclass, fields
from pathlib import Path
from typing import Any

from llama.build_args import BuildArgs
from llama.checkpoint.downloads import model_folder
from llama.checks import FieldError, brief
from llama.compat.vllm.vllm_params import SamplingParams, refusing
from llama.generation import Llama
from llama.weights import QUANTIZED

# Any value of these leaves the answers as they are: what to log, how to schedule, what to compile.
_NO_EFFECT = frozenset({
    "async_scheduling", "block_size", "disable_cascade_attn", "disable_custom_all_reduce",
    "disable_log_requests", "disable_log_stats", "enable_chunked_prefill", "enable_log_requests",
    "enable_prefix_caching", "enforce_eager", "max_context_len_to_capture",
    "max_num_batched_tokens", "max_parallel_loading_workers", "max_seq_len_to_capture",
    "num_scheduler_steps", "served_model_name", "swap_space",
    "trust_remote_code", "use_tqdm_on_load", "use_v2_block_manager",
})  # fmt: skip
# With these values they ask for nothing; any other value would.
_ONLY = {
    "config_format": ("auto",), "cpu_offload_gb": (0,), "data_parallel_size": (1,),
    "distributed_executor_backend": ("external_launcher",), "enable_lora": (False,),
    "enable_prompt_embeds": (False,), "engine_use_ray": (False,),
    "load_format": ("auto",), "max_logprobs": (20,), "model_impl": ("auto",),
    "pipeline_parallel_size": (1,), "runner": ("auto", "generate"), "scheduling_policy": ("fcfs",),
    "skip_tokenizer_init": (False,), "task": ("auto", "generate"), "tokenizer_mode": ("auto",),
    "tokenizer_pool_size": (0,), "worker_use_ray": (False,),
}  # fmt: skip


_SWITCHES = "async_", "disable_", "enable_", "enforce_", "skip_", "trust_", "use_"
_UTILIZATION = (
    "gpu_memory_utilization has no effect: the KV cache takes what max_num_seqs sequences of "
    "max_model_len tokens need, as far as memory is free; kv_cache_memory_bytes sets its size"
)
_OURS = {  # the arguments of `Llama.build` that vLLM has other names for
    "model": "ckpt_dir", "tokenizer": "tokenizer_path", "max_model_len": "max_seq_len",
    "max_num_seqs": "max_batch_size", "tensor_parallel_size": "model_parallel_size",
    "quantization": "quantize", "distributed_timeout_seconds": "timeout_s",
    "num_speculative_tokens": "speculate_tokens",
}  # fmt: skip
_DEFAULTS = ("repetition_penalty", "temperature", "top_k", "top_p", "min_p")  # of a model


def _speculate(config: Any) -> dict[str, Any]:
    """From vLLM's speculative_config, as a dict or as JSON, to arguments of `Llama.build`."""
    if isinstance(config, str):
        with contextlib.suppress(ValueError):
            config = json.loads(config)
    if config is None:
        return {}
    given = config if isinstance(config, dict) else {}
    method, draft = given.get("method"), given.get("model")
    if method in ("ngram", "suffix"):
        draft = "lookup"
    elif method not in (None, "draft_model") or not isinstance(draft, str):
        words = "give the model that drafts, or the method 'ngram' or 'suffix', which are look-up"
        raise ValueError(f"speculative_config={brief(config)}: {words}")
    return {"speculate": draft, "speculate_tokens": given.get("num_speculative_tokens", 7)}


@refusing(_ONLY, _NO_EFFECT)
@dataclass
class EngineArgs:
    """The arguments of `Llama.build` by vLLM's names and defaults. The tokenizer may be a folder
    that has one. generation_config: "auto" takes the defaults of calls without sampling parameters
    from the model's generation_config.json, "vllm" does not."""

    model: str
    tokenizer: str | None = None
    dtype: Any = "auto"
    seed: int | None = 0
    max_model_len: int | None = None
    tensor_parallel_size: int = 1
    max_num_seqs: int | None = None
    kv_cache_memory_bytes: int | None = None
    kv_cache_dtype: str = "auto"
    distributed_timeout_seconds: float | None = None
    device: str = "auto"
    generation_config: str = "auto"
    quantization: str | None = None
    speculative_config: Any = None
    gpu_memory_utilization: InitVar[float | None] = None

    def __post_init__(self, gpu_memory_utilization: float | None) -> None:
        _speculate(self.speculative_config)
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
        """The model, loaded by `Llama.build`, whose errors these are."""
        named = {_OURS.get(name, name): value for name, value in vars(self).items()}
        names = {each.name for each in fields(BuildArgs)}
        given = {k: x for k, x in named.items() if k in names and x not in (None, "auto")}
        asked: dict[str, Any] = {
            "seed": 0, **given, "tokenizer_path": _tokenizer_file(self.tokenizer, self.model),
        }  # fmt: skip
        try:
            return Llama.build(**asked, **_speculate(self.speculative_config))
        except FieldError as e:
            theirs = {ours: name for name, ours in _OURS.items()}
            raise e.at(theirs.get(e.field, e.field)) from None

    def default_params(self) -> SamplingParams:
        """For calls that give none: what the model's generation_config.json says, as in vLLM."""
        path = model_folder(self.model) / "generation_config.json"
        if self.generation_config == "vllm" or not path.is_file():
            return SamplingParams()
        try:
            said = json.loads(path.read_bytes())
            named = {name: said[name] for name in _DEFAULTS if said.get(name) is not None}
            return SamplingParams(**named, max_tokens=said.get("max_new_tokens", 16))
        except (TypeError, ValueError) as error:
            remedy = "mend it, or give generation_config='vllm'"
            raise ValueError(f"{path}: {error}: {remedy}") from None

    @classmethod
    def add_cli_args(cls, parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        """An option for each field: --max-model-len for max_model_len. Those that ask for nothing
        are taken too, as --enforce-eager."""
        for f in fields(cls):
            flag, default = "--" + f.name.replace("_", "-"), getattr(cls, f.name, None)
            kind = int if "int" in str(f.type) else float if "float" in str(f.type) else str
            parser.add_argument(flag, type=kind, required=f.name == "model", default=default)
        for name in sorted(_NO_EFFECT | _ONLY.keys()):
            is_switch = any(part in name for part in _SWITCHES)
            how: Any = {"type": _number_or_text}
            how = {"action": argparse.BooleanOptionalAction} if is_switch else how
            parser.add_argument("--" + name.replace("_", "-"), default=argparse.SUPPRESS, **how)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> "EngineArgs":
        names = {f.name for f in fields(cls)} | _NO_EFFECT | _ONLY.keys()
        return cls(**{name: value for name, value in vars(args).items() if name in names})


class FlexibleArgumentParser(argparse.ArgumentParser):
    """argparse's, to which --max-model-len and --max_model_len are the same option."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        known = {option.replace("_", "-"): option for option in self._option_string_actions}
        words = [word.partition("=") for word in (sys.argv[1:] if args is None else args)]
        spelled = [known.get(x.replace("_", "-"), x) + "".join(rest) for x, *rest in words]
        return super().parse_known_args(spelled, namespace)


AsyncEngineArgs = EngineArgs  # under the name that clients of AsyncLLMEngine import


def _number_or_text(text: str) -> int | str:
    return int(text) if text.isdecimal() else text


def _tokenizer_file(tokenizer: str | None, model: str) -> str | None:
    """Hosts name a folder; `Llama.build` takes the file."""
    if tokenizer is None or str(tokenizer) == str(model):
        return None
    files = [Path(tokenizer, name) for name in ("tokenizer.model", "tokenizer.json")]
    return str(next(filter(Path.is_file, files), tokenizer))
