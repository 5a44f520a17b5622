"""Measures what KV pages on disk cost and leak: `python tests/programs/kv_bars.py NAME ...`.

`cost FOLDER`: a prompt of which nothing is found, a decode step of 32 sequences and the memory,
with the store and without, in turn, in one process. `work`: the processor time that the store takes
for a page of the 1B of such a prompt, by its parts, with one thread; a noisy machine hardly changes
it. `tenants`: the first token of a prompt that another tenant has cached, and of one that nobody
has. `faults`: pages that are read from files with random damage. FOLDER has weights in Meta's
layout; small models answer where none is needed.
"""

import argparse
import contextlib
import logging
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from bench.engines.ours import our_llama
from bench.shapes import write_checkpoint
from helpers.kv_pages import always, build, wait_until_written
from helpers.launch import DEMO
from llama import Llama, SamplingParams
from llama.storage.kv_folder import Identity, KVFolder
from llama.storage.kv_segments import HEADER_BYTES, Part
from llama.storage.kv_writer import KVWriter

MIB = 1 << 20
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}


@contextlib.contextmanager
def used(llama: Llama, *, is_on: bool) -> Iterator[None]:
    """Let the engine have its pages on disk within the block, or leave them out."""
    pages = llama.pages_on_disk
    assert pages is not None
    pool, hooks = llama.engine.scheduler.pool, llama.engine.hooks
    if not is_on:
        hooks.remove(pages)
        pool.tier = None
    try:
        yield
    finally:
        if not is_on:
            hooks.append(pages)
            pool.tier = pages


def first_token(llama: Llama, prompt: list[int], tenant: bytes = b"") -> tuple[float, int]:
    """Return the seconds to the first token of a prompt, and its cached tokens."""
    params = SamplingParams(max_tokens=1, **GREEDY)
    began = time.perf_counter()
    request = llama.llm_engine.prepare("", prompt, params, tenant=tenant)
    output = llama.llm_engine.run([request])[0]
    return time.perf_counter() - began, output.usage.cached_tokens


def peak_bytes() -> int:
    """Return the largest memory since the last call."""
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    Path("/proc/self/clear_refs").write_text("5")
    return peak * 1024


def report(name: str, on: list[float], off: list[float]) -> None:
    ratios = [a / b for a, b in zip(on, off, strict=True)]
    print(
        f"{name}: with {1e3 * statistics.median(on):.1f} ms, without "
        f"{1e3 * statistics.median(off):.1f}, median of the ratios of pairs "
        f"{statistics.median(ratios):.4f}, {min(ratios):.3f} to {max(ratios):.3f}, "
        f"{len(ratios)} pairs"
    )


def cost(folder: str, root: Path, num_tokens: int, seconds: float) -> int:
    """Bars b and c."""
    draw = random.Random(0)
    job = {
        "folder": folder, "params": {"vocab_size": 128_256}, "device": "cpu", "dtype": "bf16",
    }  # fmt: skip
    sizes = {"max_seq_len": 2048, "max_batch_size": 32, "kv_cache_dir": str(root)}
    llama = our_llama(job, sizes | {"kv_cache_disk_bytes": 4 << 30})

    def prompt(count: int) -> list[int]:
        return [draw.randrange(128_000) for _ in range(count)]

    first_token(llama, prompt(num_tokens))
    wait_until_written(llama)
    times: dict[bool, list[float]] = {True: [], False: []}
    peaks: dict[bool, list[int]] = {True: [], False: []}
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for is_on in random.sample((True, False), 2):
            peak_bytes()
            with used(llama, is_on=is_on):
                times[is_on].append(first_token(llama, prompt(num_tokens))[0])
            peaks[is_on].append(peak_bytes())
            wait_until_written(llama)
    report(f"prompt of {num_tokens}", times[True], times[False])
    more = statistics.median(peaks[True]) - statistics.median(peaks[False])
    print(f"memory: {more / MIB:.0f} MiB more")
    engine = llama.llm_engine
    for i in range(32):
        params = SamplingParams(max_tokens=None, **GREEDY)
        engine.add_request(str(i), prompt(40), params)
    while sum(bool(output.outputs[0].token_ids) for output in engine.step()) < 32:
        pass
    steps: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(61):
        for is_on in (True, False) if turn % 2 else (False, True):
            with used(llama, is_on=is_on):
                began = time.perf_counter()
                engine.step()
                steps[is_on].append(time.perf_counter() - began)
    report("decode step of 32", steps[True][1:], steps[False][1:])
    llama.close()
    return 0


def counted(call: Callable[..., Any], seconds: list[float]) -> Callable[..., Any]:
    """Return a function that adds the processor time of its thread to the last number."""

    def wrapped(*arguments: Any, **options: Any) -> Any:
        began = time.thread_time()
        try:
            return call(*arguments, **options)
        finally:
            seconds[-1] += time.thread_time() - began

    return wrapped


def work(root: Path, num_prompts: int) -> int:
    """Bar b, without the noise of a clock.

    The model has the KV cache of the 1B and little else, so that its prompts cost nothing.
    """
    torch.set_num_threads(1)
    params = {
        "dim": 512, "n_layers": 16, "n_heads": 8, "n_kv_heads": 8, "vocab_size": 2048,
        "norm_eps": 1e-5, "multiple_of": 32,
    }  # fmt: skip
    folder = write_checkpoint(root.with_name("model"), params, torch.bfloat16)
    draw = random.Random(0)
    always()
    with build(folder, root, max_seq_len=2048, dtype="bf16") as llama:
        pages = llama.pages_on_disk
        assert pages is not None and pages.folder.part.page_bytes == 512 << 10
        parts = {
            "look-up": (pages, ("load", "before_pack", "before_pass")),
            "copies": (pages, ("after_rows",)),
            "hashes and writes": (pages.writer._writer, ("append",)),
        }
        times: dict[str, list[float]] = {name: [] for name in parts}
        for name, (target, calls) in parts.items():
            for call in calls:
                setattr(target, call, counted(getattr(target, call), times[name]))
        for _ in range(num_prompts):
            for seconds in times.values():
                seconds.append(0.0)
            prompt = [draw.randrange(1024) for _ in range(50 * 16 + 1)]
            assert first_token(llama, prompt)[1] == 0
            wait_until_written(llama)
        assert pages.num_dropped == 0
    total = 0.0
    for name, seconds in times.items():
        page = [1e6 * x / 50 for x in seconds[1:]]
        total += statistics.median(page)
        print(
            f"{name}: {statistics.median(page):.0f} us a page, {min(page):.0f} to {max(page):.0f}"
        )
    print(f"together: {total:.0f} us a page of 16 tokens, {num_prompts - 1} prompts of 50 pages")
    return 0


def tenants(root: Path, num_pairs: int) -> int:
    """Bar g."""
    always()
    draw = random.Random(0)
    cold: list[float] = []
    others: list[float] = []
    own: list[float] = []
    num_cached = 0
    with build(DEMO, root) as llama:
        for turn in range(num_pairs + 5):
            known, new = ([draw.randrange(300, 1800) for _ in range(400)] for _ in range(2))
            first_token(llama, known, b"a" * 32)
            wait_until_written(llama)
            pairs = [(known, others), (new, cold)]
            for prompt, times in pairs if turn % 2 else reversed(pairs):
                seconds, count = first_token(llama, prompt, b"b" * 32)
                times.append(seconds)
                num_cached += count
                wait_until_written(llama)
            own.append(first_token(llama, known, b"a" * 32)[0])
    report("another tenant's prompt (with), a new one (without)", others[5:], cold[5:])
    later = sum(a > b for a, b in zip(others[5:], cold[5:], strict=True))
    print(
        f"another tenant's was slower in {later} of {num_pairs} pairs; {num_cached} cached tokens"
    )
    print(f"the tenant's own prompt again: {1e3 * statistics.median(own[5:]):.1f} ms")
    return int(num_cached > 0)


def damaged(content: bytes, part: Part, draw: random.Random) -> bytes:
    """Return a segment with one fault."""
    size = part.record_bytes
    changed = bytearray(content)
    place, other = (HEADER_BYTES + size * draw.randrange(8) for _ in range(2))
    at = draw.choice([draw.randrange(len(content)), place + draw.randrange(100)])
    count = draw.choice([1, 4, 64, 4096, size])
    match draw.choice(["bit", "cut", "zeros", "noise", "records", "heads", "headers", "shifted"]):
        case "bit":
            changed[at] ^= 1 << draw.randrange(8)
        case "cut":
            del changed[at:]
        case "zeros":
            changed[at : at + count] = bytes(len(changed[at : at + count]))
        case "noise":
            changed[at : at + count] = draw.randbytes(len(changed[at : at + count]))
        case "records":
            changed[place : place + size] = content[other : other + size]
        case "heads":
            body = slice(place + HEADER_BYTES, place + size)
            changed[body] = content[other + HEADER_BYTES : other + size]
        case "headers":
            changed[place : place + HEADER_BYTES] = content[other : other + HEADER_BYTES]
        case "shifted":
            del changed[at : at + count]
    return bytes(changed)


def faults(root: Path, num_faults: int) -> int:
    """Bar e."""
    logging.disable()
    draw = random.Random(0)
    part = Part(0, 2, 0, 4, 1024)
    identity = Identity("/model", {"weights": "a"}, {})
    pages = {draw.randbytes(32): draw.randbytes(part.page_bytes) for _ in range(8)}
    always()
    folder = KVFolder(root, identity, part)
    writer = KVWriter(folder, MIB)
    for key, page in pages.items():
        assert writer.append(key, memoryview(page))
    writer.close()
    (path,) = folder.path.glob("*.kv")
    whole = path.read_bytes()
    counts = {"right": 0, "missed": 0, "wrong": 0}
    for _ in range(num_faults):
        path.write_bytes(damaged(whole, part, draw))
        folder = KVFolder(root, identity, part)
        for key, page in pages.items():
            out = bytearray(part.page_bytes)
            found = folder.read_into(key, memoryview(out))
            counts[("right" if out == page else "wrong") if found else "missed"] += 1
        folder.close()
    print(f"{num_faults:,} faults: pages {counts}")
    return int(counts["wrong"] > 0)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("name", choices=("cost", "work", "tenants", "faults"))
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--count", type=int)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        root = Path(place, "kv")
        if options.name == "cost":
            return cost(options.folder, root, options.tokens, options.seconds)
        if options.name == "work":
            return work(root, options.count or 40)
        if options.name == "tenants":
            return tenants(root, options.count or 200)
        return faults(root, options.count or 10_000)


if __name__ == "__main__":
    sys.exit(main())
