"""Packed weights in files: the result of `Transformer.pack`, used where it is mapped.

In: a checkpoint, written as one file; or a folder with that file, and a model on any number of
ranks. Out: the model's weights are parts of the mapped file: nothing is read, copied or packed, and
all processes that map it share its pages. The file is a safetensors file whose tensors are called
PATH.FORMAT.NAME and begin at multiples of 64 bytes.
"""

import functools
import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llama.checkpoint import loader
from llama.checkpoint.files import MappedTensor, open_tensors
from llama.checkpoint.find import PACKED_FORMAT, Checkpoint
from llama.checkpoint.packing import pack_model
from llama.checkpoint.table import num_elements, rank_shapes, share, whole_shapes
from llama.checkpoint.write import atomic as writing
from llama.common.checks import brief, torchrun_number
from llama.kernels.cpu import native
from llama.model.layers import Matrix, RMSNorm
from llama.model.transformer import Transformer
from llama.ranks.placement import WHOLE, Placement
from llama.storage.page_cache import cache_anew, read_ahead
from llama.vision.parts import with_image_parts
from llama.weights import choice
from llama.weights.choice import FORMATS
from llama.weights.coded import CodedRows
from llama.weights.plain import PlainWeight
from llama.weights.weight import Weight

_IMAGE_PARTS = "image_parts."  # the path of the parts that read images
_PARAMETER = "parameter"  # what stands for a format where a tensor is no matrix
_HEADER_BYTES_PER_MODULE = 512  # the most that names and shapes of a module's tensors can take
# Errors that a format can raise for tensors of other sizes and types.
_MISFITS = (LookupError, TypeError, ValueError, ArithmeticError, RuntimeError)


def write(checkpoint: Checkpoint, folder: Path, quantize: str | None, progress: bool) -> None:
    """Write the file of packed weights.

    Host memory holds two parts of the model, each a layer, the embedding or the lm_head.

    Args:
        checkpoint: The checkpoint.
        folder: Where the file is written.
        quantize: The format of `build`.
        progress: Whether a bar is drawn on stderr.
    """
    model = with_image_parts(Transformer(checkpoint.params, dtype=torch.bfloat16))
    metadata = {
        "activations": (checkpoint.activations if checkpoint.in_codes else None) or "",
        "format": PACKED_FORMAT,
        "is_guard": str(checkpoint.is_guard),
        "layout": checkpoint.source_layout,
        "quantize": (checkpoint.file_type if checkpoint.in_codes else quantize) or "",
        "source": str(checkpoint.weights_path.absolute()),
    }
    file = folder / "packed.safetensors"
    num_tensors = len(list(model.modules())) + len(list(_image_parameters(model)))
    max_header = _HEADER_BYTES_PER_MODULE * num_tensors
    with writing.tensor_file(file, max_header, metadata) as add:
        filled = functools.partial(_pack_and_write, model, add, quantize)
        loader.load(checkpoint, model, filled=filled, progress=progress)
    cache_anew(file)


def _pack_and_write(
    model: Transformer,
    add: Callable[[str, Tensor], None],
    quantize: str | None,
    part: nn.Module,
    coded: dict[str, CodedRows],
) -> None:
    """Pack and write one part of `loading_order`, and free the memory of its matrices."""
    pack_model(model, part, coded, quantize=quantize)
    modules = set(part.modules())
    for path, module in _parts(model):
        if module not in modules:
            continue
        if isinstance(module, Matrix):
            weight = module.weight
        else:
            weight = PlainWeight((len(module.weight), 1), module.weight)
        format_name = next(name for name, x in FORMATS.items() if x is type(weight))
        for name, tensor in weight.tensors().items():
            add(f"{path}.{format_name}.{name}", tensor)
        if isinstance(module, Matrix):
            module.weight = PlainWeight.pack(torch.empty(0, 0, device="meta"))
    for path, owner, name in _image_parameters(model):
        if owner in modules:
            add(f"{path}.{_PARAMETER}", getattr(owner, name).data)


def _parts(model: Transformer) -> Iterator[tuple[str, Matrix | RMSNorm]]:
    """Yield the modules that hold weights, by path; a tied matrix once, as that of lm_head."""
    share = model.plan.share
    has_both_ends = share.has_embedding and share.has_lm_head
    tied = model.tok_embeddings if model.params.tied_output and has_both_ends else None
    for path, module in model.named_modules():
        is_second = tied is not None and module is tied
        if isinstance(module, Matrix | RMSNorm) and not is_second:
            yield path, module


def _image_parameters(model: Transformer) -> Iterator[tuple[str, nn.Module, str]]:
    """Yield what the parts that read images hold besides matrices and norms.

    Yields:
        The path of a parameter, the module that has it, and its name there.
    """
    for path, module in model.named_modules():
        if path.startswith(_IMAGE_PARTS) and not isinstance(module, Weight | RMSNorm):
            for name, _ in module.named_parameters(recurse=False):
                yield f"{path}.{name}", module, name


def check_use(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype, quantize: str | None
) -> None:
    """Check that packed weights are what a build asks for.

    Args:
        checkpoint: The packed weights.
        device: The device of the build.
        dtype: Its type.
        quantize: The format that was asked for, if any.

    Raises:
        ValueError: They are not; the message has the command that makes others.
    """
    if device.type != "cpu" or dtype is not torch.bfloat16 or native.kernels() is None:
        raise ValueError(
            f"{checkpoint.folder} holds packed weights, which need this project's CPU kernels and "
            "dtype bf16: give the folder that they were made from"
        )
    stored = checkpoint.file_type
    if quantize not in (None, stored):
        metadata = checkpoint.packed or {}
        source = brief(metadata["source"]).strip("'\"")
        raise ValueError(
            f"{checkpoint.folder} holds {stored or 'bf16'} weights, and {quantize} was asked for: "
            f"leave that out, or make another folder: {command(source, quantize)}"
        )


def command(source: str, quantize: str | None = None) -> str:
    """Return the command that writes packed weights, for messages."""
    flags = "" if quantize is None else f" --quantize {quantize}"
    return f"llama convert {shlex.quote(source)} OUT --packed{flags}"


def bytes_of(checkpoint: Checkpoint, placement: Placement) -> int:
    """Return the bytes of memory that a rank's weights take.

    The ranks of this machine, and replicas, share the pages of the file.
    """
    own = num_elements(rank_shapes(checkpoint.params, placement))
    part = own / num_elements(whole_shapes(checkpoint.with_images().params))
    num_ranks = placement.size * placement.stages
    replicas = max(1.0, torchrun_number("LOCAL_WORLD_SIZE") / num_ranks)
    return int(checkpoint.shards[0].stat().st_size * part / replicas)


def attach(checkpoint: Checkpoint, model: Transformer) -> dict[str, MappedTensor]:
    """Make the tensors of the file, or the rank's parts of them, the weights of a model.

    Args:
        checkpoint: The packed weights.
        model: The model.

    Returns:
        All tensors of the file.

    Raises:
        OSError: The file cannot be read.
        ValueError: A tensor does not fit the model; it is named.
    """
    (file,) = checkpoint.shards
    is_whole = model.parallel.placement == WHOLE
    whole = model
    if not is_whole:
        whole = Transformer(model.params, device="meta", dtype=torch.bfloat16)
        whole = with_image_parts(whole)
    read_ahead(file)
    tensors = open_tensors(file)
    misfit = _attach_whole(tensors, whole)
    if misfit is not None:
        raise ValueError(
            f"{file}: {brief(misfit)} is not as {checkpoint.params_path} describes it: the two do "
            "not belong together; write the folder again"
        )
    if not is_whole:
        _attach_share(whole, model)
    model.quantization = checkpoint.file_type
    model.tie()
    return tensors


def _attach_whole(tensors: dict[str, MappedTensor], model: Transformer) -> str | None:
    """Give a whole model the weights of a file; return the path of one that does not fit."""
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        path, _, part = name.rpartition(".")
        parts.setdefault(path, {})[part] = tensor.data
    parts.pop(writing.FILLER, None)
    for path, module in _parts(model):
        format_name = next((name for name in FORMATS if f"{path}.{name}" in parts), "")
        # A norm's shape has one dimension, which the plain format takes as well.
        shape: Any = tuple(module.weight.shape)
        try:
            weight = FORMATS[format_name].of_tensors(shape, parts.pop(f"{path}.{format_name}"))
            is_fitting = weight.is_whole()
        except _MISFITS:
            is_fitting = False
        if not is_fitting:
            return path
        if isinstance(module, Matrix):
            module.weight = weight
        else:
            module.weight = weight.values
    for path, owner, name in _image_parameters(model):
        stored = parts.pop(path, {}).get(_PARAMETER)
        if stored is None or stored.shape != getattr(owner, name).shape:
            return path
        setattr(owner, name, nn.Parameter(stored, requires_grad=False))
    if model.image_parts is None:  # the text model alone is wanted
        parts = {path: part for path, part in parts.items() if not path.startswith(_IMAGE_PARTS)}
    return next(iter(parts), None)  # a tensor that belongs to no module


def _attach_share(whole: Transformer, model: Transformer) -> None:
    """Give a rank's model its parts of the weights of a whole one."""
    params = replace(model.params, tied_output=False)
    shapes = whole_shapes(params)
    for path, module in _parts(model):
        is_tied = model.params.tied_output and path == "tok_embeddings"
        source = whole.get_submodule("output" if is_tied else path)
        if isinstance(module, Matrix):
            assert isinstance(source, Matrix), path
            module.weight = _share(source.weight, module.names, shapes, model)
        else:
            assert isinstance(source, RMSNorm), path
            module.weight = source.weight
    for path, owner, name in _image_parameters(model):
        dim, wanted = share(params, path.removeprefix(_IMAGE_PARTS), model.parallel.placement)
        part = whole.get_parameter(path).data.narrow(dim, wanted.start, len(wanted))
        setattr(owner, name, nn.Parameter(part, requires_grad=False))


def _share(
    whole: Weight, names: Sequence[str], shapes: dict[str, torch.Size], model: Transformer
) -> Weight:
    """Return a rank's part of a matrix, where it lies, or a copy where the format cannot be cut.

    Args:
        whole: The matrix.
        names: The tensors that are stacked in it.
        shapes: The shapes of the whole tensors.
        model: The model of the rank.
    """
    first_row = 0
    rows = []
    columns = slice(0, whole.shape[1])
    for name in names:
        dim, wanted = share(model.params, name, model.parallel.placement)
        if dim:
            columns = slice(wanted.start, wanted.stop)
            wanted = range(shapes[name][0])
        rows.append(slice(first_row + wanted.start, first_row + wanted.stop))
        first_row += shapes[name][0]
    part = whole.part(rows, columns)
    if part is not None:
        return part
    plain = whole.plain()
    return choice.packed(torch.cat([plain[some, columns] for some in rows]))
