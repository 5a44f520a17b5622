"""A pytest plugin that runs tests over several ranks, and records what they generate.

programs/over_ranks.py starts it in every rank of a job, and in one process, to compare the records.
Each rank runs the same tests in the same order, as each rank of a program makes the same calls:

- `Llama.build` builds over all ranks, in as many pipeline stages as asked.
- The checkpoints have twice as many heads, heads of 32 elements and more layers, so that there is
  a part of them for each rank and stage, and so that the CPU kernels support them.
- Tests that say nothing about ranks are deselected, each with a reason (`_UNFIT`).
- The ranks wait for one another after each test.

The record of a rank is a file of JSON lines: for each test its outcome and all that `Llama`'s
methods returned and that its engine's requests ended with, floats with all their digits.
"""

import functools
import itertools
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pytest
import torch
from fairscale.nn.model_parallel import initialize as fs_init
from torch.distributed import TCPStore

from helpers import fixtures
from helpers import meta as oracle
from helpers.recorded_runs import PORT
from llama import Llama
from llama.build_args import BuildArgs
from llama.loading.files import find_files
from llama.model.shares import RankShare
from llama.ranks.placement import Placement
from llama.requests.llm_engine import LLMEngine
from llama.requests.rank_calls import RankCalls
from llama.requests.request import RequestOutput, Usage

RANK = int(os.environ.get("RANK", "0"))
WORLD = int(os.environ.get("WORLD_SIZE", "1"))
_WAIT = timedelta(seconds=120)  # for the other ranks, after each test
_BUILD_TIMEOUT_S = 60.0
_METHODS = ("generate", "text_completion", "chat_completion", "beam_search")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", help="folder of the ranks' records")
    parser.addoption("--stages", type=int, default=1, help="pipeline stages")
    parser.addoption("--layers", type=int, default=0, help="more layers of checkpoints")
    parser.addoption("--bf16", action="store_true", help="build in bf16 where a test says fp32")


@pytest.hookimpl(tryfirst=True)  # before the plugin of tmp_path reads the option
def pytest_configure(config: pytest.Config) -> None:
    config.option.basetemp = f"{config.option.record}/tmp{RANK}"
    config.pluginmanager.register(OverRanks(config.option), "over_ranks_session")


class OverRanks:
    """The run of this rank."""

    def __init__(self, options: Any) -> None:
        self.options = options
        self.narrow: dict[str, dict[str, Any]] = {}  # params of checkpoints as tests wanted them
        self.results: list[Any] = []  # of the running test
        # Calls without a seed in the running test, of each engine.
        self.num_calls: WeakKeyDictionary[RankCalls, int] = WeakKeyDictionary()
        self.outcome: tuple[str, str] = ("", "")
        self.num_tests = 0
        self.store: TCPStore | None = None
        self.patches = pytest.MonkeyPatch()
        self.path = Path(options.record, f"rank{RANK}.jsonl")
        self.path.write_text("")

    def pytest_sessionstart(self) -> None:
        if WORLD > 1:
            port = int(os.environ[PORT])
            self.store = TCPStore(
                "127.0.0.1", port, WORLD, is_master=RANK == 0, timeout=_WAIT, wait_for_workers=False
            )
            _keep_metas_model_in_one_process(self.patches)
        if self.options.bf16:
            # What a test compares with in float32 is not compared in bf16.
            self.patches.setattr(oracle, "greedy", lambda *_: _Anything())
            self.patches.setattr(pytest, "approx", lambda *_, **__: _Anything())
        if self.options.stages > 1:
            # How much of a prompt is cached depends on the steps that have been settled.
            self.patches.setattr(Usage, "__eq__", _has_as_many_tokens)
        self.patches.setattr(fixtures, "model_params", self._wide_params)
        self.patches.setattr(Llama, "build", staticmethod(self._builder(Llama.build)))
        for name in _METHODS:
            self.patches.setattr(Llama, name, self._recorder(getattr(Llama, name)))
        taken = LLMEngine.take_output

        def take_output(engine: LLMEngine, request: Any) -> RequestOutput:
            output = taken(engine, request)
            if output.finished:
                self.results.append(["request", _kind(engine), _described(output)])
            return output

        self.patches.setattr(LLMEngine, "take_output", take_output)
        self.patches.setattr(RankCalls, "take_number", lambda calls: self._take_number(calls))

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[Any]) -> None:
        found: dict[str, list[str]] = {}
        kept = []
        for item in items:
            reason = why_unfit(item.nodeid, self.options)
            if reason is None:
                kept.append(item)
            else:
                found.setdefault(reason, []).append(item.nodeid)
        config.hook.pytest_deselected(items=[x for x in items if x not in kept])
        items[:] = kept
        self._write({"deselected": found})

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        self.results.clear()
        self.num_calls.clear()
        self.outcome = ("passed", "")
        result = yield
        self.num_tests += 1
        found: dict[str, Any] = {"test": item.nodeid, "outcome": self.outcome[0]}
        self._write(found | {"why": self.outcome[1], "results": self.results})
        if self.store is not None:
            keys = [f"{self.num_tests}/{rank}" for rank in range(WORLD)]
            self.store.set(keys[RANK], self.outcome[0])
            self.store.wait(keys, _WAIT)
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any, request: Any) -> Iterator[Any]:
        """Record what a shared fixture generates by itself: another test may be its first user."""
        if fixturedef.scope == "function":
            return (yield)
        of_test, self.results = self.results, []
        try:
            return (yield)
        finally:
            name = f"{fixturedef.baseid}::{fixturedef.argname}[{getattr(request, 'param', '')}]"
            self._write({"test": name, "outcome": "set up", "results": self.results})
            self.results = of_test

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.outcome != "passed":
            crash = getattr(report.longrepr, "reprcrash", None)
            self.outcome = report.outcome, crash.message if crash else str(report.longrepr)[-300:]

    def pytest_sessionfinish(self) -> None:
        self._write({"finished": True})
        self.patches.undo()

    def _write(self, found: dict[str, Any]) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(found) + "\n")

    def _wide_params(self, changes: dict[str, Any]) -> dict[str, Any]:
        narrow = fixtures.PARAMS | changes
        wide = narrow | {"n_layers": narrow["n_layers"] + self.options.layers}
        wide["n_heads"] *= 2
        if (narrow["n_kv_heads"] or 1) > 1:
            wide["n_kv_heads"] *= 2
        wide["dim"] = max(narrow["dim"], 32 * wide["n_heads"])
        self.narrow[json.dumps(wide, sort_keys=True)] = narrow
        return wide

    def _take_number(self, calls: RankCalls) -> int:
        """Number the calls of each test from 0: their seeds must not depend on other tests."""
        number = self.num_calls.get(calls, 0)
        self.num_calls[calls] = number + 1
        return number

    def _builder(self, build: Callable[..., Llama]) -> Callable[..., Llama]:
        @functools.wraps(build)
        def wrapped(*args: Any, **kwargs: Any) -> Llama:
            kwargs.setdefault("timeout_s", _BUILD_TIMEOUT_S)
            kwargs.setdefault("mute_ranks", False)
            if self.options.stages > 1 and kwargs.get("pipeline_parallel_size", 1) == 1:
                kwargs["pipeline_parallel_size"] = self.options.stages
            if self.options.bf16 and kwargs.get("dtype") == "fp32":
                kwargs["dtype"] = "bf16"
            if kwargs.get("kv_cache_memory_bytes"):
                kwargs["kv_cache_memory_bytes"] = self._as_many_pages(BuildArgs(*args, **kwargs))
            return build(*args, **kwargs)

        return wrapped

    def _as_many_pages(self, asked: BuildArgs) -> int:
        """Return the bytes that hold as many pages as a test asks for, on the fullest rank."""
        num_bytes = asked.kv_cache_memory_bytes
        assert num_bytes is not None
        params = json.loads(Path(asked.ckpt_dir, "params.json").read_text())
        narrow = self.narrow.get(json.dumps(params, sort_keys=True))
        if narrow is None:
            return num_bytes
        stages = self.options.stages
        size = WORLD // stages
        held = 0
        for stage, rank in itertools.product(range(stages), range(size)):
            files = find_files(asked, Placement(stage, stages, rank, size), torch.device("cpu"))
            share = RankShare.of(files.checkpoint.params, files.placement)
            held = max(held, len(share.layers) * len(share.kv_heads) * share.head_dim)
        head_dim = narrow["dim"] // narrow["n_heads"]
        wanted = narrow["n_layers"] * (narrow["n_kv_heads"] or narrow["n_heads"]) * head_dim
        return num_bytes * held // wanted // (2 if self.options.bf16 else 1)

    def _recorder(self, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def wrapped(llama: Llama, *args: Any, **kwargs: Any) -> Any:
            found = method(llama, *args, **kwargs)
            self.results.append([method.__name__, _kind(llama.llm_engine), found])
            return found

        return wrapped


class _Anything:
    """An object that equals any other."""

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None  # type: ignore[assignment]


def _has_as_many_tokens(usage: Usage, other: object) -> bool:
    return isinstance(other, Usage) and usage.counts == other.counts


def _kind(engine: LLMEngine) -> str:
    """Return the types of a model's elements and of its KV cache."""
    runner = engine.core.runner
    quantized = runner.model.quantization or ""
    return f"{runner.model.norm.weight.dtype} {quantized} {runner.kv_cache.dtype}"


def _described(output: RequestOutput) -> dict[str, Any]:
    """Return what a caller sees of a request that has ended, but for what depends on time."""
    answers = []
    for answer in output.outputs:
        seen: dict[str, Any] = {"finish_reason": answer.finish_reason}
        if answer.finish_reason != "abort":  # when it ends depends on how full the steps were
            seen |= {"ids": answer.token_ids, "text": answer.text, "stop": answer.stop_reason}
            seen |= {"logprobs": _pairs(answer.logprobs), "sum": answer.cumulative_logprob}
        answers.append(seen)
    return {
        "prompt": output.prompt_token_ids,
        "error": output.error,
        "prompt_logprobs": _pairs(output.prompt_logprobs),
        "answers": answers,
    }


def _pairs(logprobs: Any) -> Any:
    return logprobs and [None if each is None else list(each.items()) for each in logprobs]


def _keep_metas_model_in_one_process(patches: pytest.MonkeyPatch) -> None:
    """Let Meta's layers see a group of this rank alone, which the data-parallel group is."""

    @contextmanager
    def alone() -> Iterator[None]:
        group = fs_init.get_model_parallel_group()
        fs_init._MODEL_PARALLEL_GROUP = fs_init.get_data_parallel_group()
        try:
            yield
        finally:
            fs_init._MODEL_PARALLEL_GROUP = group

    for name in ("model", "greedy", "logprobs"):
        patches.setattr(oracle, name, alone()(getattr(oracle, name)))
    for name in ("join_a_world_of_one", "leave_the_world"):
        patches.setattr(oracle, name, lambda: None)


_PRINTS = "reads what a single process prints or logs"
_ALONE = "is about a process without ranks"
_NO_RANKS = "builds its model without ranks, or none"
_SIZES = "expects what another model than the wide one gives"
_THREADS = "calls from several threads, for which rank 0 must lead"
_METRICS = "reads the metrics of a server, which rank 0 alone has"
_FAILS = "lets a step fail, which ends a job of several ranks"
_INTERRUPTED = "interrupts a step, which leaves the messages of stages out of order"
_STEPS = "expects fewer steps than a pipeline has"
_IS_FLOAT32 = "compares with float32"
_ONE_STAGE = "reads or calls modules of the model that its stage lacks"
_DRAFT_MODEL = "has a draft model, which stages refuse"

# Patterns of the names of tests that are not run, each with the reason.
_UNFIT = {
    "a_build_leaves_pythons_traceback_alone": _ALONE,
    r"bad_arguments_to_build\[.*does not divide the 1 processes": _ALONE,
    "ranks_of_one_machine_share_its_memory": _ALONE,
    "where_int8_is_for": _PRINTS,
    "building_touches_no_global_state": _PRINTS,
    "a_build_can_be_silent": _PRINTS,
    "defaults_fit_the_memory": _PRINTS,
    "a_kv_cache_in_8_bits": _SIZES,
    "a_prediction_is_where_drafts_come_from": _SIZES,
    "a_model_is_built_with_a_draft_model": _SIZES,
    "a_model_is_built_to_speculate": _METRICS,
    "a_rank_holds_at_least_one_head": _NO_RANKS,
    "int8_is_the_model_of_the_rounded_weights": _NO_RANKS,
    "packed_weights_say_what_unpacked_ones_do": _NO_RANKS,
    "a_row_of_a_chunk_has_the_bits_of_a_single_step": _NO_RANKS,
    "async_request": _THREADS,
    "an_error_in_a_step_reaches_every_waiter": _THREADS,
    "requests_that_have_not_run_outlive_a_step_that_fails": _FAILS,
}
_UNFIT_IN_BF16 = {
    "(bf16|fp16)_stays_near_float32": _IS_FLOAT32,
    r"what_cannot_be_quantized_is_refused\[.* not fp32": _IS_FLOAT32,
    "equals_transformers": _IS_FLOAT32,
}
_UNFIT_WITH_MORE_LAYERS = {
    "stop_tokens_are_those_of_the_release": _SIZES,
    r"beam_search_equals_transformers\[-1": _SIZES,  # within the error of fewer layers
    "streamed_equals_not_streamed_on_80_prompts": _SIZES,
}
_UNFIT_IN_STAGES = {
    "prompts_of_mixed_lengths_are_prefilled_whole": _STEPS,
    r"drafts_change_no_answer\[oracle-300": _STEPS,
    "(bf16|fp16)_stays_near_float32": _ONE_STAGE,
    "a_matrix_stored_once_is_held_once": _ONE_STAGE,
    "logprobs_hold_the_token_and_the_likeliest": _ONE_STAGE,
    "where_the_vocabulary_does_not_fill_its_blocks": _ONE_STAGE,
    r"drafts_change_no_answer\w*\[model": _DRAFT_MODEL,
    "a_draft_model": _DRAFT_MODEL,
    "an_interrupted_call_leaves_nothing_behind": _INTERRUPTED,
}


def why_unfit(nodeid: str, options: Any) -> str | None:
    """Return why a test is not run in a layout, or None."""
    unfit = dict(_UNFIT)
    if options.layers:
        unfit |= _UNFIT_WITH_MORE_LAYERS
    if options.bf16:
        unfit |= _UNFIT_IN_BF16
    if options.stages > 1:
        unfit |= _UNFIT_IN_STAGES
    name = nodeid.partition("::test_")[2]
    return next((reason for x, reason in unfit.items() if re.search(x, name)), None)
