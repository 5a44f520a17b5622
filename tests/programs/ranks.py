"""The program that test_parallel.py runs on every rank: it reads jobs and writes results as JSON.

A job is {"do": name, ...}; its result is that of the function of that name, or the text of the
error that it raised.
"""

import asyncio
import atexit
import contextlib
import dataclasses
import functools
import gc
import io
import json
import operator
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fairscale.nn.model_parallel import initialize as fs_init
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from helpers import drafts
from helpers.kernels import without_amx
from helpers.tape import Again
from helpers.waiting import wait_until
from llama import AsyncLLMEngine, Llama
from llama.compat import hosts, vllm
from llama.ops.kernels import KernelError, Kernels
from llama.ops.swiglu import silu_mul
from llama.options.engine_options import EngineOptions
from llama.options.graphs.recorder import CaptureError, Outputs
from llama.options.graphs.step_graphs import StepGraphs
from llama.options.speculation.hook import speculate
from llama.ranks import one_shot as one_shot_module
from llama.ranks import torch_private
from llama.ranks.collectives import ModelParallel
from llama.ranks.one_shot import MAX_BYTES, OneShot
from llama.ranks.parallel import RankError
from llama.ranks.shared_memory import _FIELD
from llama.ranks.stage_link import StageLink
from llama.sampling_params import SamplingParams
from llama.weights import choice

RANK = int(os.environ["RANK"])
loaded: dict[str, Llama] = {}
_BUILD = Llama.build


def build(folder: str, size: int | None = None, timeout_s: float = 60.0, **kwargs) -> Llama:
    if folder not in loaded:
        loaded[folder] = Llama.build(
            folder, None, 128, 4, size, dtype="fp32", device="cpu", timeout_s=timeout_s, **kwargs
        )
    return loaded[folder]


def peers_of(llama: Llama) -> ModelParallel:
    """Return the peers of this rank, which has some."""
    parallel = llama.model.parallel
    assert isinstance(parallel, ModelParallel)
    return parallel


def forget() -> None:
    """Drop the model, so that the next job loads it anew."""
    loaded.clear()


def use_shares(shares: list[int] | None, ffn_shares: list[int] | None = None) -> None:
    """Let all builds that follow give the ranks these shares."""
    options = {"shares": shares, "ffn_shares": ffn_shares}
    Llama.build = staticmethod(functools.partial(_BUILD, **options))  # type: ignore


def generate(folder: str, prompts: list, size: int | None = None, **kwargs) -> list:
    tokens, logprobs = build(folder, size).generate(prompts, **kwargs)
    return [tokens, logprobs]


def embed(folder: str, prompts: list) -> list:
    """Return means, last states, and a hidden state of each prompt, called and led."""
    llama = build(folder)

    def vectors() -> list:
        found = [
            x.tolist() for kind in ("mean", "last") for x in llama.embed(prompts, pooling=kind)
        ]
        states = llama.hidden_states(prompts, [1, "norm"], "last")
        return [*found, [{str(name): x.tolist() for name, x in state.items()} for state in states]]

    return [vectors(), llama.lead(vectors)]


def score(folder: str, texts: list[str]) -> list:
    """Return scores of a reranker, and its refusal of other arguments on rank 1 alone."""
    llama = build(folder)
    found = llama.score(texts[0], texts[1:])
    with contextlib.suppress(ValueError):
        llama.score(texts[0] if RANK else "", texts[1:])
        found.append(-1.0)
    return [*found, llama.classify(texts)[0].logits]


def place(folder: str, size: int | None = None) -> list[int]:
    parallel = build(folder, size).model.parallel
    return [parallel.rank, parallel.size, parallel.data_rank, parallel.data_size]


def half_round_trip(folder: str) -> float | None:
    """Return half of the shortest round trip to rank 1 in seconds; None on other ranks."""
    world = peers_of(build(folder)).world
    assert world is not None
    message, seconds = torch.zeros(1), []
    for _ in range(8):
        began = time.monotonic()
        for sender in (0, 1):
            if sender == RANK:
                world.send([message], 1 - RANK, 0).wait()
            else:
                world.recv([message], 1 - RANK, 0).wait()
        seconds.append(time.monotonic() - began)
    return None if RANK else min(seconds) / 2


def different(folder: str, prompts: list) -> None:
    """Pass another prompt on each rank: an error is due on every rank."""
    build(folder).generate([prompts[RANK]], 4)


def one_bad(folder: str, bad_rank: int) -> None:
    """Pass a bad prompt on one rank alone."""
    build(folder).generate([[] if bad_rank == RANK else [256]], 4)


def build_unlike(folder: str) -> None:
    """Request another size on each rank."""
    Llama.build(folder, None, 64 + RANK, 1, dtype="fp32", device="cpu")


def adapters(folder: str, roots: list[str], prompts: list[list[int]]) -> list[Any]:
    """Answer with adapters that every rank loads, then with some that rank 0 loads while it leads.

    Even and odd ranks see the adapters of different roots: "lost" is in the first one alone, and
    "unlike" differs.
    """
    llama = build(folder)
    before = os.getcwd()
    os.chdir(roots[RANK % len(roots)])
    try:
        llama.load_adapter("one", "one")
        refused = []
        for name in ("lost", "unlike"):
            try:
                llama.load_adapter(name, name)
            except Exception as e:
                refused.append(f"{type(e).__name__}: {e}")
        called = llama.generate(prompts, 8, 0.0, adapter="one")[0]

        def work() -> list[Any]:
            failures = []
            for name in ("lost", "unlike"):
                try:
                    llama.load_adapter(name, name)
                except Exception as e:
                    failures.append(f"{type(e).__name__}: {e}")
            llama.load_adapter("two", "two")
            answers = [llama.generate(prompts, 8, 0.0, adapter=x)[0] for x in (None, "one", "two")]
            llama.drop_adapter("two")
            return [failures, answers]

        led = llama.lead(work)
        left = len(llama.llm_engine.adapter_store._adapters)
        llama.drop_adapter("one")
    finally:
        os.chdir(before)
    return [refused, called, led, left]


def other_torch(folder: str) -> None:
    """Imitate another version of torch on each rank."""
    with mock.patch("torch.__version__", f"2.{10 + RANK}"):
        Llama.build(folder, None, 64, 1, dtype="fp32", device="cpu")


def other_weights(folders: list[str]) -> None:
    """Load different weights of the same shapes on each rank."""
    Llama.build(folders[RANK], None, 64, 1, dtype="fp32", device="cpu")


def fewer_files(folder: str) -> None:
    """Build from a folder that only rank 0 has, as if another machine lacked the weights."""
    Llama.build(folder if RANK == 0 else folder + "-gone", None, 64, 1, dtype="fp32", device="cpu")


def build_merged(folder: str, lora: list[str | None], prompt: list[int]) -> list[list[int]]:
    """Merge an adapter that each rank has a path of its own for, and answer a prompt."""
    llama = Llama.build(folder, None, 64, 4, dtype="fp32", device="cpu", lora=lora[RANK])
    return llama.generate([prompt], 8, 0)[0]


def verified(folder: str) -> None:
    """Build with a damaged weight, which only the rank that checks it finds."""
    Llama.build(folder, None, 64, 1, dtype="fp32", device="cpu", verify=True)


def one_amx(folder: str) -> list[Any]:
    """Build where only rank 1 has AMX, then where none has it.

    Return whether lm_head rounds its inputs by default, and the error where it is asked to.
    """

    def build_with(*ranks: int, **options: Any) -> Llama:
        with (
            mock.patch.object(choice, "_has_amx", lambda: RANK in ranks),
            contextlib.redirect_stdout(io.StringIO()),
        ):
            return Llama.build(folder, None, 64, 1, device="cpu", mute_ranks=False, **options)

    models = [build_with(*ranks).model for ranks in ((1,), ())]
    found: list[Any] = [bool(model.output.weight.activations) for model in models]
    try:
        build_with(1, activations="int8_lm_head")
    except Exception as e:
        found.append(f"{type(e).__name__}: {e}")
    return found


def listening(folder: str) -> list[str]:
    """Return the addresses, in the kernel's hex, that this process listens on beyond loopback."""
    build(folder)
    links = []
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor that lists them
            links.append(os.readlink(fd))
    own = {link[8:-1] for link in links if link.startswith("socket:[")}
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            address, state, inode = line.split()[1], line.split()[3], line.split()[9]
            if state == "0A" and inode in own:
                found.append(address)
    loopback = (
        "0100007F:",
        "00000000000000000000000001000000:",
        "0000000000000000FFFF00000100007F:",
    )
    assert found, "gloo listens somewhere"
    return [address for address in found if not address.startswith(loopback)]


def different_requests(folder: str) -> None:
    """Add another request on each rank, then make the same call on all.

    The requests are refused when they are added: the call runs without them, and no rank waits for
    one that never comes.
    """
    llama = build(folder)
    steps = llama.engine.stats.steps
    try:
        llama.llm_engine.add_request("a", [256, 65 + RANK], SamplingParams(max_tokens=4))
    finally:
        assert not llama.llm_engine.has_unfinished_requests()
        assert llama.engine.stats.steps == steps
        assert llama.generate([[256, 65]], 3, 0)[0][0]


def second_thread(folder: str) -> str:
    """Call from another thread while this one has a request: it is refused, and nothing is mixed
    up.
    """
    llama = build(folder)
    llama.llm_engine.add_request("a", [256, 65], SamplingParams(max_tokens=4, temperature=0))
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(llama.generate, [[256, 66]], 3, 0).exception()
    while llama.llm_engine.has_unfinished_requests():
        llama.llm_engine.step()
    return f"{type(error).__name__}: {error}"


def stream(folder: str, prompts: list[str]) -> list[str]:
    """Return streamed answers, joined, on every rank."""
    texts = [""] * len(prompts)
    for increment in build(folder).stream_text(prompts, 1.0, 1.0, 16, seed=3):
        texts[increment.index] += increment.text
    return texts


def shares_memory(folder: str, prompts: list) -> list:
    """Return how often this rank exchanges tensors for one token, and greedy answers.

    The token is greedy, sampled, and sampled with its log probability.
    """
    llama, counts = build(folder), []
    shared = peers_of(llama).shared
    assert shared is not None
    ways: list[dict] = [{"temperature": 0.0}, {"temperature": 1.0}, {"logprobs": True}]
    for settings in ways:
        before = int(shared._tensors[_FIELD["sequence"]])
        llama.generate([[256, 65, 66]], 1, **settings)
        counts.append(int(shared._tensors[_FIELD["sequence"]]) - before)
    return [counts, llama.generate(prompts, 8, 0.0)[0]]


def one_shot_sums(folder: str) -> list:
    """Return whether a one-shot all-reduce is accepted, and its sums.

    The cases are a right one, a wrong one on one rank, and other bits on one rank. gloo replaces
    the GPU kernels.
    """
    parallel = peers_of(build(folder))
    assert parallel.group is not None and parallel.control is not None
    group, control = parallel.group, parallel.control

    def reduce(own: Tensor, out: Tensor) -> None:
        assert own.shape == out.shape
        dist.all_reduce(out, group=group)

    def switch(own: Tensor, out: Tensor) -> None:
        reduce(own, out)

    def wrong(own: Tensor, out: Tensor) -> None:
        reduce(own, out)
        out[0] += RANK

    def unlike(own: Tensor, out: Tensor) -> None:
        reduce(own, out)
        if out[0] % 1:
            out *= 1 + RANK * 1e-2

    taken = []
    for body in (reduce, wrong, unlike):
        tried = OneShot(torch.empty(MAX_BYTES, dtype=torch.uint8), body)
        taken.append(tried.self_test(group, control))
    one_shot = OneShot(torch.empty(MAX_BYTES, dtype=torch.uint8), reduce)
    joined = [
        join_one_shot(group, control, (small, large), way)
        for small, large, way in (
            (reduce, None, ""), (reduce, None, "prepare"), (reduce, None, "meet"),
            (reduce, None, "forbid"),
            (reduce, switch, ""), (reduce, [None, switch][RANK], ""), (reduce, wrong, ""),
        )
    ]  # fmt: skip
    switched = OneShot(torch.empty(4 * MAX_BYTES, dtype=torch.uint8), wrong, reduce)
    whole = torch.ones(MAX_BYTES)
    switched.all_reduce(whole)
    x = torch.arange(8.0).view(2, 4) + RANK
    sizes = [
        one_shot.supports(torch.empty(n)) for n in (0, 3, 4, MAX_BYTES // 4, MAX_BYTES // 4 + 4)
    ]
    sizes += [one_shot.supports(torch.empty(8, dtype=x)) for x in (torch.bfloat16, torch.float16)]
    one_shot.all_reduce(x)
    are_summed = [
        bool((whole == 2).all()),
        switched.supports(whole),
        switched.supports(whole.repeat(2)),
    ]
    return [taken, x.tolist(), sizes, joined, are_summed, fails_in_a_rendezvous(group, control)]


def join_one_shot(group: Any, control: Any, sums: tuple, fails: str) -> list[int]:
    """Return the maximal bytes of a sum, and of one without the switch; 0 where it is unavailable.

    On rank 1 no memory can be allocated or it is forbidden, or no rank can map another's.
    """

    def meet(group: Any) -> tuple:
        if fails == "meet":
            raise RuntimeError("no permission")
        return sums

    def buffer(num_bytes: int, device: torch.device) -> tuple[Tensor, Callable]:
        if fails == "prepare" and RANK:
            raise RuntimeError("no memory")
        return torch.empty(num_bytes, dtype=torch.uint8), meet

    def seconds(run: Any) -> float:
        """Return a time by which nccl wins from 8 MB on, and the switch from 64 KB on."""
        num_bytes = run.args[-1].nbytes
        if run.func is dist.all_reduce:
            return 3.0 if num_bytes < 8 << 20 else 1.0
        is_switch = run.func is sums[1]
        return 2.0 - (is_switch and num_bytes >= 64 << 10) + (RANK and num_bytes == 8 << 10) / 2

    with (
        mock.patch.object(one_shot_module, "_seconds", seconds),
        mock.patch.object(torch_private, "symmetric_buffer", buffer),
        mock.patch.object(one_shot_module, "_reaches_peers", lambda device: True),
    ):
        is_allowed = fails != "forbid" or RANK == 0
        found = OneShot.join(group, control, torch.device("cpu"), is_allowed=is_allowed)
        return [0, 0] if found is None else [found.max_bytes, found._one_shot_bytes]


def fails_in_a_rendezvous(group: Any, control: Any) -> str:
    """Fail on rank 1 where rank 0 waits for it; rank 1 returns the error that ends the job soon.

    Rank 0 goes on afterwards, and does not wait for as long as the group's own limit.
    """
    found = ""

    def fail() -> OneShot:
        raise OSError("no permission")

    if RANK:
        try:
            one_shot_module._in_time(fail, control, 0.5)
        except RankError as e:
            found = str(e)
    dist.barrier(group, async_op=True).wait(timedelta(seconds=20))
    return found


def spans_machines(folder: str) -> list:
    """Return the number of ranks of the group, and whether they share memory."""
    parallel = peers_of(build(folder))
    return [parallel.size, parallel.shared is not None]


def gathered(folder: str) -> list[list[int]]:
    """Return the shapes that are gathered for one greedy token of each of two prompts."""
    gather, shapes = ModelParallel.all_gather, []

    def noting(parallel: ModelParallel, x: Tensor, widths: Sequence[int] = ()) -> Tensor:
        shapes.append(list(x.shape))
        return gather(parallel, x, widths)

    llama = build(folder)
    with mock.patch.object(ModelParallel, "all_gather", noting):
        llama.generate([[256, 65, 66], [256, 67]], 1, 0.0)
    return shapes


def gathered_unequal(folder: str) -> list[list[float]]:
    """Return tensors of 3 and 2 columns that are gathered in shared memory, and by gloo."""
    parallel = peers_of(build(folder))
    widths = [3, 2]
    x = torch.arange(2.0 * widths[RANK]).view(2, -1) + 10 * RANK
    ways = (parallel, dataclasses.replace(parallel, shared=None))
    return [way.all_gather(x, widths).flatten().tolist() for way in ways]


def samples(folder: str, prompts: list) -> list:
    """Make three calls without a seed, the second refused on one rank: the samples are new and
    alike.
    """
    llama = build(folder)
    first = llama.generate(prompts, 8, 1.0, 1.0)[0]
    with contextlib.suppress(ValueError, RankError):
        llama.generate([[]] if RANK else prompts, 8, 1.0, 1.0)
    return [first, llama.generate(prompts, 8, 1.0, 1.0)[0]]


def speculated(folder: str, prompts: list, draft: str) -> list:
    """Call on every rank, then lead from rank 0, with lookup drafts or a shared draft model.

    Returns the answers, and how many drafts each rank has verified.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        llama = Llama.build(
            folder, None, 256, 4, dtype="fp32", device="cpu", mute_ranks=False, speculate=draft,
            speculate_shared=draft == "lookup",
        )  # fmt: skip
    called = llama.generate(prompts, 60, 0.0)[0]
    found = llama.lead(lambda: llama.generate(prompts, 60, 0.0)[0])
    return [called, found, llama.engine.stats.draft_tokens]


def drafted(folder: str, quantize: str | None, kinds: list[str], stages: int = 1) -> list:
    """Return the kinds of drafts that change an answer or the cache, and how many were verified.

    Every rank makes the calls, and then rank 0 leads.
    """
    with contextlib.redirect_stdout(io.StringIO()):
        llama = Llama.build(
            folder, None, 128, 8, device="cpu", dtype="bf16", quantize=quantize, mute_ranks=False,
            pipeline_parallel_size=stages,
        )  # fmt: skip
    found, truth = drafts.without_drafts(llama)
    slots, *rest, _ = drafts.cached(llama, None, truth)
    changed, num = [], 0
    for kind in kinds:
        for is_led in (False, True):
            again = Llama(llama.model, llama.tokenizer, options=EngineOptions(num_pages=300))
            speculate(again.engine, drafts.Drafts(kind, truth))
            ask = functools.partial(drafts.answers_of, again)
            answers = again.lead(ask) if is_led else ask()
            changed += [] if answers in (found, None) else [f"{kind}, {is_led=}"]
            num += again.engine.stats.draft_tokens
        own, *others, _ = drafts.cached(llama, kind, truth)
        changed += [] if own.equal(slots) and others == rest else [f"{kind}, the cache"]
    return [changed, num]


def staged(
    folder: str, stages: int, leads: bool, options: dict[str, Any], has_graphs: bool = False
) -> list:
    """Return the answers of a model in pipeline stages to requests of all kinds, and its layers.

    Args:
        folder: the model.
        stages: the number of stages.
        leads: whether rank 0 leads, or every rank makes the calls.
        options: further arguments of `Llama.build`.
        has_graphs: whether a recorder takes steps of single tokens, which it runs again.
    """
    again = Again()
    recorder = again if has_graphs else None
    recorder_for = mock.patch("llama.generation.recorder_for", lambda model: recorder)
    with contextlib.redirect_stdout(io.StringIO()), recorder_for:
        llama = Llama.build(
            folder, None, 128, 8, dtype="bf16", device="cpu", mute_ranks=False,
            pipeline_parallel_size=stages, **options,
        )  # fmt: skip
    again.num_replays = 0  # without those of the trial at build
    ask = functools.partial(drafts.answers_of, llama)
    answers = list(map(repr, (llama.lead(ask) if leads else ask()) or []))
    vectors = drafts.vectors_of(llama)
    answers += vectors if answers else []
    parallel, stats = llama.model.parallel, llama.engine.stats
    groups = [
        dist.get_process_group_ranks(fs_init.get_model_parallel_group()),
        list(fs_init.get_pipeline_parallel_ranks()),
        dist.get_process_group_ranks(fs_init.get_pipeline_parallel_group()),
        dist.get_process_group_ranks(fs_init.get_data_parallel_group()),
    ]
    counts = [stats.prompt_tokens, stats.generated_tokens, again.num_replays, stats.draft_tokens]
    where = [parallel.placement.stage, parallel.rank, parallel.global_rank, parallel.data_size]
    planes = llama.engine.runner.kv_cache.shape[0]
    llama.close()
    return [answers, where, list(llama.model.plan.share.layers), planes, groups, counts]


class FailingOnce(Again):
    """A recorder that cannot capture one step on rank 1, once it has run there."""

    left = 0  # the steps that it captures before that; 0: all

    def record(
        self, function: Callable[[], Outputs], inputs: Iterable[Tensor]
    ) -> tuple[Outputs, Callable[[], None]]:
        recorded = super().record(function, inputs)
        self.left -= 1
        if self.left == 0 and RANK == 1:
            raise CaptureError("no memory for a graph")
        return recorded


def faults(folder: str, prompts: list, when: str) -> list:
    """Answer while a kernel and a graph fail on rank 1 alone.

    Args:
        folder: the model.
        prompts: the prompts.
        when: when the graph fails, "measured" or "recorded" at build, or "in a step".

    Returns:
        the answers, whether the kernel is in use, whether there were graphs after the build and
        after the answers, and what was warned of.
    """
    recorder = FailingOnce()
    recorder.left = {"measured": 1, "recorded": 4}.get(when, 0)
    calls = 0

    def failing(x: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        if RANK == 1 and calls == 4:
            raise KernelError("no shared memory")
        return silu_mul(x)

    kernels = Kernels({"silu_mul": failing}).dropping_failed()
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with mock.patch("llama.generation.recorder_for", lambda model: recorder):
            llama = Llama.build(
                folder, None, 128, 4, dtype="fp32", device="cpu", mute_ranks=False, verbose=False
            )
        graphs = llama.engine.runner.replayer
        llama.model.use_kernels(kernels)
        if isinstance(graphs, StepGraphs):
            graphs._graphs.clear()  # so that steps are recorded when they are needed
            recorder.left = 1
        found = llama.generate(prompts, 8, 0.0)[0]
    said = sorted({str(warning.message) for warning in warned})
    has_graphs = [graphs is not None, llama.engine.runner.replayer is not None]
    llama.close()
    return [found, kernels.has("silu_mul"), has_graphs, said]


def left_in_flight(folder: str, stages: int) -> list:
    """Leave streams while a step of theirs is in flight, and call this model and another one.

    Afterwards nothing may be on its way to another stage, where it would be lost with the model.
    """
    options: dict[str, Any] = {"dtype": "bf16", "mute_ranks": False, "verbose": False}
    one, other = (
        Llama.build(folder, None, 128, 8, device="cpu", pipeline_parallel_size=stages, **options)
        for _ in range(2)
    )
    streams = [one.stream_text(["ab", "cd", "ef"], 0.8, 0.9, 60, seed=3) for _ in range(2)]
    for _ in range(4):
        for stream in streams:
            next(stream)
    answers = [one.engine.has_step_in_flight, other.generate([[256, 65, 66]], 5, 0.0)[0]]
    for stream in streams:
        stream.close()
    answers.append(one.generate([[256, 65, 66]], 5, 0.0)[0])
    link = one.model.parallel.link
    assert isinstance(link, StageLink)
    return [*answers, len(link._sent)]


def in_8_bits(folder: str, prompts: list) -> list:
    """Return a model's results with an 8-bit cache, and the error if one rank alone asks for it."""
    error, options = "", dict[str, Any](dtype="fp32", device="cpu", mute_ranks=False)
    with contextlib.redirect_stdout(io.StringIO()):
        llama = Llama.build(folder, None, 128, 4, kv_cache_dtype="int8", **options)
        try:
            Llama.build(folder, None, 128, 4, kv_cache_dtype=None if RANK else "int8", **options)
        except ValueError as e:
            error = str(e)
    return [llama.generate(prompts, 1, 0.0, logprobs=True, echo=True), error]


def rounded(folder: str, prompts: list) -> list:
    """Return a model's results with activations in int8, and how its matrices round.

    The last result is the number of its feed-forward columns on this rank.
    """
    options = dict[str, Any](quantize="int8", activations="int8", device="cpu")
    with without_amx():
        with contextlib.redirect_stdout(io.StringIO()):
            llama = Llama.build(folder, None, 128, 4, mute_ranks=False, **options)
        answers = llama.generate(prompts, 1, 0.0, logprobs=True, echo=True)
    layer, *_ = llama.model.blocks()
    matrices = (
        layer.attention.wqkv,
        layer.attention.wo,
        layer.feed_forward.w13,
        layer.feed_forward.w2,
    )
    groups = [matrix.weight.activations for matrix in matrices]
    return [answers, groups, layer.feed_forward.w2.weight.shape[1]]


def build_often(folder: str) -> list[list[int]]:
    """Return threads and open files of this rank after the second of five builds and the last.

    A thread that was joined may exist for a moment longer, so the last count waits for it.
    """
    counts = []
    for _ in range(5):
        with contextlib.redirect_stdout(io.StringIO()):
            Llama.build(folder, None, 64, 1, dtype="fp32", device="cpu").close()
        gc.collect()
        counts.append(threads_and_files())
    second, last = counts[1], counts[-1]
    with contextlib.suppress(AssertionError):
        wait_until(lambda: all(map(operator.le, threads_and_files(), second)))
        last = second
    return [second, last]


def threads_and_files() -> list[int]:
    return [len(os.listdir(f"/proc/self/{kind}")) for kind in ("task", "fd")]


def speak(folder: str) -> list[str]:
    """Print with two models open, with one, with none, and where no rank is muted."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        models = [
            Llama.build(folder, None, 128, 4, dtype="fp32", device="cpu", mute_ranks=muted)
            for muted in (False, True, True)
        ]
        printed.truncate(0)
        printed.seek(0)
        for left in ("two", "one", "none"):
            print(left)
            models.pop().close()
    return printed.getvalue().split()


def led(folder: str, prompts: list) -> list:
    """Call on rank 0 alone, from threads and from asyncio; then on every rank once more."""
    llama = build(folder)

    def one_by_async() -> list[int]:
        async def answer() -> list[int]:
            served = AsyncLLMEngine(llama)
            params = SamplingParams(max_tokens=8, seed=4)
            async for output in served.generate(prompts[0], params, "async"):
                tokens = output.outputs[0].token_ids
            served.close()
            return tokens

        return asyncio.run(answer())

    def work() -> list:
        with ThreadPoolExecutor(4) as pool:
            jobs = [pool.submit(llama.generate, [p], 8, 1.0, 1.0, seed=4) for p in prompts]
            bad = pool.submit(llama.generate, [[999]], 8)
            last = pool.submit(one_by_async)
            left = llama.stream_text(["never finished"], 0.0, max_gen_len=60)
            next(left)
            left.close()
            answers = [job.result()[0][0] for job in jobs]
        unseeded = llama.generate(prompts[:1], 8, 1.0, 1.0)[0]
        beams = [b["generation"] for b in llama.beam_search(["Once"], 3, 8)[0]]
        return [answers, str(bad.exception()), last.result(), unseeded, beams]

    found = llama.lead(work)
    used = time.process_time()
    llama.lead(lambda: time.sleep(1.5))
    assert time.process_time() - used < 0.75, "an idle rank does not sleep"
    return [found, llama.generate(prompts[:1], 8, 1.0, 1.0)[0]]


def beams(folder: str, prompts: list[str]) -> list:
    return [[b["generation"] for b in found] for found in build(folder).beam_search(prompts, 3, 8)]


def vllm_client(folder: str, prompts: list[str], size: int) -> list:
    """Run a batch, a loop of steps, and a beam search between two of them, by vLLM's API."""
    llm = vllm.LLM(
        folder, dtype="float32", device="cpu", max_model_len=128, tensor_parallel_size=size
    )
    loaded[folder] = llm.llama
    asked = vllm.SamplingParams(temperature=0.9, seed=3, max_tokens=6, ignore_eos=True)
    ids = [output.outputs[0].token_ids for output in llm.generate(prompts, asked)]
    for i, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(i), prompt, asked)
    llm.llm_engine.step()
    (beams,) = llm.beam_search(prompts[1], vllm.BeamSearchParams(beam_width=2, max_tokens=4))
    ids.append(beams.sequences[0].tokens)
    while llm.llm_engine.has_unfinished_requests():
        ended = [output for output in llm.llm_engine.step() if output.finished]
        ids += [output.outputs[0].token_ids for output in ended]
    return ids


def vllm_bad_request(folder: str, bad_rank: int) -> None:
    """Add a wrong request on one rank alone; no rank has it then."""
    engine = vllm.LLMEngine(build(folder))
    prompt = {"prompt": 7} if bad_rank == RANK else "x"
    try:
        engine.add_request("a", prompt, vllm.SamplingParams())
    finally:
        assert not engine.has_unfinished_requests()


def host_bad_request(folder: str, bad_rank: int) -> None:
    """Give wrong params on one rank alone; no rank has a request then."""
    llama = build(folder)
    params = {"prompt": "x", "top_p": 7 if bad_rank == RANK else 1.0}
    try:
        hosts.generate_stream(llama, llama.tokenizer, params, "cpu", 64)
    finally:
        assert not llama.llm_engine.has_unfinished_requests()
        assert llama.generate([[256, 65]], 3, 0)[0][0]


def main(jobs_file: str, out_dir: str) -> None:
    torch.set_num_threads(1)
    results = []
    for job in json.loads(Path(jobs_file).read_text()):
        try:
            results.append({"result": globals()[job.pop("do")](**job)})
        except Exception as e:
            results.append({"error": f"{type(e).__name__}: {e}"})
    (Path(out_dir) / f"rank{RANK}.json").write_text(json.dumps(results))


def note_end(out_dir: str) -> None:
    """Record as the last thing that Python runs whether the groups were destroyed by themselves."""
    (Path(out_dir) / f"rank{RANK}.end").write_text(str(dist.is_initialized()))


if __name__ == "__main__":
    atexit.register(note_end, sys.argv[2])  # registered before any other, so it runs last
    main(*sys.argv[1:])
