"""The main function of a program that checks kernels or graphs, in a process that they may end.

In: a `Job` as JSON, and a function that checks one of its names. Out: for each name a line of JSON
with the reason why it must not be used, or null. The first that fails is the last, as it may have
broken more than itself. Where the machine cannot compile, the reason is that of all names.
"""

import contextlib
import ctypes
import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from subprocess import SubprocessError

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
    for i in range(len(job.names)):
        result = _result_of(job, job.names[i:], check)
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


def _result_of(job: Job, names: Sequence[str], check: Check) -> CheckResult:
    """Return the result of the first name, whatever its check raises.

    Without a compiler, or with a full disk, it is the result of the others as well.
    """
    try:
        return CheckResult({names[0]: None}, check(job, names[0]))
    except Exception as e:
        kind = "" if isinstance(e, ArithmeticError) else f"{type(e).__name__}: "
        message = " ".join(str(e).split())
        reason = kind + message[:_MAX_REASON]
        failed = names if _is_of_machine(e) else names[:1]
        return CheckResult(dict.fromkeys(failed, reason), is_final=_is_final(e))


def _is_of_machine(error: BaseException | None) -> bool:
    """Return whether an error says that nothing can be compiled here, such as without Python.h."""
    is_own = isinstance(error, SubprocessError | OSError)
    return is_own or (error is not None and isinstance(error.__cause__, OSError))


def _is_final(error: Exception) -> bool:
    """Return whether the same check would fail again, as the kernel is at fault.

    It is where its results are wrong, or where Triton cannot compile it for this GPU. Other errors
    may end with their cause: no compiler, no memory, or a full disk.
    """
    if isinstance(error, ArithmeticError):
        return True
    if "triton" not in sys.modules:
        return False
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources

    return isinstance(error, CompilationError | OutOfResources)


def end_with_parent() -> None:
    """Have Linux kill this process when the one that started it ends, in whatever way (prctl(2)).

    A kernel that hangs would otherwise keep the GPU for ever.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = str(os.getppid())
    if os.environ.get(PARENT, parent) != parent:
        sys.exit("the process that asked for this check has ended")
