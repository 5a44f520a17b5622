"""Time products with quantized weights on a GPU: each tile of each format, alongside bf16.

    python scripts/bench/quantized.py                      # the shapes of the 8B, about 70 s
    python scripts/bench/quantized.py --formats int8 --rows 1 --no_more
    TRITON_INTERPRET=1 python scripts/bench/quantized.py --dry   # on a CPU, tiny

In: formats, numbers of rows, and a limit of seconds. Out: a table of microseconds, summed over the
four matrices of a layer, where each matrix takes its fastest tile; a table of the tiles; and the
fastest tile of each matrix. Elements are random bits, since a kernel's time does not depend on
them: builds compare results. Each time is that of a CUDA graph that multiplies by several
copies of a weight, more than the GPU's cache holds. "dequantized" makes parts of the weight plain
and multiplies by PyTorch's library, as more than 256 rows do. "PyTorch" is `_weight_int4pack_mm`,
which torchao and gpt-fast multiply 4-bit weights by.
"""

import argparse
import contextlib
import math
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from llama.common.device import available_cores
from llama.kernels.cuda import linear, quantized
from llama.kernels.cuda.launch import Blocks, Tile

_SHAPES = {"wqkv": (6144, 4096), "wo": (4096, 4096), "w13": (28672, 4096), "w2": (4096, 14336)}
_DRY_SHAPES = {"wqkv": (96, 1024), "w2": (64, 2048)}
_COLD_BYTES = 256 << 20  # bytes of weights that are read before one is read again
_REPLAYS = 7
_LIBRARIES = ("cuBLAS", "dequantized", "PyTorch")  # ways that are no tile of ours
_INNER_TILES = 8  # 16 columns each, of PyTorch's packed int4 weights
_MAX_PROCESSES = 14  # that compile
_COMPILE_S = 50
# Tiles that are timed alongside `candidates`, to see whether they should replace one.
_MORE_FORMATS = ("int8", "int4")
_MORE_FEW = (
    Tile(32, 1024, 8, 3),
    Tile(32, 512, 8, 4),
    Tile(16, 256, 4, 6),
)
_MORE_MANY = (
    Tile(64, 64, 4, 4, splits=4),
    Tile(64, 128, 4, 2),
    Tile(64, 128, 4, 2, splits=4),
    Tile(128, 128, 8, 3),
    Tile(128, 128, 8, 3, splits=2),
    Tile(128, 128, 8, 3, splits=8),
)


class Format(NamedTuple):
    """A format of weights: `bits` of an element, and what the fields of `Blocks` of it are."""

    kind: int
    bits: int
    dtype: torch.dtype
    first: int
    group: int  # 0: a whole row
    per_group: int
    scale_dtype: torch.dtype

    def blocks(self, n: int, k: int, device: torch.device) -> Blocks:
        group = self.group or k
        num_bytes = n * k * self.bits // 8
        values = torch.randint(256, (num_bytes,), dtype=torch.uint8, device=device)
        groups = k // group
        if self.scale_dtype is torch.uint8:
            eights = (n // 32, groups // 8, self.per_group * 320)
            scales = torch.randint(60, eights, dtype=torch.uint8, device=device)
        else:
            floats = (n // 32, groups, self.per_group, 32)
            scales = torch.rand(floats, device=device).to(self.scale_dtype)
        return Blocks(
            values.view(self.dtype), scales, (n, k), self.kind, self.first, group, self.per_group
        )


FORMATS = {
    "int8": Format(1, 8, torch.int8, 0, 0, 1, torch.float32),
    "fp8": Format(2, 8, torch.float8_e4m3fn, 0, 0, 1, torch.float32),
    "int4": Format(3, 4, torch.int32, 0, 32, 2, torch.uint8),
    "W4A16": Format(3, 4, torch.int32, -8, 128, 1, torch.float16),
    "Q8_0": Format(1, 8, torch.int8, 0, 32, 1, torch.float16),
    "Q6_K": Format(1, 8, torch.int8, 0, 16, 1, torch.uint8),
}
Call = Callable[[int], object]  # multiplies by copy i of a weight


class Product(NamedTuple):
    """A product that is timed: its row of the tables, its matrix, and its call."""

    format: str
    m: int
    matrix: str
    how: str  # a tile, or which library multiplies
    call: Call
    copies: int


def main(arguments: Sequence[str] | None = None) -> int:
    """Time all products, and print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--formats", default="int8,fp8,int4,W4A16,Q6_K")
    parser.add_argument("--rows", default="1,16,64,128")
    parser.add_argument("--seconds", type=float, default=75, help="no product starts after these")
    parser.add_argument("--no_more", action="store_true", help="time the candidates alone")
    parser.add_argument("--dry", action="store_true", help="on the CPU, with tiny shapes")
    parser.add_argument("--compile", default="", help=argparse.SUPPRESS)  # in a child
    given = sys.argv[1:] if arguments is None else arguments
    args = parser.parse_args(given)
    names = args.formats.split(",")
    if unknown := sorted({*names} - {*FORMATS}):
        parser.error(f"--formats has {', '.join(unknown)}: there are {', '.join(FORMATS)}")
    rows = [int(m) for m in args.rows.split(",")]
    if not args.dry and not torch.cuda.is_available():
        parser.error("torch finds no CUDA GPU here: --dry runs all of this on the CPU")
    began = time.monotonic()
    device = torch.device("cpu" if args.dry else "cuda")
    shapes = _DRY_SHAPES if args.dry else _SHAPES
    if not args.dry and not args.compile:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {_triton_version()}")
    copied_bytes = 0 if args.dry or args.compile else _COLD_BYTES
    calls = products(names, rows, shapes, device, copied_bytes, more=not args.no_more)
    if args.compile:
        index, count = map(int, args.compile.split(","))
        compile_part(calls, index, count)
        return 0
    if not args.dry:
        compile_all(given)
        print(f"{len(calls)} products, compiled after {time.monotonic() - began:.0f} s", flush=True)
    times: dict[Product, float] = {}
    for product in calls:
        if time.monotonic() - began > args.seconds:
            print(f"stopped after {args.seconds:.0f} s: {len(times)} of {len(calls)} were timed")
            break
        times[product] = seconds(product, dry=args.dry)
    report(times, shapes)
    print(f"{time.monotonic() - began:.0f} s")
    return 0


def products(
    names: Sequence[str],
    rows: Sequence[int],
    shapes: dict[str, tuple[int, int]],
    device: torch.device,
    copied_bytes: int,
    *,
    more: bool,
) -> list[Product]:
    """Return all products, those of bf16 first; copies of a weight have `copied_bytes`."""
    found = []
    is_gpu = device.type == "cuda"
    dtype = torch.bfloat16 if is_gpu else torch.float16  # the interpreter has no bf16
    inputs = {(m, k): torch.randn(m, k, device=device).to(dtype)
              for m in rows for _, k in shapes.values()}  # fmt: skip
    for name in ("bf16", *names):
        for matrix, (n, k) in shapes.items():
            weights: list[Any] = []
            num_bytes = 2 * n * k if name == "bf16" else n * k * FORMATS[name].bits // 8
            copies = max(2, -(-copied_bytes // num_bytes))
            for _ in range(copies):
                if name == "bf16":
                    weights.append(torch.randn(n, k, device=device, dtype=dtype))
                else:
                    weights.append(FORMATS[name].blocks(n, k, device))
            for m in rows:
                for how, call in _calls(
                    name, weights, inputs[m, k], more=more and name in _MORE_FORMATS
                ):
                    found.append(Product(name, m, matrix, how, call, copies))
    return found


def _calls(name: str, weights: list[Any], x: Tensor, *, more: bool) -> list[tuple[str, Call]]:
    """Return the ways to multiply x by copies of a weight, by name."""
    m, k = x.shape
    if name == "bf16":
        n = len(weights[0])
        ways: list[tuple[str, Call]] = [("cuBLAS", lambda i: F.linear(x, weights[i]))]
        for tile in linear.candidates(n, k, m):
            ways.append((_text(tile), partial(_ours, x, weights, tile)))
        return ways
    n = weights[0].shape[0]
    kind = weights[0].kind
    tiles = quantized.candidates(kind, n, k, m)
    if more:
        others = _MORE_FEW if m <= quantized.MAX_FEW_ROWS else _MORE_MANY
        tiles += [x for x in others if k % (x.columns * x.splits) == 0]
    ways = [(_text(tile), partial(_quantized, x, weights, tile)) for tile in tiles]
    if m > quantized.MAX_FEW_ROWS:
        ways.append(
            ("dequantized", lambda i: F.linear(x, quantized.plain(weights[i], 0, n, x.dtype)))
        )
    if name == "W4A16":
        ways.append(("PyTorch", _library_int4(weights, x)))
    return ways


def _library_int4(weights: list[Blocks], x: Tensor) -> Call:
    """Return PyTorch's product with 4-bit weights of the same sizes and groups."""
    n, k = weights[0].shape
    group = weights[0].group
    scales = torch.rand(k // group, n, 2, device=x.device).to(x.dtype)  # and offsets
    packed: list[Tensor] = []  # once it is called: a GPU may refuse them

    def on_gpu(i: int) -> Tensor:
        while len(packed) < len(weights):
            pairs = torch.randint(256, (n, k // 2), dtype=torch.uint8, device=x.device)
            packed.append(torch._convert_weight_to_int4pack(pairs, _INNER_TILES))
        return torch._weight_int4pack_mm(x, packed[i], group, scales)

    def on_cpu(i: int) -> Tensor:
        while len(packed) < len(weights):
            codes = torch.randint(16, (n, k), dtype=torch.int32)
            packed.append(torch._convert_weight_to_int4pack_for_cpu(codes, _INNER_TILES))
        return torch._weight_int4pack_mm_for_cpu(x, packed[i], group, scales)

    return on_gpu if x.is_cuda else on_cpu


def _ours(x: Tensor, weights: list[Tensor], tile: Tile, i: int) -> Tensor:
    return linear.run(x, weights[i], tile)


def _quantized(x: Tensor, weights: list[Blocks], tile: Tile, i: int) -> Tensor:
    return quantized.run(x, weights[i], tile)


def _text(tile: Tile) -> str:
    splits = f" / {tile.splits}" if tile.splits > 1 else ""
    dot = "" if tile.uses_dot else " FMA"
    return f"{tile.rows}x{tile.columns} {tile.warps}w {tile.stages}s{splits}{dot}"


def _triton_version() -> str:
    import triton

    return f"Triton {triton.__version__}"


def compile_all(arguments: Sequence[str]) -> None:
    """Compile all kernels into Triton's cache on disk, in processes.

    In one process the parts of the compiler that are Python take turns. What does not compile is
    found when it is timed.
    """
    count = max(1, min(_MAX_PROCESSES, available_cores() - 2))
    command = [sys.executable, __file__, *arguments]
    children = [
        subprocess.Popen([*command, "--compile", f"{i},{count}"], stderr=subprocess.DEVNULL)
        for i in range(count)
    ]
    until = time.monotonic() + _COMPILE_S
    try:
        for child in children:
            child.wait(max(1.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        print(f"compiling takes over {_COMPILE_S} s", flush=True)
    finally:
        for child in children:
            child.kill()
            child.wait()


def compile_part(calls: Sequence[Product], index: int, count: int) -> None:
    """Compile every count-th kernel of some products, from one on."""
    from triton import JITFunction

    launch = JITFunction.run

    def compile_only(kernel: Any, *args: Any, **options: Any) -> Any:
        return launch(kernel, *args, **options | {"warmup": True})

    JITFunction.run = compile_only
    kernels = {}
    for product in calls:
        k = _SHAPES[product.matrix][1]
        if product.how not in _LIBRARIES:
            kernels[product.format, product.m, product.how, k] = product
    for product in [*kernels.values()][index::count]:
        with contextlib.suppress(Exception):
            product.call(0)


def seconds(product: Product, *, dry: bool) -> float:
    """Return the median time of a product; infinity where it does not run."""
    try:
        product.call(0)
    except Exception as error:
        print(f"{product[:4]}: {type(error).__name__}: {str(error)[:120]}", flush=True)
        return math.inf
    if dry:
        began = time.perf_counter()
        product.call(1)
        return time.perf_counter() - began
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(product.copies):
            product.call(i)
    times = []
    graph.replay()
    for _ in range(_REPLAYS):
        start = torch.cuda.Event(enable_timing=True)
        end = torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / product.copies / 1e3)
    return statistics.median(times)


def report(times: dict[Product, float], shapes: dict[str, tuple[int, int]]) -> None:
    """Print the tables."""
    best: dict[tuple[str, int, str], tuple[float, str]] = {}
    by_way: dict[tuple[str, int, str], dict[str, float]] = defaultdict(dict)
    for product, value in times.items():
        by_way[product.format, product.m, product.how][product.matrix] = value
        key = (product.format, product.m, product.matrix)
        if product.how not in _LIBRARIES and value < best.get(key, (math.inf, ""))[0]:
            best[key] = (value, product.how)
    rows = sorted({product.m for product in times})
    formats = list(dict.fromkeys(product.format for product in times))

    def total(values: dict[str, float]) -> float:
        return sum(values.values()) if len(values) == len(shapes) else math.nan

    print("\nA layer, µs (fastest tile of each matrix); in brackets cuBLAS bf16's time / this one")
    print("format   " + "".join(f"{m:>8} rows      " for m in rows))
    for name in formats:
        cells = []
        for m in rows:
            fastest = {x: best[name, m, x][0] for x in shapes if (name, m, x) in best}
            cells.append(_cell(total(fastest), total(by_way["bf16", m, "cuBLAS"])))
        print(f"{name:<9}" + "".join(cells))
    libraries = [("bf16", "cuBLAS"), *((name, "dequantized") for name in formats[1:])]
    if "W4A16" in formats:
        libraries.append(("W4A16", "PyTorch"))
    for name, how in libraries:
        cells = [_cell(total(by_way[name, m, how]), total(by_way["bf16", m, "cuBLAS"]))
                 for m in rows]  # fmt: skip
        print(f"{name:<9}" + "".join(cells) + f"  {how}")
    print("\nEach tile, µs: " + ", ".join(shapes) + ", and their sum")
    for (name, m, how), values in by_way.items():
        columns = "".join(f"{values.get(x, math.nan) * 1e6:9.1f}" for x in shapes)
        print(f"{name:<6}{m:>4}  {how:<24}{columns}{total(values) * 1e6:10.1f}")
    print("\nFastest: " + ", ".join(shapes))
    for name in formats:
        for m in rows:
            ways = [best.get((name, m, x), (math.inf, "-")) for x in shapes]
            print(f"{name:<6}{m:>4}  " + "; ".join(f"{way} {t * 1e6:.1f}" for t, way in ways))


def _cell(value: float, reference: float) -> str:
    return f"{value * 1e6:9.1f} ({reference / value:5.2f})  "


if __name__ == "__main__":
    sys.exit(main())
