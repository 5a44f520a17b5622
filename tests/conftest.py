"""Settings for the processes of the suite: environment, garbage collection, exit, and cost.

The fixtures are in helpers/fixtures.py.
"""

import atexit
import functools
import gc
import logging
import os
import resource
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

os.environ["TRITON_INTERPRET"] = "1"  # read when Triton is imported, as other libraries may do
# The suite starts hundreds of processes: without __pycache__, which git ignores, each would compile
# the package anew, and each worker the tests. An empty variable counts as unset.
os.environ["PYTHONDONTWRITEBYTECODE"] = ""
sys.dont_write_bytecode = False  # in this process, which has already read the variable
gc.disable()  # until collection has ended, see below


# The quick tier: folders and files whose tests compile nothing and start no process.
QUICK = (
    "engine/test_hooks.py", "engine/test_sampler.py", "engine/test_scheduler.py",
    "engine/test_speculative.py", "prompts/test_call_format.py", "prompts/test_dialog_format.py",
    "prompts/test_grammar.py", "prompts/test_parser.py", "prompts/test_template.py",
    "prompts/test_tools.py", "requests/test_calls.py", "requests/test_leader.py",
    "requests/test_reasoning_text.py", "test_checks.py",
    "test_core.py", "test_docs.py", "test_layout.py", "test_model.py", "test_pages.py",
    "test_readmes.py", "test_sampling_params.py", "test_style.py", "test_tokenizer.py",
)  # fmt: skip
_STARTS = ("subprocess.Popen", "os.fork", "os.posix_spawn", "os.exec")  # events of sys.audit


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick", action="store_true", help="the quick tier, see QUICK in conftest.py"
    )
    help = "every engine uses drafts, some of them wrong: -n 0 tests/test_generation.py"
    parser.addoption("--guess", action="store_true", help=help)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """With --quick, keep the tests of the quick tier, without those that are marked otherwise."""
    if not config.option.quick:
        return
    folder = config.rootpath / "tests"
    places = [folder / name for name in QUICK]
    kept: list[pytest.Item] = []
    left_out: list[pytest.Item] = []
    for item in items:
        is_placed = any(item.path == place or place in item.path.parents for place in places)
        is_marked = any(
            item.get_closest_marker(name) for name in ("dist", "process", "slow", "hosts", "gpu")
        )
        (kept if is_placed and not is_marked else left_out).append(item)
    config.hook.pytest_deselected(items=left_out)
    items[:] = kept


@pytest.fixture(autouse=True)
def _quick_tests_start_no_process(pytestconfig: pytest.Config) -> Iterator[None]:
    """With --quick, fail a test that starts a process."""
    _started.clear()
    yield
    if pytestconfig.option.quick and _started:
        pytest.fail(f"a test of the quick tier started a process: {_started[0]}")


_started: list[str] = []  # what started processes in this test


def _note_start(event: str, arguments: tuple[Any, ...]) -> None:
    if event in _STARTS:
        _started.append(f"{event}{arguments!r}"[:200])


def pytest_configure(config: pytest.Config) -> None:
    """Set up kernels for `-m gpu`, which runs them on the GPU and deselects the interpreter's
    tests.

    The process that distributes tests to workers does not import torch.
    """
    if config.option.quick:
        os.environ["LLAMA_CPU_KERNELS"] = "none"  # else the kernels would be compiled
        sys.addaudithook(_note_start)
    if config.option.markexpr == "gpu":
        del os.environ["TRITON_INTERPRET"]
    if config.getoption("dist", "no") == "no":
        config.pluginmanager.import_plugin("helpers.fixtures")


_SLOW_IMPORTS = ("transformers", "anthropic")  # each takes seconds to import


@pytest.hookimpl(optionalhook=True)  # a hook of pytest-xdist
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Distribute whole files; those that import the same slow library go to one worker."""
    if config.option.dist != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    @functools.cache
    def scope_of(file: str) -> str:
        text = (config.rootpath / file).read_text()
        return next((name for name in _SLOW_IMPORTS if name in text), file)

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(super()._split_scope(nodeid))

    return Scheduling(config, log)


def _children_seconds() -> float:
    """Return the processor time of reaped children, including their own children."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


# a shell that became this process may have installed packages
_SECONDS_BEFORE = _children_seconds()
_spent: Counter[str] = Counter()  # processor milliseconds of each file


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    before = time.process_time() + _children_seconds()
    result = yield
    seconds = time.process_time() + _children_seconds() - before
    _spent[item.location[0]] += round(1000 * seconds)
    return result


@pytest.hookimpl(optionalhook=True)  # a hook of pytest-xdist
def pytest_testnodedown(node: Any) -> None:
    _spent.update(node.workeroutput["spent"])


@pytest.fixture(scope="session", autouse=True)
def _ctrl_c_is_heard() -> None:
    """Restore Ctrl-C: a shell starts background jobs with SIGINT ignored, and children inherit
    that.
    """
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[Any]:
    """Speed up collection, during which nothing becomes garbage.

    Python's collector does not search a million objects of modules and tests, neither now nor
    later. torch's fifty loggers propagate their records: pytest would otherwise add a handler to
    each of them, and remove it, six times a test.
    """
    try:
        return (yield)
    finally:
        for name, logger in logging.root.manager.loggerDict.items():
            if name.startswith("torch") and isinstance(logger, logging.Logger):
                logger.propagate = True
        _freeze()
        gc.enable()


def _freeze() -> None:
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="module")
def _what_a_file_imports_stays() -> Iterator[None]:
    yield
    _freeze()


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["spent"] = dict(_spent)
        atexit.register(os._exit, 0)  # a million objects need not be torn down one by one


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print the processor time of the whole suite and of its ten most expensive files.

    Other work on the machine hardly affects these figures.
    """
    seconds = time.process_time() + _children_seconds() - _SECONDS_BEFORE
    terminalreporter.write_line(f"{seconds:.0f} s of processor time, with all child processes")
    for file, spent in _spent.most_common(10):
        terminalreporter.write_line(f"{spent / 1000:6.1f} s of them in {file}")
