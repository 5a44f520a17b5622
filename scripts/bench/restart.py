"""Measure prompts that are loaded from disk: the first token after a restart, and what it costs.

In: a model and the tokens of a prompt. Out: a row for prompts that are computed, one for prompts
that a new engine loads (the page cache has dropped them), and one for llama.cpp, which restores the
file of a slot, as its server does. Our answers must be the same.

The cost of writing is the processor time after the first token, when nothing else runs. Neighbours
are sequences that generate while the prompt arrives: their longest wait between two tokens.
"""

import gc
import json
import os
import random
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.engines.ours import our_llama
from bench.report import Column
from bench.run import Bench, Row, whole
from llama import Llama, SamplingParams

_COLUMNS: list[Column] = [
    ("engine", "engine", ""), ("prompt", "prompt", ""), ("first ms", "first_ms", ".0f"),
    ("least", "first_ms_min", ".0f"), ("times sooner", "gain", ".1f"),
    ("neighbours ms", "wait_ms", ".0f"), ("their step ms", "step_ms", ".1f"),
    ("writing ms", "write_ms", ".0f"), ("of the prompt", "write_part", ".1%"),
    ("MB", "megabytes", ".0f"),
]  # fmt: skip
_NEIGHBOURS = 4
_STEPS = 8  # steps of the neighbours before the prompt arrives, and after it


def restart(tokens: int = 2000, repeats: int = 2, **flags: Any) -> None:
    """Measure the first token of a prompt after a restart, computed and loaded from disk.

    "neighbours" is the longest time between two tokens of other sequences while the prompt is
    computed or loaded, and "writing" the processor time that its pages took to be written.
    """
    bench = Bench(**flags)
    count = whole("tokens", tokens)
    draw = random.Random(bench.seed)
    prompts = [
        [draw.randrange(bench.args.vocab_size - 256) for _ in range(count)]
        for _ in range(whole("repeats", repeats) + 1)
    ]
    rows: list[Row] = []
    with bench.folders("load") as folders, tempfile.TemporaryDirectory(dir=bench.work_dir) as root:
        pages = str(Path(root, "kv"))
        first = _measured(_built(bench, folders, pages, count), prompts, is_stored=False)
        for path in Path(pages).glob("*/*.kv"):
            _drop(path)
        later = _measured(_built(bench, folders, pages, count), prompts, is_stored=True)
        assert first.pop("answers") == later.pop("answers"), "the answers differ"
        rows = [{"engine": "ours", "prompt": "computed", **first}]
        rows.append({"engine": "ours", "prompt": "loaded", **later})
        if "llama_cpp" in bench.pythons:
            rows += _llama_cpp(bench, folders["gguf"], prompts, Path(root, "slot"))
    for row in rows:
        computed = next(x for x in rows if x["engine"] == row["engine"])
        row["gain"] = computed["first_ms"] / row["first_ms"]
    bench.report(_COLUMNS, rows, None)


def _built(bench: Bench, folders: Row, pages: str, count: int) -> Llama:
    sizes = {
        "max_seq_len": count + 64, "max_batch_size": _NEIGHBOURS + 1, "kv_cache_dir": pages,
        "kv_cache_disk_bytes": 4 << 30,
    }  # fmt: skip
    llama: Llama = our_llama(bench.ours() | {"folder": folders["folder"]}, sizes)
    for i in range(3):  # neither loaded nor written: these are short
        _first_token(llama, [i + 1] * 64)
    return llama


def _measured(llama: Llama, prompts: list[list[int]], *, is_stored: bool) -> Row:
    """Return the figures of an engine, which is closed; the last prompt meets neighbours."""
    pages = llama.pages_on_disk
    assert pages is not None
    seconds: list[float] = []
    writing: list[float] = []
    answers: list[int] = []
    for prompt in prompts[:-1]:
        taken, token = _first_token(llama, prompt)
        began = time.process_time()
        while pages.writer.waiting:
            time.sleep(0.01)
        writing.append(time.process_time() - began)
        seconds.append(taken)
        answers.append(token)
    waits = list(_waits(llama, prompts[-1]))
    num_loaded = pages.stats.hit_tokens
    assert bool(num_loaded) == is_stored, f"{num_loaded} tokens were loaded"
    megabytes = (pages.stats.read_bytes if is_stored else pages.writer.written_bytes) / 1e6
    while pages.writer.waiting:
        time.sleep(0.01)
    llama.close()
    del llama, pages
    gc.collect()
    row: Row = {
        "first_ms": statistics.median(seconds) * 1e3,
        "first_ms_min": min(seconds) * 1e3,
        "wait_ms": max(waits) * 1e3,
        "step_ms": statistics.median(waits) * 1e3,
        "megabytes": megabytes,
        "answers": answers,
    }
    if not is_stored:
        row["write_ms"] = statistics.median(writing) * 1e3
        row["write_part"] = statistics.median(writing) / statistics.median(seconds)
    return row


def _first_token(llama: Llama, prompt: list[int]) -> tuple[float, int]:
    """Return the seconds to the first token of a prompt, and the token."""
    engine = llama.llm_engine
    began = time.perf_counter()
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=1)
    engine.add_request("prompt", prompt, params)
    while True:
        for output in engine.step():
            if output.outputs[0].token_ids:
                return time.perf_counter() - began, output.outputs[0].token_ids[0]


def _waits(llama: Llama, prompt: list[int]) -> Iterator[float]:
    """Yield the times between tokens of sequences that generate while a prompt arrives."""
    engine = llama.llm_engine
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)
    names = [str(i) for i in range(_NEIGHBOURS)]
    for i, name in enumerate(names):
        engine.add_request(name, [i + 1] * 64, params)
    while sum(len(output.outputs[0].token_ids) > 1 for output in engine.step()) < _NEIGHBOURS:
        pass
    for step in range(2 * _STEPS):
        if step == _STEPS:
            engine.add_request("prompt", prompt, params)
        began = time.perf_counter()
        engine.step()
        yield time.perf_counter() - began
    for name in [*names, "prompt"]:
        engine.abort_request(name)


def _drop(path: Path) -> None:
    """Write a file to the disk, and let the page cache drop it."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


_LLAMA_CPP = """
import ctypes, json, os, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from bench.engines.llama_cpp import LlamaCpp

job, prompts, path = json.loads(sys.stdin.read())
computed, restored = [], []
for prompt in prompts:
    engine = LlamaCpp(job)
    engine.start([prompt[:64]])
    engine.finish()
    began = time.perf_counter()
    engine.start([prompt])
    computed.append(time.perf_counter() - began)
    api = engine.api
    ids = (api.llama_token * len(prompt))(*prompt)
    assert api.llama_state_seq_save_file(engine.context, path.encode(), 0, ids, len(prompt))
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    size = os.path.getsize(path)
    engine.finish()
    began = time.perf_counter()
    count = ctypes.c_size_t()
    assert api.llama_state_seq_load_file(
        engine.context, path.encode(), 0, ids, len(prompt), ctypes.byref(count)
    )
    # The last token is computed again, as the server does.
    api.llama_memory_seq_rm(api.llama_get_memory(engine.context), 0, len(prompt) - 1, -1)
    engine.lengths[0] = len(prompt) - 1
    engine._compute({0: prompt[-1:]})
    restored.append(time.perf_counter() - began)
    # With random weights its token differs at times: it rounds a step of one token otherwise.
    assert count.value == len(prompt), count.value
    del engine
print(json.dumps([computed, restored, size]))
"""


def _llama_cpp(bench: Bench, gguf: str, prompts: list[list[int]], path: Path) -> list[Row]:
    """Return the rows of llama.cpp, in a process of its own."""
    job = bench.ours() | {
        "gguf": gguf, "longest": len(prompts[0]) + 64, "batch": 1, "dtype": bench.stored,
    }  # fmt: skip
    scripts = str(Path(__file__).resolve().parents[1])
    done = subprocess.run(
        [bench.pythons["llama_cpp"], "-c", _LLAMA_CPP, scripts],
        input=json.dumps([job, prompts[:-1], str(path)]), text=True, capture_output=True,
        check=False,
    )  # fmt: skip
    if done.returncode:
        bench.failed["llama_cpp"] = done.stderr.strip().rpartition("\n")[2]
        return []
    computed, restored, size = json.loads(done.stdout.splitlines()[-1])
    rows = []
    for prompt, seconds in (("computed", computed), ("loaded", restored)):
        row: Row = {"engine": "llama_cpp", "prompt": prompt, "megabytes": size / 1e6}
        row["first_ms"] = statistics.median(seconds) * 1e3
        row["first_ms_min"] = min(seconds) * 1e3
        rows.append(row)
    return rows
