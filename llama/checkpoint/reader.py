"""The tensors of a checkpoint, copied into one rank's part of a model.

In: a `Checkpoint`, a `Placement`, and tensors or a Transformer to fill. Out: filled tensors. A rank
reads the bytes that it copies and no others, and nothing in a file is run.

Shapes: N outputs (rows), K inputs (columns).
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from llama.checkpoint import huggingface as hf
from llama.checkpoint.files import FileReader, MappedTensor
from llama.checkpoint.find import Checkpoint
from llama.checkpoint.quantized_matrix import PackTarget, QuantizedMatrix
from llama.checkpoint.shards import open_shards
from llama.checkpoint.table import ROTATED, name_in, share, whole_shapes
from llama.checks import errors_in
from llama.model.layers import Matrix
from llama.model.transformer import Transformer
from llama.ops.cpu.constants import N_BLOCK
from llama.ranks.placement import WHOLE, Placement
from llama.storage.downloads import broken
from llama.weights.coded import Coded, CodedRows, joined

_CPU = torch.device("cpu")
_CHUNK_ELEMENTS = 1 << 22  # elements that are unpacked at a time

Fill = Callable[[Tensor, Tensor], object]  # fills a tensor with the rows of another


def matrix_names(module: nn.Module, shards: dict[str, Tensor]) -> list[Sequence[str]]:
    """Return the names of each matrix in a part of a model, if it is filled with that part."""
    names = [part.names for part in module.modules() if isinstance(part, Matrix)]
    return [x for x in names if x[0] in shards]


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


class _Region(NamedTuple):
    """Rows and columns of a matrix."""

    rows: range
    columns: slice


class CheckpointReader:
    """All tensors of a checkpoint under Meta's names.

    Every name and shape is checked when the reader is created.

    Attributes:
        params: The model's sizes.
        layout: The layout of the files.
        shapes: The shapes of the whole tensors.
        shards: The tensors of each shard. Layouts other than Meta's have one.
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
        names = {name: name_in(self.layout, name) for name in self.shapes}
        self.shards = [
            {name: shard[title] for name, title in names.items()}
            for shard in open_shards(checkpoint)
        ]
        # Shards of Meta's layout hold what equal ranks would hold.
        count = len(self.shards)
        self._placements = [Placement(rank=i, size=count) for i in range(count)]
        self._file_reader = FileReader(device)
        self._first_rows: dict[object, Coded | None] = {}

    def are_equal(self, one: str, other: str) -> bool:
        """Return whether two tensors have the same elements; other layouts then store one."""
        if not all(torch.equal(shard[one].data, shard[other].data) for shard in self.shards):
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
        """Fill a tensor of any float type with what a rank holds.

        On a GPU that is done in the order of the current stream.

        Args:
            name: Meta's name of the tensor.
            into: The tensor that is filled.
            placement: The rank.
            layout: The layout whose order the rows get, "meta" or "hf".
        """
        fill = self._fill(name, layout)
        dim, wanted = share(self.params, name, placement)
        if self.shards[0][name].quantized is None:
            for piece in self._pieces(name, wanted):
                size = piece.end - piece.begin
                source = piece.tensor.data.narrow(dim, piece.begin, size)
                target = into.narrow(dim, piece.position, size)
                self._copy_piece(piece.tensor, source, target, fill)
            return
        region = self._region(name, placement)
        row = 0
        for coded in self._read_chunks(name, region, fill, into.device):
            plain = coded.plain(into.dtype)
            if coded.is_rotated:  # all columns were read, because the rotation mixes them
                plain = plain[:, wanted.start : wanted.stop]
            into[row : row + len(plain)] = plain
            row += len(plain)

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
        matrices = []
        for name in names:
            matrix = self.shards[0][name].quantized
            if matrix is None or (matrix.is_rotated and placement.size > 1):
                return None
            matrices.append(matrix)
        regions = [self._region(name, placement) for name in names]
        stacked = _StackedMatrices(self, names, matrices, regions)
        key = (placement, *stacked.layout_key())
        if key not in self._first_rows:
            self._first_rows[key] = stacked.read_first()
        first = self._first_rows[key]
        if first is None:
            return None
        return CodedRows(stacked.num_rows, first, stacked.read, stacked.pack)

    def read_rows(self, name: str, region: _Region, max_rows: int | None = None) -> list[Coded]:
        """Read a region of a quantized tensor, or its first rows, to the CPU in Meta's order."""
        rows = region.rows[:max_rows]
        fill = self._fill(name, "meta")
        return list(self._read_chunks(name, region._replace(rows=rows), fill, _CPU))

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
            if stored.start <= position < end:
                begin = position - stored.start
                yield _Piece(shard[name], begin, end - stored.start, position - wanted.start)
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
        is_direct = is_same and (into.is_contiguous() or not reader.is_staged)
        raw = into if is_direct else torch.empty_like(piece, device=into.device)
        if tensor.offset is not None and piece.is_contiguous() and raw.is_contiguous():
            begin = tensor.offset + piece.data_ptr() - tensor.data.data_ptr()
            reader.read(raw, tensor.file, begin)
        else:
            reader.copy(raw, piece)
        if raw is not into:
            fill(into, raw)

    def _region(self, name: str, placement: Placement) -> _Region:
        """Return the rows and columns that a rank reads of a quantized tensor."""
        n, k = self.shapes[name]
        dim, wanted = share(self.params, name, placement)
        if dim == 0:
            return _Region(wanted, slice(0, k))
        matrix = self.shards[0][name].quantized
        if matrix is not None and matrix.is_rotated:
            return _Region(range(n), slice(0, k))
        return _Region(range(n), slice(wanted.start, wanted.stop))

    def _read_chunks(
        self, name: str, region: _Region, fill: Fill, device: torch.device
    ) -> Iterator[Coded]:
        """Read a region of a quantized tensor, whole heads at a time.

        Args:
            name: Meta's name of the tensor.
            region: The rows and columns.
            fill: Copies rows into the order that they get.
            device: Where the chunks lie.
        """
        granularity = math.lcm(N_BLOCK, self.params.head_dim)
        max_rows = _CHUNK_ELEMENTS // self.shapes[name][1]
        step = max(max_rows // granularity, 1) * granularity
        for start in range(0, len(region.rows), step):
            rows = region.rows[start : start + step]
            coded = self._read(name, region._replace(rows=rows), device)
            yield coded if fill is Tensor.copy_ else coded.in_order(fill)

    def _read(self, name: str, region: _Region, device: torch.device) -> Coded:
        """Read a region of a quantized tensor from all shards that hold some of it."""
        dim, _ = share(self.params, name, WHOLE)
        rows = slice(region.rows.start, region.rows.stop)
        columns = region.columns
        along = columns if dim else rows
        parts: list[Coded] = []
        for piece in self._pieces(name, range(along.start, along.stop)):
            within = slice(piece.begin, piece.end)
            file = piece.tensor.file
            matrix = piece.tensor.quantized
            if matrix is None:
                raise broken(file, f"has {name} plain, which is quantized in the first shard")
            with errors_in(f"{file}: {name}"):
                if dim:
                    coded = matrix.read(rows, within, device)
                else:
                    coded = matrix.read(within, columns, device)
            if not coded.is_finite():
                raise broken(file, f"has a number or a scale of {name} that is not finite")
            parts.append(coded)
        whole = parts[0] if len(parts) == 1 else joined(parts, dim)
        assert whole is not None, name  # all shards have one format
        return whole


class _StackedMatrices:
    """A rank's parts of several quantized matrices, stacked to one matrix of the model."""

    def __init__(
        self,
        reader: CheckpointReader,
        names: Sequence[str],
        matrices: Sequence[QuantizedMatrix],
        regions: Sequence[_Region],
    ) -> None:
        self.reader = reader
        self.names = names
        self.matrices = matrices
        self.regions = regions
        self.row_counts = [len(region.rows) for region in regions]

    @property
    def num_rows(self) -> int:
        """The rows of the stacked matrix."""
        return sum(self.row_counts)

    def layout_key(self) -> tuple[object, ...]:
        """Return a key that is equal where the first rows have the same table, groups and types."""
        keys = [matrix.layout_key for matrix in self.matrices]
        return *self.row_counts, *(self.names if None in keys else keys)

    def read(self) -> Coded:
        """Read all rows."""
        coded = self._read(None)
        assert coded is not None, self.names  # the first rows could be joined
        return coded

    def read_first(self) -> Coded | None:
        """Read the first rows of each matrix, or all if they are few; None if they do not join."""
        if any(count % N_BLOCK for count in self.row_counts):
            return self._read(None)
        return self._read(math.lcm(N_BLOCK, self.reader.params.head_dim))

    def _read(self, max_rows: int | None) -> Coded | None:
        parts: list[Coded] = []
        for name, region in zip(self.names, self.regions, strict=True):
            parts += self.reader.read_rows(name, region, max_rows)
        return joined(parts)

    def pack(self, first: Coded, weight_kind: int, values: Tensor, scales: Tensor) -> bool:
        """Fill a packed weight from the files, as `CodedRows` has it."""
        ends = list(itertools.accumulate(count // N_BLOCK for count in self.row_counts))[:-1]
        value_parts = values.tensor_split(ends)
        scale_parts = scales.tensor_split(ends)
        for matrix, region, value_part, scale_part in zip(
            self.matrices, self.regions, value_parts, scale_parts, strict=True
        ):
            target = PackTarget(first, weight_kind, value_part, scale_part)
            if not matrix.pack(region.rows, region.columns, target):
                return False
        return True


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
    total = sum(weight.nbytes for weight in model.parameters())
    bar = tqdm(total=total, desc="Loading", unit="B", unit_scale=True, disable=not progress)
    with bar, ThreadPoolExecutor(1, "llama-pack") as packer:
        packing: Future[object] = packer.submit(int)
        for module, shards in model.loading_order():
            if check is not None:
                check([files[name] for files in reader.shards for name in shards])
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
    for names in matrix_names(module, shards):
        coded = reader.coded(names, placement)
        if coded is not None:
            taken[names[0]] = coded
            bar.update(sum(shards.pop(name).nbytes for name in names))
    return taken
