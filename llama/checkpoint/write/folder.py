"""A new folder in Meta's or Hugging Face's layout, written file by file.

In: a reader, and the names of the tensors of each file. Out: the folder. Each file of weights is
first put together in scratch files on the same disk, so that memory holds one tensor at most. What
a conversion is, and which files it has, is not known here.
"""

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from llama.checkpoint.file_tensors import appended_to, as_stored, is_appended, title_of
from llama.checkpoint.find import Checkpoint
from llama.checkpoint.reader import CheckpointReader
from llama.checkpoint.table import shard_shapes
from llama.checkpoint.write import atomic as writing
from llama.checkpoint.write.quantize import GROUP, quantized_tensors
from llama.checkpoint.write.settings_files import FileContent
from llama.common.checks import FieldError
from llama.ranks.placement import Placement
from llama.vision.tensors import CROSS
from llama.weights.choice import QUANTIZED


@dataclass
class OutputFolder:
    """The files of a folder that is to be written.

    Attributes:
        layout: "meta" or "hf".
        weights: The files of weights, and Meta's names of the tensors of each. In Meta's layout
            file i has the shares of rank i of as many ranks as there are files.
        others: The other files: each a path to copy, a text, or the content of a JSON file.
    """

    layout: str
    weights: dict[str, list[str]]
    others: dict[str, FileContent] = field(default_factory=dict)

    @property
    def num_ranks(self) -> int:
        """How many ranks the files divide the tensors among."""
        return len(self.weights) if self.layout == "meta" else 1


class ConversionReader(CheckpointReader):
    """The tensors of a checkpoint as they are written.

    Attributes:
        quantize: The format in which the matrices of the layers are written; None for no change.
        activations: How the new files ask for activations to be rounded; None: not at all.
    """

    def __init__(
        self, checkpoint: Checkpoint, quantize: str | None = None, activations: str | None = None
    ) -> None:
        super().__init__(checkpoint)
        self.quantize = quantize
        self.activations = activations
        params = self.params
        lengths = sorted({params.dim, params.n_heads * params.head_dim, params.ffn_dim})
        if quantize and any(length % GROUP for length in lengths):
            raise FieldError.of(
                "quantize",
                f"={quantize!r} needs rows whose length is a multiple of {GROUP}, and this "
                f"model has rows of {' and '.join(map(str, lengths))}",
            )

    def dtype(self, name: str) -> torch.dtype:
        """Return the type that a tensor has before its matrix is quantized."""
        return torch.bfloat16 if self.quantize else super().dtype(name)

    def quantize_for(self, name: str) -> str | None:
        """Return the format in which a tensor is written, None for a plain one."""
        is_matrix = name.startswith(("layers.", CROSS)) and len(self.shapes[name]) == 2
        return self.quantize if is_matrix else None

    def num_bytes(self, layout: str, num_ranks: int) -> dict[str, int]:
        """Return the bytes of one rank's share of each tensor; estimates of quantized ones.

        Args:
            layout: The layout in which they are written.
            num_ranks: The ranks that divide them.
        """
        sizes = {}
        for name, shape in shard_shapes(self.params, num_ranks).items():
            quantize = self.quantize_for(name)
            if quantize is None:
                plain = torch.empty(shape, dtype=self.dtype(name), device="meta")
                placement = Placement(size=num_ranks)
                sizes[name] = as_stored(layout, name, plain, self.params, placement).nbytes
            else:
                _, bits = QUANTIZED[quantize].in_files
                sizes[name] = shape.numel() * bits // 7  # an eighth of the bytes is for scales
        return sizes


def write_folder(
    reader: ConversionReader, output: OutputFolder, out_dir: str | os.PathLike[str], progress: bool
) -> list[str]:
    """Write a folder.

    Args:
        reader: Reads the tensors.
        output: The files to write.
        out_dir: The folder, which must not exist or be empty.
        progress: Whether a bar is drawn on stderr.

    Returns:
        A line for each file and one for all.
    """
    with writing.new_folder(out_dir) as folder:
        _WeightsWriter(reader, output, folder, progress).write()
        write_other_files(output.others, folder)
    return writing.describe(out_dir)


def write_other_files(others: dict[str, FileContent], folder: Path) -> None:
    """Copy or write the files of a folder that are not weights."""
    for title, content in others.items():
        if isinstance(content, Path):
            writing.copy_file(content, folder / title)
        elif isinstance(content, str):
            writing.write_text(folder / title, content)
        else:
            writing.write_json(folder / title, content)


def progress_bar(total: int, progress: bool) -> "tqdm[Any]":
    """Return a bar of bytes on stderr, which is drawn if `progress`."""
    return tqdm(total=total, desc="Writing", unit="B", unit_scale=True, disable=not progress)


class _WeightsWriter:
    """Writes the files of weights, and the index of several of Hugging Face's."""

    def __init__(
        self, reader: ConversionReader, output: OutputFolder, folder: Path, progress: bool
    ) -> None:
        self.reader = reader
        self.output = output
        self.folder = folder
        self.shapes = shard_shapes(reader.params, output.num_ranks)
        sizes = reader.num_bytes(output.layout, output.num_ranks)
        file_sizes = [sum(sizes[name] for name in names) for names in output.weights.values()]
        self.total = sum(file_sizes)
        # All files, and the scratch files of the largest, are there at the same time.
        writing.check_free_space(folder, self.total + max(file_sizes))
        self.bar = progress_bar(self.total, progress)

    def write(self) -> None:
        """Write all files."""
        count = len(self.output.weights)
        total_size = 0
        file_of: dict[str, str] = {}
        with self.bar:
            for i, (title, names) in enumerate(self.output.weights.items()):
                self.bar.set_postfix_str(f"file {i + 1} of {count}")
                sizes = self._write_file(title, names, i % self.output.num_ranks)
                total_size += sum(sizes.values())
                file_of |= dict.fromkeys(sizes, title)
        if self.output.layout == "hf" and count > 1:
            index = {"metadata": {"total_size": total_size}, "weight_map": file_of}
            writing.write_json(self.folder / "model.safetensors.index.json", index)

    def _write_file(self, title: str, names: list[str], rank: int) -> dict[str, int]:
        """Write one file and return the bytes of its tensors by name.

        The scratch files are gone when this returns, before the next file begins.
        """
        tensors = self._gather(names, rank)
        writing.save(self.folder / title, tensors, self._report)
        return {name: tensor.nbytes for name, tensor in tensors.items()}

    def _gather(self, names: list[str], rank: int) -> dict[str, Tensor]:
        """Return the tensors of a file by their names in it, all in scratch files."""
        tensors: dict[str, Tensor] = {}
        for name in names:
            if is_appended(self.output.layout, name):
                continue
            parts = self._parts(name, rank)
            self._report(sum(part.nbytes for part in parts.values()))
            tensors |= parts
        if self.output.layout == "meta":
            # A tied lm_head is a second name for the embedding, whose bytes are stored once.
            lm_head, embedding = (
                title_of("meta", f"{name}.weight", self.reader.params)
                for name in ("output", "tok_embeddings")
            )
            tensors.setdefault(lm_head, tensors[embedding])
        return tensors

    def _parts(self, name: str, rank: int) -> dict[str, Tensor]:
        """Return one tensor, or the tensors that store it quantized, in scratch files."""
        layout = self.output.layout
        params = self.reader.params
        placement = Placement(rank=rank, size=self.output.num_ranks)
        joined = [name]
        appended = appended_to(layout, name, params)
        if appended is not None:
            joined.append(appended)
        num_rows = [self.shapes[each][0] for each in joined]
        shape = torch.Size((sum(num_rows), *self.shapes[name][1:]))
        plain = writing.scratch(self.folder, shape, self.reader.dtype(name))
        for each, rows in zip(joined, plain.split(num_rows), strict=True):
            self.reader.copy(each, rows, placement, layout)
        title = title_of(layout, name, params)
        quantize = self.reader.quantize_for(name)
        if quantize is None:
            stored = as_stored(layout, name, plain, params, placement)
            if stored is plain:
                return {title: plain}
            parts = {title: stored}
        else:
            parts = quantized_tensors(title, plain, quantize, self.reader.activations)
        for part_title, part in parts.items():
            stored = writing.scratch(self.folder, part.shape, part.dtype)
            parts[part_title] = stored.copy_(part)
        return parts

    def _report(self, count: int) -> None:
        """Advance the bar: a tensor counts half when it is in scratch, and half when it is written.

        A .pth has some bytes more than its tensors: beyond the total, tqdm would draw no bar.
        """
        self.bar.update(min(count / 2, self.total - self.bar.n))
