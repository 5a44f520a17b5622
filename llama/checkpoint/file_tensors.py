"""A tensor as the files of a layout hold it: its name, and its elements, for files to be written.

In: Meta's name of a tensor, its elements in the order of a layout, and the sizes of the model. Out:
the name in the files, and the elements in their shape. Only the parts of a model that read images
have another shape in one layout than in another.
"""

from torch import Tensor

from llama.checkpoint import vision
from llama.checkpoint.hf import vision as hf
from llama.checkpoint.table import name_in
from llama.model.args import ModelArgs
from llama.ranks.placement import Placement
from llama.vision.tensors import IMAGE_ROWS

_EMBEDDING = "tok_embeddings.weight"
_INNER = "model."  # absent from the names of a model without lm_head, as LLM2Vec has it


def title_of(layout: str, name: str, params: ModelArgs) -> str:
    """Return the name of a tensor in the files of a layout, "meta" or "hf"."""
    if params.vision is None:
        return name_in(layout, name)
    if layout == "hf":
        return hf.file_name(name, params)
    return vision.file_name(name)


def titles_of_modules(name: str, params: ModelArgs) -> list[str]:
    """Return the names of the module that has a weight, in transformers' models of any version.

    Args:
        name: Meta's name of the weight.
        params: The sizes of the model.
    """
    title = title_of("hf", name, params).removesuffix(".weight")
    if params.vision is None:
        return [title, title.removeprefix(_INNER)]
    return [title, hf.newer_name(title)]


def appended_to(layout: str, name: str, params: ModelArgs) -> str | None:
    """Return the tensor whose rows follow those of another in the same tensor of the files.

    Hugging Face's embedding has the rows of further ids after those of the vocabulary.
    """
    has_rows = layout == "hf" and params.vision is not None
    return IMAGE_ROWS if has_rows and name == _EMBEDDING else None


def is_appended(layout: str, name: str) -> bool:
    """Return whether a tensor is in the files as rows of another one alone."""
    return layout == "hf" and name == IMAGE_ROWS


def as_stored(
    layout: str, name: str, plain: Tensor, params: ModelArgs, placement: Placement
) -> Tensor:
    """Return the elements of a tensor in the shape that they have in a file.

    Args:
        layout: The layout of the file.
        name: Meta's name of the tensor.
        plain: What the rank holds of it.
        params: The sizes of the model.
        placement: The rank whose share the file has.
    """
    if params.vision is None:
        return plain
    if layout == "hf":
        return hf.file_tensor(name, plain, params.vision)
    return vision.shard_of(name, plain, placement)
