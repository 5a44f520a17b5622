"""Steps of a whole model through the interpreted Triton kernels."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers.kernels import INTERPRETED, KERNELS_RUN, interpreted
from llama import Llama, ModelArgs, Transformer
from llama.kernels.cuda.launch import Tile
from llama.model.layers import Linear
from llama.ops.adapters import AdapterRows
from llama.ops.batch import Batch
from llama.ops.kernels import NO_KERNELS
from llama.weights.choice import QUANTIZED, on_gpu

CPU = torch.device("cpu")
PAGE_SIZE = 4
PARAMS: dict[str, Any] = {
    "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 96,
    "multiple_of": 32, "norm_eps": 1e-5, "rope_theta": 500000.0, "max_seq_len": 128,
}  # fmt: skip
STEPS = [  # (earlier tokens, new tokens) of each sequence
    [(30, 1), (3, 1)], [(0, 17)], [(5, 1), (0, 1), (17, 18), (0, 5)],
]  # fmt: skip


def make_model(dtype: torch.dtype, **changes: int) -> Transformer:
    model = Transformer(ModelArgs(**PARAMS | changes), dtype=dtype)
    generator = torch.Generator().manual_seed(3)
    for weight in model.parameters():
        scale = 0.1 if weight.dim() == 2 else 1.0
        weight.data.copy_(torch.randn(weight.shape, generator=generator) * scale)
    model.use_kernels(INTERPRETED)
    return model


def run(
    model: Transformer, sequences: list[tuple[int, int]], adapters: AdapterRows | None = None
) -> list[Tensor]:
    """Return the hidden states, and the keys and values after the step."""
    starts, lens = [s for s, _ in sequences], [n for _, n in sequences]
    held = [-(-(s + n) // PAGE_SIZE) for s, n in sequences]
    order = list(range(sum(held)))
    pages = [[order.pop() for _ in range(n)] for n in held]
    ids, rows = [7 * i % 96 for i in range(sum(lens))], list(range(sum(lens)))
    tokens, batch = Batch.pack(ids, starts, lens, pages, PAGE_SIZE, rows, CPU)
    batch = replace(batch, adapters=adapters)
    kv_cache = model.new_kv_cache(sum(held), PAGE_SIZE)
    kv_cache.copy_(torch.randn(kv_cache.shape, generator=torch.Generator().manual_seed(2)))
    with torch.inference_mode():
        return [model.hidden_states(tokens, batch, kv_cache), kv_cache]


def test_the_stack_gives_the_bytes_of_the_modules(monkeypatch, launches, dtype):
    """The stack of ops gives the bytes of the modules, which launch the same kernels.

    The values are near those of PyTorch.
    """
    model = make_model(dtype)
    # the last one has both kinds of rows
    for step in STEPS if dtype is torch.float32 else STEPS[-1:]:
        launches.clear()
        stacked = run(model, step)
        assert launches.count("norm_kernel") == 5  # one per residual except the last, and two more
        assert launches.count("rope_kernel") == launches.count("silu_mul_kernel") == 2
        assert launches.count("decode_kernel") == 2 * any(n <= 16 for _, n in step)
        assert launches.count("prefill_kernel") == 2 * any(n > 16 for _, n in step)
        handle = model.layers[0].register_forward_hook(lambda *_: None)
        launches.clear()
        through_modules = run(model, step)
        assert launches.count("norm_kernel") == 5 and launches.count("rope_kernel") == 2
        model.use_kernels(NO_KERNELS)
        plain = run(model, step)
        model.use_kernels(INTERPRETED)
        handle.remove()
        for got, same, near in zip(stacked, through_modules, plain, strict=True):
            assert torch.equal(got, same)
            atol = 2e-2 if dtype is torch.float16 else 1e-5
            torch.testing.assert_close(got, near, atol=atol, rtol=1e-2)


@pytest.mark.skipif(not KERNELS_RUN, reason="the CPU's kernels pack the weights")
def test_a_step_with_quantized_weights(monkeypatch, launches):
    """A step with quantized weights is near PyTorch's values.

    The weights have groups with offsets; tiles are available for the products, or not.
    """
    model = make_model(torch.float32, dim=128, multiple_of=128, n_layers=1)
    for module in model.layers.modules():
        if isinstance(module, Linear):
            plain = module.weight.plain().bfloat16()
            module.weight = on_gpu(plain, "int4")
    kind, step = QUANTIZED["int4"].kind, [(30, 1), (3, 1), (0, 1)]
    shapes = [x.weight.shape for x in model.layers.modules() if isinstance(x, Linear)]
    tiles = {(kind, *shape, 4): Tile(32, 128, 4, 2, True) for shape in shapes}
    model.use_kernels(NO_KERNELS)
    wanted = run(model, step)
    for held, kernel in ((tiles, "few_rows_kernel"), ({}, "plain_kernel")):
        launches.clear()
        model.use_kernels(interpreted(held))
        found = run(model, step)
        assert launches.count(kernel) == 4 and "norm_kernel" in launches
        for got, near in zip(found, wanted, strict=True):
            torch.testing.assert_close(got, near, atol=1e-3, rtol=1e-3)


@pytest.mark.skipif(not KERNELS_RUN, reason="the CPU's kernels pack the weights")
def test_rows_in_e4m3_are_rounded_by_the_kernels_that_make_them(launches):
    """Norm and SwiGLU round their rows; the bytes are those of the modules, which round later.

    Rows of a step with adapters, which multiply the rows as they are, are rounded later, too.
    """
    model = make_model(torch.float32, dim=256, multiple_of=256, n_layers=1)
    for module in model.layers.modules():
        if isinstance(module, Linear):
            module.weight = on_gpu(module.weight.plain().bfloat16(), "fp8")
            assert module.weight.round_to_e4m3()
    step = [(7, 1), (3, 1), (0, 2)]
    model.use_kernels(INTERPRETED)
    launches.clear()
    fused = run(model, step)
    counts = Counter(launches)
    assert counts["round_norm_kernel"] == 2 and counts["norm_kernel"] == 1, "the last norm"
    assert counts["round_silu_mul_kernel"] == counts["round_rows_kernel"] == 1, "the rows of wo"
    assert counts["few_scaled_rows_kernel"] == 4 and not counts["silu_mul_kernel"]
    launches.clear()
    no_adapters = AdapterRows([])
    with_adapters = run(model, step, adapters=no_adapters)
    model.use_modules(True)
    through_modules = run(model, step)
    assert launches.count("round_rows_kernel") == 8 and "round_norm_kernel" not in launches
    for first, second, third in zip(fused, with_adapters, through_modules, strict=True):
        assert torch.equal(first, second) and torch.equal(first, third)
    assert fused[0].isfinite().all()


def test_an_engine_gives_the_same_tokens(monkeypatch, launches, checkpoint_dir):
    """An engine gives the same tokens.

    Prompts have several lengths, in steps that mix prefill and decode, and in chunks.
    """
    prompts = [[1, 5, 9], [2] * 21, [7], [3, 4] * 9]
    model = Llama.build(str(checkpoint_dir[0]), None, 64, 2, device="cpu", dtype="fp32")
    model.model.use_kernels(INTERPRETED)
    got, _ = model.generate(prompts, max_gen_len=4, temperature=0.0)
    assert launches.count("decode_kernel") and launches.count("prefill_kernel")
    launches.clear()
    model.model.use_kernels(NO_KERNELS)
    want, _ = model.generate(prompts, max_gen_len=4, temperature=0.0)
    assert got == want and not launches
