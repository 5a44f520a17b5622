"""Probes of `scripts/gpu_check.py`: what only a GPU can show of faults that were found by reading.

In: a section, see gpu_run.py. Out: "ok" for each probe, or an exception. A probe is a process of
its own, as a fault may end it with an illegal access. `--only probes` runs all of them. Dry, each
runs on the CPU, except for those that need two processes on a GPU or a tool of CUDA's.
"""

import contextlib
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench import machine
from bench.gpu_run import MODES, Section
from bench.shapes import random_model, write_checkpoint
from llama import Llama, SamplingParams, Transformer
from llama.options import page_store
from llama.options.graphs.recorder import CudaRecorder, Outputs
from llama.options.page_store import PageStore
from llama.ranks import torch_private
from llama.requests.llm_engine import LLMEngine
from llama.storage import kv_disk
from llama.storage.kv_folder import Identity

LIMITS = {  # seconds of each probe
    "probe_nan": 60, "probe_builds": 60, "probe_thread": 45, "probe_capture": 45,
    "probe_small_gpu": 120, "probe_first_request": 60, "probe_symmetric_memory": 120,
    "probe_memcheck": 150, "probe_pages_on_disk": 45,
}  # fmt: skip
_SMALL = {  # a model for which the kernels run, as its heads have 64 elements
    "dim": 256, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 2048, "multiple_of": 64,
    "norm_eps": 1e-5, "rope_theta": 500000.0,
}  # fmt: skip
_NUM_BUILDS = 40  # torch hands out 32 streams in turn
_PROMPTS = [[5, 6, 7], [9, 8], [*range(20, 60)]]
_NAN_TOKEN = 77
_SUM_BYTES = (8 << 10, 64 << 10, 256 << 10)  # sizes of sums, each of which is repeated
_NUM_SUMS = 33_000
_SMALL_GPU_BYTES = 24 * 10**9
_MEMCHECKED = """
from llama import Llama
llama = Llama.build("checkpoints/demo", None, 128, 4, device="cuda")
print(llama.generate([[256, 70, 71], [256, 77]], 10, 0.0)[0])
"""


def probe_nan(at: Section) -> None:
    """Let one row be NaN while the next step is in flight: it fails alone."""
    model = _small_model(at)
    with at.engine(model, _mode(at), 4096) as engine:
        wanted = _answers(engine, _PROMPTS)
    embedding = model.tok_embeddings.weight.plain()
    embedding[_NAN_TOKEN] = torch.nan
    with at.engine(model, _mode(at), 4096) as engine:
        *good, bad = _run(engine, [*_PROMPTS, [3, _NAN_TOKEN]])
        _expect([x.outputs[0].token_ids for x in good], wanted)
        _expect(bad.outputs[0].finish_reason, "error")
        _expect(_answers(engine, _PROMPTS), wanted)
    at.say(at.name, "ok")


def probe_builds(at: Section) -> None:
    """Build and close many models alongside an older one, whose graphs must give the same ids."""
    with _answering(at) as answers:
        wanted = answers()
        for _ in range(at.size(_NUM_BUILDS, 3)):
            with at.engine(_small_model(at), _mode(at), 4096) as later:
                _expect(_answers(later, _PROMPTS), wanted)
            _expect(answers(), wanted)
    at.say(at.name, "ok")


def probe_thread(at: Section) -> None:
    """Build in a thread that ends, and replay its graphs in another one."""
    with at.engine(_small_model(at), "torch", 4096) as eager:
        wanted = _answers(eager, _PROMPTS)
    with contextlib.ExitStack() as stack:
        made: list[Callable[[], list[list[int]]]] = []
        builder = threading.Thread(target=lambda: made.append(stack.enter_context(_answering(at))))
        builder.start()
        builder.join()
        for _ in range(at.size(3, 1)):
            torch.empty(at.size(1 << 28, 1), device=at.device).fill_(1)  # reuses freed memory
            _expect_similar(made[0](), wanted)
    at.say(at.name, "ok")


def probe_capture(at: Section) -> None:
    """Wait for the device in a capture, which CUDA forbids; later steps must run as before."""
    with _answering(at) as answers:
        wanted = answers()
        x = torch.ones(8, device=at.device)

        def wait() -> Outputs:
            if at.dry:
                raise RuntimeError("a graph cannot be captured")
            return (x * float(x[0]),)

        recorder: Any = at._recorder()
        stream = None if at.dry else torch.cuda.current_stream()
        try:
            recorder.record(wait, [x])
        except RuntimeError as error:
            at.say("a wait in a capture", str(error).splitlines()[0])
        else:
            raise AssertionError("a wait in a capture raised no error")
        _expect(None if at.dry else torch.cuda.current_stream(), stream)
        _expect(answers(), wanted)
        with at.engine(_small_model(at), _mode(at), 4096) as later:
            _expect(_answers(later, _PROMPTS), wanted)
    at.say(at.name, "ok")


def probe_small_gpu(at: Section) -> None:
    """Build an 8B where other tensors leave 24 GB, and run prompts and a batch."""
    ballast = None
    if not at.dry:
        free, _total = torch.cuda.mem_get_info(at.device)
        ballast = torch.empty(max(free - _SMALL_GPU_BYTES, 0), dtype=torch.uint8, device=at.device)
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() and not at.dry else None) as tmp:
        folder = write_checkpoint(Path(tmp, "model"), at.params("8b"), at.dtype)
        llama = Llama.build(
            str(folder), None, at.size(4096, 64), at.size(16, 2), device=str(at.device),
            dtype=at.dtype,
        )  # fmt: skip
    at.say("24 GB: tokens in the KV cache", llama.engine.runner.num_pages * 16)
    prompt = list(range(at.size(2000, 20)))
    answers = llama.generate([prompt] * at.size(16, 2), 8, 0.0)[0]
    _expect(len(answers), at.size(16, 2))
    llama.close()
    del ballast
    at.say(at.name, "ok")


def probe_first_request(at: Section) -> None:
    """Time the first request of a build against the second one."""
    model = at.model("8b", at.size(2048, 64), 4)
    with at.engine(model, _mode(at), at.size(8192, 256)) as engine:
        for which in ("first", "second"):
            prompt = [len(which), *range(at.size(60, 10))]
            began = time.perf_counter()
            _answers(engine, [prompt], max_tokens=1)
            machine.wait_for(at.device)
            at.say(f"{which} request", (time.perf_counter() - began) * 1e3, "ms")
    at.say(at.name, "ok")


def probe_symmetric_memory(at: Section) -> None:
    """Run the one-shot sum in two processes, in place, eager and in a graph, and very often.

    They are on two GPUs, or share one.
    """
    if at.dry:
        at.say(at.name, "needs a GPU")
        return
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    env = os.environ | {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1", "PYTHONPATH": _paths()}
    _run_program([*command, "-m", "bench.gpu_probes"], env, LIMITS[at.name] - 5)
    at.say(at.name, "ok")


def probe_memcheck(at: Section) -> None:
    """Build the demo model and run ten steps under CUDA's memcheck, if it is installed."""
    found = [*Path("/usr/local").glob("cuda*/bin/compute-sanitizer")]
    sanitizer = shutil.which("compute-sanitizer") or next(map(str, found), None)
    if at.dry or sanitizer is None:
        at.say(at.name, "needs a GPU and CUDA's compute-sanitizer")
        return
    command = [sanitizer, "--tool", "memcheck", "--error-exitcode", "7"]
    env = os.environ | {"PYTHONPATH": _paths()}
    _run_program([*command, sys.executable, "-c", _MEMCHECKED], env, LIMITS[at.name] - 5)
    at.say(at.name, "ok")


def probe_pages_on_disk(at: Section) -> None:
    """Load the pages that another engine has written: the ids are the same.

    Of one prompt a single token is left to compute, so that its step may be a graph.
    """
    model = _small_model(at)
    prompts = [[*range(i, i + 97)] for i in (5, 300)] + [[*range(700, 900)]]
    with at.engine(model, _mode(at), 4096) as engine:
        wanted = _answers(engine, prompts)
    policy = page_store.POLICY
    policy.min_seconds = policy.min_gain = kv_disk._MIN_FREE = kv_disk._MIN_FREE_PART = 0
    with tempfile.TemporaryDirectory() as root:
        identity = Identity("small", {}, {})
        options = {"kv_cache_dir": root, "page_identity": identity}
        for num_loaded in (0, 2 * 96 + 192):
            with at.engine(model, _mode(at), 4096, **options) as engine:
                _expect([_answers(engine, [prompt])[0] for prompt in prompts], wanted)
                pages = next(x for x in engine.core.hooks if isinstance(x, PageStore))
                _expect(pages.stats.hit_tokens, num_loaded)
    at.say(at.name, "ok")


def _mode(at: Section) -> str:
    """Return how steps run: with kernels and graphs; dry without the interpreter's slow kernels."""
    return MODES[1] if at.dry else MODES[0]


def _small_model(at: Section) -> Transformer:
    sizes = _SMALL | {"max_seq_len": 256, "max_batch_size": 4}
    return random_model(sizes, at.dtype, str(at.device))


@contextlib.contextmanager
def _answering(at: Section) -> Iterator[Callable[[], list[list[int]]]]:
    """Yield a function that answers the prompts with an engine that stays alive in the block."""
    with at.engine(_small_model(at), _mode(at), 4096) as engine:
        yield lambda: _answers(engine, _PROMPTS)


def _run(engine: LLMEngine, prompts: list[list[int]], max_tokens: int = 12) -> list[Any]:
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens)
    return engine.run([engine.prepare("", prompt, params) for prompt in prompts])


def _answers(engine: LLMEngine, prompts: list[list[int]], max_tokens: int = 12) -> list[list[int]]:
    """Return the greedy ids after each prompt."""
    outputs = _run(engine, prompts, max_tokens)
    return [list(output.outputs[0].token_ids) for output in outputs]


def _expect(value: object, wanted: object) -> None:
    if value != wanted:
        raise AssertionError(f"{value} where {wanted} was expected")


def _expect_similar(answers: list[list[int]], wanted: list[list[int]]) -> None:
    """Compare the first ids: kernels round otherwise than torch, so that later ones may differ."""
    _expect([answer[0] for answer in answers], [answer[0] for answer in wanted])


def _paths() -> str:
    scripts = Path(__file__).resolve().parents[1]
    return os.pathsep.join([str(scripts), str(scripts.parent), os.environ.get("PYTHONPATH", "")])


def _run_program(command: list[str], env: dict[str, str], limit_s: float) -> None:
    root = Path(__file__).resolve().parents[2]
    subprocess.run(command, env=env, cwd=root, timeout=limit_s, check=True)


def num_wrong_sums(sum_up: Callable[[Tensor], Any], x: Tensor, rank: int, count: int) -> int:
    """Return how many elements of sums over two ranks are wrong, which the device compares.

    Args:
        sum_up: Replaces x by the sum over the ranks.
        x: Memory for the values.
        rank: This rank, whose values are one larger than those of the one before.
        count: The number of sums, whose values change each time.
    """
    wrong = torch.zeros((), dtype=torch.int64, device=x.device)
    offsets = torch.arange(x.numel(), device=x.device) % 13
    for i in range(count):
        values = (offsets + i) % 13  # whole numbers that bf16 has
        x.copy_(values + rank)
        sum_up(x)
        wrong += (x != 2 * values + 1).sum()
    return int(wrong)


def symmetric_rank() -> None:
    """Sum on one of two ranks; an AssertionError where a sum is wrong."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    buffer, join = torch_private.symmetric_buffer(1 << 20, device)
    group = dist.distributed_c10d.GroupMember.WORLD
    assert group is not None
    one_shot, _switch = join(group)
    x = torch.empty(4096, dtype=torch.bfloat16, device=device)

    def sum_in_place() -> tuple[Tensor]:
        one_shot(buffer.view(x.dtype)[: x.numel()], x)
        return (x,)

    x.fill_(rank + 1)
    sum_in_place()
    assert bool((x == 3).all()), x
    recorder = CudaRecorder(device)
    x.fill_(rank + 1)
    _, replay = recorder.record(sum_in_place, [x])
    x.fill_(rank + 2)
    replay()
    assert bool((x == 5).all()), x
    recorder.close()
    for num_bytes in _SUM_BYTES:
        x = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=device)
        own = buffer.view(x.dtype)[: x.numel()]
        wrong = num_wrong_sums(functools.partial(one_shot, own), x, rank, _NUM_SUMS)
        assert not wrong, f"{wrong} elements of sums of {num_bytes} bytes are wrong"
    dist.destroy_process_group()


PROBES: dict[str, Callable[[Section], None]] = {
    probe.__name__: probe
    for probe in (
        probe_nan, probe_builds, probe_thread, probe_capture, probe_small_gpu, probe_first_request,
        probe_symmetric_memory, probe_memcheck, probe_pages_on_disk,
    )
}  # fmt: skip

if __name__ == "__main__":
    symmetric_rank()
