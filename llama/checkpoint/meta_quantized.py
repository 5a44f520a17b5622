"""Meta's FP8 of the 405B: matrices of e4m3 in the shards, and the scales of their rows beside them.

fp8_scales_N.pt names them by layer, matrix and shard, as llama-models' quantization/loader.py has
it. Activations stay as they are.
"""

import re

import torch

from llama.checkpoint.downloads import broken
from llama.checkpoint.files import MappedTensor, Quantized, open_tensors
from llama.checkpoint.hf_quantized import eight_bits


def gathered(tensors: dict[str, MappedTensor], rank: int) -> dict[str, MappedTensor]:
    """Of shard `rank`; ValueError or OSError names file and tensor where scales do not fit."""
    kinds = {name: (x.data.dtype, x.data.dim()) for name, x in tensors.items()}
    names = [name for name, kind in kinds.items() if kind == (torch.float8_e4m3fn, 2)]
    if not names:
        return tensors
    file = tensors[names[0]].file.with_name(f"fp8_scales_{rank}.pt")
    scales, whole = open_tensors(file), dict(tensors)
    for name in names:
        data = tensors[name].data
        key = re.sub(r"^layers\.(\d+)\.(.+)\.weight$", rf"\1_\2_{rank}", name)
        scale = scales.pop(key).data if key in scales else torch.empty(0)
        if scale.shape not in (data.shape[:1], (len(data), 1)) or not scale.is_floating_point():
            raise broken(file, f"has no {key} with a scale for each row of {name}")
        of = eight_bits({"weight": data, "weight_scale": scale.view(-1, 1)}, {})
        whole[name] = tensors[name]._replace(quantized=Quantized("fp8", of.shape, of.read))
    if scales:
        raise broken(file, f"has scales of {min(scales)}, which is not in FP8")
    return whole
