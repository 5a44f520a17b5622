"""Quantized matrices of several tensors, as one in codes: Hugging Face's, and Meta's INT4_EO8.

Those of a matrix become one tensor, which is unpacked when it is read. The formats are those of
compressed-tensors, fbgemm_fp8 and modelopt (FP8), AutoAWQ (gemm), GPTQ and bitsandbytes; and that
of llama-models' quantization/loader.py, of which `of_params` makes a quantization_config.

Shapes: N outputs, K inputs, G groups along K.
"""

import json
import math
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Size, Tensor

from llama.checkpoint.files import MappedTensor, Quantized
from llama.checks import brief, errors_in, number, whole_number
from llama.weights.coded import Coded

METHODS = ("compressed-tensors", "fbgemm_fp8", "modelopt", "awq", "gptq", "bitsandbytes")
_EO8 = "int4_weight_int8_dynamic_activation"
_MATRIX = re.compile(r"(.+_proj|lm_head|tok_embeddings|output|.+\.w[qkvo123])\.(.+)")
_IGNORED = {  # of activations and of the KV cache, which stay as they are
    "input_scale", "input_zero_point", "q_scale", "k_scale", "v_scale", "output_scale",
}  # fmt: skip
_OF_CACHE = re.compile(r".+\.self_attn\.[qkv]_(scale|zero_point)")
_E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
_BYTES = torch.arange(-128.0, 128)
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # which four bits of a word have neighbours 0 to 7
_QUANT_STATE = "weight.quant_state.bitsandbytes__nf4"
_TAKE = "take the model in bfloat16, FP8, w4a16, AWQ (gemm), GPTQ or GGUF"
# What tensors of other sizes and types raise, and a configuration with other values.
_MISFITS = ValueError, TypeError, LookupError, ArithmeticError, RuntimeError, AttributeError


@dataclass(frozen=True)
class _Format:
    """weight = scale * table[code]; with a zero, the code that stands for 0, the table has 0 in its
    middle. codes: rows and columns -> (n, k) uint8. scale and zero: rows -> (n, G). group_of: (K),
    where groups are not neighbours. adaptor: A (R, K), B (N, R) and what B is multiplied with."""

    shape: Size
    table: Tensor
    codes: Callable[[slice, slice], Tensor]
    scale: Callable[[slice], Tensor]
    zero: Callable[[slice], Tensor] | None = None
    group_of: Tensor | None = None
    adaptor: tuple[Tensor, Tensor, float] | None = None
    is_rotated: bool = False

    def read(self, rows: slice, columns: slice, device: torch.device) -> Coded:
        scale, offset = self.scale(rows).float(), None
        if self.zero is not None:
            middle = self.zero(rows).float() - len(self.table) // 2
            offset = -scale * middle if middle.any() else None
        if self.group_of is not None:
            groups = self.group_of[columns]
        else:
            whole = self.shape[1] // scale.shape[1]
            step = math.gcd(whole, columns.start, columns.stop)
            groups = torch.arange(columns.start, columns.stop, step) // whole
        offset = None if offset is None else offset[:, groups].to(device)
        codes = self.codes(rows, columns).to(device)
        coded = Coded(codes, self.table.to(device), scale[:, groups].to(device), offset)
        if self.adaptor is not None:
            down, up, factor = self.adaptor
            up = up[rows].float().to(device) * factor
            coded = replace(coded, down=down[:, columns].float().to(device), up=up)
        return replace(coded, is_rotated=self.is_rotated)


Parts = dict[str, Tensor]


def eight_bits(parts: Parts, _: dict[str, Any]) -> _Format:
    weight, order = parts.pop("weight"), parts.pop("weight_format", None)
    (n, k), is_fp8 = weight.shape, weight.dtype is torch.float8_e4m3fn
    _check((is_fp8 or weight.dtype is torch.int8) and (order is None or not order.any()))
    data, sign = weight.view(torch.uint8), 0 if is_fp8 else 128
    unit = parts.pop("SCB") / 127 if "SCB" in parts else parts.pop("weight_scale")
    unit = unit.reshape(len(unit) if unit.dim() else 1, -1)
    _check(n % len(unit) == 0 and k % unit.shape[1] == 0)
    return _Format(
        weight.shape,
        _E4M3 if is_fp8 else _BYTES,
        lambda rows, columns: data[rows, columns] ^ sign,
        lambda rows: unit[torch.arange(rows.start, rows.stop) * len(unit) // n],
    )


def _packed_along_k(
    bits: int, words: Tensor, scale: Tensor, zero: Tensor | None, group_of: Tensor | None
) -> _Format:
    """words: (N, K * bits / 32) int32; scale: (N, G); zero: (G, N * bits / 32) int32."""
    if bits not in (2, 4, 8):
        raise ValueError(f"it has {bits} bits, and 2, 4 and 8 are read")
    each, k = 32 // bits, words.shape[1] * 32 // bits
    _check(words.dtype is torch.int32)
    _check(len(scale) == len(words) and k % scale.shape[1] == 0)
    if group_of is not None:
        _check(group_of.shape == (k,) and group_of.dtype in (torch.int32, torch.int64))
        _check(bool(((group_of >= 0) & (group_of < scale.shape[1])).all()))
        if torch.equal(group_of, torch.arange(k) // (k // scale.shape[1])):
            group_of = None

    def codes(rows: slice, columns: slice) -> Tensor:
        whole, within = _covering(columns, each)
        return _unpack(words[rows, whole], bits)[:, within]

    natural, n = list(range(each)), len(words)
    zeros = None if zero is None else _across(zero, bits, natural, Size(scale.shape))
    table = torch.arange(1 << bits).float() - (1 << bits - 1)
    return _Format(Size((n, k)), table, codes, lambda rows: scale[rows], zeros, group_of)


def _compressed(parts: Parts, _: dict[str, Any]) -> _Format:
    words, zero = parts.pop("weight_packed"), parts.pop("weight_zero_point", None)
    shape, group_of = parts.pop("weight_shape").tolist(), parts.pop("weight_g_idx", None)
    bits = words.shape[1] * 32 // shape[1]  # modules may differ
    zero = None if zero is None else zero.t()
    of = _packed_along_k(bits, words, parts.pop("weight_scale"), zero, group_of)
    _check(of.shape == Size(shape))
    return of


def _gptq(parts: Parts, config: dict[str, Any]) -> _Format:
    bits, zero = config["bits"], parts.pop("qzeros")
    version = config.get("checkpoint_format") or "gptq"
    _check(version in ("gptq", "gptq_v2"))
    if version == "gptq":  # v1: one less, borrowed over the word
        zero = zero + sum(1 << i for i in range(0, 32, bits))
    words, scale = parts.pop("qweight").t(), parts.pop("scales").t()
    return _packed_along_k(bits, words, scale, zero, parts.pop("g_idx", None))


def _awq(parts: Parts, config: dict[str, Any]) -> _Format:
    words, scale, zero = parts.pop("qweight"), parts.pop("scales").t(), parts.pop("qzeros")
    k, n = words.shape[0], 8 * words.shape[1]
    version, bits = config.get("version", "gemm"), config["bits"]
    if str(version).lower() != "gemm" or bits != 4:
        raise ValueError(f"it is {brief(version)} of {brief(bits)} bits, not gemm of 4")
    _check(len(scale) == n and k % scale.shape[1] == 0)

    def codes(rows: slice, columns: slice) -> Tensor:
        return _across(words[columns], 4, _AWQ_ORDER, Size((n, len(words[columns]))))(rows)

    zeros = _across(zero, 4, _AWQ_ORDER, Size(scale.shape))
    return _Format(Size((n, k)), torch.arange(-8.0, 8), codes, lambda rows: scale[rows], zeros)


def _nf4(parts: Parts, _: dict[str, Any]) -> _Format:
    state = json.loads(bytes(parts.pop(_QUANT_STATE).tolist()))
    (n, k), block = state["shape"], state["blocksize"]
    data, absmax = parts.pop("weight").view(n, k // 2), parts.pop("weight.absmax").view(n, -1)
    _check(state["quant_type"] == "nf4" and absmax.shape[1] * block == k)
    _check(parts["weight.quant_map"].shape == (16,))
    names = ("weight.nested_absmax", "weight.nested_quant_map")
    nested, numbers = (parts.pop(name, None) for name in names)
    if nested is not None and numbers is not None:
        _check(len(nested) * state["nested_blocksize"] >= absmax.numel() and len(numbers) == 256)

    def codes(rows: slice, columns: slice) -> Tensor:
        whole, within = _covering(columns, 2)
        some = data[rows, whole]
        return torch.stack([some >> 4, some & 15], -1).flatten(1)[:, within]

    def scale(rows: slice) -> Tensor:
        some = absmax[rows]
        if nested is None or numbers is None:
            return some
        places = torch.arange(rows.start * absmax.shape[1], rows.stop * absmax.shape[1])
        unit = nested[places // state["nested_blocksize"]].view(some.shape)
        return numbers[some.int()] * unit + state["nested_offset"]

    return _Format(Size((n, k)), parts.pop("weight.quant_map"), codes, scale)


def of_params(content: dict[str, Any], source: str, shards: int) -> dict[str, Any] | None:
    """What a params.json says of INT4_EO8, taken out of it; ValueError if it is of other bits."""
    if "quantization_args" not in content:
        return None
    args, lora = content.pop("quantization_args"), content.pop("lora_args", None)
    known, given = (x if isinstance(x, dict) else {} for x in (args, lora))
    is_rotated = known.get("spinquant", False)
    kind = "SPINQUANT_" if is_rotated else "" if lora is None else "QLORA_"
    found: dict[str, Any] = {"quant_method": f"{kind}INT4_EO8", "is_rotated": is_rotated}
    with errors_in(source):
        if known.get("scheme") != _EO8 or not isinstance(is_rotated, bool) or shards > 1:
            raise ValueError(f"quantization_args={brief(args)}: only {_EO8} is read, in one shard")
        if lora is not None:
            found["rank"] = whole_number("lora_args.rank", given.get("rank"), 1, 2**16)
            found["scale"] = number("lora_args.scale", given.get("scale"), 0, 1e6)
    return found


def _eo8(parts: Parts, config: dict[str, Any]) -> _Format:
    """4 bits, or 8 where a row has one scale, as embedding and output have."""
    weight, scale = parts.pop("weight"), parts.pop("scales")
    n, k = weight.shape
    of = eight_bits({"weight": weight, "weight_scale": scale}, {})
    _check(weight.dtype is torch.int8 and len(scale) == n)
    if scale.numel() == n:
        return of
    zero = parts.pop("zeros", torch.zeros(()).expand(scale.shape))
    _check(zero.shape == scale.shape)
    if "rank" in config:
        down, up = (parts.pop(f"adaptor.{x}.weight") for x in "AB")
        _check(down.shape == (config["rank"], k) and up.shape == (n, config["rank"]))
        of = replace(of, adaptor=(down, up, config["scale"]))

    def codes(rows: slice, columns: slice) -> Tensor:
        some = (weight[rows, columns] + 8).view(torch.uint8)
        if some.max() > 15:
            raise ValueError("a number is not one of 4 bits")
        return some

    of = replace(of, zero=lambda rows: zero[rows].float() + 8)
    return replace(of, table=torch.arange(-8.0, 8), codes=codes)


def _covering(some: slice, each: int) -> tuple[slice, slice]:
    """The words of `each` numbers that hold some numbers, and where these are among theirs."""
    first = some.start // each
    within = slice(some.start - first * each, some.stop - first * each)
    return slice(first, -(-some.stop // each)), within


def _unpack(words: Tensor, bits: int) -> Tensor:
    """(..., w) int32 -> (..., w * 32 / bits) uint8: the lowest bits first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return (words.unsqueeze(-1) >> shifts & (1 << bits) - 1).byte().flatten(-2)


def _across(words: Tensor, bits: int, order: list[int], shape: Size) -> Callable[[slice], Tensor]:
    """words: (k, N * bits / 32) int32, `shape`: (N, k) -> a function of rows to (n, k) uint8."""
    _check(words.dtype is torch.int32 and words.shape == (shape[1], shape[0] * bits // 32))
    each = len(order)

    def of(rows: slice) -> Tensor:
        whole, within = _covering(rows, each)
        some = _unpack(words[:, whole], bits).unflatten(-1, (-1, each))[..., order]
        return some.flatten(-2)[:, within].t()

    return of


def _check(fits: bool) -> None:
    if not fits:
        raise ValueError("its tensors do not fit one another, or are of another version")


def gathered(tensors: dict[str, MappedTensor], config: dict[str, Any]) -> dict[str, MappedTensor]:
    """ValueError names file and matrix, where its tensors are not those of a format."""
    matrices: dict[str, dict[str, MappedTensor]] = {}
    whole: dict[str, MappedTensor] = {}
    for name, tensor in tensors.items():
        if (found := _MATRIX.fullmatch(name)) and found[2] not in _IGNORED:
            matrices.setdefault(found[1], {})[found[2]] = tensor
        elif found is None and not _OF_CACHE.fullmatch(name):
            whole[name] = tensor
    for name, parts in matrices.items():
        first = next(iter(parts.values()))
        if parts.keys() == {"weight"} and (first.quantized or first.data.itemsize > 1):
            whole[f"{name}.weight"] = first
            continue
        left = {own: tensor.data for own, tensor in parts.items()}
        try:
            of = _format_of(left, config)(left, config)
            _check(not left and of.scale(slice(0, 1)).is_floating_point())
            if config.get("is_rotated") and name.endswith(".w2"):
                _check(of.shape[1] >= 32 and of.shape[1] & (of.shape[1] - 1) == 0)
                of = replace(of, is_rotated=True)
        except _MISFITS as e:
            raise ValueError(
                f"{first.file}: {name} has {', '.join(sorted(parts))}, which cannot be read as "
                f"{brief(config.get('quant_method'))}: {brief(str(e))}; {_TAKE}"
            ) from e
        quantized = Quantized(str(config.get("quant_method")), of.shape, of.read, of.is_rotated)
        whole[f"{name}.weight"] = first._replace(quantized=quantized, offset=None)
    return whole


def _format_of(parts: Parts, config: dict[str, Any]) -> Callable[[Parts, dict[str, Any]], _Format]:
    if "qweight" in parts:
        return _awq if config.get("quant_method") == "awq" else _gptq
    if "weight_packed" in parts:
        return _compressed
    if "scales" in parts and str(config.get("quant_method")).endswith("_EO8"):
        return _eo8
    return _nf4 if _QUANT_STATE in parts else eight_bits
