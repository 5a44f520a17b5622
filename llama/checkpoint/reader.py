"""The tensors of a checkpoint: one rank's part of each, by Meta's names.

In: a `Checkpoint`, a `Placement`, and tensors to fill. Out: filled tensors, into which the adapters
of the checkpoint are merged by merged.py, or the codes of quantized ones. A rank reads the bytes
that it needs and no others, and nothing in a file is run.

Shapes: N outputs (rows), K inputs (columns).
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from llama.checkpoint.files import FileReader, MappedTensor
from llama.checkpoint.find import Checkpoint
from llama.checkpoint.hf import config as hf
from llama.checkpoint.lora.ends import TIED
from llama.checkpoint.lora.merged import copy_merged
from llama.checkpoint.lora.merging import Update
from llama.checkpoint.shards import Shard, check_alike, open_shards
from llama.checkpoint.stacked import Part, StackedParts
from llama.checkpoint.table import as_slice, is_rotated, name_in, share, whole_shapes
from llama.common.checks import errors_in
from llama.ops.formats import N_BLOCK
from llama.ranks.placement import WHOLE, Placement
from llama.weights.coded import Coded, CodedRows, joined
from llama.weights.plain import all_finite

_CPU = torch.device("cpu")
_CHUNK_ELEMENTS = 1 << 22  # elements that are unpacked at a time

Fill = Callable[[Tensor, Tensor], object]  # fills a tensor with the rows of another


class _Piece(NamedTuple):
    """The part of a range of rows or columns that one shard holds.

    Attributes:
        tensor: The shard's tensor.
        begin: The first row or column within that tensor.
        end: The one after the last.
        position: Where the piece begins within the range.
    """

    tensor: MappedTensor
    begin: int
    end: int
    position: int


class CheckpointReader:
    """All tensors of a checkpoint under Meta's names.

    Every name and shape is checked when the reader is created.

    Attributes:
        params: The model's sizes.
        layout: The layout of the files.
        shapes: The shapes of the whole tensors.
        shards: The tensors of each shard. Layouts other than Meta's have one.
        updates: What adapters do to tensors, in their order.
    """

    def __init__(
        self, checkpoint: Checkpoint, device: torch.device = _CPU, *, compares: bool = True
    ) -> None:
        """Open the files.

        Args:
            checkpoint: The checkpoint.
            device: Where the tensors lie that are filled.
            compares: Whether shards are compared with each other; else `check_alike` is called
                once the checksums of the files have been.

        Raises:
            OSError: A file cannot be read.
            ValueError: The weights are packed, a tensor is missing or wrong, or the shards are not
                of one model.
        """
        if checkpoint.packed is not None:
            raise ValueError(
                f"{checkpoint.folder} holds packed weights, which can only be run: give the folder "
                "that they were made from"
            )
        self.params = checkpoint.params
        self._params_of_files = checkpoint.params_of_files
        self.layout = checkpoint.layout
        self.shapes = whole_shapes(self.params)
        self.shards = [self._by_metas_names(shard) for shard in open_shards(checkpoint)]
        if compares:
            self.check_alike()
        self.updates: dict[str, list[Update]] = {}
        for adapter in checkpoint.adapters:
            for name, update in adapter.updates.items():
                self.updates.setdefault(name, []).append(update)
        # Shards of Meta's layout hold what equal ranks would hold.
        count = len(self.shards)
        self._placements = [Placement(rank=i, size=count) for i in range(count)]
        self._file_reader = FileReader(device)
        self._first_rows: dict[object, Coded | None] = {}

    def check_alike(self) -> None:
        """Raise ValueError if the shards of Meta's layout are not of one model."""
        check_alike(self.shards)

    def _by_metas_names(self, shard: Shard) -> Shard:
        """Return the tensors by Meta's names; an lm_head that adapters untie is the embedding."""
        tensors = {}
        is_untied = self._params_of_files.tied_output
        for name in self.shapes:
            source = TIED[0] if is_untied and name == TIED[1] else name
            tensors[name] = shard[name_in(self.layout, source)]
        return tensors

    def are_equal(self, one: str, other: str) -> bool:
        """Return whether two tensors have the same elements; other layouts then store one.

        A tensor that an adapter changes counts as another.
        """
        if one in self.updates or other in self.updates:
            return False
        for shard in self.shards:
            if not torch.equal(shard[one].data, shard[other].data):
                return False
        first = self.coded([one])
        second = self.coded([other])
        if first is None or second is None:
            return True
        return torch.equal(first.read().scale, second.read().scale)

    def dtype(self, name: str) -> torch.dtype:
        """Return the type of a tensor, which is bf16 for a quantized one that becomes plain."""
        tensor = self.shards[0][name]
        return torch.bfloat16 if tensor.quantized else tensor.data.dtype

    def copy(
        self, name: str, into: Tensor, placement: Placement = WHOLE, layout: str = "meta"
    ) -> None:
        """Fill a tensor of any float type with what a rank holds, adapters merged.

        On a GPU that is done in the order of the current stream.

        Args:
            name: Meta's name of the tensor.
            into: The tensor that is filled.
            placement: The rank.
            layout: The layout whose order the rows get, "meta" or "hf".
        """
        if name in self.updates:
            copy_merged(self, name, self.updates[name], into, placement, layout)
            return
        fill = self._fill(name, layout)
        dim, wanted = share(self.params, name, placement)
        part = self._part(name, placement)
        if part is None:
            for piece in self._pieces(name, wanted):
                size = piece.end - piece.begin
                source = piece.tensor.data.narrow(dim, piece.begin, size)
                target = into.narrow(dim, piece.position, size)
                self._copy_piece(piece.tensor, source, target, fill)
            return
        row = 0
        for coded in self._read_chunks(part, fill, into.device):
            plain = coded.plain(into.dtype)
            if coded.is_rotated:  # all columns were read
                plain = plain[:, as_slice(wanted)]
            into[row : row + len(plain)] = plain
            row += len(plain)

    def num_rows_in_files(self, name: str) -> int:
        """Return the rows of a matrix in the files, which may be fewer than adapters make it."""
        return self._params_of_files.vocab_size if name in TIED else self.shapes[name][0]

    def read_base(self, name: str, rows: range, columns: range, layout: str, into: Tensor) -> None:
        """Fill a tensor of a wide float type with rows and columns of a matrix of the files.

        Args:
            name: Meta's name of the matrix.
            rows: Some whole heads of rows, no more than are unpacked at a time.
            columns: The columns; all, where rows are divided among ranks.
            layout: The layout whose order the rows get.
            into: The tensor.
        """
        fill = self._fill(name, layout)
        dim, _ = share(self.params, name, WHOLE)
        matrix = self.shards[0][name].quantized
        if matrix is not None:
            stored = range(self.shapes[name][1]) if matrix.is_rotated else columns
            coded = self._read(Part(name, matrix, rows, stored), into.device)
            plain = (coded if fill is Tensor.copy_ else coded.in_order(fill)).plain(torch.float32)
            into.copy_(plain[:, as_slice(columns)] if matrix.is_rotated else plain)
            return
        for piece in self._pieces(name, columns if dim else rows):
            size = piece.end - piece.begin
            source = piece.tensor.data.narrow(dim, piece.begin, size)
            if dim:
                source = source[as_slice(rows)]
            self._copy_piece(piece.tensor, source, into.narrow(dim, piece.position, size), fill)

    def coded(self, names: Sequence[str], placement: Placement = WHOLE) -> CodedRows | None:
        """Return what a rank holds of tensors that are stacked to one matrix, in their codes.

        The rows are read, to the CPU, when they are asked for.

        Args:
            names: Meta's names of the tensors, in order.
            placement: The rank.

        Returns:
            The rows; None where the tensors are not all quantized, or not so that their codes can
            be joined.
        """
        parts = []
        for name in names:
            part = self._part(name, placement)
            if part is None or (part.matrix.is_rotated and placement.size > 1):
                return None
            parts.append(part)
        stacked = StackedParts(parts, self.params.head_dim, self.read_rows)
        key = (placement, *stacked.layout_key())
        if key not in self._first_rows:
            self._first_rows[key] = stacked.read_first()
        first = self._first_rows[key]
        if first is None:
            return None
        return CodedRows(stacked.num_rows, first, stacked.read, stacked.pack)

    def read_rows(self, part: Part, max_rows: int | None = None) -> list[Coded]:
        """Read a part, or its first rows, to the CPU in the order of Meta's layout."""
        fill = self._fill(part.name, "meta")
        first_rows = part._replace(rows=part.rows[:max_rows])
        return list(self._read_chunks(first_rows, fill, _CPU))

    def _fill(self, name: str, layout: str) -> Fill:
        """Return the function that copies rows of the files into the order of a layout."""
        if (layout == "hf") == (self.layout == "hf") or not is_rotated(name):
            return Tensor.copy_
        return functools.partial(hf.copy_rows, head_dim=self.params.head_dim, to=layout)

    def _pieces(self, name: str, wanted: range) -> Iterator[_Piece]:
        """Yield the pieces of a range along the dimension that the shards divide, in order.

        Where several shards hold the same rows, those of the first are taken.
        """
        position = wanted.start
        for shard, placement in zip(self.shards, self._placements, strict=True):
            _, stored = share(self._params_of_files, name, placement)
            end = min(stored.stop, wanted.stop)
            if not stored.start <= position < end:
                continue
            yield _Piece(
                tensor=shard[name],
                begin=position - stored.start,
                end=end - stored.start,
                position=position - wanted.start,
            )
            position = end
        assert position == wanted.stop, (name, wanted)

    def _copy_piece(self, tensor: MappedTensor, piece: Tensor, into: Tensor, fill: Fill) -> None:
        """Fill `into` with a piece of a tensor.

        Threads do it, except where the CPU changes the bytes on the way.
        """
        reader = self._file_reader
        is_same = fill is Tensor.copy_ and piece.dtype is into.dtype
        if piece.stride(-1) != 1 or not (is_same or reader.is_staged):
            fill(into, piece)
            return
        if is_same and (into.is_contiguous() or not reader.is_staged):
            raw = into
        else:
            raw = torch.empty_like(piece, device=into.device)
        if tensor.offset is not None and piece.is_contiguous() and raw.is_contiguous():
            begin = tensor.offset + piece.data_ptr() - tensor.data.data_ptr()
            reader.read(raw, tensor.file, begin)
        else:
            reader.copy(raw, piece)
        if raw is not into:
            fill(into, raw)

    def _part(self, name: str, placement: Placement) -> Part | None:
        """Return the part of a tensor that a rank reads, or None if it is not quantized."""
        matrix = self.shards[0][name].quantized
        if matrix is None:
            return None
        n, k = self.shapes[name]
        dim, wanted = share(self.params, name, placement)
        if dim == 0:
            return Part(name, matrix, wanted, range(k))
        # The rotation mixes all columns, so that all are read.
        columns = range(k) if matrix.is_rotated else wanted
        return Part(name, matrix, range(n), columns)

    def _read_chunks(self, part: Part, fill: Fill, device: torch.device) -> Iterator[Coded]:
        """Read a part, some whole heads at a time.

        Args:
            part: The part.
            fill: Copies rows into the order that they get.
            device: Where the chunks lie.
        """
        for rows in self.row_chunks(part.name, part.rows):
            coded = self._read(part._replace(rows=rows), device)
            yield coded if fill is Tensor.copy_ else coded.in_order(fill)

    def row_chunks(self, name: str, rows: range) -> Iterator[range]:
        """Yield rows of a matrix, some whole heads at a time."""
        granularity = math.lcm(N_BLOCK, self.params.head_dim)
        max_rows = _CHUNK_ELEMENTS // self.shapes[name][1]
        step = max(max_rows // granularity, 1) * granularity
        for start in range(0, len(rows), step):
            yield rows[start : start + step]

    def _read(self, part: Part, device: torch.device) -> Coded:
        """Read a part from all shards that hold some of it."""
        name = part.name
        dim, _ = share(self.params, name, WHOLE)
        rows = as_slice(part.rows)
        columns = as_slice(part.columns)
        pieces: list[Coded] = []
        for piece in self._pieces(name, part.columns if dim else part.rows):
            file = piece.tensor.file
            matrix = piece.tensor.quantized
            if matrix is None:
                raise ValueError(
                    f"{file} holds {name} plain, but the first shard holds it quantized: the two "
                    "are of two models"
                )
            within = slice(piece.begin, piece.end)
            if dim:
                columns = within
            else:
                rows = within
            with errors_in(f"{file}: {name}"):
                coded = matrix.read(rows, columns, device)
            if not coded.is_finite():
                raise ValueError(
                    f"{file} has a number or a scale of {name} that is not finite: `llama verify` "
                    "says whether it is damaged"
                )
            pieces.append(coded)
        whole = pieces[0] if len(pieces) == 1 else joined(pieces, dim)
        assert whole is not None, name  # all shards have one format
        return whole


def find_not_finite(checkpoint: Checkpoint, names: Iterable[str]) -> dict[Path, list[str]]:
    """Return which plain tensors of which files hold NaN or infinity, by their names in the files.

    The tensors are read whole.

    Args:
        checkpoint: The checkpoint.
        names: Meta's names of the tensors that are examined.
    """
    damaged: dict[Path, list[str]] = {}
    shards = CheckpointReader(checkpoint).shards
    for name, shard in itertools.product(names, shards):
        tensor = shard.get(name)  # a tied lm_head is no tensor of its own
        if tensor is not None and tensor.quantized is None and not all_finite(tensor.data):
            damaged.setdefault(tensor.file, []).append(name_in(checkpoint.layout, name))
    return damaged
