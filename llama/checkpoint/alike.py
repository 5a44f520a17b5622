"""Tensors that must be alike, or must differ: in the shards of Meta's layout, and at both ends.

In: tensors that are mapped from files. Out: an error for shards that do not belong together, and
whether an lm_head is the embedding. Few bytes of large tensors are read, unless all are compared.
"""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from llama.checkpoint.files import MappedTensor
from llama.checkpoint.names import open_model_tensors

LM_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"
_SAMPLED_ROWS = 8


def check_shards(
    shards: Sequence[Mapping[str, MappedTensor]], whole: Sequence[str], divided: Sequence[str]
) -> None:
    """Check that shards are those of one model.

    A shard in the place of another one cannot be told, since its shapes are the same.

    Args:
        shards: The tensors of each shard.
        whole: The names of tensors that every shard holds whole.
        divided: The names of tensors of which no two shards hold the same part.

    Raises:
        ValueError: Two shards differ in what all hold, or one is a copy of another.
    """
    first = shards[0]
    for shard, name in itertools.product(shards[1:], whole):
        if not torch.equal(_bytes(first[name]), _bytes(shard[name])):
            raise ValueError(
                f"{shard[name].file} and {first[name].file} differ in {name}, which all shards of "
                "a model hold alike: they are of two models, or of two steps of a training; take "
                "all shards from one"
            )
    for one, other in itertools.combinations(shards, 2):
        samples = [(_sample(one[name]), _sample(other[name])) for name in divided]
        is_constant = all(bool((sample == sample[0]).all()) for sample, _ in samples)
        if samples and not is_constant and all(torch.equal(a, b) for a, b in samples):
            file, copied = other[divided[0]].file, one[divided[0]].file
            raise ValueError(
                f"{file} holds the same part of the model as {copied}: one of the two is a copy; "
                "fetch the shard that belongs there"
            )


def _bytes(tensor: MappedTensor) -> torch.Tensor:
    return tensor.data.contiguous().view(-1).view(torch.uint8)


def _sample(tensor: MappedTensor) -> torch.Tensor:
    """Return the bytes of the first rows of a matrix."""
    return tensor.data[:_SAMPLED_ROWS].contiguous().view(-1).view(torch.uint8)


def is_lm_head_the_embedding(files: Sequence[Path]) -> bool:
    """Return whether files of Hugging Face's layout hold no lm_head, or one like the embedding."""
    tensors: dict[str, MappedTensor] = {}
    for file in files:
        tensors |= open_model_tensors(file)
    heads = [name for name in tensors if name.startswith("lm_head.")]
    if not heads:
        return True
    if heads != [LM_HEAD] or _EMBEDDING not in tensors:
        return False
    head = tensors[LM_HEAD].data
    embedding = tensors[_EMBEDDING].data
    return head.dtype is embedding.dtype and torch.equal(head, embedding)
