"""vLLM behind the benchmark's `Engine`: its LLMEngine in this process, one step at a time.

In: a job with "hf", a folder with safetensors and config.json, then prompts as ids. Out: ids. As is
its default, it compiles when it starts, and keeps that in ~/.cache/vllm. Prefix caching is off.
"""

import itertools
import json
from pathlib import Path
from typing import Any

_BLOCK = 128  # slots: vLLM's default on a CPU; its pages are not larger elsewhere


def vllm_environment(venv: Path) -> dict[str, str]:
    """Return the variables that must be set before vLLM's process begins.

    They turn off the network and the separate engine process, and preload the two libraries that
    vLLM's documentation recommends on a CPU, where the environment has them.
    """
    wanted = ("libtcmalloc_minimal.so*", "libiomp5.so")
    found = (sorted((venv / "lib").glob(name))[:1] for name in wanted)
    preloaded = ":".join(str(path) for paths in found for path in paths)
    return {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
    } | ({"LD_PRELOAD": preloaded} if preloaded else {})


class Vllm:
    def __init__(self, job: dict[str, Any]) -> None:
        from vllm import EngineArgs, LLMEngine, SamplingParams

        self.params, self.longest = SamplingParams, job["longest"]
        self.names = itertools.count()
        self.running: list[str] = []
        args = EngineArgs(
            model=job["hf"],
            dtype=job["torch_dtype"],
            max_model_len=job["longest"],
            max_num_seqs=job["batch"],
            kv_cache_memory_bytes=_cache_bytes(job),
            skip_tokenizer_init=True,
            enable_prefix_caching=False,
            disable_log_stats=True,
        )
        self.engine = LLMEngine.from_engine_args(args)

    def start(self, prompts: list[list[int]]) -> list[int]:
        self.running = [self._add(prompt, self.longest - len(prompt)) for prompt in prompts]
        latest: dict[str, int] = {}
        while len(latest) < len(prompts):
            latest |= self._step()
        return [latest[name] for name in self.running]

    def step(self) -> list[int]:
        latest = self._step()
        return [latest[name] for name in self.running]

    def finish(self) -> None:
        self.engine.abort_request(self.running)
        self.running = []
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def offline(self, prompts: list[list[int]], answers: list[int]) -> None:
        for prompt, count in zip(prompts, answers, strict=True):
            self._add(prompt, count)
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def _add(self, prompt: list[int], count: int) -> str:
        name = str(next(self.names))
        params = self.params(temperature=0.0, ignore_eos=True, max_tokens=count, detokenize=False)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, params)
        return name

    def _step(self) -> dict[str, int]:
        outputs = self.engine.step()
        return {output.request_id: output.outputs[0].token_ids[-1] for output in outputs}


def _cache_bytes(job: dict[str, Any]) -> int:
    """Return the bytes of the KV cache of all sequences, in whole blocks, with some to spare."""
    config = json.loads(Path(job["hf"], "config.json").read_text())
    num_elements = (
        2 * config["num_hidden_layers"] * config["num_key_value_heads"] * config["head_dim"]
    )
    blocks = job["batch"] * (-(-job["longest"] // _BLOCK) + 1) + 8
    return num_elements * (4 if job["dtype"] == "fp32" else 2) * _BLOCK * blocks
