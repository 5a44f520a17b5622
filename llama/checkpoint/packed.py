"""Packed weights in files: what `Transformer.pack` makes, to be used where it is mapped.

In: a checkpoint, written as one file; or a folder with that file, and a model on any number of
ranks. Out: the model's weights are parts of the mapped file: nothing is read, copied or packed, and
all processes that map it share its pages. It is a safetensors file whose tensors are called
PATH.FORMAT.NAME, and begin at multiples of 64 bytes.
"""

import functools
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llama import weights
from llama.checkpoint import reader, writing
from llama.checkpoint.downloads import cache_anew, read_ahead
from llama.checkpoint.files import MappedTensor, open_tensors
from llama.checkpoint.find import PACKED, Checkpoint
from llama.checkpoint.table import share, whole_shapes
from llama.checks import brief, torchrun_number
from llama.model.layers import Matrix, RMSNorm
from llama.model.transformer import Transformer
from llama.ops.cpu import native
from llama.ranks.placement import WHOLE, Placement
from llama.weights import FORMATS, PlainWeight, Weight
from llama.weights.coded import CodedRows


def write(checkpoint: Checkpoint, folder: Path, quantize: str | None, progress: bool) -> None:
    """Write the file. Host memory: two parts of the model, each a layer or one of the ends."""
    model = Transformer(checkpoint.params, dtype=torch.bfloat16)
    metadata = {
        "format": PACKED, "is_guard": str(checkpoint.is_guard),
        "quantize": (checkpoint.file_type if checkpoint.in_codes else quantize) or "",
        "source": str(checkpoint.weights_path.absolute()),
    }  # fmt: skip
    file, most_header = folder / "packed.safetensors", 512 * len([*model.modules()])
    with writing.tensor_file(file, most_header, metadata) as add:
        filled = functools.partial(_pack_and_write, model, add, quantize)
        reader.load(checkpoint, model, filled=filled, progress=progress)
    cache_anew(file)


def _pack_and_write(
    model: Transformer,
    add: Callable[[str, Tensor], None],
    quantize: str | None,
    part: nn.Module,
    coded: dict[str, CodedRows],
) -> None:
    """One part of `loading_order`; its matrices' memory is free afterwards."""
    model.pack(part, coded, quantize=quantize)
    own = set(part.modules())
    for path, module in _parts(model):
        if module not in own:
            continue
        held = module.weight
        weight = held if isinstance(held, Weight) else PlainWeight((len(held), 1), held)
        format = next(name for name, kind in FORMATS.items() if kind is type(weight))
        for name, tensor in weight.tensors().items():
            add(f"{path}.{format}.{name}", tensor)
        if isinstance(module, Matrix):
            module.weight = PlainWeight.pack(torch.empty(0, 0, device="meta"))


def _parts(model: Transformer) -> Iterator[tuple[str, Matrix | RMSNorm]]:
    """What holds weights, by its path; a tied matrix once, as the output's."""
    for path, module in model.named_modules():
        is_second = model.params.tied_output and module is model.tok_embeddings
        if isinstance(module, Matrix | RMSNorm) and not is_second:
            yield path, module


def check_use(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, want: str | None
) -> None:
    """ValueError where packed weights are not for this, with the command to make others. want: the
    format that was asked for."""
    made, held, why = checkpoint.packed or {}, checkpoint.file_type, ""
    if device.type != "cpu" or dtype is not torch.bfloat16 or native.kernels() is None:
        why = "is for this project's CPU kernels, in bf16: give the folder that it was made from"
    elif want not in (None, held):
        source = brief(made["source"]).strip("'\"")
        why = f"holds {held or 'bf16'} weights, and {want} was asked for: leave that out, or make "
        why += f"another: {command(source, want)}"
    if why:
        raise ValueError(f"{checkpoint.folder} {why}")


def command(source: str, quantize: str | None = None) -> str:
    """What makes a folder of packed weights, for messages."""
    words = f"llama convert {shlex.quote(source)} OUT --packed"
    return words + (f" --quantize {quantize}" if quantize else "")


def bytes_of(checkpoint: Checkpoint, placement: Placement) -> int:
    """Bytes of memory that a rank's weights take: those of this machine, and replicas, share the
    file."""
    sharing = max(placement.size, torchrun_number("LOCAL_WORLD_SIZE"))
    return checkpoint.shards[0].stat().st_size // sharing


def attach(checkpoint: Checkpoint, model: Transformer) -> dict[str, MappedTensor]:
    """Make the tensors of the file, or its rank's parts of them, the weights of a model; returns
    all. ValueError names the file, and what in it does not fit the model."""
    (file,) = checkpoint.shards
    is_whole = model.parallel.placement == WHOLE
    whole = model if is_whole else Transformer(model.params, device="meta", dtype=torch.bfloat16)
    read_ahead(file)
    found = open_tensors(file)
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in found.items():
        path, _, own = name.rpartition(".")
        parts.setdefault(path, {})[own] = tensor.data
    parts.pop(writing.FILLER, None)
    for path, module in _parts(whole):
        format = next((name for name in FORMATS if f"{path}.{name}" in parts), "")
        try:
            shape: Any = tuple(module.weight.shape)  # a norm's is one number
            weight = FORMATS[format](shape, **parts.pop(f"{path}.{format}"))
            fits = weight.is_whole()
        except (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError):
            fits = False
        if not fits:
            parts = {path: {}}
            break
        module.weight = weight.values if isinstance(module, RMSNorm) else weight
    for path in parts:
        raise ValueError(
            f"{file}: {brief(path)} is not as {checkpoint.params_path} describes it: they do not "
            "belong together; make the folder anew"
        )
    shapes = whole_shapes(replace(model.params, tied_output=False))
    for path, module in () if is_whole else _parts(model):
        held: Any = whole.get_submodule(path).weight
        if isinstance(module, Matrix):
            held = _share(held, module.names, shapes, model)
        module.weight = held
    model.quantization = checkpoint.file_type
    model.tie()
    return found


def _share(
    whole: Weight, names: Sequence[str], shapes: dict[str, torch.Size], model: Transformer
) -> Weight:
    """This rank's part of a matrix that is made of tensors of such names: where it lies, or a copy
    where a format cannot be cut there."""
    above, rows, columns = 0, [], slice(0, whole.shape[1])
    for name in names:
        dim, held = share(model.params, name, model.parallel.placement)
        if dim:
            columns = slice(held.start, held.stop)
            held = range(shapes[name][0])
        rows.append(slice(above + held.start, above + held.stop))
        above += shapes[name][0]
    if (part := whole.part(rows, columns)) is not None:
        return part
    plain = whole.plain()
    return weights.packed(torch.cat([plain[each, columns] for each in rows]))
