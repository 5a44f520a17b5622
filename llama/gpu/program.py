"""The main function of a program that checks kernels or graphs, in a process that they may end.

In: a `Job` as JSON, and a function that checks one of its names. Out: for each name a line of JSON
with the reason why it must not be used, or null; the first that fails is the last, as it may have
broken more.
"""

import contextlib
import ctypes
import os
import signal
import sys
import warnings
from collections.abc import Callable

import torch

from llama.gpu.job import JOB, RESULT, CheckResult, Choice, Job

PARENT = "LLAMA_CHECK_PARENT"  # a variable: the process that started this one
_PR_SET_PDEATHSIG = 1


def run(
    argument: str,
    check: Callable[[Job, str], list[Choice]],
    prepare: Callable[[Job], None] = lambda job: None,
) -> int:
    """The program: `check` for each of the job's names, and a line of JSON on what came of it.

    prepare: on CUDA, before the first.
    """
    warnings.simplefilter("ignore")
    end_with_parent()
    job = JOB.validate_json(argument)
    if torch.device(job.device).type == "cuda":
        torch.backends.cuda.matmul.allow_tf32 = False
        try:
            torch.cuda.set_device(job.device)
            torch.zeros(1, device=job.device)
        except Exception as e:  # the GPU is another process's alone
            text = " ".join(str(e).split())
            sys.exit(f"{text[:160]} (compute mode EXCLUSIVE_PROCESS? nvidia-smi -c DEFAULT)")
        with contextlib.suppress(Exception):  # the check of a kernel will tell
            prepare(job)
    for name in job.names:
        try:
            result = CheckResult({name: None}, check(job, name))
        except Exception as e:  # whatever it is: this kernel is not used
            kind = "" if isinstance(e, ArithmeticError) else f"{type(e).__name__}: "
            reason = kind + " ".join(str(e).split())[:300]
            is_final = not isinstance(e, torch.OutOfMemoryError)
            result = CheckResult({name: reason}, is_final=is_final)
        print(RESULT.dump_json(result).decode(), flush=True)
        if result.failed:
            break
    return 0


def end_with_parent() -> None:
    """Have Linux kill this process when the one that started it has ended, in whatever way: a
    kernel that hangs would else keep the GPU for ever (prctl(2))."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.environ.get(PARENT, str(os.getppid())) != str(os.getppid()):
        sys.exit("the process that asked for this check has ended")
