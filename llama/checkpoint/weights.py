"""Weights on disk: found, checked, and copied into one rank's share of a model.

In: a folder with Meta's consolidated.NN.pth and params.json, in any number of shards, or with
Hugging Face's *.safetensors and config.json. Out: a `Checkpoint`, and filled tensors. Files are
mapped, so that a rank reads the bytes that it copies and no others, and nothing in them is run.
Which layout it is follows from the files there, never from a path's name.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from llama.args import ModelArgs
from llama.checkpoint import huggingface as hf
from llama.checkpoint.find import Checkpoint
from llama.checkpoint.tensor_files import offsets, open_tensors, read_into
from llama.model import Transformer
from llama.parallel import ModelParallel

# Meta's name, without "layers.N." -> Hugging Face's, and the dimension that the ranks of a group
# divide among them (None: each holds the whole). Load, reshard and convert all go by this table.
TABLE: dict[str, tuple[str, int | None]] = {
    "tok_embeddings.weight": ("model.embed_tokens.weight", 0),
    "attention.wq.weight": ("self_attn.q_proj.weight", 0),
    "attention.wk.weight": ("self_attn.k_proj.weight", 0),
    "attention.wv.weight": ("self_attn.v_proj.weight", 0),
    "attention.wo.weight": ("self_attn.o_proj.weight", 1),
    "feed_forward.w1.weight": ("mlp.gate_proj.weight", 0),
    "feed_forward.w2.weight": ("mlp.down_proj.weight", 1),
    "feed_forward.w3.weight": ("mlp.up_proj.weight", 0),
    "attention_norm.weight": ("input_layernorm.weight", None),
    "ffn_norm.weight": ("post_attention_layernorm.weight", None),
    "norm.weight": ("model.norm.weight", None),
    "output.weight": ("lm_head.weight", 0),
}
ROTATED = ("attention.wq.weight", "attention.wk.weight")  # rows in another order in the hf layout
_KV = ("attention.wk.weight", "attention.wv.weight")
_HARMLESS = ("rope.freqs", "rotary_emb.inv_freq")  # computed, not learned: some files carry them


def name_in(layout: str, name: str) -> str:
    """What a tensor of Meta's name is called in files of `layout`."""
    if layout == "meta":
        return name
    if name.startswith("layers."):
        _, number, part = name.split(".", 2)
        return f"model.layers.{number}.{TABLE[part][0]}"
    return TABLE[name][0]


def sharded_dim(name: str) -> int | None:
    return TABLE[name.split(".", 2)[2] if name.startswith("layers.") else name][1]


def shard_shapes(
    params: ModelArgs, size: int, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Meta's names -> tensors without memory, of the shapes that one of `size` ranks holds."""
    args = replace(params, max_seq_len=1)  # the rotary table is not wanted here
    model = Transformer(args, parallel=ModelParallel(size=size), device="meta", dtype=dtype)
    return model.named_shards()


def bytes_of(checkpoint: Checkpoint, size: int, dtype: torch.dtype) -> int:
    """Bytes of the weights that one of `size` ranks holds in `dtype`; reads no file.

    In int8, norms and an embedding of its own are bf16, and each row of a matrix has a scale.
    """
    slots = shard_shapes(checkpoint.params, size, dtype)
    if dtype is not torch.int8:
        return sum(slot.nbytes for slot in slots.values())
    untied = () if checkpoint.params.tied_output else ("tok_embeddings.weight",)
    return sum(
        2 * slot.numel() if slot.dim() < 2 or name in untied else slot.numel() + 4 * slot.shape[0]
        for name, slot in slots.items()
    )


class MappedTensor(NamedTuple):
    """A tensor where it lies: `data` is mapped, and read when it is copied."""

    file: Path
    name: str  # in the file
    data: Tensor
    offset: int | None  # in the file, if that is known

    def copy(self, piece: Tensor, into: Tensor) -> None:
        """Fill `into` with a piece of `data`: read where it is the same bytes, else converted."""
        same = piece.dtype is into.dtype and piece.is_contiguous() and into.is_contiguous()
        if self.offset is None or not same or into.device.type != "cpu":
            into.copy_(piece)
            return
        read_into(into, self.file, self.offset + piece.data_ptr() - self.data.data_ptr())


def _map_file(file: Path, *, tied: bool) -> list[MappedTensor]:
    found = open_tensors(file)
    if tied and _is_tied(found):
        del found["output.weight"]
    places = offsets(file, found.values())
    return [
        MappedTensor(file, name, data, offset)
        for (name, data), offset in zip(found.items(), places, strict=True)
    ]


class Weights:
    """All tensors of a checkpoint under Meta's names, every name and shape checked on opening.

    ValueError names file, tensor, and what was expected and found.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.params = checkpoint.params
        self.layout = checkpoint.layout
        self.shapes = {name: slot.shape for name, slot in shard_shapes(self.params, 1).items()}
        ours = {name_in(self.layout, name): name for name in self.shapes}
        tied = self.params.tied_output
        self.shards = [  # "?": a name of the other layout must not pass for one of this
            {ours.get(stored.name, f"?{stored.name}"): stored for stored in _map_file(f, tied=tied)}
            for f in checkpoint.shards
        ]
        if self.layout == "hf":  # each file holds some tensors, whole: together they are one shard
            self.shards = [_merge(self.shards)]
        self._check(checkpoint)

    def _check(self, checkpoint: Checkpoint) -> None:
        _check_count(checkpoint, self.shards)
        try:
            shapes = shard_shapes(self.params, len(self.shards))
        except ValueError as e:
            raise ValueError(
                f"{checkpoint.folder} has {len(self.shards)} shards, which do not fit "
                f"{checkpoint.params_path.name}: {e}"
            ) from e
        places = checkpoint.shards if self.layout == "meta" else [checkpoint.folder]
        for place, shard in zip(places, self.shards, strict=True):
            missing = [name_in(self.layout, n) for n in shapes if n not in shard]
            if missing:
                more = f" and {len(missing) - 1} more" if missing[1:] else ""
                raise ValueError(
                    f"{place}: {missing[0]}{more} missing, which {checkpoint.params_path} asks "
                    "for: they do not belong together, or a file is incomplete: download it again"
                )
            for name, stored in shard.items():
                if not name.endswith(_HARMLESS):
                    self._check_tensor(stored, shapes.get(name), checkpoint.params_path)

    def _check_tensor(self, stored: MappedTensor, wanted: Tensor | None, params: Path) -> None:
        where = f"{stored.file}: {stored.name}"
        if wanted is None:
            tied = stored.name == name_in(self.layout, "output.weight")
            raise ValueError(
                f"{where} has no place in the model that {params} describes: "
                + ("say there that the output is not tied" if tied else "they do not fit together")
            )
        if not stored.data.is_floating_point() or stored.data.itemsize < 2:
            raise ValueError(
                f"{where} has type {stored.data.dtype}: it looks quantized, and this runtime loads "
                "float32, bfloat16 and float16 weights"
            )
        if stored.data.shape != wanted.shape:
            raise ValueError(
                f"{where} has shape {tuple(stored.data.shape)}, where {params} and "
                f"{len(self.shards)} shard(s) give {tuple(wanted.shape)}: they do not belong "
                "together, or shards are missing"
            )

    def are_equal(self, one: str, other: str) -> bool:
        """Are two tensors the same numbers in every shard? Other layouts then hold them once."""
        return all(torch.equal(shard[one].data, shard[other].data) for shard in self.shards)

    def dtype(self, name: str) -> torch.dtype:
        return self.shards[0][name].data.dtype

    def shard_range(self, name: str, part: int, parts: int) -> tuple[int, int]:
        """Which rows (or columns) of the whole tensor, from and to, part number `part` holds.

        With more parts than kv heads, each head is held by several: for 2 heads and 4 parts, heads
        0, 0, 1, 1.
        """
        dim = sharded_dim(name)
        assert dim is not None
        kv_heads, head_dim = self.params.kv_heads, self.params.head_dim
        if parts > kv_heads and name.endswith(_KV):
            head = part * kv_heads // parts
            return head * head_dim, (head + 1) * head_dim
        each = self.shapes[name][dim] // parts
        return part * each, (part + 1) * each

    def copy(self, name: str, into: Tensor, part: int, parts: int) -> None:
        """Fill `into`, of any float type and device, with part number `part` of a tensor."""
        dim = sharded_dim(name)
        if dim is None:
            stored = self.shards[0][name]
            stored.copy(stored.data, into)
            return
        start, end = self.shard_range(name, part, parts)
        here = start
        for i, shard in enumerate(self.shards):
            low, high = self.shard_range(name, i, len(self.shards))
            if low <= here < min(high, end):  # the first shard that has it; copies are passed over
                count = min(high, end) - here
                piece = shard[name].data.narrow(dim, here - low, count)
                target = into.narrow(dim, here - start, count)
                if self.layout == "hf" and name.endswith(ROTATED):
                    hf.copy_pairs(target, piece, self.params.head_dim)
                else:
                    shard[name].copy(piece, target)
                here += count
        assert here == end, (name, part, parts)


def load(
    checkpoint: Checkpoint,
    model: Transformer,
    *,
    filled: Callable[[nn.Module], None] = lambda part: None,
    progress: bool = False,
) -> None:
    """Fill a model with its rank's share of the weights, in the model's type and on its device.

    The checkpoint may have any number of shards, and the model's group any size that divides it.
    Every file is checked before anything is copied: ValueError names what is wrong. Host memory
    beside the model: at most one tensor. `filled` is called with each part of the model once it is
    whole; `progress` draws a bar on stderr.
    """
    weights, rank, size = Weights(checkpoint), model.parallel.rank, model.parallel.size
    total = sum(weight.nbytes for weight in model.parameters())
    with tqdm(total=total, desc="Loading", unit="B", unit_scale=True, disable=not progress) as bar:
        for part, slots in model.loading_order():
            for name, slot in slots.items():
                weights.copy(name, slot, rank, size)
                bar.update(slot.nbytes)
            filled(part)


def is_tied(checkpoint: Checkpoint) -> bool:
    """Whether output and embedding are one matrix: by config.json, or by how Meta's file is stored.

    In the .pth of 3.2 1B and 3B both names stand for the same bytes, which params.json leaves out.
    """
    if checkpoint.params.tied_output or checkpoint.layout == "hf":
        return checkpoint.params.tied_output
    return all(_is_tied(open_tensors(file)) for file in checkpoint.shards)


def _is_tied(shard: dict[str, Tensor]) -> bool:
    """Whether the two names of a shard stand for the same bytes in the same shape."""
    if not shard.keys() >= {"output.weight", "tok_embeddings.weight"}:
        return False
    a, b = shard["output.weight"], shard["tok_embeddings.weight"]
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride()


def _merge(files: list[dict[str, MappedTensor]]) -> dict[str, MappedTensor]:
    whole: dict[str, MappedTensor] = {}
    for file in files:
        for name, stored in file.items():
            other = whole.setdefault(name, stored)
            if other is not stored:
                raise ValueError(
                    f"{stored.file} and {other.file.name} both hold {stored.name}: move away what "
                    "does not belong to the model"
                )
    return whole


def _check_count(checkpoint: Checkpoint, shards: list[dict[str, MappedTensor]]) -> None:
    """Tell from the embedding's shape how many shards there once were, and who cut them."""
    first = shards[0].get("tok_embeddings.weight")
    vocab, dim = checkpoint.params.vocab_size, checkpoint.params.dim
    if checkpoint.layout != "meta" or first is None or first.data.dim() != 2:
        return
    rows, columns = first.data.shape
    if rows == vocab and columns < dim:
        raise ValueError(
            f"{first.file}: tok_embeddings.weight has shape {(rows, columns)}: it is cut along "
            "dim 1, as Llama 2's shards are; this runtime loads Llama 3 and later"
        )
    if columns == dim and 0 < rows < vocab and vocab % rows == 0 and vocab // rows != len(shards):
        raise ValueError(
            f"{first.file} is one of {vocab // rows} shards (by the shape of "
            f"tok_embeddings.weight), but {len(shards)} are in {checkpoint.folder}: download the "
            "rest, or move away what does not belong to the model"
        )
