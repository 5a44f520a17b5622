"""Packed weights in files: what `Transformer.pack` makes, to be used where it is mapped.

In: a checkpoint, written as a file for each rank; or a folder of such files, and a model. Out: the
model's weights are the mapped files: nothing is read, copied or packed, and all processes that map
a file share its pages. A file is a safetensors file whose tensors are called PATH.FORMAT.NAME, and
begin at multiples of 64 bytes. Its metadata say which layout this is, whether matrices were
rounded, and for how many ranks.
"""

import functools
import os
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llama.checkpoint import reader, writing
from llama.checkpoint.downloads import read_ahead
from llama.checkpoint.files import MappedTensor, open_tensors
from llama.checkpoint.find import PACKED, Checkpoint
from llama.checks import brief
from llama.model.layers import Matrix, RMSNorm
from llama.model.transformer import Transformer
from llama.ops.cpu import native
from llama.ranks.collectives import ModelParallel
from llama.weights import FORMATS, PlainWeight, Weight
from llama.weights.coded import CodedRows


def write(
    checkpoint: Checkpoint, folder: Path, quantize: str | None, ranks: int, progress: bool
) -> None:
    """Write the file of each rank. Host memory: what two parts of the model take, each a layer or
    one of the ends."""
    held = checkpoint.file_type if checkpoint.in_codes else quantize
    for rank in range(ranks):
        parallel = ModelParallel(rank=rank, size=ranks)
        model = Transformer(checkpoint.params, parallel=parallel, dtype=torch.bfloat16)
        metadata = {
            "format": PACKED, "rank": str(rank), "ranks": str(ranks), "quantize": held or "",
            "is_guard": str(checkpoint.is_guard), "source": str(checkpoint.weights_path.absolute()),
        }  # fmt: skip
        file, most_header = folder / f"packed.{rank:02d}.safetensors", 512 * len([*model.modules()])
        with writing.tensor_file(file, most_header, metadata) as add:
            filled = functools.partial(_pack_and_write, model, add, quantize)
            reader.load(checkpoint, model, filled=filled, progress=progress)


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
    checkpoint: Checkpoint, ranks: int, device: torch.device, dtype: torch.dtype, want: str | None
) -> None:
    """ValueError where packed weights are not for this, with the command to make others. want: the
    format that was asked for."""
    made, held, why = checkpoint.packed or {}, checkpoint.file_type, ""
    if device.type != "cpu" or dtype is not torch.bfloat16 or native.kernels() is None:
        why = "is for this project's CPU kernels, in bf16: give the folder that it was made from"
    elif want not in (None, held):
        why = f"holds {held or 'bf16'} weights, and {want} was asked for: leave that out, or"
    elif ranks != len(checkpoint.shards):
        why = f"is for {len(checkpoint.shards)} rank(s), and there are {ranks}:"
    if why.endswith((":", "or")):
        format = want or (held if held in FORMATS else None)
        source = brief(made["source"]).strip("'\"")
        why += f" make another: {command(source, ranks, format)}"
    if why:
        raise ValueError(f"{checkpoint.folder} {why}")


def command(source: str, ranks: int = 1, quantize: str | None = None) -> str:
    """What makes a folder of packed weights, for messages."""
    words = f"llama convert {shlex.quote(source)} OUT --packed"
    words += f" --quantize {quantize}" if quantize else ""
    return words + (f" --ranks {ranks}" if ranks > 1 else "")


def bytes_of(checkpoint: Checkpoint) -> int:
    """Bytes of memory that one rank's weights take: replicas on this machine share a file."""
    sharing = max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")) // len(checkpoint.shards))
    return max(path.stat().st_size for path in checkpoint.shards) // sharing


def attach(checkpoint: Checkpoint, model: Transformer) -> dict[str, MappedTensor]:
    """Make the tensors of its rank's file the weights of a model; returns them.

    ValueError names the file, and what in it does not fit the model.
    """
    file = checkpoint.shards[model.parallel.rank]
    read_ahead(file)
    found = open_tensors(file)
    parts: dict[str, dict[str, Tensor]] = {}
    for name, tensor in found.items():
        path, _, own = name.rpartition(".")
        parts.setdefault(path, {})[own] = tensor.data
    parts.pop(writing.FILLER, None)
    for path, module in _parts(model):
        format = next((name for name in FORMATS if f"{path}.{name}" in parts), "")
        try:
            shape: Any = tuple(module.weight.shape)  # a norm's is one number
            weight = FORMATS[format](shape, **parts.pop(f"{path}.{format}"))
            fits = weight.is_whole()
        except (KeyError, TypeError, ValueError, IndexError, RuntimeError):
            fits = False
        if not fits:
            raise _unfit(file, checkpoint, path)
        module.weight = weight.values if isinstance(module, RMSNorm) else weight
    for path in parts:
        raise _unfit(file, checkpoint, path)
    model.quantization = checkpoint.file_type
    model.tie()
    return found


def open_all(checkpoint: Checkpoint) -> list[dict[str, MappedTensor]]:
    """The tensors of each file; ValueError where one is not as the params have it."""
    ranks = range(len(checkpoint.shards))
    groups = [ModelParallel(rank=rank, size=len(ranks)) for rank in ranks]
    return [
        attach(checkpoint, Transformer(checkpoint.params, parallel=group, device="meta"))
        for group in groups
    ]


def _unfit(file: Path, checkpoint: Checkpoint, path: str) -> ValueError:
    return ValueError(
        f"{file}: {brief(path)} is not as {checkpoint.params_path} describes it: they do not "
        "belong together; make the folder anew"
    )
