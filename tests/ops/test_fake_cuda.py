"""The PyTorch implementation on an absent CUDA device: shapes, dtypes, and the operators called.

FakeTensorMode computes no values. It needs a PyTorch built for CUDA, but no GPU.
"""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from llama import ModelArgs, Transformer
from llama.kernels.cuda.table import NAMES, table
from llama.ops.batch import Batch
from llama.ops.kernels import NO_KERNELS, Kernels
from llama.ops.linear import linear

pytestmark = pytest.mark.skipif(
    not torch.backends.cuda.is_built(), reason="this torch is not built for CUDA"
)
CUDA = torch.device("cuda", 0)
VIEWS = {
    "view", "_unsafe_view", "t", "unbind", "slice", "select", "unflatten", "flatten", "reshape",
    "view_as_real", "detach", "_reshape_alias", "transpose", "expand",
    "device",
}  # fmt: skip


class Operators(TorchDispatchMode):
    """A recorder of the names of the PyTorch operators that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.names.append(str(function))
        return function(*args, **(kwargs or {}))


@pytest.fixture(autouse=True)
def fake_cuda() -> Iterator[None]:
    with FakeTensorMode(), torch.inference_mode():
        yield


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(3, 64), (2, 5, 64), (0, 64)])
def test_float32_logits_are_the_sums_as_they_are(dtype, shape):
    """float32 logits are the unrounded sums.

    A past fault: they were rounded to 16 bits first, so that 3 % of rows tied at the top.
    """
    x, weight = (torch.empty(*s, dtype=dtype, device=CUDA) for s in (shape, (96, 64)))
    with Operators() as called:
        logits = linear(x, weight, dtype=torch.float32)
    assert logits.shape == (*shape[:-1], 96) and logits.dtype is torch.float32
    assert ("aten.mm.dtype" in called.names) == (dtype is not torch.float32)
    assert linear(x, weight).dtype is dtype


def run_step(
    dtype: torch.dtype,
    query_lens: list[int],
    seq_lens: list[int],
    kernels: Kernels = NO_KERNELS,
) -> list[str]:
    """Return the operators of a step of two layers, up to the logits, on fake tensors."""
    sizes: dict[str, Any] = {
        "dim": 256, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 512,
    }  # fmt: skip
    model = Transformer(ModelArgs(**sizes, max_seq_len=64), dtype=dtype, device=CUDA)
    model.use_kernels(kernels)
    kv_cache = model.new_kv_cache(9, 16)

    def ids(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=torch.int64, device=CUDA)

    t, b = sum(query_lens), len(query_lens)
    batch = Batch(ids(t), ids(t), ids(b, 2), ids(b + 1), ids(b), ids(b), query_lens, seq_lens)
    tokens = ids(t)
    with Operators() as called:
        logits = model.logits(model.hidden_states(tokens, batch, kv_cache))
    assert logits.shape == (b, 512) and logits.dtype is torch.float32 and logits.is_cuda
    return called.names


STEPS = [([1, 1], [6, 17]), ([1, 5, 20], [3, 5, 30])]  # new tokens and all tokens of each sequence


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("query_lens, seq_lens", STEPS)
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_step_without_cudnn(monkeypatch, dtype, query_lens, seq_lens):
    """A step does not use cuDNN, whose attention would be planned anew for each length."""
    sdpa, enabled = F.scaled_dot_product_attention, torch.backends.cuda.cudnn_sdp_enabled
    allowed: list[bool] = []

    def noted(*args: Any, **options: Any) -> Any:
        allowed.append(enabled())
        return sdpa(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    before = enabled()
    names = run_step(dtype, query_lens, seq_lens)
    assert allowed and not any(allowed) and enabled() == before
    assert not {"aten._local_scalar_dense.default", "aten.nonzero.default"} & set(names)


class Launches:
    """A replacement for a kernel: it records the launch, and computes nothing."""

    def __init__(self, name: str, names: list[str]) -> None:
        self.name, self.names = name, names

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *_, **__: self.names.append(self.name)


@pytest.mark.parametrize("query_lens, seq_lens", STEPS)
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_a_step_of_kernels_sends_nothing_and_waits_for_nothing(monkeypatch, query_lens, seq_lens):
    """A step of kernels neither transfers nor waits.

    Each layer is four products and its kernels, which decide nothing on the host.
    """
    pytest.importorskip("triton")
    from llama.kernels.cuda import attention as gpu_attention
    from llama.kernels.cuda import elementwise

    launched: list[str] = []
    for module in (gpu_attention, elementwise):
        for name in [x for x in vars(module) if x.endswith("_kernel")]:
            monkeypatch.setattr(module, name, Launches(name, launched))
    monkeypatch.setattr(gpu_attention, "has_wide_tiles", lambda _: True)
    kernels = table(frozenset(NAMES))
    names = run_step(torch.bfloat16, query_lens, seq_lens, kernels)
    mixed = ["prefill_kernel"] if query_lens[-1] > 1 else []
    layer = ["rope_kernel", "decode_kernel", "merge_kernel", *mixed, "norm_kernel"]
    layer += ["silu_mul_kernel", "norm_kernel"]
    assert launched == ["norm_kernel", *layer, *layer]
    computed = [x for x in names if x.split(".")[1] not in VIEWS]
    products = [x for x in computed if x.split(".")[1] in ("mm", "bmm", "matmul", "linear")]
    assert len(products) == 2 * 4 + 1
    others = {"aten.embedding.default", "aten.index.Tensor", "aten.add.Tensor"}
    memory = {"aten.empty.memory_format", "aten.empty_like.default", "aten.new_empty.default"}
    assert {*computed} - {*products} <= others | memory
