"""Answers of models with KV pages on disk, for tests that compare them with answers without."""

import random
import time
from pathlib import Path
from typing import Any

from llama import Llama, SamplingParams
from llama.options import page_store
from llama.storage import kv_disk, kv_folder

START = random.Random(1).choices(range(300, 1800), k=200)  # what prompts have in common
PROMPTS = [START + random.Random(i).choices(range(300, 1800), k=20 * i) for i in range(4)]


def always() -> None:
    """Let this process write and read every page, on a disk that may be full."""
    page_store.POLICY.min_seconds = 0.0
    page_store.POLICY.min_gain = 0.0
    kv_disk._MIN_FREE = 0
    kv_disk._MIN_FREE_PART = 0
    kv_folder._REFRESH_S = 0.0


def build(folder: Any, root: Path | str | None, **options: Any) -> Llama:
    sizes = {"max_seq_len": 512, "max_batch_size": 8}
    return Llama.build(
        str(folder), device="cpu", verbose=False, kv_cache_dir=root, **{**sizes, **options}
    )


def answers(
    llama: Llama, prompts: list[list[int]] = PROMPTS, **options: Any
) -> list[tuple[list[int], list[float]]]:
    """Return ids and log-probabilities of sampled answers, which a change of any bit changes."""
    asked = {"max_gen_len": 12, "temperature": 0.9, "logprobs": True, "seed": 7, **options}
    ids, logprobs = llama.generate(prompts, **asked)
    assert logprobs is not None
    return list(zip(ids, logprobs, strict=True))


def wait_until_written(llama: Llama) -> None:
    assert llama.pages_on_disk is not None
    end = time.monotonic() + 30
    while llama.pages_on_disk.writer.waiting and time.monotonic() < end:
        time.sleep(0.01)


def num_cached(llama: Llama, prompt: list[int], salt: str | None = None) -> int:
    """Return how many tokens of a prompt were not computed, in memory or on disk."""
    params = SamplingParams(max_tokens=1, cache_salt=salt)
    request = llama.llm_engine.prepare("", prompt, params)
    return llama.llm_engine.run([request])[0].usage.cached_tokens
