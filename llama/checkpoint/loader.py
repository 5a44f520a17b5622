"""The weights of a checkpoint, read into a model part by part.

In: a `Checkpoint` and a `Transformer` whose rank is known. Out: the filled model. While one part of
the model is packed, the next is read.
"""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from llama.checkpoint.files import MappedTensor
from llama.checkpoint.find import Checkpoint
from llama.checkpoint.reader import CheckpointReader
from llama.model.layers import Matrix
from llama.model.transformer import Transformer
from llama.ranks.placement import Placement
from llama.weights.coded import CodedRows


def matrices_in(module: nn.Module, shards: dict[str, Tensor]) -> list[Matrix]:
    """Return the matrices in a part of a model that it fills, and that may be in codes."""
    matrices = [part for part in module.modules() if isinstance(part, Matrix)]
    return [each for each in matrices if each.names[0] in shards and each.may_quantize]


def load(
    checkpoint: Checkpoint,
    model: Transformer,
    *,
    reader: CheckpointReader | None = None,
    check: Callable[[list[MappedTensor]], None] | None = None,
    filled: Callable[[nn.Module, dict[str, CodedRows]], None] = lambda module, coded: None,
    progress: bool = False,
) -> None:
    """Fill a model with its rank's shard of the weights, in the model's type and on its device.

    Every file is checked before anything is copied. The host memory besides the model is that of
    two parts of it on a CPU, if `filled` makes them smaller, else none; and two buffers on a GPU.

    Args:
        checkpoint: The checkpoint.
        model: The model.
        reader: Reads the checkpoint to the device of the model; by default a new one.
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
    reader = reader or CheckpointReader(checkpoint, device, compares=check is None)
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
    if check is not None:  # the bytes of a damaged file differ, too
        reader.check_alike()
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
