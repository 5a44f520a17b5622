"""The main function of a program that checks kernels or graphs, in a process that they may end.

In: a `Job` as JSON, and a function that checks one of its names. Out: for each name a line of JSON
with the reason why it must not be used, or null. The first that fails is the last, as it may have
broken more than itself.
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

PARENT = "LLAMA_CHECK_PARENT"  # environment variable: the id of the process that started this one
_PR_SET_PDEATHSIG = 1
_MAX_REASON = 300  # characters

Check = Callable[[Job, str], list[Choice]]


def run(argument: str, check: Check, prepare: Callable[[Job], None] = lambda job: None) -> int:
    """Check each of the job's names, and print a line of JSON with its result.

    Args:
        argument: The job, as JSON.
        check: Checks one name; an exception is the reason why it must not be used.
        prepare: Runs once before the first check, on CUDA only.

    Returns:
        The exit code of the program.
    """
    warnings.simplefilter("ignore")
    end_with_parent()
    job = JOB.validate_json(argument)
    if torch.device(job.device).type == "cuda":
        _open_gpu(job.device)
        with contextlib.suppress(Exception):  # the check of a kernel will report it
            prepare(job)
    for name in job.names:
        result = _result_of(job, name, check)
        print(RESULT.dump_json(result).decode(), flush=True)
        if result.failed:
            break
    return 0


def _open_gpu(device: str) -> None:
    """Make a GPU the current device; the program ends with a message where that is not allowed."""
    torch.backends.cuda.matmul.allow_tf32 = False
    try:
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    except Exception as e:  # another process has the GPU for itself
        text = " ".join(str(e).split())
        sys.exit(f"{text[:160]} (compute mode EXCLUSIVE_PROCESS? nvidia-smi -c DEFAULT)")


def _result_of(job: Job, name: str, check: Check) -> CheckResult:
    """Return the result of one name, whatever its check raises."""
    try:
        return CheckResult({name: None}, check(job, name))
    except Exception as e:
        kind = "" if isinstance(e, ArithmeticError) else f"{type(e).__name__}: "
        message = " ".join(str(e).split())
        reason = kind + message[:_MAX_REASON]
        is_final = not isinstance(e, torch.OutOfMemoryError)
        return CheckResult({name: reason}, is_final=is_final)


def end_with_parent() -> None:
    """Have Linux kill this process when the one that started it ends, in whatever way (prctl(2)).

    A kernel that hangs would otherwise keep the GPU for ever.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = str(os.getppid())
    if os.environ.get(PARENT, parent) != parent:
        sys.exit("the process that asked for this check has ended")
