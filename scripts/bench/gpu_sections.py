"""The sections of `scripts/gpu_check.py`: what each measures on a GPU, or tries on the CPU.

In: a section, see gpu_run.py. Out: its figures, with "of_floor" where the machine's own limit is
known. Dry, shapes and counts are tiny, steps run again in place of graphs, and the kernels run in
Triton's interpreter: what is shown is that every line of this runs.
"""

import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Container
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import (
    gpu_drafts,
    gpu_formats,
    gpu_mixed,
    gpu_probes,
    gpu_ranks,
    gpu_scaled,
    gpu_steps,
    machine,
)
from bench.gpu_run import DRY_KERNELS, MODES, Section, read_results
from bench.machine import NO_TRITON, has_triton
from bench.shapes import random_lengths, write_checkpoint
from llama import Llama, ModelArgs, SamplingParams
from llama.engine.core import PAGE_SIZE
from llama.gpu.cases import Cases, Computed
from llama.gpu.check import check_kernels
from llama.model.cost import attention_flop, prefill_flop
from llama.ops.batch import Batch

LIMITS = {  # seconds of each section, in the order in which they run: 9.5 minutes in all
    "facts": 35, "checks": 150, "decode": 110, "profile": 45, "throughput": 110, "load": 40,
    "peers": 40, "sweeps": 30,
}  # fmt: skip
# Seconds of sections that run only if --only names them, in a run of their own.
LIMITS_ALONE = {
    "ranks": 420, "tests": 560, "formats": 400, **gpu_mixed.LIMITS, **gpu_drafts.LIMITS,
    **gpu_scaled.LIMITS, **gpu_probes.LIMITS,
}  # fmt: skip
_SAMPLED = SamplingParams(temperature=0.8, top_p=0.95, ignore_eos=True, max_tokens=None)
_COUNTED = ("tests", "failures", "errors", "skipped")
_GPU_EVENTS = ("kernel", "gpu_memcpy", "gpu_memset")  # categories of a trace
_CPU_EVENTS = ("cpu_op",)
_TIMED_TOKENS = 40_960  # of prompts that are timed together
_COLD_BYTES = 256 << 20  # more than a GPU's cache holds


def has_gpu() -> bool:
    return torch.cuda.is_available()


def run(name: str, out: Path, *, dry: bool) -> None:
    """Run one section in this process."""
    torch.manual_seed(0)
    _SECTIONS[name](Section(name, out, dry=dry))


def facts(at: Section) -> None:
    """Report the machine, and the limits that all other figures are compared with."""
    for key, value in machine.facts(at.device).items():
        at.say(key, value)
    if not at.dry:
        import triton

        at.say("triton", triton.__version__)
        free, total = torch.cuda.mem_get_info(at.device)
        at.say("memory free", free / 1e9, "GB", total=total / 1e9)
        cublas = [x.version for x in metadata.distributions() if x.name.startswith("nvidia-cublas")]
        at.say("cuda", torch.version.cuda, nccl=torch.cuda.nccl.version(), cublas=cublas)
        for name, value in machine.gpu_state(at.device).items():
            at.say(name, value)
    at.say("read bandwidth", 1e10 if at.dry else machine.read_bandwidth(at.device), "bytes/s")
    at.say("matrix rate", 1e11 if at.dry else machine.matrix_flops(at.device, at.dtype), "FLOP/s")


def checks(at: Section) -> None:
    """Compare each kernel and the graphs at the sizes of the 8B: as a build does, and all cases."""
    _check(at, "8b")


def _check(at: Section, shape: str) -> None:
    model = at.model(shape, 64, 1)
    computed = Computed(model.plan, model.params.vocab_size, at.device, at.dtype)
    names = DRY_KERNELS if at.dry else computed.names
    for what, every in (("of a build", False), ("of all cases", True)):
        began = time.perf_counter()
        cases = Cases(computed, every=every, lengths=(1, 70) if at.dry else ())
        checked = check_kernels(cases, names if has_triton() else ())
        at.say(f"{shape} check {what}", time.perf_counter() - began, "s")
        for (_, n, k, m), tile in () if every else checked.tiles.items():
            at.say(f"{shape} tile {n} x {k}, {m} rows", list(tile))
    for name in names:
        reason = checked.reasons[name] if has_triton() else NO_TRITON
        _say_checked(at, f"{shape} {name}", reason)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with at.engine(model, MODES[0], 2048) as engine:
            has_graphs = engine.core.runner.replayer is not None
    reasons = "; ".join(str(warning.message) for warning in caught)
    _say_checked(at, f"{shape} graphs", None if has_graphs else reasons)


def _say_checked(at: Section, what: str, reason: str | None) -> None:
    at.say(what, "passed" if reason is None else reason)


def decode(at: Section) -> None:
    """Time the 8B shape, mode by mode: a step at batch 1, 32 and 64, and a prompt of 4,096."""
    context = at.size(2048, 20)
    steps, prompt = at.size(96, 1), at.size(4096, 18)
    model = at.model("8b", max(context + 2 * steps, prompt) + 64, at.size(64, 2))
    sizes = (
        ("8b batch 1", 1, at.size(128, 10)),
        ("8b batch 32", at.size(32, 2), at.size(128, 10)),
        ("8b batch 64 context 2048", at.size(64, 2), context),
    )
    for mode in MODES:
        with at.engine(model, mode, at.size(64, 2) * (context + 2 * steps + 64)) as engine:
            for what, batch, length in sizes:
                gpu_steps.say_decode(at, what, mode, engine, batch, length, steps)
                if mode == MODES[0]:
                    what += ", T 0.8, top_p 0.95"
                    gpu_steps.say_decode(at, what, mode, engine, batch, length, steps, _SAMPLED)
            seconds = gpu_steps.prefill_seconds(engine, prompt, repeats=at.size(3, 1))
        operations = prefill_flop(model.params, prompt) + attention_flop(model.params, prompt)
        floor = operations / at.found("matrix rate")
        at.say("8b prefill 4096", prompt / seconds, "tokens/s", mode=mode, of_floor=floor / seconds)


def throughput(at: Section) -> None:
    """Time the 8B shape with many requests; check the 1B shape, and time it at batch 1."""
    steps = at.size(256, 1)
    mode = MODES[0]
    model = at.model("8b", at.size(2200, 128), at.size(256, 2))
    answers = at.size(2048, 2)
    many = [(at.size(32, 5), answers)] * at.size(128, 2)
    mixed = random_lengths(at.size(256, 2), at.size(100, 2), at.size(1024, 3), seed=0)
    for what, lengths in (("8b 128 x (32, 2048)", many), ("8b 256 mixed requests", mixed)):
        with at.engine(model, mode, sum(p + n for p, n in lengths) + 4096) as engine:
            began = time.perf_counter()
            gpu_steps.answer(engine, lengths)
            seconds = time.perf_counter() - began
            preempted = engine.core.scheduler.num_preemptions
        out = sum(n for _, n in lengths)
        at.say(what, out / seconds, "tokens/s", mode=mode, preempted=preempted)
    del model, engine
    _check(at, "1b")
    small = at.model("1b", 1024, 1)
    for mode in MODES:
        with at.engine(small, mode, 2048) as engine:
            gpu_steps.say_decode(at, "1b batch 1", mode, engine, 1, at.size(128, 20), steps)


def sweeps(at: Section) -> None:
    """Time decode attention by the number of parts, to judge `attention.num_parts`, and prefill."""
    if not has_triton():
        at.say("sweeps", NO_TRITON)
        return
    from llama.kernels.cuda import attention

    args = ModelArgs(**at.params("8b"))
    heads, kv_heads, d = args.n_heads, args.kv_heads, args.head_dim
    dtype = at.dtype
    chosen = attention.num_parts
    for batch, context in ((1, 2048), (1, 8192), (8, 2048), (64, 2048)):
        batch, context = at.size(batch, 1), at.size(context, 32)
        width = context // PAGE_SIZE
        shape = 2, batch * width + 1, PAGE_SIZE, kv_heads, d
        cache = torch.randn(shape, device=at.device, dtype=dtype)
        cold = at.size(_COLD_BYTES // cache.nbytes, 1)
        caches = [cache, *(cache.clone() for _ in range(cold))]  # in turn: none is in the L2
        queries = torch.randn(batch, heads, d, device=at.device, dtype=dtype)
        pages = torch.randperm(batch * width).view(batch, width).tolist()
        starts = [context - 1] * batch
        ones = [1] * batch
        _, step = Batch.pack([], starts, ones, pages, PAGE_SIZE, [], at.device)
        for parts in (1, 2, 4, 8, 16, 32, 64)[: at.size(7, 1)]:
            attention.num_parts = functools.partial(_always, parts * batch)
            ways = [functools.partial(attention.paged_attention, queries, x, step) for x in caches]
            seconds = gpu_steps.device_seconds(at, ways)
            at.say(
                f"attention {batch} x {context}, {parts} parts each", seconds * 1e6, "us",
                gb_per_s=2 * batch * context * kv_heads * d * dtype.itemsize / seconds / 1e9,
                chosen=chosen(batch, kv_heads),
            )  # fmt: skip
    attention.num_parts = chosen
    for length in (2048, 8192, 32_768)[: at.size(3, 1)]:
        _prompt_attention(at, args, at.size(length, 32))


def _prompt_attention(at: Section, args: ModelArgs, length: int) -> None:
    """Time attention of a prompt, by our kernel and by PyTorch's FlashAttention without pages."""
    from llama.kernels.cuda.attention import paged_attention

    heads, kv_heads, d = args.n_heads, args.kv_heads, args.head_dim
    pages = [*range(length // PAGE_SIZE)]
    shape = 2, len(pages), PAGE_SIZE, kv_heads, d
    cache = torch.randn(shape, device=at.device, dtype=at.dtype)
    queries = torch.randn(length, heads, d, device=at.device, dtype=at.dtype)
    _, step = Batch.pack([], [0], [length], [pages], PAGE_SIZE, [], at.device)
    keys, values = (plane.view(1, length, kv_heads, d).transpose(1, 2) for plane in cache)
    q = queries.unsqueeze(0).transpose(1, 2)

    def flash() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return F.scaled_dot_product_attention(q, keys, values, is_causal=True, enable_gqa=True)

    def ours() -> torch.Tensor:
        return paged_attention(queries, cache, step)

    for name, call in (("ours", ours), ("FlashAttention of PyTorch", flash)):
        seconds = gpu_steps.device_seconds(at, [call], max(2, _TIMED_TOKENS // length))
        flop = 2 * heads * d * length * length  # two products, each over half of the pairs
        what = f"attention of a prompt of {length}, {name}"
        at.say(what, seconds * 1e6, "us", flop_per_s=flop / seconds)


def _always(value: int, *_: Any) -> int:
    return value


def tests(at: Section) -> None:
    """Run the tests that are marked for a GPU.

    The files need no more packages than a bare machine has. In a dry run they are collected and
    skipped.
    """
    if find_spec("pytest") is None:
        at.say("tests", "pytest is not installed")
        return
    names = ["tests/test_gpu.py", "tests/ops/test_attention.py", "tests/ops/test_elementwise.py"]
    names += ["tests/ops/test_sample.py"] * (find_spec("hypothesis") is not None)
    with tempfile.TemporaryDirectory() as scratch:
        report = Path(scratch, "report.xml")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "gpu",
            "-q",
            "-rf",
            "-p",
            "no:cacheprovider",
        ]
        env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        done = subprocess.run(
            [*command, f"--junitxml={report}", *names], env=env, check=False,
            cwd=Path(__file__).resolve().parents[2],
        )  # fmt: skip
        suites = ElementTree.parse(report).getroot().iter("testsuite")
        counts = Counter({k: int(suite.get(k, 0)) for suite in suites for k in _COUNTED})
    for kind in _COUNTED:
        at.say(f"tests: {kind}", counts[kind])
    if done.returncode:
        raise RuntimeError(f"pytest -m gpu ended with {done.returncode}")


def profile(at: Section) -> None:
    """Report the device time of a step at batch 1 and 64, kernel by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    batch, context = at.size(64, 2), at.size(2048, 20)
    model = at.model("8b", context + 256, batch)
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * (not at.dry)
    for n in (1, batch):
        count = at.size(16, 2)
        with at.engine(model, MODES[0], n * (context + 256)) as engine:
            gpu_steps.begin(engine, n, context)
            with profiler(activities=activities) as seen:
                for _ in range(count):
                    engine.core.step()
                machine.wait_for(at.device)
        with tempfile.TemporaryDirectory() as scratch:
            path = Path(scratch, "trace.json")
            seen.export_chrome_trace(str(path))
            trace = json.loads(path.read_text())
        for row in kernel_times(trace, _CPU_EVENTS if at.dry else _GPU_EVENTS)[:20]:
            what = f"batch {n}: {row.name[:60]} {row.grid}".rstrip()
            at.say(what, row.us / count, "us/step", calls=row.launches / count)


class KernelTime(NamedTuple):
    """The time of all launches of one kernel with the same grid."""

    name: str
    grid: str
    us: float
    launches: int


def kernel_times(trace: dict[str, Any], categories: Container[str]) -> list[KernelTime]:
    """Return the times of a profiler's trace by kernel and grid, the longest first.

    The grid tells the products apart, which are one kernel. Times of the host, such as its waits,
    are events of other categories.
    """
    times: dict[tuple[str, str], list[float]] = {}
    for event in trace["traceEvents"]:
        if event.get("cat") in categories and "dur" in event:
            grid = "x".join(map(str, event.get("args", {}).get("grid", ())))
            times.setdefault((event["name"], grid), []).append(event["dur"])
    rows = [KernelTime(*key, sum(values), len(values)) for key, values in times.items()]
    return sorted(rows, key=lambda row: row.us, reverse=True)


def load(at: Section) -> None:
    """Time Llama.build of the 8B shape from files in the page cache."""
    shared = Path("/dev/shm")
    is_large = shared.is_dir() and os.statvfs(shared).f_bavail * os.statvfs(shared).f_frsize > 20e9
    with tempfile.TemporaryDirectory(dir=shared if is_large and not at.dry else None) as scratch:
        params = at.params("8b")
        folder = write_checkpoint(Path(scratch, "model"), params, at.dtype)
        for _ in range(2):
            began = time.perf_counter()
            llama = Llama.build(str(folder), None, 512, 1, device=str(at.device), dtype=at.dtype)
            machine.wait_for(at.device)
            seconds = time.perf_counter() - began
            llama.close()
            weights = sum(w.nbytes for w in llama.model.parameters())
            del llama
        at.say("8b load", seconds, "s", gb_per_s=weights / seconds / 1e9)


def peers(at: Section) -> None:
    """Time transformers on the same shape at batch 1 and 32, eager, with its own cache."""
    if find_spec("transformers") is None:
        at.say("peers", "transformers is not installed")
        return
    from transformers import LlamaConfig, LlamaForCausalLM

    args = ModelArgs(**at.params("8b"))
    config = LlamaConfig(
        hidden_size=args.dim, intermediate_size=args.ffn_dim, num_hidden_layers=args.n_layers,
        num_attention_heads=args.n_heads, num_key_value_heads=args.kv_heads,
        vocab_size=args.vocab_size, max_position_embeddings=4096,
    )  # fmt: skip
    torch.set_default_dtype(at.dtype)  # this process ends with the section
    with torch.device(at.device):
        model = LlamaForCausalLM(config).eval()
    for batch, what in ((1, "8b batch 1"), (at.size(32, 2), "8b batch 32")):
        ids = torch.randint(args.vocab_size, (batch, at.size(128, 20)), device=at.device)
        with torch.inference_mode():
            out = model(ids, use_cache=True, logits_to_keep=1)
            times = []
            for _ in range(at.size(24, 2)):
                latest = out.logits[:, -1].argmax(-1, keepdim=True)
                machine.wait_for(at.device)
                began = time.perf_counter()
                out = model(latest, past_key_values=out.past_key_values, use_cache=True)
                machine.wait_for(at.device)
                times.append(time.perf_counter() - began)
        theirs = batch / statistics.median(times)
        at.say(f"transformers {what}", theirs, "tokens/s")
        ours = [
            row["value"] for row in read_results(at.out)
            if row.get("what") == what and row.get("mode") == MODES[0]
        ]  # fmt: skip
        if ours:
            at.say(f"times transformers, {what[3:]}", ours[-1] / theirs)


_SECTIONS: dict[str, Callable[[Section], None]] = {
    section.__name__: section
    for section in (
        facts,
        checks,
        decode,
        profile,
        throughput,
        load,
        peers,
        sweeps,
        tests,
        gpu_ranks.ranks,
        gpu_formats.formats,
        gpu_mixed.skew,
        gpu_mixed.lora,
        gpu_mixed.prompts,
        gpu_drafts.drafts,
        gpu_scaled.scaled,
    )
} | gpu_probes.PROBES
