"""LoRA adapters that stay apart from the weights: a rank's share of one, ready for products.

In: the folder of an adapter, and a model on some rank. Out: an `AdapterWeights`, in the type of the
model. What only a merge can do is a ValueError that names it: DoRA, weights that were trained
whole, updates of the embedding and the lm_head, and added tokens. Of the weights of the model only
those are read that the adapter has a copy of.
"""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from llama.checkpoint.hf import config as hf
from llama.checkpoint.lora.adapters import Adapter, open_adapters
from llama.checkpoint.lora.config import names_module
from llama.checkpoint.lora.ends import TIED
from llama.checkpoint.lora.merging import LowRank, Update
from llama.checkpoint.table import as_slice, is_rotated, name_in, share
from llama.common.checks import errors_in
from llama.kernels.cpu import native
from llama.kernels.cpu.adapters import PackedAdapter
from llama.kernels.cpu.constants import MAX_RANK
from llama.model.kinds import HalfLayer
from llama.model.layers import Linear
from llama.model.transformer import Transformer, TransformerBlock
from llama.ops.adapters import RANK_STEP, AdapterWeights, Delta, DeltaPart
from llama.weights.blocks import BlockedWeight
from llama.weights.plain import PlainWeight

_MERGE = "merge it: build with lora=, or use `llama convert --lora`"


@dataclass(frozen=True)
class LoadedAdapter:
    """An adapter that requests can choose.

    Attributes:
        digest: The SHA-256 of its configuration and tensors, by which requests name it.
        weights: Its updates on this rank.
        base_model: The name of the base model in its configuration, for messages.
        rank: The largest rank of its updates.
    """

    digest: bytes
    weights: AdapterWeights
    base_model: str
    rank: int


def load(path: str | os.PathLike[str], model: Transformer) -> LoadedAdapter:
    """Read an adapter for a model.

    Args:
        path: Its folder, or the name of a download.
        model: The model, as this rank holds it.

    Raises:
        OSError: A file is missing or cannot be read.
        ValueError: The adapter is damaged, does not fit the model, or can only be merged.
    """
    (adapter,) = open_adapters([path], model.params)
    with errors_in(str(adapter.folder)):
        if adapter.vocab_size != model.params.vocab_size:
            raise ValueError(
                f"it has rows for {adapter.vocab_size} tokens, and the model for "
                f"{model.params.vocab_size}: {_MERGE}"
            )
        low_ranks = {
            name: _low_rank(name, update)
            for name, update in adapter.updates.items()
            if not _is_copy(name, update, adapter, model)
        }
        if not low_ranks:
            raise ValueError("it holds no low-rank update")
    digest = bytes.fromhex(adapter.digest())
    products = [linear for block in model.blocks() for linear in products_of(block)]
    parts_of: dict[str, list[DeltaPart]] = {}
    for linear in products:
        parts = list(_parts(linear, low_ranks, model))
        if parts:
            parts_of[linear.names[0]] = parts
    weights: AdapterWeights
    if _is_packed(model):
        weights = PackedAdapter(parts_of, [linear.names[0] for linear in products])
    else:
        weights = AdapterWeights(_plain_deltas(parts_of, model))
    rank = max(len(low_rank.down) for low_rank in low_ranks.values())
    return LoadedAdapter(digest, weights, adapter.config.base_model, rank)


def _is_copy(name: str, update: Update, adapter: Adapter, model: Transformer) -> bool:
    """Return whether an update is the model's own embedding or lm_head, as far as a rank has it.

    PEFT saves them with save_embedding_layers=True.

    Raises:
        ValueError: That cannot be told, as the model's matrix is quantized.
    """
    title = name_in("hf", name).removesuffix(".weight")
    was_trained = any(names_module(end, title) for end in adapter.config.modules_to_save)
    whole, low_rank, tokens = update
    if name not in TIED or whole is None or was_trained or low_rank or tokens:
        return False
    share = model.plan.share
    if not (share.has_embedding if name == TIED[0] else share.has_lm_head):
        return True
    weight = (model.tok_embeddings if name == TIED[0] else model.output).weight
    if type(weight) not in (PlainWeight, BlockedWeight):
        raise ValueError(
            f"it holds {title}.weight, and as the model's is quantized they cannot be compared: "
            "save it with save_embedding_layers=False"
        )
    plain = weight.plain()
    return torch.equal(plain, whole[as_slice(share.vocab)].to(plain))


def _low_rank(name: str, update: Update) -> LowRank:
    """Return the low-rank update of a tensor, if that is all that the adapter changes."""
    if update.tokens is not None:
        raise ValueError(
            f"it changes rows of {name} (trainable_token_indices), and requests can choose "
            f"low-rank updates only: {_MERGE}"
        )
    if update.replacement is not None:
        raise ValueError(
            f"it replaces {name} (modules_to_save), and requests can choose low-rank updates only: "
            f"{_MERGE}"
        )
    low_rank = update.low_rank
    assert low_rank is not None
    if low_rank.magnitude is not None:
        raise ValueError(f"use_dora is true, and DoRA cannot be chosen by request: {_MERGE}")
    if not name.startswith("layers."):
        raise ValueError(
            f"it updates {name}, and requests can choose updates of the layers only: {_MERGE}"
        )
    rank = len(low_rank.down)
    if rank > MAX_RANK:
        raise ValueError(
            f"the update of {name} has rank {rank}, and requests can choose adapters of up to "
            f"{MAX_RANK}: {_MERGE}"
        )
    return low_rank


def products_of(block: TransformerBlock) -> Iterator[Linear]:
    """Return the products of a layer in the order in which they are computed."""
    for kind in block.kinds:
        half: HalfLayer = getattr(block, kind.name)
        yield from (half.first, half.second)


def _parts(
    linear: Linear, low_ranks: Mapping[str, LowRank], model: Transformer
) -> Iterator[DeltaPart]:
    """Return this rank's share of the updates of the matrices that are multiplied as one."""
    first = 0
    for name in linear.names:
        dim, wanted = share(model.params, name, model.parallel.placement)
        some = slice(wanted.start, wanted.stop)
        low_rank = low_ranks.get(name)
        if low_rank is not None:
            up = low_rank.up
            down = low_rank.down
            if dim == 0:
                up = up[some]
            else:
                down = down[:, some]
            up = _in_metas_order(name, up, model.params.head_dim)
            yield DeltaPart(first, up, down, low_rank.scale)
        if dim == 0:
            first += len(wanted)


def _in_metas_order(name: str, rows: Tensor, head_dim: int) -> Tensor:
    """Return rows of Hugging Face's layout in the order of Meta's, some whole heads."""
    if not is_rotated(name):
        return rows
    ordered = torch.empty_like(rows, memory_format=torch.contiguous_format)
    hf.copy_rows(ordered, rows.contiguous(), head_dim, to="meta")
    return ordered


def _is_packed(model: Transformer) -> bool:
    """Return whether the CPU kernels compute the updates of a model."""
    like = model.norm.weight
    is_taken = like.is_cpu and like.dtype is torch.bfloat16 and native.kernels() is not None
    return is_taken and not any(size % 2 for size in (model.plan.dim, model.plan.ffn_dim))


def _plain_deltas(parts_of: Mapping[str, list[DeltaPart]], model: Transformer) -> dict[str, Delta]:
    """Return copies of the updates in the type and on the device of a model.

    Ranks of zeros fill them up to what kernels take.
    """
    like = model.norm.weight
    deltas = {}
    for name, parts in parts_of.items():
        moved = []
        for part in parts:
            num_zeros = -len(part.down) % RANK_STEP
            up = F.pad(part.up.to(like, copy=True), (0, num_zeros)).contiguous()
            down = F.pad(part.down.to(like, copy=True), (0, 0, 0, num_zeros)).contiguous()
            moved.append(part._replace(up=up, down=down))
        deltas[name] = Delta(moved)
    return deltas
