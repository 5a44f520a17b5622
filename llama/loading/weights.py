"""The weights of one rank: read into a model, packed and examined.

In: the files of a model, how they will be held, and the sizes of the run. Out: the rank's
`Transformer`, and warnings that name damaged tensors and their files.
"""

import functools
import itertools
import sys
import warnings
from dataclasses import replace

import torch

from llama.checkpoint import loader, packed
from llama.checkpoint.find import Checkpoint
from llama.checkpoint.packing import pack_model
from llama.checkpoint.pooling import HEAD
from llama.checkpoint.reader import CheckpointReader, find_not_finite
from llama.checkpoint.shards import open_head
from llama.checkpoint.verify import LoadCheck
from llama.common.checks import brief
from llama.common.device import dtype_name, set_num_threads
from llama.loading.files import Files
from llama.loading.memory import RunSizes
from llama.model.layers import Matrix, RMSNorm
from llama.model.transformer import Transformer
from llama.ops.kv_cache import KVFormat
from llama.ranks.parallel import Parallel
from llama.storage.downloads import AGAIN
from llama.vision.parts import with_image_parts
from llama.weights import choice
from llama.weights.plain import PlainWeight, all_finite

_NOT_FINITE = "`llama verify` says whether the file is damaged; else the model was trained so"


def load_weights(
    files: Files,
    *,
    parallel: Parallel,
    kv_format: KVFormat,
    sizes: RunSizes,
    verify: bool,
) -> Transformer:
    """Read this rank's weights, and pack each part of the model once it is whole.

    Args:
        files: The files, and how their weights will be held.
        parallel: The rank among its peers.
        kv_format: The format of the KV cache.
        sizes: The sizes of the run that the model is made for.
        verify: Whether the files are compared with the digests alongside them.
    """
    if files.device.type == "cpu":
        set_num_threads(files.placement.shares)
    checkpoint = files.checkpoint
    params = replace(
        checkpoint.params, max_seq_len=sizes.max_seq_len, max_batch_size=sizes.max_batch_size
    )
    reader = None
    if checkpoint.packed is None:  # Wrong names and shapes are told before a model is made.
        reader = CheckpointReader(checkpoint, files.device, compares=not verify)
    model = Transformer(
        params,
        parallel=parallel.placed(files.placement),
        device=files.device,
        dtype=files.dtype,
        kv_format=kv_format,
        fills_late=files.device.type == "cuda",
    )
    model.use_kernels(files.kernels)
    with_image_parts(model)
    is_first = parallel.global_rank == 0
    has_stages = parallel.placement.stages > 1
    check = None
    if verify:
        check = LoadCheck(checkpoint, warns=is_first, divides=not has_stages).check
    if checkpoint.packed is not None:
        packed.attach(checkpoint, model)
    else:
        loader.load(
            checkpoint,
            model,
            reader=reader,
            check=check,
            filled=functools.partial(pack_model, model, quantize=files.quantize),
            progress=is_first and sys.stderr.isatty(),
        )
        if checkpoint.in_codes:
            model.quantization = checkpoint.file_type
            if files.device.type == "cuda" and is_first:
                warn_of_plain(_layer_matrices(model), str(checkpoint.file_type))
        _warn_of_damage(model, checkpoint)
    if files.activations is not None:
        round_activations(model, files.activations, files.rounds_where_possible)
    return model


def load_head(checkpoint: Checkpoint) -> torch.Tensor | None:
    """Return the classification head of a checkpoint, (labels, E) float32; None without one.

    Raises:
        OSError: A file cannot be read.
        ValueError: The tensor is missing or wrong, or not finite.
    """
    if checkpoint.pooling.head is None:
        return None
    tensor = open_head(checkpoint)
    head = tensor.data.to(torch.float32, copy=True)
    if not all_finite(head):
        raise ValueError(f"{tensor.file}: {HEAD} holds NaN or infinity: {_NOT_FINITE}")
    return head


def round_activations(model: Transformer, name: str, where_possible: bool = False) -> None:
    """Round the inputs of a model's matrices, as a value of `activations=` says.

    Raises:
        ValueError: The matrices do not fit this value, and not only those that fit are asked for.
    """
    matrices = {"/".join(x.names): x.weight for x in _layer_matrices(model)}
    if choice.ROUNDED_ACTIVATIONS[name].with_lm_head and model.plan.share.has_lm_head:
        matrices[choice.LM_HEAD] = model.output.weight
    choice.round_activations(matrices, name, where_possible)


def _matrices(model: Transformer) -> list[Matrix]:
    return [module for module in model.modules() if isinstance(module, Matrix)]


def _layer_matrices(model: Transformer) -> list[Matrix]:
    """Return the matrices within the layers; those of the vocabulary can be padded with zeros."""
    return [matrix for matrix in _matrices(model) if matrix.names[0].startswith("layers.")]


def warn_of_plain(matrices: list[Matrix], file_type: str) -> None:
    """Warn of matrices that no GPU kernel takes in the codes of their file."""
    plain = ["/".join(x.names) for x in matrices if type(x.weight) is PlainWeight]
    if plain:
        warnings.warn(
            f"{len(plain)} of {len(matrices)} matrices of {file_type} are held in bf16, as no "
            f"kernel of a GPU takes their codes: {brief(plain)}",
            stacklevel=3,
        )


def _warn_of_damage(model: Transformer, checkpoint: Checkpoint) -> None:
    """Warn of NaN and infinity, and of zeros as a truncated download has them, that packing saw."""
    damaged = [x.names for x in _matrices(model) if not x.weight.is_finite]
    warn_not_finite(model, checkpoint, list(dict.fromkeys(itertools.chain(*damaged))))
    empty = ["/".join(x.names) for x in _layer_matrices(model) if x.weight.has_empty_row]
    if empty:
        warnings.warn(
            f"{checkpoint.weights_path} holds rows of zeros in {brief(empty)}: {AGAIN}, or convert "
            "it anew",
            stacklevel=3,
        )


def plain_not_finite(model: Transformer) -> list[str]:
    """Return Meta's names of the tensors of this rank's model that are plain and not finite."""
    names: dict[str, None] = {}  # in order, and a tied matrix once
    for path, module in model.named_modules():
        if isinstance(module, Matrix) and isinstance(module.weight, PlainWeight):
            if not all_finite(module.weight.plain()):
                names |= dict.fromkeys(module.names)
        elif isinstance(module, RMSNorm) and not all_finite(module.weight):
            names[f"{path}.weight"] = None
    return list(names)


def warn_not_finite(model: Transformer, checkpoint: Checkpoint, names: list[str]) -> None:
    """Warn of tensors that are not finite in a model, with the files that hold them.

    Args:
        model: The model.
        checkpoint: Its files, which are read where `names` has tensors.
        names: Meta's names of the tensors.
    """
    if not names:
        return
    damaged = find_not_finite(checkpoint, names)
    for file, damaged_names in damaged.items():
        warnings.warn(
            f"{file} holds NaN or infinity in {brief(damaged_names)}: {_NOT_FINITE}",
            stacklevel=3,
        )
    if not damaged:
        warnings.warn(
            f"{brief(names)} of {checkpoint.weights_path} have elements that are too large for "
            f"{dtype_name(model.norm.weight.dtype)}: build with dtype='bf16'",
            stacklevel=3,
        )
