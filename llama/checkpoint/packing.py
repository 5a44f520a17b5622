"""The matrices of a model, put into the formats of weights once they are filled.

In: a model with plain matrices, or with codes of its files. Out: the same model in the format that
was asked for, or in this machine's fastest one. The model itself knows plain weights alone.
"""

from collections.abc import Mapping
from types import MappingProxyType

from torch import nn

from llama.model.layers import Linear, Matrix
from llama.model.transformer import Transformer
from llama.weights import choice
from llama.weights.coded import CodedRows
from llama.weights.plain import PlainWeight


def pack_model(
    model: Transformer,
    part: nn.Module | None = None,
    coded: Mapping[str, CodedRows] = MappingProxyType({}),
    *,
    quantize: str | None = None,
) -> None:
    """Put one part of `Transformer.loading_order`, or all, into a format, once it is filled.

    The views of `loading_order` are invalid afterwards.

    Args:
        model: The model.
        part: The part; by default the whole model.
        coded: Matrices that were not filled, by the first of their names.
        quantize: The format; by default this machine's fastest.
    """
    model.quantization = quantize or model.quantization
    share = model.plan.share
    lm_head = model.output if share.has_lm_head else None
    # Both ends of a tied model have the same bytes, also on stages that have one of them.
    only_tied = None
    if model.params.tied_output and share.has_embedding and not share.has_lm_head:
        only_tied = model.tok_embeddings
    for module in (part or model).modules():
        if isinstance(module, Matrix) and module.names[0] in coded:
            device = model.norm.weight.device
            module.weight = choice.packed(coded[module.names[0]], None, device)
            if model.is_tied and module is model.tok_embeddings:
                model.output.weight = module.weight
        elif isinstance(module, Linear) or module is only_tied:
            is_end = module is lm_head or module is only_tied
            quantize_to = choice.lm_head_format(quantize) if is_end else quantize
            pack_matrix(module, quantize_to if module.may_quantize else None)
        if module is lm_head:
            model.tie()


def pack_matrix(matrix: Matrix, quantize: str | None = None) -> None:
    """Put a plain matrix into the format asked for, or the fastest; its views become invalid."""
    if isinstance(matrix.weight, PlainWeight):
        plain = matrix.weight.plain()
        memory = matrix.weight.values.data
        matrix.weight = choice.packed(plain, quantize, plain.device, memory=memory)
