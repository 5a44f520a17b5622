"""Quantized matrices whose parts are several tensors, joined to one tensor each.

In: the tensors of a file with Hugging Face's or Meta's names, and a quantization_config. Out: the
tensors, with each matrix under the name of its weight; and how the config asks for activations to
be rounded. Nothing is unpacked before it is read, and `hf_formats` knows the formats.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import replace

from llama.checkpoint.files import MappedTensor
from llama.checkpoint.hf import formats as hf_formats
from llama.checkpoint.hf.formats import CodedMatrix, Config, Parts, check_fits
from llama.common.checks import brief
from llama.weights.choice import ROUNDED_ACTIVATIONS

METHODS = ("compressed-tensors", "fbgemm_fp8", "modelopt", "awq", "gptq", "bitsandbytes")
_MATRIX_PART = re.compile(r"(.+_proj|lm_head|tok_embeddings|output|.+\.w[qkvo123])\.(.+)")
# Parts that describe activations and the KV cache with constant scales, which are not used here.
_IGNORED_PARTS = {
    "input_scale",
    "input_zero_point",
    "q_scale",
    "k_scale",
    "v_scale",
    "output_scale",
}
_KV_CACHE_PART = re.compile(r".+\.self_attn\.[qkv]_(scale|zero_point)")
# The values of keys that a description of activations leaves out.
_DEFAULTS: Config = {"num_bits": 8, "type": "int", "symmetric": True}
# Strategies of weights by which all columns of a row share a scale.
_SCALE_PER_ROW = ("channel", "tensor")
_REMEDY = "take the model in bfloat16, FP8, w4a16, AWQ (gemm), GPTQ or GGUF"


def activations_of(config: Config) -> str | None:
    """Return the value of `activations=` that a quantization_config asks for.

    Only what the kernels compute exactly and fast on every CPU counts: activations and weights of
    as many bits, and one scale per row of a weight. Other activations stay as they are, and so do
    those of a model in which the groups of matrices ask for several kinds.

    Args:
        config: The quantization_config of a folder, of any method.
    """
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
        config: The quantization_config; its quant_method is one of METHODS, or of Meta's formats.

    Raises:
        ValueError: The tensors of a matrix are not those of a format; file and matrix are named.
    """
    matrices: dict[str, dict[str, MappedTensor]] = {}
    joined: dict[str, MappedTensor] = {}
    for name, tensor in tensors.items():
        match = _MATRIX_PART.fullmatch(name)
        if match is None:
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
        build = _format_of(remaining, config)
        matrix = build(remaining, config)
        check_fits(not remaining and matrix.scales(slice(0, 1)).is_floating_point())
        if config.get("is_rotated") and name.endswith(".w2"):
            k = matrix.shape[1]
            check_fits(k >= 32 and k.bit_count() == 1)  # a Hadamard matrix of this size is known
            matrix = replace(matrix, is_rotated=True)
    except hf_formats.MISFITS as e:
        file = next(iter(parts.values())).file
        raise ValueError(
            f"{file}: {name} has {', '.join(sorted(parts))}, which cannot be read as "
            f"{brief(config.get('quant_method'))}: {brief(str(e))}; {_REMEDY}"
        ) from e
    return matrix


def _format_of(parts: Parts, config: Config) -> Callable[[Parts, Config], CodedMatrix]:
    """Return the function that builds a matrix from such tensors."""
    method = str(config.get("quant_method"))
    if "qweight" in parts:
        return hf_formats.awq if method == "awq" else hf_formats.gptq
    if "weight_packed" in parts:
        return hf_formats.compressed_tensors
    if "scales" in parts and method.endswith("_EO8"):
        return hf_formats.int4_eo8
    if hf_formats.NF4_STATE in parts:
        return hf_formats.nf4
    return hf_formats.eight_bits
