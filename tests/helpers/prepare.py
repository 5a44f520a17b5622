"""Compile before the tests what their first run would compile: python -m helpers.prepare, in
tests/.

It reports each slow step and its progress on stderr; nothing is compiled a second time.
"""

import os
import resource
import subprocess
import sys
from importlib.util import find_spec

from helpers import emulated
from helpers.kernels import HAS_KERNELS, INTEGER_BODIES, can_run, library, path_of
from helpers.launch import PROGRAMS, REPO
from llama.kernels.cpu import build


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def compile_for_the_cpu() -> None:
    """Compile each variant of the CPU kernels that can run here."""
    todo = [x for x in INTEGER_BODIES.values() if can_run(x) and not build.is_whole(path_of(x))]
    for number, body in enumerate(todo, 1):
        say(f"compiling the CPU kernels, {number} of {len(todo)} (up to half a minute each)")
        library(body.name)


def compile_for_arm() -> None:
    """Compile the CPU kernels for ARM, which QEMU runs."""
    for name in emulated.ARM:
        say(f"compiling the CPU kernels for ARM, unless they are there: {name}")
        emulated.compiled(name)


def compile_for_gpus() -> None:
    """Compile Triton's kernels to machine code for GPUs that may be absent, and cache them."""
    clean = {name: x for name, x in os.environ.items() if name != "TRITON_INTERPRET"}
    clean["PYTHONPATH"] = str(REPO)
    command = [sys.executable, str(PROGRAMS / "compiled_kernels.py")]
    with subprocess.Popen(command, env=clean, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for number, _ in enumerate(process.stdout, 1):
            if number % 10 == 0:
                say(f"compiling Triton's kernels: {number} done (about a minute in all)")
    say("compiling Triton's kernels of sampling (some seconds)")
    command = [sys.executable, str(PROGRAMS / "compile_sample.py"), "80", "90"]
    subprocess.run(command, env=clean, stdout=subprocess.DEVNULL, check=False)


def processor_seconds() -> float:
    """Return the processor time of this process and of those that it started."""
    used = [resource.getrusage(x) for x in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(x.ru_utime + x.ru_stime for x in used)


if __name__ == "__main__":
    if HAS_KERNELS:
        compile_for_the_cpu()
    if emulated.CAN_EMULATE:
        compile_for_arm()
    cache = os.environ.get("TRITON_CACHE_DIR") or os.path.expanduser("~/.triton/cache")
    if find_spec("triton") and not os.path.isdir(cache):
        compile_for_gpus()
    say(f"prepared in {processor_seconds():.0f} s of processor time")
