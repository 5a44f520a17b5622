"""The blocks in which GGUF stores quantized rows, unpacked without changing a value.

In: the bytes of rows, and the name of their kind. Out: a `Coded`. One function for each kind, from
blocks (n, bytes) to codes (n, weights of a block), scales (n, groups of a block) and offsets; what
the codes stand for is the kind's table. The layouts are those of ggml-common.h and of gguf-py's
quants.py in https://github.com/ggml-org/llama.cpp.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from llama.checkpoint.downloads import broken
from llama.checkpoint.gguf import Kind, TensorInfo
from llama.ops.cpu import native
from llama.ops.cpu.constants import PackState
from llama.weights.coded import Coded

Unpacked = tuple[Tensor, Tensor, Tensor | None]


def _float16(blocks: Tensor, at: int) -> Tensor:
    """(n, bytes) -> (n, 1) float32: the number at a byte."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _fields(some: Tensor, bits: int, run: int) -> Tensor:
    """(n, bytes) -> (n, bytes * 8 / bits): `run` bytes give `run` numbers by their lowest bits,
    then `run` by the next ones. For example, 4 bits and run 2: 0x21 0x43 are 1 3 2 4."""
    runs = some.reshape(len(some), -1, run)
    fields = [runs >> shift & (1 << bits) - 1 for shift in range(0, 8, bits)]
    return torch.stack(fields, 2).flatten(1)


def _nibbles(blocks: Tensor, *, has_offset: bool = False, has_fifth: bool = False) -> Unpacked:
    """Of 32 weights: the scale, the offset, the fifth bits and the lower four of the codes."""
    parts = blocks[:, 4:] if has_offset else blocks[:, 2:]
    codes = _fields(parts[:, -16:], 4, 16)
    if has_fifth:
        codes |= _fields(parts[:, :4], 1, 1) << 4
    return codes, _float16(blocks, 0), _float16(blocks, 2) if has_offset else None


def _q8_0(blocks: Tensor) -> Unpacked:
    return blocks[:, 2:] ^ 128, _float16(blocks, 0), None  # signed bytes, from -128 on


def _q2_k(blocks: Tensor) -> Unpacked:
    scales, minima = _fields(blocks[:, :16], 4, 16).float().chunk(2, 1)
    codes = _fields(blocks[:, 16:80], 2, 32)
    return codes, _float16(blocks, 80) * scales, -(_float16(blocks, 82) * minima)


def _q3_k(blocks: Tensor) -> Unpacked:
    codes = _fields(blocks[:, 32:96], 2, 32) | _fields(blocks[:, :32], 1, 32) << 2
    scales = _fields(blocks[:, 96:104], 4, 8) | _fields(blocks[:, 104:108], 2, 4) << 4
    return codes, _float16(blocks, 108) * (scales.float() - 32), None


def _q4_k(blocks: Tensor) -> Unpacked:
    """Q4_K, and Q5_K, which has fifth bits too: eight scales and minima of six bits each."""
    codes = _fields(blocks[:, -128:], 4, 32)
    if blocks.shape[1] > 144:
        codes |= _fields(blocks[:, 16:48], 1, 32) << 4
    low, middle, high = blocks[:, 4:16].split(4, 1)
    scales = torch.cat([low & 63, high & 15 | low >> 6 << 4], 1)
    minima = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], 1)
    return codes, _float16(blocks, 0) * scales, -(_float16(blocks, 2) * minima)


def _q6_k(blocks: Tensor) -> Unpacked:
    codes = _fields(blocks[:, :128], 4, 64) | _fields(blocks[:, 128:192], 2, 32) << 4
    scales = (blocks[:, 192:208] ^ 128).float() - 128  # signed bytes
    return codes, _float16(blocks, 208) * scales, None


def _iq4_xs(blocks: Tensor) -> Unpacked:
    scales = _fields(blocks[:, 4:8], 4, 1) | _fields(blocks[:, 2:4], 2, 1) << 4
    return _fields(blocks[:, 8:], 4, 16), _float16(blocks, 0) * (scales.float() - 32), None


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_FORMATS: dict[str, tuple[Sequence[int], Callable[[Tensor], Unpacked]]] = {
    "Q4_0": (range(-8, 8), _nibbles),
    "Q4_1": (range(16), functools.partial(_nibbles, has_offset=True)),
    "Q5_0": (range(-16, 16), functools.partial(_nibbles, has_fifth=True)),
    "Q5_1": (range(32), functools.partial(_nibbles, has_offset=True, has_fifth=True)),
    "Q8_0": (range(-128, 128), _q8_0),
    "Q2_K": (range(4), _q2_k),
    "Q3_K": (range(-4, 4), _q3_k),
    "Q4_K": (range(16), _q4_k),
    "Q5_K": (range(32), _q4_k),
    "Q6_K": (range(-32, 32), _q6_k),
    "IQ4_NL": (_IQ4, _nibbles),
    "IQ4_XS": (_IQ4, _iq4_xs),
}


def read(data: Tensor, kind: Kind, rows: slice, columns: slice, device: torch.device) -> Coded:
    """Some rows and columns, from where to where, of a matrix: data is (N, bytes of a row) uint8.

    Of a row, the blocks that hold the columns are read.
    """
    first, end = columns.start // kind.block, -(-columns.stop // kind.block)
    some = data[rows, first * kind.num_bytes : end * kind.num_bytes].to(device)
    begin = first * kind.block
    return _unpack(some, kind).columns(columns.start - begin, columns.stop - begin)


def pack(
    file: Path, of: TensorInfo, rows: range, columns: slice, like: Coded, held: int, *to: Tensor
) -> bool:
    """As `read`, from the file to values and scales of a weight of the kind `held`, in the groups
    of `like`. False where these have other sizes or types, or a number is not finite."""
    kind, stride, k = of.kind, of.num_bytes // of.shape[0], columns.stop - columns.start
    is_cut = k % kind.block or columns.start % kind.block
    is_other = like.shape[1] != k or any(len(x) * 32 != len(rows) for x in to)
    if is_cut or is_other or to[1].dtype is not (torch.uint8 if kind.block > 32 else torch.float16):
        return False
    numbers, at = _FORMATS[kind.name][0], columns.start // kind.block * kind.num_bytes
    table, state = torch.tensor(numbers, dtype=torch.float32), torch.zeros((), dtype=torch.int64)
    sizes = len(rows), k, like.group, 1 if like.offset is None else 2
    with file.open("rb") as source:
        place = source.fileno(), of.offset + rows.start * stride + at, stride
        codes = _native_type(kind.name), len(numbers), held, int(like.table[0])
        native.call("pack_gguf", *to, table, state, *place, *sizes, *codes)
    if state == PackState.FILE_TOO_SHORT:
        raise broken(file, "became shorter while it was read")
    return not state


def _native_type(name: str) -> int:
    """Return the number by which the CPU kernels know a type of blocks."""
    number = native.call("gguf_type", name)
    assert number >= 0, name
    return number


def _unpack(rows: Tensor, kind: Kind) -> Coded:
    numbers, unpack = _FORMATS[kind.name]
    blocks = rows.reshape(-1, kind.num_bytes).contiguous()
    if rows.device.type == "cpu" and native.kernels() is not None:
        parts = [x.new_empty(len(blocks), x.shape[1]) for x in unpack(blocks[:1]) if x is not None]
        number = _native_type(kind.name)
        native.call("unpack_gguf", blocks, *parts[:2], parts[-1], number, len(blocks))
    else:
        parts = [x for x in unpack(blocks) if x is not None]
    codes, scale, *offset = (x.view(len(rows), -1) for x in parts)
    table = torch.tensor(numbers, dtype=torch.float32, device=rows.device)
    return Coded(codes, table, scale, offset[0] if offset else None)
