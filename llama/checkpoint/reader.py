"""The tensors of a checkpoint, checked, and copied into one rank's part of a model.

In: a `Checkpoint`, and a Transformer to fill. Out: filled tensors. A rank reads the bytes that it
copies and no others, and nothing in a file is run.
"""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import cast

import torch
from torch import Size, Tensor, nn
from tqdm import tqdm

from llama import weights as formats
from llama.checkpoint import huggingface as hf
from llama.checkpoint import meta_quantized
from llama.checkpoint.downloads import broken
from llama.checkpoint.files import FileReader, MappedTensor, open_tensors
from llama.checkpoint.find import Checkpoint, is_tied
from llama.checkpoint.hf_quantized import gathered
from llama.checkpoint.table import (
    ROTATED,
    name_in,
    rank_shapes,
    shard_shapes,
    share,
    whole_shapes,
)
from llama.checks import brief, errors_in
from llama.model.layers import Matrix
from llama.model.transformer import Transformer
from llama.ranks.collectives import ModelParallel
from llama.ranks.placement import WHOLE, Placement
from llama.weights.coded import Coded, CodedRows, joined
from llama.weights.groups import GroupedWeight

# Computed, not learned: some files carry them.
_HARMLESS = ("rope.freqs", "rotary_emb.inv_freq", "rope_freqs.weight")
_CPU = torch.device("cpu")
_UNPACKED = 1 << 22  # numbers that are unpacked at a time


def bytes_of(
    found: Checkpoint,
    placement: Placement,
    dtype: torch.dtype,
    quantize: str | None,
    device: torch.device,
) -> int:
    """Bytes of the weights that a rank holds, told without reading them.

    An untied embedding is not rounded, and neither are norms. Where matrices stay in the codes of
    their file, some rows of each are read and packed.
    """
    if found.in_codes:
        return _in_codes(found, placement, dtype, device.type == "cuda")[0]
    of_ends = formats.of_output(quantize)
    ends = {"output.weight": of_ends, "tok_embeddings.weight": None}
    if found.params.tied_output:
        ends["tok_embeddings.weight"] = of_ends
    shapes = rank_shapes(found.params, placement)
    return sum(
        formats.bytes_of(shape, dtype, ends.get(name, quantize)) for name, shape in shapes.items()
    )


def forms_of(found: Checkpoint, placement: Placement) -> list[formats.Form]:
    """Those of a rank's matrices that a GPU holds in the codes of their file."""
    return sorted(_in_codes(found, placement, torch.bfloat16, is_gpu=True)[1])


def _in_codes(
    found: Checkpoint, placement: Placement, dtype: torch.dtype, is_gpu: bool
) -> tuple[int, set[formats.Form]]:
    reader = CheckpointReader(found)
    model = Transformer(found.params, parallel=ModelParallel(placement), device="meta", dtype=dtype)
    total, forms = 0.0, set()
    for module, shards in model.loading_order():
        total += sum(shard.nbytes for shard in shards.values())
        for names in _matrices(module, shards):
            if (coded := reader.coded(names, placement)) is not None:
                (n, k), rows = coded.first.shape, coded.n
                held = (formats.on_gpu if is_gpu else formats.packed)(coded.first)
                thin = held.tensors().get("adaptor", torch.empty(0)).nbytes  # of (n + k, R)
                total += (held.nbytes - thin) * rows / n + thin * (rows + k) / (n + k)
                total -= sum(shards[name].nbytes for name in names)
                forms |= {held.form} if isinstance(held, GroupedWeight) else set()
    return math.ceil(total), forms


def _matrices(module: nn.Module, shards: dict[str, Tensor]) -> list[Sequence[str]]:
    """The names of each matrix of a part of a model, if it is filled with that part."""
    found = (part.names for part in module.modules() if isinstance(part, Matrix))
    return [names for names in found if names[0] in shards]


Shard = dict[str, MappedTensor]
Fill = Callable[[Tensor, Tensor], object]  # of a tensor with another


class CheckpointReader:
    """All tensors of a checkpoint under Meta's names, every name and shape checked on opening.

    `device`: of the tensors that are filled. ValueError names file, tensor, and what was expected
    and found.
    """

    def __init__(self, checkpoint: Checkpoint, device: torch.device = _CPU) -> None:
        if checkpoint.packed is not None:
            raise ValueError(
                f"{checkpoint.folder} holds packed weights, which are only run: give the folder "
                "that it was made from"
            )
        self.params, self.layout = checkpoint.params, checkpoint.layout
        self.shapes = whole_shapes(self.params)
        self._file_reader = FileReader(device)
        self._firsts: dict[object, Coded | None] = {}  # blocks of a kind have one form everywhere
        first = checkpoint.header or checkpoint.shards[0]  # a header was read already
        shards = [open_tensors(file) for file in (first, *checkpoint.shards[1:])]
        for shard in shards:
            if self.params.tied_output and is_tied(shard):
                del shard["output.weight"]
        if self.layout != "meta":  # each file holds some tensors, whole: together, one shard
            shards = [_merged(shards)]
        else:
            shards = [meta_quantized.gathered(shard, i) for i, shard in enumerate(shards)]
        if checkpoint.quantization is not None:
            shards = [gathered(shard, checkpoint.quantization) for shard in shards]
        _check(checkpoint, shards)
        names = {name: name_in(self.layout, name) for name in self.shapes}
        self.shards = [{name: shard[there] for name, there in names.items()} for shard in shards]
        # Shards of Meta's layout hold what equal ranks would hold.
        count = len(shards)
        self._placements = [Placement(rank=i, size=count) for i in range(count)]

    def are_equal(self, one: str, other: str) -> bool:
        """Are two tensors the same numbers in every shard? Other layouts then hold them once."""
        same = all(torch.equal(shard[one].data, shard[other].data) for shard in self.shards)
        a, b = (self.coded([name]) for name in (one, other)) if same else (None, None)
        return same and (a is None or b is None or torch.equal(a.read().scale, b.read().scale))

    def dtype(self, name: str) -> torch.dtype:
        """Of the numbers; of those in codes, what they become where plain ones are wanted."""
        tensor = self.shards[0][name]
        return torch.bfloat16 if tensor.quantized else tensor.data.dtype

    def copy(
        self, name: str, into: Tensor, placement: Placement = WHOLE, layout: str = "meta"
    ) -> None:
        """Fill `into`, of any float type, with what a rank holds, in the order of rows that
        `layout` has. On a GPU it is done in the order of the current stream."""
        fill = self._fill(name, layout)
        dim, wanted = share(self.params, name, placement)
        if self.shards[0][name].quantized is not None:
            for row, coded in self._unpacked(name, placement, into.device, fill, None):
                rows = coded.plain(into.dtype)
                if coded.is_rotated:
                    rows = rows[:, wanted.start : wanted.stop]
                into[row : row + len(rows)] = rows
            return
        here = wanted.start
        for shard, shard_placement in zip(self.shards, self._placements, strict=True):
            _, held = share(self.params, name, shard_placement)
            end = min(held.stop, wanted.stop)
            if held.start <= here < end:  # the first shard that has it; replicas are skipped
                count = end - here
                piece = shard[name].data.narrow(dim, here - held.start, count)
                target = into.narrow(dim, here - wanted.start, count)
                self._copy_piece(shard[name], piece, target, fill)
                here += count
        assert here == wanted.stop, (name, placement)

    def _fill(self, name: str, layout: str) -> Fill:
        """How a tensor's rows are filled with those of the files: as they are, or turned."""
        if (layout == "hf") == (self.layout == "hf") or not name.endswith(ROTATED):
            return Tensor.copy_
        return functools.partial(hf.copy_rows, head_dim=self.params.head_dim, to=layout)

    def _copy_piece(self, tensor: MappedTensor, piece: Tensor, into: Tensor, fill: Fill) -> None:
        """Fill `into` with a piece of a tensor: by threads, but where a CPU changes the bytes."""
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

    def coded(self, names: Sequence[str], placement: Placement = WHOLE) -> CodedRows | None:
        """What a rank holds of tensors whose rows stand below one another, as the file has it, read
        when taken; None where not all are in codes that can do so. On the CPU."""
        found = [self.shards[0][name].quantized for name in names]
        of = [x for x in found if x and not (x.is_rotated and placement.size > 1)]
        if len(of) < len(names):
            return None
        shares = [self._share(name, placement) for name in names]
        counts = [len(rows) for rows, _ in shares]

        def read(most: int | None = None) -> Coded | None:
            fills = ((name, self._fill(name, "meta")) for name in names)
            parts = (self._unpacked(name, placement, _CPU, fill, most) for name, fill in fills)
            return joined([coded for part in parts for _, coded in part])

        def pack(first: Coded, kind: int, *into: Tensor) -> bool:
            ends = [sum(counts[:i]) // 32 for i in range(1, len(counts))]
            each = zip(of, shares, *(x.tensor_split(ends) for x in into), strict=True)
            return all(x.pack and x.pack(*own, first, kind, *part) for x, own, *part in each)

        own = [(x.kind, x.shape) for x in of] if all(x.pack for x in of) else names
        if (first := self._firsts.get(alike := (placement, *counts, *own))) is None:
            few = None if any(n % 32 for n in counts) else math.lcm(32, self.params.head_dim)
            first = self._firsts[alike] = read(few)
        whole = cast(Callable[[], Coded], read)  # of which the first rows have one form
        return None if first is None else CodedRows(sum(counts), first, whole, pack)

    def _share(self, name: str, placement: Placement) -> tuple[range, slice]:
        """The rows and columns that a rank reads of a tensor in codes."""
        n, k = self.shapes[name]
        dim, wanted = share(self.params, name, placement)
        if dim == 0:
            return wanted, slice(0, k)
        quantized = self.shards[0][name].quantized
        if quantized and quantized.is_rotated:
            return range(n), slice(0, k)
        return range(n), slice(wanted.start, wanted.stop)

    def _unpacked(
        self, name: str, placement: Placement, device: torch.device, fill: Fill, most: int | None
    ) -> Iterator[tuple[int, Coded]]:
        """A rank's share of a tensor in codes, or its first rows: some whole heads' rows at a time,
        in their order, each with the number of its first."""
        rows, columns = self._share(name, placement)
        unit = math.lcm(32, self.params.head_dim)  # whole heads, and whole blocks
        step = max(_UNPACKED // self.shapes[name][1] // unit, 1) * unit
        for i in range(0, len(rows[:most]), step):
            some = rows[i : i + (most or step)]
            coded = self._read(name, slice(some.start, some.stop), columns, device)
            yield i, coded if fill is Tensor.copy_ else coded.in_order(fill)

    def _read(self, name: str, rows: slice, columns: slice, device: torch.device) -> Coded:
        """Some rows and columns of a tensor in codes, from all shards that have some."""
        parts: list[Coded] = []
        for shard, placement in zip(self.shards, self._placements, strict=True):
            file, _, _, quantized = shard[name]
            dim, held = share(self.params, name, placement)
            wanted = columns if dim else rows
            here = wanted.start + sum(part.codes.shape[dim] for part in parts)
            end = min(held.stop, wanted.stop)
            if quantized is None or not held.start <= here < end:
                continue  # replicas are skipped
            some = slice(here - held.start, end - held.start)
            with errors_in(f"{file}: {name}"):
                coded = quantized.read(*((rows, some) if dim else (some, columns)), device)
            if not coded.is_finite():
                raise broken(file, f"has a number or a scale of {name} that is not finite")
            parts.append(coded)
        whole = parts[0] if len(parts) == 1 else joined(parts, dim)
        assert whole is not None and whole.codes.shape[dim] == wanted.stop - wanted.start, name
        return whole


def load(
    checkpoint: Checkpoint,
    model: Transformer,
    *,
    check: Callable[[list[MappedTensor]], None] | None = None,
    filled: Callable[[nn.Module, dict[str, CodedRows]], None] = lambda module, coded: None,
    progress: bool = False,
) -> None:
    """Fill a model with its rank's shard of the weights, in the model's type and on its device.

    Every file is checked before anything is copied: ValueError names what is wrong. Host memory
    beside the model: none on a CPU, but that of two parts where `filled` makes them smaller; two
    buffers on a GPU. `check`, such as that of `LoadCheck`, is called with the tensors of all files
    that are copied next, on every rank with the same. `filled` is called with each module of
    `model.loading_order` once it is whole, on a GPU once its bytes are on their way, and with the
    matrices that stay in codes, by the first of their names: those are not filled. `progress` draws
    a bar on stderr.
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
            coded, left = {}, dict(shards)
            for names in _matrices(module, shards) if checkpoint.in_codes else ():
                if (codes := reader.coded(names, placement)) is not None:
                    coded[names[0]] = codes
                    bar.update(sum(left.pop(name).nbytes for name in names))
            for name, shard in left.items():
                reader.copy(name, shard, placement)
                bar.update(shard.nbytes)
            packing.result()
            if device.type == "cpu":  # while the next part is read
                packing = packer.submit(filled, module, coded)
            else:
                filled(module, coded)
        packing.result()
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _merged(files: list[Shard]) -> Shard:
    whole: Shard = {}
    for file in files:
        for name in file.keys() & whole.keys():
            raise ValueError(
                f"{file[name].file} and {whole[name].file.name} both hold {brief(name)}: move away "
                "what does not belong to the model"
            )
        whole |= file
    return whole


def _check(checkpoint: Checkpoint, shards: list[Shard]) -> None:
    """ValueError unless the shards hold the tensors that params.json asks for, and no others."""
    params, layout, path = checkpoint.params, checkpoint.layout, checkpoint.params_path
    if layout == "meta":
        _check_count(checkpoint, shards)
    try:
        shapes = shard_shapes(params, len(shards))
    except ValueError as e:
        raise ValueError(
            f"{checkpoint.folder} has {len(shards)} shards, which do not fit {path.name}: {e}"
        ) from e
    wanted = {name_in(layout, name): shape for name, shape in shapes.items()}
    sources = checkpoint.shards if layout == "meta" else [checkpoint.weights_path]
    for source, shard in zip(sources, shards, strict=True):
        missing = [name for name in wanted if name not in shard]
        if missing:
            more = f" and {len(missing) - 1} more" if missing[1:] else ""
            raise ValueError(
                f"{source}: {missing[0]}{more} missing, which {path} asks for: they do not belong "
                "together, or a file is incomplete: download it again"
            )
        for name, tensor in shard.items():
            if not name.endswith(_HARMLESS):
                _check_tensor(name, tensor, wanted.get(name), f"{path} and {len(shards)} shard(s)")


def _check_tensor(name: str, tensor: MappedTensor, wanted: Size | None, source: str) -> None:
    file, data = tensor.file, tensor.data
    if wanted is None:
        output = name in ("output.weight", name_in("hf", "output.weight"))
        raise ValueError(
            f"{file}: {brief(name)} has no place in the model that {source} describe: "
            + ("say there that the output is not tied" if output else "they do not fit together")
        )
    is_number = data.is_floating_point() and data.itemsize > 1
    if not (is_number or (tensor.quantized and len(tensor.shape) == 2)):
        raise ValueError(
            f"{file}: {name} has type {data.dtype}: it looks quantized, and this runtime loads "
            "float32, bfloat16 and float16 weights"
        )
    if tensor.shape != wanted:
        raise ValueError(
            f"{file}: {name} has shape {brief(tuple(tensor.shape))}, but {source} give "
            f"{tuple(wanted)}: they do not belong together, or shards are missing"
        )


def _check_count(checkpoint: Checkpoint, shards: list[Shard]) -> None:
    """ValueError where the embedding's shape shows that shards are missing, or Llama 2's."""
    first = shards[0].get("tok_embeddings.weight")
    vocab, dim = checkpoint.params.vocab_size, checkpoint.params.dim
    if first is None or first.data.dim() != 2:
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
