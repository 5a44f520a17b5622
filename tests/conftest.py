"""Shared fixtures: a tokenizer, a small random checkpoint, a loaded `Llama`, the CPU kernels."""

import gc
import logging
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, as other libraries may do
# The suite starts hundreds of processes: without __pycache__, which git ignores, each would compile
# the package anew, and each worker the tests. Empty counts as unset.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""

import pytest
import torch

from helpers import forked, warm
from helpers.checkpoints import random_state, write_byte_tokenizer, write_meta
from helpers.kernels import BODIES, HAS_KERNELS, library
from helpers.launch import DEMO
from llama import Llama
from llama.engine.core import EngineCore
from llama.engine.lookup import Lookup
from llama.engine.sequence import Sequence
from llama.engine.speculative import Drafter, Guess
from llama.ops.cpu import native
from llama.ranks.collectives import ModelParallel

sys.dont_write_bytecode = False  # in this process, which has read the variable; see above

PARAMS = {
    "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 512,
    "multiple_of": 32, "ffn_dim_multiplier": 1.3, "norm_eps": 1e-5, "rope_theta": 500000.0,
}  # fmt: skip


def pytest_addoption(parser: pytest.Parser) -> None:
    help = "every engine guesses tokens ahead, some of them wrong: -n 0 tests/test_generation.py"
    parser.addoption("--guess", action="store_true", help=help)


class _Guesses(Drafter):
    """Of each text what it repeats, and a wrong token behind it."""

    def _begin(self, seq: Sequence) -> Guess:
        return Guess(seq, [])

    def _draft(self, guesses: list[Guess], seconds: float) -> list[list[int]]:
        texts = [x.seq.tokens for x in guesses]
        return [[*Lookup(tokens).guess(len(tokens) % 5), 65] for tokens in texts]


@pytest.fixture(autouse=True, scope="session")
def _guess(pytestconfig: pytest.Config) -> Iterator[list[EngineCore]]:
    """With --guess: the engines that did. A program in another process does not."""
    cores: list[EngineCore] = []
    with pytest.MonkeyPatch.context() as patched:
        if pytestconfig.option.guess:
            made = EngineCore.__init__

            def init(core: EngineCore, runners: Any, scheduler: Any) -> None:
                made(core, runners, scheduler)
                if not core.runner.async_scheduling:
                    core.drafter = _Guesses(7, ModelParallel(), [])
                cores.append(core)

            patched.setattr(EngineCore, "__init__", init)
        yield cores
    if pytestconfig.option.guess:
        stats = [core.stats for core in cores]
        print(f"\n{sum(x.accepted_tokens for x in stats)} of {sum(x.draft_tokens for x in stats)}")


def pytest_configure(config: pytest.Config) -> None:
    """What `-m gpu` selects runs its kernels on the GPU, and the interpreter's tests stay away."""
    if config.option.markexpr == "gpu":
        del os.environ["TRITON_INTERPRET"]


def _children_seconds() -> float:
    """Processor time of the children that have ended and were waited for, with theirs."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


_SECONDS_BEFORE = _children_seconds()  # a shell that became this process may have installed things
_spent: Counter[str] = Counter()  # processor milliseconds of each file


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    before = time.process_time() + _children_seconds()
    result = yield
    seconds = time.process_time() + _children_seconds() - before
    _spent[item.location[0]] += round(1000 * seconds)
    return result


@pytest.hookimpl(optionalhook=True)  # pytest-xdist's
def pytest_testnodedown(node: Any) -> None:
    _spent.update(node.workeroutput["spent"])


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_is_heard() -> None:
    """A shell starts a job in its background with SIGINT ignored, and children inherit that."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def make_checkpoint(tmp_path_factory) -> Callable[..., tuple[Path, dict, dict]]:
    """make_checkpoint(num_shards=1, seed=0, **params) -> (folder, state, params)."""

    def make(num_shards: int = 1, seed: int = 0, **changes) -> tuple[Path, dict, dict]:
        params = {**PARAMS, **changes}
        state = random_state(params, seed)
        folder = tmp_path_factory.mktemp("checkpoint")
        write_meta(folder, params, state, num_shards)
        write_byte_tokenizer(folder)
        return folder, state, params

    return make


@pytest.fixture(scope="session")
def checkpoint_dir(make_checkpoint) -> tuple[Path, dict, dict]:
    return make_checkpoint()


@pytest.fixture(scope="session")
def shared_llama(checkpoint_dir) -> Llama:
    """One float32 model on the CPU for many tests; none of them may change it."""
    return Llama.build(str(checkpoint_dir[0]), None, 128, 4, device="cpu", dtype="fp32")


@pytest.fixture(scope="session")
def demo() -> Llama:
    """The demo model in float32 on the CPU, for many tests; none of them may change it."""
    return Llama.build(str(DEMO), None, 512, 64, device="cpu", dtype="fp32")


@pytest.fixture(autouse=True)
def single_thread() -> Iterator[None]:
    """Tiny models run fastest on one thread, and two-core machines stay quiet. OMP_NUM_THREADS
    stands for another number: no test may depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    yield
    torch.set_num_threads(before)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """What is imported stays: Python's collector does not look for garbage in a million objects of
    modules and tests, neither while they become more nor later. torch's fifty loggers hand on what
    they log: pytest would give each of them a handler, and take it away, six times a test."""
    gc.disable()
    try:
        return (yield)
    finally:
        for name, logger in logging.root.manager.loggerDict.items():
            if name.startswith("torch") and isinstance(logger, logging.Logger):
                logger.propagate = True
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_sessionfinish(session: pytest.Session) -> None:
    """What forks for the tests ends here, and so counts below."""
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["spent"] = dict(_spent)
    warm.close()
    forked.close()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """What the tests cost in all, which other work on the machine does not change much, and the
    ten dearest files: 480 s are to last for all."""
    seconds = time.process_time() + _children_seconds() - _SECONDS_BEFORE
    terminalreporter.write_line(f"{seconds:.0f} s of processor time, with all child processes")
    for file, spent in _spent.most_common(10):
        terminalreporter.write_line(f"{spent / 1000:6.1f} s of them in {file}")


@pytest.fixture(params=BODIES)
def kernels(request, monkeypatch) -> str:
    """An op with its kernel, in each body that runs here: the body's name."""
    if not HAS_KERNELS:
        pytest.skip("needs x86-64 with AVX2, and g++")
    if not native.cpu_flags() >= BODIES[request.param].needs:
        pytest.skip(f"this CPU has no {request.param}")
    body = library(request.param)
    monkeypatch.setattr(native, "kernels", lambda: body)
    return request.param


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> torch.device:
    """Where a torch body runs: the CPU always, a GPU where there is one."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("there is no CUDA GPU")
    return torch.device(request.param)


@pytest.fixture
def no_kernels(monkeypatch):
    monkeypatch.setattr(native, "kernels", lambda: None)
