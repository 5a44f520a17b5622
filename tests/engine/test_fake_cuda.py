"""Steps on a GPU that is not there: torch's fake tensors have its device, shapes and types, and no
numbers. It needs a torch built for CUDA, and no GPU; elsewhere these tests are skipped.

They show that a step runs on one device without reading a value, for every kind of step and for a
rank of several, and that what a graph captures can be captured.
"""

import dataclasses

import pytest
import torch
import torch._subclasses.fake_tensor as fake_tensor
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from helpers.tape import TapeRecorder
from llama.engine.graphs import DecodeGraphs, DecodeInputs
from llama.model import Transformer
from llama.model.args import ModelArgs
from llama.ops.batch import Batch
from llama.ops.sample import choose_ids
from llama.ranks.collectives import ModelParallel

pytestmark = pytest.mark.skipif(torch.version.cuda is None, reason="this torch has no CUDA")

GPU = torch.device("cuda", 3)
PAGE = 16
ARGS_8B = ModelArgs(
    dim=4096, n_layers=2, n_heads=32, n_kv_heads=8, vocab_size=128_256, multiple_of=1024,
    ffn_dim_multiplier=1.3, max_seq_len=8192, max_batch_size=64,
)  # fmt: skip
ARGS_70B = dataclasses.replace(ARGS_8B, dim=8192, n_heads=64, multiple_of=4096)


@pytest.fixture(autouse=True)
def _no_constants(monkeypatch):
    """Fake tensors remember the values of small ones; a GPU would have to be asked for them."""
    monkeypatch.setattr(fake_tensor, "CONSTANT_NUMEL_LIMIT", 0)


class EightRanks(ModelParallel):
    """A rank of eight, whose sums stay where they are."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return torch.cat([x] * self.size, dim=-1)


def fake_batch(starts: list[int], counts: list[int]) -> tuple[Tensor, Batch]:
    """A batch as the runner packs it, its tensors on the GPU. Within FakeTensorMode."""
    n = sum(counts)
    width = max(-(-(s + c) // PAGE) for s, c in zip(starts, counts, strict=True))
    shapes = {
        "positions": (n,), "slots": (n,), "page_table": (len(starts), width),
        "query_starts": (len(starts) + 1,), "seq_lens": (len(starts),),
        "logit_rows": (len(starts),),
    }  # fmt: skip
    tensors = {k: torch.zeros(v, dtype=torch.int64, device=GPU) for k, v in shapes.items()}
    seq_lens = [s + c for s, c in zip(starts, counts, strict=True)]
    ids = torch.zeros(n, dtype=torch.int64, device=GPU)
    return ids, Batch(**tensors, query_lens_cpu=counts, seq_lens_cpu=seq_lens)


def fake_model(args: ModelArgs, dtype: torch.dtype) -> Transformer:
    parallel = EightRanks(rank=3, size=8) if args is ARGS_70B else None
    return Transformer(args, parallel=parallel, dtype=dtype, device=GPU)


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
def test_a_decode_step_of_fixed_shape_can_be_captured(args, wants_logits, monkeypatch):
    monkeypatch.setattr(DecodeInputs, "fill", lambda *_: None)  # pins memory, which needs a driver
    with FakeTensorMode(), torch.inference_mode():
        model = fake_model(args, torch.bfloat16)
        kv_cache = model.new_kv_cache(64, PAGE)
        last_ids = torch.zeros(64, dtype=torch.int64, device=GPU)
        recorder = TapeRecorder.of_model(model)
        graphs = DecodeGraphs(model, kv_cache, recorder, last_ids)
        made, _ = graphs._record(8, 512, wants_logits)
        outputs = [x for x in (made.ids, made.logits) if x is not None]
        assert [tuple(x.shape) for x in outputs] == [(8,), (8, 128_256)][: 1 + wants_logits]
