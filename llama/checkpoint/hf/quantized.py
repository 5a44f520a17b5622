"""Quantized matrices whose parts are several tensors, joined to one tensor each.

In: the tensors of a file with Hugging Face's or Meta's names, and a quantization_config. Out: the
tensors, with each matrix under the name of its weight; and how the config asks for activations to
be rounded. The tensors of a matrix tell its format, not the name of the method. Nothing is unpacked
before it is read, and `formats`, `bitsandbytes`, `fp4` and `marlin` know the formats.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from llama.checkpoint.files import MappedTensor
from llama.checkpoint.hf import bitsandbytes, fp4, marlin
from llama.checkpoint.hf import formats as hf_formats
from llama.checkpoint.hf.coded_matrix import MISFITS, CodedMatrix, Config, Parts, check_fits
from llama.checkpoint.hf.quantization import UnknownLayoutError
from llama.common.checks import brief
from llama.vision.tensors import ENCODER
from llama.weights.choice import ROUNDED_ACTIVATIONS

_MATRIX_PART = re.compile(
    r"(.+_proj|.+\.c_fc|.+\.vision_projection|lm_head|.*embed_tokens|tok_embeddings|output"
    r"|.+\.w[qkvo123])\.(.+)"
)
# Parts that describe activations and the KV cache with constant scales, which are not used here,
# and the memory that a kernel for GPUs needs.
_IGNORED_PARTS = {
    "activation_scale",
    "workspace",
    "input_scale",
    "input_global_scale",
    "input_zero_point",
    "q_scale",
    "k_scale",
    "v_scale",
    "output_scale",
}
_KV_CACHE_PART = re.compile(r".+\.self_attn\.([qkv]|kv)_(scale|zero_point)")
# The values of keys that a description of activations leaves out.
_DEFAULTS: Config = {"num_bits": 8, "type": "int", "symmetric": True}
# Strategies of weights by which all columns of a row share a scale.
_SCALE_PER_ROW = ("channel", "tensor")
_REMEDY = "take the model in bfloat16, FP8, w4a16, AWQ, GPTQ or GGUF"
_GPTQ_REMEDY = (
    ', or dequantize it with the package gptqmodel: python -c "from gptqmodel.utils.model_dequant '
    "import dequantize_model; dequantize_model('{folder}', 'OUT')\""
)


def activations_of(config: Config) -> str | None:
    """Return the value of `activations=` that a quantization_config asks for.

    Only what kernels compute exactly and fast counts: activations and weights of as many bits, and
    one scale per row of a weight. Other activations stay as they are, and so do those of a model in
    which the groups of matrices ask for several kinds.

    Args:
        config: The quantization_config of a folder, of any method.
    """
    if config.get("quant_method") == "fp8":  # AutoFP8's: e4m3 with a scale for each matrix
        is_dynamic = config.get("activation_scheme") == "dynamic"
        return "fp8" if is_dynamic and not config.get("weight_block_size") else None
    groups = config.get("config_groups")
    if config.get("quant_method") != "compressed-tensors" or not isinstance(groups, dict):
        return None
    described_groups = [group for group in groups.values() if isinstance(group, dict)]
    for name, activation_format in ROUNDED_ACTIVATIONS.items():
        inputs = activation_format.in_files
        if described_groups and inputs is not None:
            weights = {key: inputs[key] for key in ("num_bits", "type")}
            if all(
                _matches(group.get("input_activations"), inputs)
                and _matches(group.get("weights"), weights)
                and group["weights"].get("strategy") in _SCALE_PER_ROW
                for group in described_groups
            ):
                return name
    return None


def _matches(quantized: object, described: Mapping[str, object]) -> bool:
    """Return whether the activations or weights of a group are those that are described."""
    return isinstance(quantized, dict) and (_DEFAULTS | quantized).items() >= described.items()


def join_parts(tensors: dict[str, MappedTensor], config: Config) -> dict[str, MappedTensor]:
    """Return the tensors of a file with the parts of each quantized matrix as one tensor.

    Args:
        tensors: All tensors of the file, by name.
        config: The quantization_config, of a method of Hugging Face's folders or of Meta's.

    Raises:
        ValueError: The tensors of a matrix are not those of a format; file and matrix are named.
    """
    matrices: dict[str, dict[str, MappedTensor]] = {}
    joined: dict[str, MappedTensor] = {}
    for name, tensor in tensors.items():
        match = _MATRIX_PART.fullmatch(name)
        is_bias = name.startswith(ENCODER) and name.endswith(".bias")  # no layer of text has one
        if match is None or is_bias:
            if not _KV_CACHE_PART.fullmatch(name):
                joined[name] = tensor
        elif match[2] not in _IGNORED_PARTS:
            matrices.setdefault(match[1], {})[match[2]] = tensor
    for name, parts in matrices.items():
        first = next(iter(parts.values()))
        if parts.keys() == {"weight"} and (first.quantized or first.data.itemsize > 1):
            joined[f"{name}.weight"] = first  # not quantized, or joined already
        else:
            matrix = _join(name, parts, config)
            joined[f"{name}.weight"] = first._replace(quantized=matrix, offset=None)
    return joined


def _join(name: str, parts: dict[str, MappedTensor], config: Config) -> CodedMatrix:
    """Return the matrix that these tensors are."""
    remaining = {part: tensor.data for part, tensor in parts.items()}
    try:
        bias = remaining.pop("bias", None)
        check_fits(bias is None or not bias.any())  # Older programs write zeros.
        build = _format_of(remaining, config)
        matrix = build(remaining, config)
        check_fits(not remaining and matrix.scales(slice(0, 1)).is_floating_point())
        if config.get("is_rotated") and name.endswith(".w2"):
            k = matrix.shape[1]
            check_fits(k >= 32 and k.bit_count() == 1)  # a Hadamard matrix of this size is known
            matrix = replace(matrix, is_rotated=True)
    except MISFITS as e:
        file = next(iter(parts.values())).file
        method = config.get("quant_method")
        is_layout = isinstance(e, UnknownLayoutError)
        cause = str(e) if is_layout else brief(str(e))
        is_known_there = is_layout and method == "gptq"
        remedy = _GPTQ_REMEDY.format(folder=file.parent) if is_known_there else ""
        raise ValueError(
            f"{file}: {name} has {', '.join(sorted(parts))}, which cannot be read as "
            f"{brief(method)}: {cause}; {_REMEDY}{remedy}"
        ) from e
    return matrix


def _format_of(parts: Parts, config: Config) -> Callable[[Parts, Config], CodedMatrix]:
    """Return the function that builds a matrix from such tensors."""
    if "qweight" in parts:
        if hf_formats.is_awq_gemv(parts):
            return hf_formats.awq_gemv
        return hf_formats.awq if hf_formats.is_awq(parts) else hf_formats.gptq
    if "B" in parts:
        return marlin.marlin
    if fp4.is_fp4(parts):
        return fp4.fp4
    if "weight_packed" in parts:
        return hf_formats.compressed_tensors
    if "scales" in parts and str(config.get("quant_method")).endswith("_EO8"):
        return hf_formats.int4_eo8
    if bitsandbytes.is_four_bits(parts):
        return bitsandbytes.four_bits
    return hf_formats.eight_bits
