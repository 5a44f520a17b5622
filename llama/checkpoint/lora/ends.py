"""The embedding and the lm_head of a model with an adapter: their rows, and whether they are one.

In: the tensors or updates of an adapter for the two, its configuration, and the sizes of the base
model. Out: the size of the vocabulary afterwards, and the tokens whose rows were trained alone. No
file is opened.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from llama.checkpoint.lora.config import AdapterConfig, names_module
from llama.checkpoint.lora.merging import Update
from llama.checkpoint.table import name_in
from llama.model.args import ModelArgs

# The matrices that can be one, and that have a row for each token.
TIED = ("tok_embeddings.weight", "output.weight")


def token_ids_of(config: AdapterConfig, name: str) -> tuple[int, ...]:
    """Return the tokens whose rows of a matrix an adapter trained alone.

    Those of the embedding are those of an lm_head that is tied to it, too.

    Args:
        config: The configuration of the adapter.
        name: Meta's name of the matrix.
    """
    for each in dict.fromkeys((name, TIED[0])):
        title = name_in("hf", each).removesuffix(".weight")
        for end, ids in config.token_ids.items():
            if names_module(end, title):
                return ids
    return ()


def vocab_size_of(
    ends: Mapping[str, Mapping[str, Tensor]], config: AdapterConfig, params: ModelArgs
) -> int:
    """Return the rows of embedding and lm_head after an adapter, which may add some.

    Args:
        ends: The tensors of the adapter for the two by their roles, by Meta's names of the two.
        config: The configuration of the adapter.
        params: The sizes of the base model.

    Raises:
        ValueError: The two would have unlike numbers of rows, or rows without values.
    """
    sizes = dict.fromkeys(TIED, params.vocab_size)
    for name, tensors in ends.items():
        weight = tensors.get("weight")
        if weight is not None and weight.dim() == 2:
            sizes[name] = len(weight)
        if "tokens" in tensors:
            size = sizes[name]
            new = {x for x in token_ids_of(config, name) if x >= size}
            if new != set(range(size, size + len(new))):
                raise ValueError(
                    f"trainable_token_indices names token {max(new)}, and the base model has "
                    f"{size}: the rows between are in neither: save the adapter with "
                    "save_embedding_layers=True"
                )
            sizes[name] = size + len(new)
    if params.tied_output and TIED[1] not in ends and "tokens" in ends.get(TIED[0], {}):
        sizes[TIED[1]] = sizes[TIED[0]]
    embedding, lm_head = sizes.values()
    if embedding != lm_head:
        raise ValueError(
            f"with the adapter embed_tokens has shape ({embedding}, {params.dim}), and lm_head "
            f"({lm_head}, {params.dim}): the adapter is one of another vocabulary; if tokens were "
            "added, save it with save_embedding_layers=True"
        )
    return embedding


def stays_tied(updates: dict[str, Update]) -> bool:
    """Return whether an adapter leaves the matrix of embedding and lm_head one matrix."""
    embedding, lm_head = (updates.get(name) for name in TIED)
    if lm_head is None:
        return embedding is None or (embedding.replacement is None and embedding.low_rank is None)
    if embedding is None or embedding.low_rank is not None or lm_head.low_rank is not None:
        return False
    if embedding.tokens is not None and lm_head.tokens is None:
        lm_head = lm_head._replace(tokens=embedding.tokens)
    pairs = [(embedding.replacement, lm_head.replacement)]
    pairs += zip(embedding.tokens or (None,), lm_head.tokens or (None,), strict=False)
    return all(x is y or (x is not None and y is not None and torch.equal(x, y)) for x, y in pairs)
