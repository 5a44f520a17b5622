"""The tensors of a checkpoint, copied into one rank's part of a model.

In: a `Checkpoint`, a `Placement`, and tensors or a Transformer to fill. Out: filled tensors, into
which the adapters of the checkpoint are merged by merged.py. A rank reads the bytes that it needs
and no others, and nothing in a file is run. The file has over 400 lines because plain, quantized
and stacked tensors share the rule of which shard holds what.

Shapes: N outputs (rows), K inputs (columns).
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from llama.checkpoint import huggingface as hf
from llama.checkpoint.adapters import TIED
from llama.checkpoint.files import FileReader, MappedTensor
from llama.checkpoint.find import Checkpoint
from llama.checkpoint.merged import copy_merged
from llama.checkpoint.merging import Update
from llama.checkpoint.quantized_matrix import PackTarget, QuantizedMatrix
from llama.checkpoint.shards import Shard, open_shards
from llama.checkpoint.table import ROTATED, as_slice, name_in, share, whole_shapes
from llama.checks import errors_in
from llama.model.layers import Matrix
from llama.model.transformer import Transformer
from llama.ops.cpu.constants import N_BLOCK, num_blocks
from llama.ranks.placement import WHOLE, Placement
from llama.storage.downloads import broken
from llama.weights.coded import Coded, CodedRows, joined
from llama.weights.plain import all_finite

_CPU = torch.device("cpu")
_CHUNK_ELEMENTS = 1 << 22  # elements that are unpacked at a time

Fill = Callable[[Tensor, Tensor], object]  # fills a tensor with the rows of another


def matrices_in(module: nn.Module, shards: dict[str, Tensor]) -> list[Matrix]:
    """Return the matrices in a part of a model that are filled with that part."""
    matrices = [part for part in module.modules() if isinstance(part, Matrix)]
    return [matrix for matrix in matrices if matrix.names[0] in shards]


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


class _Part(NamedTuple):
    """The part of a quantized tensor that a rank reads.

    Attributes:
        name: Meta's name of the tensor.
        matrix: The tensor in the first shard.
        rows: Rows of the whole tensor.
        columns: Columns of the whole tensor.
    """

    name: str
    matrix: QuantizedMatrix
    rows: range
    columns: range


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

    def __init__(self, checkpoint: Checkpoint, device: torch.device = _CPU) -> None:
        """Open the files.

        Args:
            checkpoint: The checkpoint.
            device: Where the tensors lie that are filled.

        Raises:
            OSError: A file cannot be read.
            ValueError: The weights are packed, or a tensor is missing or wrong.
        """
        if checkpoint.packed is not None:
            raise ValueError(
                f"{checkpoint.folder} holds packed weights, which can only be run: give the folder "
                "that they were made from"
            )
        self.params = checkpoint.params
        self.layout = checkpoint.layout
        self.shapes = whole_shapes(self.params)
        self.shards = [
            self._by_metas_names(shard, checkpoint.is_untied) for shard in open_shards(checkpoint)
        ]
        self.updates: dict[str, list[Update]] = {}
        for adapter in checkpoint.adapters:
            for name, update in adapter.updates.items():
                self.updates.setdefault(name, []).append(update)
        # Shards of Meta's layout hold what equal ranks would hold.
        count = len(self.shards)
        self._placements = [Placement(rank=i, size=count) for i in range(count)]
        self._file_reader = FileReader(device)
        self._first_rows: dict[object, Coded | None] = {}

    def _by_metas_names(self, shard: Shard, is_untied: bool) -> Shard:
        """Return the tensors by Meta's names; an lm_head that adapters untie is the embedding."""
        tensors = {}
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
            coded = self._read(_Part(name, matrix, rows, stored), into.device)
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
        stacked = _StackedParts(self, parts)
        key = (placement, *stacked.layout_key())
        if key not in self._first_rows:
            self._first_rows[key] = stacked.read_first()
        first = self._first_rows[key]
        if first is None:
            return None
        return CodedRows(stacked.num_rows, first, stacked.read, stacked.pack)

    def read_rows(self, part: _Part, max_rows: int | None = None) -> list[Coded]:
        """Read a part, or its first rows, to the CPU in the order of Meta's layout."""
        fill = self._fill(part.name, "meta")
        first_rows = part._replace(rows=part.rows[:max_rows])
        return list(self._read_chunks(first_rows, fill, _CPU))

    def _fill(self, name: str, layout: str) -> Fill:
        """Return the function that copies rows of the files into the order of a layout."""
        if (layout == "hf") == (self.layout == "hf") or not name.endswith(ROTATED):
            return Tensor.copy_
        return functools.partial(hf.copy_rows, head_dim=self.params.head_dim, to=layout)

    def _pieces(self, name: str, wanted: range) -> Iterator[_Piece]:
        """Yield the pieces of a range along the dimension that the shards divide, in order.

        Where several shards hold the same rows, those of the first are taken.
        """
        position = wanted.start
        for shard, placement in zip(self.shards, self._placements, strict=True):
            _, stored = share(self.params, name, placement)
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

    def _part(self, name: str, placement: Placement) -> _Part | None:
        """Return the part of a tensor that a rank reads, or None if it is not quantized."""
        matrix = self.shards[0][name].quantized
        if matrix is None:
            return None
        n, k = self.shapes[name]
        dim, wanted = share(self.params, name, placement)
        if dim == 0:
            return _Part(name, matrix, wanted, range(k))
        # The rotation mixes all columns, so that all are read.
        columns = range(k) if matrix.is_rotated else wanted
        return _Part(name, matrix, range(n), columns)

    def _read_chunks(self, part: _Part, fill: Fill, device: torch.device) -> Iterator[Coded]:
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

    def _read(self, part: _Part, device: torch.device) -> Coded:
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
                raise broken(file, f"holds {name} plain, but the first shard holds it quantized")
            within = slice(piece.begin, piece.end)
            if dim:
                columns = within
            else:
                rows = within
            with errors_in(f"{file}: {name}"):
                coded = matrix.read(rows, columns, device)
            if not coded.is_finite():
                raise broken(file, f"has a number or a scale of {name} that is not finite")
            pieces.append(coded)
        whole = pieces[0] if len(pieces) == 1 else joined(pieces, dim)
        assert whole is not None, name  # all shards have one format
        return whole


class _StackedParts:
    """A rank's parts of several quantized tensors, stacked to one matrix of the model."""

    def __init__(self, reader: CheckpointReader, parts: list[_Part]) -> None:
        self.reader = reader
        self.parts = parts
        self.row_counts = [len(part.rows) for part in parts]

    @property
    def num_rows(self) -> int:
        """The rows of the stacked matrix."""
        return sum(self.row_counts)

    def layout_key(self) -> tuple[object, ...]:
        """Return a key that is equal where the first rows have the same table, groups and types."""
        keys: list[object] = [part.matrix.layout_key for part in self.parts]
        if None in keys:
            keys = [part.name for part in self.parts]
        return *self.row_counts, *keys

    def read(self) -> Coded:
        """Read all rows."""
        coded = self._read(None)
        assert coded is not None, self.parts  # the first rows could be joined
        return coded

    def read_first(self) -> Coded | None:
        """Read the first rows of each part, or all if they are few; None if they do not join."""
        if not self._has_whole_blocks():
            return self._read(None)
        return self._read(math.lcm(N_BLOCK, self.reader.params.head_dim))

    def _has_whole_blocks(self) -> bool:
        """Return whether each part begins with a block of the stacked matrix."""
        return not any(count % N_BLOCK for count in self.row_counts[:-1])

    def _read(self, max_rows: int | None) -> Coded | None:
        rows: list[Coded] = []
        for part in self.parts:
            rows += self.reader.read_rows(part, max_rows)
        return joined(rows)

    def pack(self, first: Coded, weight_kind: int, values: Tensor, scales: Tensor) -> bool:
        """Fill a packed weight from the files, as `CodedRows` has it."""
        if not self._has_whole_blocks():
            return False
        begin = 0
        for part, count in zip(self.parts, self.row_counts, strict=True):
            end = begin + num_blocks(count)
            target = PackTarget(first, weight_kind, values[begin:end], scales[begin:end])
            if not part.matrix.pack(part.rows, as_slice(part.columns), target):
                return False
            begin = end
        return True


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
        tensor = shard[name]
        if tensor.quantized is None and not all_finite(tensor.data):
            damaged.setdefault(tensor.file, []).append(name_in(checkpoint.layout, name))
    return damaged


def load(
    checkpoint: Checkpoint,
    model: Transformer,
    *,
    check: Callable[[list[MappedTensor]], None] | None = None,
    filled: Callable[[nn.Module, dict[str, CodedRows]], None] = lambda module, coded: None,
    progress: bool = False,
) -> None:
    """Fill a model with its rank's shard of the weights, in the model's type and on its device.

    Every file is checked before anything is copied. The host memory beside the model is that of two
    parts of it on a CPU, if `filled` makes them smaller, else none; and two buffers on a GPU.

    Args:
        checkpoint: The checkpoint.
        model: The model.
        check: Is called with the tensors of all files that are copied next, on every rank with the
            same, such as `LoadCheck.check`.
        filled: Is called with each module of `model.loading_order` once it is whole, on a GPU once
            its bytes are on their way; and with the matrices that keep their codes, by the first of
            their names, which are not filled.
        progress: Whether a bar is drawn on stderr.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is not what the model needs.
    """
    device = model.norm.weight.device
    placement = model.parallel.placement
    reader = CheckpointReader(checkpoint, device)
    bar = tqdm(
        total=sum(weight.nbytes for weight in model.parameters()),
        desc="Loading",
        unit="B",
        unit_scale=True,
        disable=not progress,
    )
    with bar, ThreadPoolExecutor(1, "llama-pack") as packer:
        packing: Future[object] = packer.submit(int)
        for module, shards in model.loading_order():
            if check is not None:
                check([shard[name] for shard in reader.shards for name in shards])
            remaining = dict(shards)
            coded: dict[str, CodedRows] = {}
            if checkpoint.in_codes:
                coded = _take_coded(reader, module, remaining, placement, bar)
            for name, shard in remaining.items():
                reader.copy(name, shard, placement)
                bar.update(shard.nbytes)
            packing.result()
            if device.type == "cpu":  # one part is packed while the next is read
                packing = packer.submit(filled, module, coded)
            else:
                filled(module, coded)
        packing.result()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _take_coded(
    reader: CheckpointReader,
    module: nn.Module,
    shards: dict[str, Tensor],
    placement: Placement,
    bar: "tqdm[Any]",
) -> dict[str, CodedRows]:
    """Return the matrices of a module that keep their codes, and remove them from `shards`."""
    taken = {}
    for matrix in matrices_in(module, shards):
        names = matrix.names
        coded = reader.coded(names, placement)
        if coded is not None:
            taken[names[0]] = coded
            bar.update(sum(shards.pop(name).nbytes for name in names))
    return taken
