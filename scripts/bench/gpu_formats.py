"""The section `formats` of `scripts/gpu_check.py`: the 8B shape with each quantization.

In: a section. Out: for bf16, int8, fp8 and int4 the seconds of `Llama.build` from files in memory,
which include quantizing and the comparison of the kernels; then a step at 1, 16, 64 and 128 rows,
a long prompt, and the ratio to bf16 of each. `fp8+fp8` also rounds activations to e4m3.
"""

import shutil
import tempfile
import time
from pathlib import Path

from bench import gpu_steps, machine
from bench.gpu_run import MODES, Section
from bench.shapes import write_checkpoint
from llama import Llama

CHECKPOINT = "llama-8b-random"  # in the folder of shared memory, which later runs find again
_FORMATS = ("bf16", "int8", "fp8", "fp8+fp8", "int4")
_ROWS = (1, 16, 64, 128)
_CONTEXT = 128
_PROMPT = 4096


def formats(at: Section) -> None:
    """Time the 8B shape with each quantization."""
    shared = Path("/dev/shm")
    if shared.is_dir() and not at.dry:
        _formats(at, write_checkpoint(shared / CHECKPOINT, at.params("8b"), at.dtype))
        shutil.rmtree(shared / CHECKPOINT)
        return
    with tempfile.TemporaryDirectory() as scratch:
        _formats(at, write_checkpoint(Path(scratch, "model"), at.params("8b"), at.dtype))


def _formats(at: Section, folder: Path) -> None:
    for name in _FORMATS:
        quantize, _, activations = name.partition("+")
        began = time.perf_counter()
        llama = Llama.build(
            str(folder), None, at.size(_PROMPT + 64, 64), at.size(128, 2), device=str(at.device),
            dtype="bf16", quantize=None if name == "bf16" else quantize,
            activations=activations or None,
        )  # fmt: skip
        machine.wait_for(at.device)
        at.say(f"8b {name} build", time.perf_counter() - began, "s")
        at.say(f"8b {name} kernels", ", ".join(sorted(llama.model.kernels.names)) or "none")
        _time(at, name, llama)
        llama.close()
        del llama


def _time(at: Section, name: str, llama: Llama) -> None:
    """Report the steps and the prompt of one format, and their ratio to bf16."""
    engine = llama.llm_engine
    quantize = None if name == "bf16" else name.partition("+")[0]
    for rows in _ROWS[: at.size(len(_ROWS), 1)]:
        what = f"8b {name} batch {rows}"
        context = at.size(_CONTEXT, 10)
        gpu_steps.say_decode(
            at, what, MODES[0], engine, rows, context, at.size(64, 1), quantize=quantize
        )
        _say_ratio(at, what, name)
    tokens = at.size(_PROMPT, 18)
    what = f"8b {name} prefill {_PROMPT}"
    seconds = gpu_steps.prefill_seconds(engine, tokens, repeats=at.size(3, 1))
    at.say(what, tokens / seconds, "tokens/s", mode=MODES[0])
    _say_ratio(at, what, name)


def _say_ratio(at: Section, what: str, name: str) -> None:
    plain = at.found(what.replace(f" {name} ", " bf16 "))
    at.say(f"{what}: times bf16", at.found(what) / plain)
