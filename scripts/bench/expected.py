"""Estimate a decode step on GPUs that nobody has measured: bytes, launches, and their sum.

Out: a table in Markdown, which README.md has. Launches are counted: a step of a small model runs
on the CPU, with kernels that do nothing. The rest is arithmetic, from figures that are estimates
until a GPU shows better ones: what a product of each size, and attention, reach of the bandwidth,
and what a small kernel takes in a graph.
"""

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from bench.host import Operators
from bench.machine import require_triton
from bench.shapes import SHAPES
from llama import ModelArgs, Transformer
from llama.engine.core import PAGE_SIZE
from llama.engine.runner import LastIds
from llama.kernels.cuda import table as cuda
from llama.model.cost import DEVICES, decode_bytes, step_roofline, weight_shapes
from llama.model.plan import LayerPlan
from llama.ops.kv_cache import FORMATS
from llama.options.graphs.shapes import Shape
from llama.options.graphs.step_graphs import StepGraphs

_SMALL_S = 2.5e-6  # seconds of a kernel that is neither a product nor attention
_SHARES = {
    "wqkv": 0.75,
    "wo": 0.70,
    "w13": 0.88,
    "w2": 0.85,
    "output": 0.90,
}  # fractions of the bandwidth
_ATTENTION_SHARE = 0.82
_STEPS = (  # sequences, tokens of each, format of the KV cache
    (1, 128, None), (64, 2048, None), (64, 2048, "int8"), (256, 512, None),
)  # fmt: skip


GPUS = (DEVICES["h100"], DEVICES["h200"])


class _NoKernel:
    def __init__(self, launched: list[str], name: str) -> None:
        self.launched, self.name = launched, name

    def __getitem__(self, grid: Any) -> Any:
        return lambda *_, **__: self.launched.append(self.name)


@contextlib.contextmanager
def _noted() -> Iterator[list[str]]:
    """Yield the names of Triton's kernels that are launched; the kernels do nothing."""
    from llama.kernels.cuda import attention, elementwise, sample

    launched: list[str] = []
    with contextlib.ExitStack() as patches:
        for module in (attention, elementwise, sample):
            for name in vars(module):
                if name.endswith("_kernel") or name in ("block_tops", "row_tops"):
                    noted = _NoKernel(launched, name)
                    patches.enter_context(mock.patch.object(module, name, noted))
        yield launched


class _NoRecorder:
    """A recorder that records no graph."""

    def record(self, function: Any, inputs: Any) -> Any:
        raise NotImplementedError

    def free_bytes(self) -> int:
        return 1 << 50

    def close(self) -> None:
        pass


@torch.inference_mode()
def launches(rows: int, layers: int) -> int:
    """Return the launches of a step of a model like the 8B.

    They are kernels, and torch's operators that write something.
    """
    args = ModelArgs(
        dim=256, n_layers=layers, n_heads=8, n_kv_heads=8, vocab_size=512, multiple_of=32,
        max_seq_len=64, max_batch_size=rows,
    )  # fmt: skip
    model = Transformer(args, dtype=torch.bfloat16)
    model.use_kernels(cuda.table(cuda.NAMES))
    graphs = StepGraphs(
        model, model.new_kv_cache(2, PAGE_SIZE), _NoRecorder(),
        LastIds(rows, torch.device("cpu")),
    )  # fmt: skip
    with _noted() as launched, Operators() as operators:
        graphs._step(Shape(rows, 4, wants_logits=True))
    return len(launched) + operators.count


def table() -> list[str]:
    """Return lines of Markdown, one for each number of sequences."""
    args = ModelArgs(**SHAPES["8b"])
    shapes = weight_shapes(args).items()
    count = {name: 1 if name == "output" else args.n_layers for name, _ in shapes}
    lines = [
        "| 8B bf16 | GB read | launches | " + " | ".join(f"{gpu.title} | goal" for gpu in GPUS)
        + " | H200: products, attention, small, ms |",
        "|---" * (4 + 2 * len(GPUS)) + "|",
    ]  # fmt: skip
    for rows, context, kv_format in _STEPS:
        contexts = [context] * rows
        plan = LayerPlan.of(args, kv_format=FORMATS[kv_format])
        kv_bytes = sum(contexts) * plan.kv_bytes_per_token(torch.bfloat16)
        plain_kv_bytes = sum(contexts) * LayerPlan.of(args).kv_bytes_per_token(torch.bfloat16)
        two = launches(rows, 2)
        three = launches(rows, 3)
        number = two + (three - two) * (args.n_layers - 2)
        small = (number - sum(count.values()) - args.n_layers) * _SMALL_S
        spared = plain_kv_bytes - kv_bytes
        cells, parts = [], (0.0, 0.0, 0.0)
        for gpu in GPUS:
            products = sum(
                count[x] * max(2 * n * k / share / gpu.bandwidth, 2 * rows * n * k / gpu.flops[16])
                for x, (n, k) in shapes
                for share in [_SHARES[x] if rows == 1 else max(_SHARES[x], 0.85)]
            )
            parts = products, kv_bytes / _ATTENTION_SHARE / gpu.bandwidth, small
            if rows == 1:
                min_s = decode_bytes(args, 2, contexts) / gpu.datasheet / 0.8
            else:
                min_s = step_roofline(args, 2, contexts, gpu.bandwidth, gpu.flops[16])
                min_s = (min_s - spared / gpu.bandwidth) / 0.85
            cells += [f"{rows / sum(parts):,.0f}", f"{rows / min_s:,.0f}"]
        total = (decode_bytes(args, 2, contexts) - spared) / 1e9
        what = f"{rows} x {context:,}" + (f", cache in {kv_format}" if kv_format else "")
        spent = ", ".join(f"{x * 1e3:.1f}" for x in parts)
        lines.append(f"| {what} | {total:.1f} | {number} | {' | '.join(cells)} | {spent} |")
    return lines


def expected(**_: Any) -> None:
    """Print what decode steps of the 8B should take on GPUs that have not been measured."""
    require_triton("expected")
    print("\n".join(table()))
