"""Meta's own quantized releases: FP8 of the 405B, and INT4_EO8 of the 1B and 3B.

In: the tensors of a shard, or the content of params.json. Out: the tensors, with the scales of FP8
joined to their matrices; or a quantization_config as `hf_quantized` takes it. Both formats are
those of llama-models' quantization/loader.py. Activations are not quantized here.
"""

import re
from typing import Any

import torch

from llama.checkpoint.files import MappedTensor, open_tensors
from llama.checkpoint.hf import formats as hf_formats
from llama.common.checks import brief, errors_in, number, whole_number


def config_of(params: dict[str, Any], source: str, num_shards: int) -> dict[str, Any] | None:
    """Return what a params.json says of INT4_EO8, as a quantization_config; None if nothing.

    Args:
        params: The content of params.json. The keys that describe the quantization are removed.
        source: What errors name.
        num_shards: How many shards the checkpoint has.

    Raises:
        ValueError: It is another quantization.
    """
    if "quantization_args" not in params:
        return None
    quantization = params.pop("quantization_args")
    lora = params.pop("lora_args", None)
    known = quantization if isinstance(quantization, dict) else {}
    is_rotated = known.get("spinquant", False)
    with errors_in(source):
        is_known = known.get("scheme") == hf_formats.INT4_EO8_SCHEME
        if not is_known or not isinstance(is_rotated, bool) or num_shards > 1:
            raise ValueError(
                f"quantization_args={brief(quantization)}: only {hf_formats.INT4_EO8_SCHEME} is "
                "read, in one shard"
            )
        if lora is None:
            method = "SPINQUANT_INT4_EO8" if is_rotated else "INT4_EO8"
            return {"quant_method": method, "is_rotated": is_rotated}
        given = lora if isinstance(lora, dict) else {}
        return {
            "quant_method": "SPINQUANT_INT4_EO8" if is_rotated else "QLORA_INT4_EO8",
            "is_rotated": is_rotated,
            "rank": whole_number("lora_args.rank", given.get("rank"), 1, 2**16),
            "scale": number("lora_args.scale", given.get("scale"), 0, 1e6),
        }


def join_fp8_scales(tensors: dict[str, MappedTensor], rank: int) -> dict[str, MappedTensor]:
    """Return the tensors of a shard with its FP8 matrices and their scales joined.

    The scales of shard `rank` are in fp8_scales_{rank}.pt alongside it.

    Raises:
        OSError: The file of scales cannot be read.
        ValueError: The scales do not fit; file and tensor are named.
    """
    names = [
        name
        for name, tensor in tensors.items()
        if tensor.data.dtype is torch.float8_e4m3fn and tensor.data.dim() == 2
    ]
    if not names:
        return tensors
    file = tensors[names[0]].file.with_name(f"fp8_scales_{rank}.pt")
    scales = open_tensors(file)
    joined = dict(tensors)
    for name in names:
        data = tensors[name].data
        key = re.sub(r"^layers\.(\d+)\.(.+)\.weight$", rf"\1_\2_{rank}", name)
        scale = scales.pop(key).data if key in scales else torch.empty(0)
        has_rows = scale.shape in ((len(data),), (len(data), 1))
        if not has_rows or not scale.is_floating_point():
            raise ValueError(f"{file} has no {key} with a scale for each row of {name}")
        parts = {"weight": data, "weight_scale": scale.view(-1, 1)}
        joined[name] = tensors[name]._replace(quantized=hf_formats.eight_bits(parts, {}))
    if scales:
        raise ValueError(f"{file} has scales of {min(scales)}, which is not in FP8")
    return joined
