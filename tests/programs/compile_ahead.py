"""Compile for an absent GPU what a check of its kernels launches, and count it.

    python tests/programs/compile_ahead.py JOB THREADS

JOB is a job of `llama.gpu.selfcheck`, on the device "cpu". Prints JSON: the elapsed and processor
seconds, the kernels, their launches, and what the check itself still had to compile. With 0 threads
nothing is compiled: Triton only binds the arguments of each launch, which the interpreter does in
another way. TRITON_INTERPRET must not be set.
"""

import json
import sys
import time
from types import SimpleNamespace
from typing import Any

from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from llama.gpu import selfcheck
from llama.gpu.cases import Cases
from llama.gpu.job import JOB
from llama.kernels.cuda.table import table

driver.set_active(
    SimpleNamespace(
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        get_current_device=lambda: 0,
        get_current_stream=lambda device: 0,
    )
)
threads = int(sys.argv[2])
selfcheck.available_cores = lambda *_: max(threads, 1)
if not threads:
    JITFunction._do_compile = lambda *_: None
job = JOB.validate_json(sys.argv[1])
compiled: list[str] = []
knobs.compilation.listener = lambda src, *_, **__: compiled.append(src.name)
began, used = time.perf_counter(), time.process_time()
selfcheck.compile_all(job)
seconds = time.perf_counter() - began, time.process_time() - used
count = len(compiled)
launched: list[str] = []
launch = JITFunction.run


def not_launched(kernel: Any, *args: Any, **options: Any) -> Any:
    launched.append(kernel.fn.__name__)
    return launch(kernel, *args, **options | {"warmup": True})


JITFunction.run = not_launched
cases = Cases(job)
kernels = table(frozenset(job.names), frozenset({cases.dtype}))
for name in job.names:
    for case in getattr(cases, name)():
        case.op(*case.inputs, kernels=kernels)
wall, cpu = seconds
print(json.dumps({
    "seconds": wall, "cpu": cpu, "kernels": count, "launches": len(launched),
    "late": compiled[count:],
}))  # fmt: skip
