"""Which tile of the small linear kernel a product uses, or cuBLAS: checked, then timed.

In: a model's sizes. Out: a choice per shape (N, K) of its weights and bucket of rows M. A part of
the self-check's process; the choices go into its stamp and, in each process, to gpu/linear.py.
"""

import functools
import importlib
import statistics
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from llama.ops.triton.cases import Place, Sizes
from llama.ops.triton.kernels import Tile

Choice = tuple[int, int, int, tuple[int, ...] | None]  # N, K, M, and a tile; None for cuBLAS

_KERNEL = "llama.ops.triton.linear"
_BUCKETS = (1, 2, 4, 8, 16)  # of rows, where gpu/linear.py names none
_COLD_BYTES = 256 << 20  # of weights that take turns: more than a GPU's cache holds
_ROUNDS = 5
_GAIN = 0.97  # of cuBLAS's time that a tile must stay below, to be worth it
_FLOORS = {torch.bfloat16: 2**-6, torch.float16: 2**-8, torch.float32: 2**-18}


def check_and_time(
    sizes: Sizes, place: Place, goes_on: Callable[[], None] = lambda: None
) -> list[Choice]:
    """The fastest tile per shape and bucket. ArithmeticError if any tile is wrong.

    A tile that does not compile here, for want of shared memory say, is no candidate. `goes_on` is
    called now and then, as there are many to compile.
    """
    try:
        linear = importlib.import_module(_KERNEL)
    except ImportError as e:
        raise NotImplementedError("this version has no such kernel") from e
    choices: list[Choice] = []
    errors: list[Exception] = []
    num_right = 0
    for n, k in sorted(_shapes(sizes)):
        weight = place.normal(n, k)
        for m in getattr(linear, "BUCKETS", _BUCKETS):
            x = place.normal(m, k)
            tiles = []
            for tile in linear.candidates(n, k, m):
                try:
                    found = linear.run(x, weight, tile)
                except Exception as e:
                    errors.append(e)
                    continue
                _check(found, x, weight)
                tiles.append(tile)
                goes_on()
            num_right += len(tiles)
            choices.append((n, k, m, _fastest(linear.run, x, weight, tiles)))
    if errors and not num_right:
        raise errors[0]
    return choices


def table(choices: Iterable[Choice]) -> dict[tuple[int, int, int], Tile]:
    """The tile chosen for each product, as a `KernelSet` has them."""
    return {(n, k, m): Tile(*numbers) for n, k, m, numbers in choices if numbers}  # type: ignore[arg-type]


def _shapes(sizes: Sizes) -> set[tuple[int, int]]:
    """(N, K) of a layer's weights, wqkv, wo, w13 and w2, and of the head."""
    inner = sizes.n_heads * sizes.head_dim
    qkv = (sizes.n_heads + 2 * sizes.n_kv_heads) * sizes.head_dim
    return {
        (qkv, sizes.dim), (sizes.dim, inner), (2 * sizes.ffn_dim, sizes.dim),
        (sizes.dim, sizes.ffn_dim), (sizes.vocab_rows, sizes.dim),
    }  # fmt: skip


def _check(found: Tensor, x: Tensor, weight: Tensor) -> None:
    parts = weight.split(2**14)  # the whole head in float64 would be 4 GB
    exact = torch.cat([x.double() @ part.double().t() for part in parts], dim=-1)
    error = float(((found.double() - exact).norm(dim=-1) / exact.norm(dim=-1)).max())
    allowed = _FLOORS[x.dtype]
    if not error <= allowed:  # NaN is not
        shape = f"{tuple(x.shape)} x {tuple(weight.shape)}"
        raise ArithmeticError(f"{shape} is off by {error:.2g} where {allowed:.2g} may be")


def _fastest(
    run: Callable[..., Tensor], x: Tensor, weight: Tensor, tiles: list[tuple[int, ...]]
) -> tuple[int, ...] | None:
    """The tile with the least time, or None where cuBLAS is about as fast. Off CUDA, the first."""
    if x.device.type != "cuda":
        return tiles[0] if tiles else None
    copies = [weight, *[weight.clone() for _ in range(_COLD_BYTES // weight.nbytes)]]
    bodies = [functools.partial(F.linear, x)]
    bodies += [functools.partial(_with_tile, run, x, tile) for tile in tiles]
    graphs = [_captured(body, copies) for body in bodies]
    times = [[_milliseconds(graph) for graph in graphs] for _ in range(_ROUNDS)]  # in turn
    medians = [statistics.median(column) for column in zip(*times, strict=True)]
    best = min(range(len(medians)), key=medians.__getitem__)
    return tiles[best - 1] if best and medians[best] < _GAIN * medians[0] else None


def _with_tile(
    run: Callable[..., Tensor], x: Tensor, tile: tuple[int, ...], weight: Tensor
) -> Tensor:
    return run(x, weight, tile)


def _captured(body: Callable[[Tensor], Tensor], weights: list[Tensor]) -> torch.cuda.CUDAGraph:
    """One product per weight, as a graph, so that the host's time does not count."""
    body(weights[0])  # compiled before the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for weight in weights:
            body(weight)
    graph.replay()
    return graph


def _milliseconds(graph: torch.cuda.CUDAGraph) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)
