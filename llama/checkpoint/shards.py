"""The tensors of a checkpoint's files, opened and checked.

In: a `Checkpoint`. Out: its shards, each a dict of tensors under the names of the layout. Every
name, type and shape is as params.json asks for. No tensor is read.
"""

from pathlib import Path

from torch import Size

from llama.checkpoint import meta_quantized
from llama.checkpoint.alike import LM_HEAD, check_shards
from llama.checkpoint.files import MappedTensor
from llama.checkpoint.find import Checkpoint, is_tied
from llama.checkpoint.hf.quantized import join_parts
from llama.checkpoint.names import open_model_tensors
from llama.checkpoint.pooling import HEAD
from llama.checkpoint.table import name_in, shard_shapes
from llama.common.checks import brief

Shard = dict[str, MappedTensor]

# Tensors that some files hold and that are computed here.
_COMPUTED = ("rope.freqs", "rotary_emb.inv_freq", "rope_freqs.weight")


def open_shards(checkpoint: Checkpoint) -> list[Shard]:
    """Open the files of a checkpoint and check their tensors.

    Returns:
        The shards of Meta's layout; one shard with all tensors for the other layouts.

    Raises:
        OSError: A file cannot be read.
        ValueError: A tensor is missing or wrong. File, tensor, what was expected and what was found
            are named.
    """
    first = checkpoint.header or checkpoint.shards[0]  # a header need not be read again
    shards = [open_model_tensors(file) for file in (first, *checkpoint.shards[1:])]
    if checkpoint.vision is not None:
        shards = checkpoint.vision.tensors(shards)
    for shard in shards:
        if checkpoint.params_of_files.tied_output and is_tied(shard):
            del shard["output.weight"]
        if checkpoint.params_of_files.tied_output and checkpoint.layout == "hf":
            shard.pop(LM_HEAD, None)  # it is the embedding: `find` has compared them
    if checkpoint.layout == "meta":
        shards = [meta_quantized.join_fp8_scales(shard, i) for i, shard in enumerate(shards)]
    else:
        shards = [_merge(shards)]
    if checkpoint.layout == "hf":
        shards = [_named_as_part(shard) for shard in shards]
        if checkpoint.pooling.head is not None:
            shards[0].pop(HEAD, None)
    if checkpoint.quantization is not None:
        shards = [join_parts(shard, checkpoint.quantization) for shard in shards]
    _check(checkpoint, shards)
    return shards


def check_alike(shards: list[Shard]) -> None:
    """Raise ValueError for shards of Meta's layout, by Meta's names, that are not of one model."""
    names = [name for name in shards[0] if not name.endswith(_COMPUTED)]
    whole = [name for name in names if name.endswith("norm.weight")]
    # Key-value heads may be in several shards.
    ends = ("tok_embeddings.weight", "output.weight", ".0.attention.wq.weight", ".w1.weight")
    check_shards(shards, whole, [name for name in names if name.endswith(ends)])


def open_head(checkpoint: Checkpoint) -> MappedTensor:
    """Open the matrix of a classification head, (labels, E), and check it.

    Raises:
        OSError: A file cannot be read.
        ValueError: There is no such tensor, or it is wrong; the error names it.
    """
    shard = _merge([open_model_tensors(file) for file in checkpoint.shards])
    path = checkpoint.params_path
    head = checkpoint.pooling.head
    assert head is not None
    if HEAD not in shard:
        raise ValueError(
            f"{checkpoint.folder}: {HEAD} is missing, the head of the "
            f"{checkpoint.pooling.architecture} that {path} describes: save the model with it"
        )
    tensor = shard[HEAD]
    num_labels = len(head.labels) or tensor.shape[0]
    expected = Size((num_labels, checkpoint.params.dim))
    _check_tensor(HEAD, tensor, expected, f"{path} with {num_labels} labels")
    return tensor


def _named_as_part(shard: Shard) -> Shard:
    """Return tensors under the names that they have as parts of a larger class.

    A model without any head is saved as `layers.0...` in place of `model.layers.0...`.
    """
    if "embed_tokens.weight" not in shard:
        return shard
    return {name if name == HEAD else f"model.{name}": x for name, x in shard.items()}


def _merge(files: list[Shard]) -> Shard:
    """Return the tensors of several files, no name of which may be in two."""
    merged: Shard = {}
    for file in files:
        for name in file.keys() & merged.keys():
            raise ValueError(
                f"{file[name].file} and {merged[name].file.name} both hold {brief(name)}: move "
                "away what does not belong to the model"
            )
        merged |= file
    return merged


def _check(checkpoint: Checkpoint, shards: list[Shard]) -> None:
    """Raise ValueError unless the shards hold the tensors that params.json asks for, and no others.

    Tensors that are computed here may be there, too.
    """
    layout = checkpoint.layout
    path = checkpoint.params_path
    if layout == "meta":
        _check_count(checkpoint, shards)
    try:
        shapes = shard_shapes(checkpoint.params_of_files, len(shards))
    except ValueError as e:
        raise ValueError(
            f"{checkpoint.folder} has {len(shards)} shards, which do not fit {path.name}: {e}"
        ) from e
    expected = {name_in(layout, name): shape for name, shape in shapes.items()}
    sources = checkpoint.shards if layout == "meta" else [checkpoint.weights_path]
    for source, shard in zip(sources, shards, strict=True):
        missing = [name for name in expected if name not in shard]
        _check_head(checkpoint, source, missing, [name for name in shard if name not in expected])
        if missing:
            more = f" and {len(missing) - 1} more are" if missing[1:] else " is"
            others = [x for x in shard if x not in expected and not x.endswith(_COMPUTED)]
            cause = "the two do not belong together, or the model was saved without them"
            if others:
                cause = f"{brief(others[0])} is there, which is no name of a Llama in this layout"
            raise ValueError(
                f"{source}: {missing[0]}{more} missing from the tensors that {path} describes: "
                f"{cause}"
            )
        for name, tensor in shard.items():
            if not name.endswith(_COMPUTED):
                rule = f"{path} and {len(shards)} shard(s)"
                _check_tensor(name, tensor, expected.get(name), rule)


def _check_head(
    checkpoint: Checkpoint, source: Path, missing: list[str], others: list[str]
) -> None:
    """Raise ValueError for a head that is not known, with the name of one of its tensors.

    Args:
        checkpoint: The checkpoint.
        source: The file or folder that an error names.
        missing: The tensors that the model needs and that are not there.
        others: The tensors that are there and have no place in the model.
    """
    lm_head = name_in(checkpoint.layout, "output.weight")
    heads = [name for name in others if not name.endswith(_COMPUTED) and name != lm_head]
    is_headless = missing == [lm_head] or not checkpoint.pooling.has_lm_head
    if checkpoint.layout == "hf" and is_headless and heads:
        raise ValueError(
            f"{source}: {brief(heads[0])} belongs to a head of "
            f"{checkpoint.pooling.architecture or 'this model'} that this runtime does not know: "
            f"it runs {lm_head}, and {HEAD} of sequence classification"
        )


def _check_tensor(name: str, tensor: MappedTensor, expected: Size | None, rule: str) -> None:
    """Raise ValueError unless a tensor has the expected shape and a type that is read.

    Args:
        name: Its name in the file.
        tensor: The tensor.
        expected: The shape; None if there should be no such tensor.
        rule: What the shape follows from.
    """
    if expected is None:
        is_lm_head = name in ("output.weight", name_in("hf", "output.weight"))
        remedy = "they do not fit together"
        if is_lm_head:
            remedy = "say there that the output is not tied"
        raise ValueError(
            f"{tensor.file}: {brief(name)} has no place in the model that {rule} describe: {remedy}"
        )
    dtype = tensor.data.dtype
    is_plain = dtype.is_floating_point and dtype.itemsize > 1
    if not is_plain and (tensor.quantized is None or len(tensor.shape) != 2):
        raise ValueError(
            f"{tensor.file}: {name} has type {dtype}: it looks quantized, and this runtime loads "
            "float32, bfloat16 and float16 weights"
        )
    if tensor.shape != expected:
        raise ValueError(
            f"{tensor.file}: {name} has shape {brief(tuple(tensor.shape))}, but {rule} give "
            f"{tuple(expected)}: they do not belong together, or shards are missing"
        )


def _check_count(checkpoint: Checkpoint, shards: list[Shard]) -> None:
    """Raise ValueError where the embedding shows that shards are missing, or Llama 2's."""
    embedding = shards[0].get("tok_embeddings.weight")
    if embedding is None or embedding.data.dim() != 2:
        return
    vocab = checkpoint.params.vocab_size
    dim = checkpoint.params.dim
    rows, columns = embedding.data.shape
    if rows == vocab and columns < dim:
        raise ValueError(
            f"{embedding.file}: tok_embeddings.weight has shape {(rows, columns)}: it is cut along "
            "dim 1, as Llama 2's shards are; this runtime loads Llama 3 and later"
        )
    is_share = columns == dim and 0 < rows < vocab and vocab % rows == 0
    if is_share and vocab // rows != len(shards):
        raise ValueError(
            f"{embedding.file} is one of {vocab // rows} shards (by the shape of "
            f"tok_embeddings.weight), but {len(shards)} are in {checkpoint.folder}: download the "
            "rest, or move away what does not belong to the model"
        )
