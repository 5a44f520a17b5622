"""Compile before the tests what their first run would compile: python -m helpers.prepare, in
tests/.

It reports each slow step and its progress on stderr; nothing is compiled a second time.
"""

import os
import subprocess
import sys
from importlib.util import find_spec

from helpers.kernels import BODIES, HAS_KERNELS, folder_of, library
from helpers.launch import PROGRAMS, REPO
from llama.ops.cpu import build


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def compile_for_the_cpu() -> None:
    """Compile each variant of the CPU kernels that the compiler supports."""
    compiler = build.find_compiler()
    assert compiler is not None
    known = [body for body in BODIES.values() if build.accepts(compiler, body)]
    paths = {x: folder_of(x) / f"{build.fingerprint(compiler, x)}.so" for x in known}
    todo = [body for body, path in paths.items() if not path.exists()]
    for number, body in enumerate(todo, 1):
        say(f"compiling the CPU kernels, {number} of {len(todo)} (half a minute each)")
        library(body.name)


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


if __name__ == "__main__":
    if HAS_KERNELS:
        compile_for_the_cpu()
    cache = os.environ.get("TRITON_CACHE_DIR") or os.path.expanduser("~/.triton/cache")
    if find_spec("triton") and not os.path.isdir(cache):
        compile_for_gpus()
