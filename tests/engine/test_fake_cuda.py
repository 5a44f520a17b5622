"""Steps on a GPU that is absent: fake tensors of PyTorch have its device, shapes and dtypes, no
values.

The tests need a PyTorch built for CUDA, but no GPU; otherwise they are skipped. They show that a
step runs on one device without reading a value, for every kind of step and for one rank of several,
and that a graph can capture the step.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch._subclasses.fake_tensor as fake_tensor
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers.drafts import drafter_of
from helpers.sequences import state_of
from helpers.tape import TapeRecorder
from llama.assembly import assemble
from llama.checkpoint.packing import pack_model
from llama.engine import runner, sampler
from llama.engine.rows import Tokens
from llama.engine.runner import LastIds
from llama.kernels.cuda.table import table
from llama.model import Transformer
from llama.model.args import ModelArgs
from llama.model.layers import Matrix
from llama.ops import sample
from llama.ops.batch import Batch
from llama.ops.kernels import Kernels
from llama.ops.kv_cache import FORMATS
from llama.ops.sample import choose_ids
from llama.options.engine_options import EngineOptions
from llama.options.graphs import step_inputs
from llama.options.graphs.shapes import Shape
from llama.options.graphs.step_graphs import StepGraphs
from llama.options.graphs.step_inputs import StepInputs
from llama.options.page_store import PageStore, _Staged
from llama.ranks.parallel import Parallel
from llama.ranks.placement import Placement
from llama.weights.groups import GroupedWeight

pytestmark = [
    pytest.mark.skipif(torch.version.cuda is None, reason="this torch has no CUDA"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch opens a GPU that is present"),
]

GPU = torch.device("cuda", 3)
PAGE = 16
ARGS_8B = ModelArgs(
    dim=4096, n_layers=2, n_heads=32, n_kv_heads=8, vocab_size=128_256, multiple_of=1024,
    ffn_dim_multiplier=1.3, max_seq_len=8192, max_batch_size=64,
)  # fmt: skip
ARGS_70B = dataclasses.replace(ARGS_8B, dim=8192, n_heads=64, multiple_of=4096)


@pytest.fixture(autouse=True)
def _no_constants(monkeypatch):
    """Disable constants: fake tensors know small values, which a GPU would have to transfer."""
    monkeypatch.setattr(fake_tensor, "CONSTANT_NUMEL_LIMIT", 0)


class EightRanks(Parallel):
    """One rank of eight, whose collectives do nothing."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, widths: Sequence[int] = ()) -> Tensor:
        return torch.cat([x] * self.size, dim=-1)


def fake_batch(starts: list[int], counts: list[int]) -> tuple[Tensor, Batch]:
    """Return a batch as the runner packs it, with its tensors on the GPU; call it in
    FakeTensorMode.
    """
    n = sum(counts)
    width = max(-(-(s + c) // PAGE) for s, c in zip(starts, counts, strict=True))
    shapes = {
        "positions": (n,), "slots": (n,), "page_table": (len(starts), width),
        "query_starts": (len(starts) + 1,), "seq_lens": (len(starts),),
        "logit_rows": (len(starts),),
    }  # fmt: skip
    tensors: Any = {k: torch.zeros(v, dtype=torch.int64, device=GPU) for k, v in shapes.items()}
    seq_lens = [s + c for s, c in zip(starts, counts, strict=True)]
    ids = torch.zeros(n, dtype=torch.int64, device=GPU)
    return ids, Batch(**tensors, query_lens_cpu=counts, seq_lens_cpu=seq_lens)


def fake_model(args: ModelArgs, dtype: torch.dtype) -> Transformer:
    parallel = EightRanks(Placement(rank=3, size=8)) if args is ARGS_70B else None
    return Transformer(args, parallel=parallel, dtype=dtype, device=GPU)


@pytest.mark.parametrize("cache", FORMATS)
def test_pages_on_disk_leave_the_gpu_and_come_back(cache):
    """Pages are copied to the host head by head, and loaded ones go into the KV cache."""
    step: Any = object()
    with FakeTensorMode(), torch.inference_mode():
        model = Transformer(ARGS_8B, dtype=torch.bfloat16, device=GPU, kv_format=FORMATS[cache])
        store = object.__new__(PageStore)
        store._runner = SimpleNamespace(kv_cache=model.new_kv_cache(64, PAGE))  # type: ignore[assignment]
        store._format = model.plan.kv_format
        data = store._copied([5, 9, 2])
        assert data.device.type == "cpu" and data.shape[:2] == (3, ARGS_8B.n_kv_heads)
        assert data.numel() * 64 == 3 * store._runner.kv_cache.nbytes
        store._staged = [_Staged(step, [1, 7, 3], data)]
        store.before_pass(step)
        assert not store._staged


@pytest.mark.parametrize("args", [ARGS_8B, ARGS_70B], ids=["8B", "70B on 8"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("starts", "counts"),
    [([70, 9, 300], [1, 1, 1]), ([0, 0], [40, 3]), ([64], [200]), ([5, 0, 32], [1, 17, 100])],
    ids=["decode", "prefill", "chunk", "mixed"],
)
def test_a_step_stays_on_its_gpu_and_gives_float32_logits(args, dtype, starts, counts):
    with FakeTensorMode(), torch.inference_mode():
        model = fake_model(args, dtype)
        ids, batch = fake_batch(starts, counts)
        hidden = model.hidden_states(ids, batch, model.new_kv_cache(64, PAGE))
        logits = model.logits(hidden)
        assert (hidden.device, hidden.dtype) == (GPU, dtype)
        assert (logits.device, logits.dtype) == (GPU, torch.float32)
        assert logits.shape == (len(starts), 128_256)
        assert choose_ids(logits, [None] * len(starts), (), ()).device == GPU


@pytest.mark.parametrize("args", [ARGS_8B, ARGS_70B], ids=["8B", "70B on 8"])
@pytest.mark.parametrize("wants_logits", [True, False])
@pytest.mark.parametrize("prompts", [0, 64])
def test_a_step_of_fixed_shape_can_be_captured(args, wants_logits, prompts, monkeypatch):
    monkeypatch.setattr(StepInputs, "fill", lambda *_: None)  # pins memory, which needs a driver
    with FakeTensorMode(), torch.inference_mode():
        model = fake_model(args, torch.bfloat16)
        model.use_kernels(table({"attention"}, ()))
        kv_cache = model.new_kv_cache(64, PAGE)
        last_ids = LastIds(64, GPU)
        recorder = TapeRecorder.of_model(model)
        graphs = StepGraphs(model, kv_cache, recorder, last_ids, max_tokens=2048)
        made, _ = graphs._record(Shape(8, 512, wants_logits, prompts))
        n = 8 + 32 if prompts else 8  # results
        assert [tuple(x.shape) for x in made] == [(n,), (n, 128_256)][: 1 + wants_logits]


def same_on_gpu(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=GPU)


@pytest.fixture
def driver(monkeypatch):
    """Replace what a runner needs from a driver: pinned memory, its bytes, and sampled results.

    Every sampled token is 65.
    """

    def pack(*args: Any) -> tuple[Tensor, Batch]:
        with fake_tensor.unset_fake_temporarily():
            ids, batch = packed(*args[:-1], torch.device("cpu"))
        tensors: Any = {k: same_on_gpu(v) for k, v in vars(batch).items() if isinstance(v, Tensor)}
        return same_on_gpu(ids), dataclasses.replace(batch, **tensors)

    def to_host(columns: Tensor) -> Any:
        assert columns.device == GPU
        return lambda: columns

    def tokens(columns: Tensor) -> Tokens:
        n = len(columns)
        return Tokens([65] * n, [-1.0] * n, [[(65, -1.0)]] * n)

    def pinned(x: np.ndarray, device: torch.device) -> Tensor:
        return torch.empty(x.shape, dtype=torch.from_numpy(x).dtype)

    packed: Any = Batch.pack
    monkeypatch.setattr(Batch, "pack", pack)
    monkeypatch.setattr(runner, "current", lambda device: contextlib.nullcontext())
    monkeypatch.setattr(runner, "peak_bytes", lambda device, work: work() or 0)
    # Values of fake tensors cannot be compared.
    monkeypatch.setattr("llama.options.graphs.kv_cache.replay_problem", lambda *_: None)
    monkeypatch.setattr(sampler, "to_host", to_host)
    monkeypatch.setattr(sampler, "tokens_of", tokens)
    for module in (sample, step_inputs):
        monkeypatch.setattr(module, "pinned", pinned)


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize("in_graphs", [True, False], ids=["graphs", "eager"])
def test_a_draft_model_guesses_on_its_gpu(driver, monkeypatch, in_graphs):
    """A draft model stays on its GPU: prefill, drafts and verification, with or without graphs."""
    args = ModelArgs(
        dim=256, n_layers=2, n_heads=8, n_kv_heads=2, vocab_size=512, multiple_of=32,
        max_seq_len=256, max_batch_size=8,
    )  # fmt: skip
    greedy: dict[str, Any] = {"temperature": 0.0}  # drawing in torch reads the device
    adjusted: dict[str, Any] = greedy | {"repetition_penalty": 1.3, "logit_bias": ((5, 1.0),)}
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, draft_model = (fake_model(args, torch.bfloat16) for _ in range(2))
        core = assemble(
            model,
            EngineOptions(
                num_pages=100,
                speculate="model",
                speculate_tokens=4,
                draft_model=draft_model,
                recorder_for=TapeRecorder.of_model if in_graphs else lambda model: None,
            ),
        ).core
        drafter = drafter_of(core)
        monkeypatch.setattr(drafter, "choose", lambda rates, *_: [len(x) for x in rates])
        for length, params in ((40, greedy), (41, adjusted)):
            core.add(state_of([1] * length, 80, **params))
        while core.has_unfinished():
            core.step()
    assert core.stats.accepted_tokens == core.stats.draft_tokens > 50
    for each in (core.runner, drafter._runner):
        assert (each.kv_cache.device, each.replayer is not None) == (GPU, in_graphs)


class Only65:
    """A constraint that allows this token alone, which all tokens are here."""

    failure: str | None = None

    def fill_allowed(
        self, tokens: list[int], first: int, drafts: list[int], bits: np.ndarray
    ) -> None:
        bits.fill(0)
        bits[:, 65 // 32] = 1 << 65 % 32

    def draft(self, output: list[int], guess: list[int]) -> tuple[list[int], bool]:
        return [], False


GREEDY = {"temperature": 0.0}
ASKED: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampled": {"temperature": 0.8, "top_p": 0.95},
    "log-probabilities": {"temperature": 0.0, "logprobs": 3},
    "penalties": {"temperature": 0.0, "presence_penalty": 1.0, "bad_words": ((7, 8),)},
    "constrained": GREEDY,
}


@pytest.fixture
def kernels_of_a_gpu(monkeypatch) -> Kernels:
    """Replace the GPU kernels for sampling and quantized products by ones that compute nothing."""

    def product(x: Tensor, weight: Any, tile: Any, dtype: torch.dtype | None = None) -> Tensor:
        return x.new_empty(*x.shape[:-1], weight.shape[0], dtype=dtype or x.dtype)

    def plain(weight: Any, first: int, end: int, dtype: torch.dtype) -> Tensor:
        return weight.values.new_empty(end - first, weight.shape[1], dtype=dtype)

    def choose(logits: Tensor, rules: Tensor, *, is_filtered: bool) -> Tensor:
        assert rules.device == logits.device == GPU
        return logits.new_empty(len(logits), dtype=torch.int64)

    monkeypatch.setattr("llama.kernels.cuda.quantized.run", product)
    monkeypatch.setattr("llama.kernels.cuda.quantized.plain", plain)
    monkeypatch.setattr("llama.kernels.cuda.sample.choose", choose)
    monkeypatch.setattr(
        "llama.kernels.cuda.sample.top_tokens",
        lambda logits: (logits.new_empty(len(logits)), choose(logits, logits, is_filtered=False)),
    )
    return table(frozenset({"sample", "linear"}), frozenset({torch.bfloat16}))


def on_gpu(weight: GroupedWeight) -> GroupedWeight:
    def all_on_gpu(held: dict[str, Any]) -> dict[str, Any]:
        return {name: x if x is None else same_on_gpu(x) for name, x in held.items()}

    moved = weight.in_fragments()
    moved._buffers = all_on_gpu(weight._buffers)
    moved._parameters = all_on_gpu(weight._parameters)
    return moved


@pytest.mark.filterwarnings("ignore:Accessing the data pointer")
@pytest.mark.parametrize("in_graphs", [True, False], ids=["graphs", "eager"])
@pytest.mark.parametrize(("held", "cache"), [(None, None), (None, "int8"), ("int4", "int8")])
@pytest.mark.parametrize("asked", ASKED)
def test_answers_of_every_kind_stay_on_their_gpu(
    driver, kernels_of_a_gpu, asked, held, cache, in_graphs
):
    """Answers of every kind stay on their GPU.

    Prompts and answers mix in each step, with async scheduling, and with quantized weights and
    cache.
    """
    args = dataclasses.replace(
        ARGS_8B, dim=512, n_heads=8, n_kv_heads=2, vocab_size=512, multiple_of=128
    )
    real = Transformer(args, dtype=torch.bfloat16, device="cpu")
    if held is not None:
        pack_model(real, quantize=held)
    with FakeTensorMode(allow_non_fake_inputs=True), torch.inference_mode():
        model = Transformer(args, dtype=torch.bfloat16, device=GPU, kv_format=FORMATS[cache])
        if held is not None:
            for ours, theirs in zip(model.modules(), real.modules(), strict=True):
                if isinstance(theirs, Matrix) and isinstance(theirs.weight, GroupedWeight):
                    ours.weight = on_gpu(theirs.weight)
        model.use_kernels(kernels_of_a_gpu)
        core = assemble(
            model,
            EngineOptions(
                num_pages=100,
                recorder_for=TapeRecorder.of_model if in_graphs else lambda model: None,
            ),
        ).core
        for length in (40, 3, 19):
            seq = state_of([1] * length, length + 12, length, **ASKED[asked])
            seq.constraint = Only65() if asked == "constrained" else None
            core.add(seq)
            core.step()
        while core.has_unfinished():
            core.step()
    assert bool(core.runner.replayer) == in_graphs and core.runner.kv_cache.device == GPU
