"""The tensors of a checkpoint, checked, and copied into one rank's part of a model.

In: a `Checkpoint`, and a Transformer to fill. Out: filled tensors. Files are mapped: a rank reads
the bytes that it copies and no others, and nothing in a file is run.
"""

import contextlib
import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Size, Tensor, nn
from tqdm import tqdm

from llama import weights as formats
from llama.checkpoint import huggingface as hf
from llama.checkpoint.files import offsets, open_tensors, read_into
from llama.checkpoint.find import Checkpoint, is_tied
from llama.checkpoint.staging import Staging
from llama.checkpoint.table import (
    ROTATED,
    name_in,
    shard_range,
    shard_shapes,
    sharded_dim,
    whole_shapes,
)
from llama.checks import brief
from llama.model.transformer import Transformer

Fill = Callable[[Tensor, Tensor], object]  # of a tensor with another
_HARMLESS = ("rope.freqs", "rotary_emb.inv_freq")  # computed, not learned: some files carry them


def bytes_of(
    checkpoint: Checkpoint, size: int, dtype: torch.dtype, quantize: str | None = None
) -> int:
    """Bytes of the weights that one of `size` ranks holds; reads no file.

    An untied embedding is not quantized, and neither are norms.
    """
    shapes = shard_shapes(checkpoint.params, size)
    untied = () if checkpoint.params.tied_output else ("tok_embeddings.weight",)
    return sum(
        formats.bytes_of(shape, dtype, None if name in untied else quantize)
        for name, shape in shapes.items()
    )


class MappedTensor(NamedTuple):
    """A tensor in a file: `data` is mapped, and read when it is copied."""

    file: Path
    name: str  # in the file
    data: Tensor
    offset: int | None  # in the file, if that is known

    def copy(
        self, piece: Tensor, into: Tensor, fill: Fill = Tensor.copy_, staging: Staging | None = None
    ) -> None:
        """Fill `into` with a piece of `data`: read where it is the same bytes, else by `fill`.

        With staging, a piece that is in one part of the file is read to the device, and what is to
        be changed in it is changed there; it is done when the staging ends.
        """
        is_same = fill is Tensor.copy_ and piece.dtype is into.dtype and into.is_contiguous()
        if self.offset is None or not piece.is_contiguous():
            fill(into, piece)
            return
        offset = self.offset + piece.data_ptr() - self.data.data_ptr()
        if staging is not None:
            if is_same:
                staging.read(into, self.file, offset)
            else:
                use = functools.partial(fill, into)
                staging.convert(piece.shape, piece.dtype, self.file, offset, use)
        elif is_same and into.device.type == "cpu":
            read_into(into, self.file, offset)
        else:
            fill(into, piece)


def _map_file(file: Path, *, tied: bool) -> list[MappedTensor]:
    tensors = open_tensors(file)
    if tied and is_tied(tensors):
        del tensors["output.weight"]
    return [
        MappedTensor(file, name, data, offset)
        for (name, data), offset in zip(
            tensors.items(), offsets(file, tensors.values()), strict=True
        )
    ]


class CheckpointReader:
    """All tensors of a checkpoint under Meta's names, every name and shape checked on opening.

    ValueError names file, tensor, and what was expected and found.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.params = checkpoint.params
        self.layout = checkpoint.layout
        self.shapes = whole_shapes(self.params)
        meta_names = {name_in(self.layout, name): name for name in self.shapes}
        self.shards: list[dict[str, MappedTensor]] = []
        for file in checkpoint.shards:
            mapped = _map_file(file, tied=self.params.tied_output)
            # "?" marks a name that this layout does not have; `_check` reports it.
            self.shards.append({meta_names.get(t.name, f"?{t.name}"): t for t in mapped})
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
        sources = checkpoint.shards if self.layout == "meta" else [checkpoint.folder]
        for source, shard in zip(sources, self.shards, strict=True):
            missing = [name_in(self.layout, n) for n in shapes if n not in shard]
            if missing:
                more = f" and {len(missing) - 1} more" if missing[1:] else ""
                raise ValueError(
                    f"{source}: {missing[0]}{more} missing, which {checkpoint.params_path} asks "
                    "for: they do not belong together, or a file is incomplete: download it again"
                )
            for name, tensor in shard.items():
                if not name.endswith(_HARMLESS):
                    self._check_tensor(tensor, shapes.get(name), checkpoint.params_path)

    def _check_tensor(self, tensor: MappedTensor, wanted: Size | None, params: Path) -> None:
        if wanted is None:
            tied = tensor.name == name_in(self.layout, "output.weight")
            raise ValueError(
                f"{tensor.file}: {brief(tensor.name)} has no place in the model that {params} "
                "describes: "
                + ("say there that the output is not tied" if tied else "they do not fit together")
            )
        if not tensor.data.is_floating_point() or tensor.data.itemsize < 2:
            raise ValueError(
                f"{tensor.file}: {tensor.name} has type {tensor.data.dtype}: it looks quantized, "
                "and this runtime loads float32, bfloat16 and float16 weights"
            )
        if tensor.data.shape != wanted:
            raise ValueError(
                f"{tensor.file}: {tensor.name} has shape {brief(tuple(tensor.data.shape))}, but "
                f"{params} and {len(self.shards)} shard(s) give {tuple(wanted)}: they do not "
                "belong together, or shards are missing"
            )

    def are_equal(self, one: str, other: str) -> bool:
        """Are two tensors the same numbers in every shard? Other layouts then hold them once."""
        return all(torch.equal(shard[one].data, shard[other].data) for shard in self.shards)

    def dtype(self, name: str) -> torch.dtype:
        return self.shards[0][name].data.dtype

    def copy(
        self, name: str, into: Tensor, rank: int, size: int, staging: Staging | None = None
    ) -> None:
        """Fill `into`, of any float type and device, with what one of `size` ranks holds.

        For example, rank 1 of 2 takes rows 64 to 127 of 128. Of four shards with 32 rows each,
        these are shards 2 and 3.
        """
        dim = sharded_dim(name)
        if dim is None:
            tensor = self.shards[0][name]
            tensor.copy(tensor.data, into, staging=staging)
            return
        fill: Fill = Tensor.copy_
        if self.layout == "hf" and name.endswith(ROTATED):
            fill = functools.partial(hf.copy_pairs, head_dim=self.params.head_dim)
        length = self.shapes[name][dim]
        start, end = shard_range(self.params, name, length, rank, size)
        here = start
        for i, shard in enumerate(self.shards):
            low, high = shard_range(self.params, name, length, i, len(self.shards))
            if low <= here < min(high, end):  # the first shard that has it; replicas are skipped
                count = min(high, end) - here
                piece = shard[name].data.narrow(dim, here - low, count)
                target = into.narrow(dim, here - start, count)
                shard[name].copy(piece, target, fill, staging)
                here += count
        assert here == end, (name, rank, size)


def load(
    checkpoint: Checkpoint,
    model: Transformer,
    *,
    filled: Callable[[nn.Module], None] = lambda module: None,
    progress: bool = False,
) -> None:
    """Fill a model with its rank's shard of the weights, in the model's type and on its device.

    The checkpoint may have any number of shards, and the model's group any size that divides it.
    Every file is checked before anything is copied: ValueError names what is wrong. Host memory
    beside the model: at most one tensor. `filled` is called with each module of
    `model.loading_order` once it is whole, on a GPU once its bytes are on their way; `progress`
    draws a bar on stderr.

    The values are not compared with a checksum here; `llama.checkpoint.verify` does that. Of 500 MB
    in the page cache, reading takes 0.5 s of CPU time and their CRC-32 another 0.4 s.
    """
    reader, rank, size = CheckpointReader(checkpoint), model.parallel.rank, model.parallel.size
    total = sum(weight.nbytes for weight in model.parameters())
    device = model.norm.weight.device
    staged = Staging(device) if device.type == "cuda" else contextlib.nullcontext()
    bar = tqdm(total=total, desc="Loading", unit="B", unit_scale=True, disable=not progress)
    with bar, staged as staging:
        for module, shards in model.loading_order():
            for name, shard in shards.items():
                reader.copy(name, shard, rank, size, staging)
                bar.update(shard.nbytes)
            filled(module)


def _merge(files: list[dict[str, MappedTensor]]) -> dict[str, MappedTensor]:
    whole: dict[str, MappedTensor] = {}
    for file in files:
        for name, tensor in file.items():
            other = whole.setdefault(name, tensor)
            if other is not tensor:
                raise ValueError(
                    f"{tensor.file} and {other.file.name} both hold {brief(tensor.name)}: move "
                    "away what does not belong to the model"
                )
    return whole


def _check_count(checkpoint: Checkpoint, shards: list[dict[str, MappedTensor]]) -> None:
    """ValueError where the embedding's shape shows that shards are missing, or Llama 2's."""
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
