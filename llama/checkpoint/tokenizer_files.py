"""The tokenizer of a checkpoint.

In: a checkpoint, and the path of a tokenizer if it is another one. Out: the Tokenizer, if they
belong together, and the file that Meta's layout has of it.
"""

import os
from pathlib import Path

from llama.checkpoint.find import Checkpoint
from llama.common.checks import path_like
from llama.storage.gguf import Header
from llama.tokenizer import Tokenizer

_RESERVED = "<|reserved_special_token_"


def load_tokenizer(checkpoint: Checkpoint, path: str | os.PathLike[str] | None = None) -> Tokenizer:
    """Load the tokenizer of a model, with the special tokens and the rows of the model.

    Args:
        checkpoint: The model.
        path: The tokenizer; None for the one in the model's files.

    Raises:
        OSError: A file cannot be read.
        ValueError: It is not a Llama 3 tokenizer, or has another vocabulary than the model.
    """
    given: str | os.PathLike[str] | Header
    if path:
        given = path_like("tokenizer_path", path)
    else:
        given = checkpoint.tokenizer_path()
        if checkpoint.header is not None and given == checkpoint.header.file:
            given = checkpoint.header
    has_config = checkpoint.layout in ("hf", "packed")
    tokenizer = Tokenizer(
        given,
        # Only the rotary embedding tells 3.0 from later releases: their tokenizer files are equal.
        llama_3_0=not checkpoint.params.use_scaled_rope,
        vocab_size=checkpoint.params.vocab_size,
        config_folder=checkpoint.model_folder if has_config else None,
    )
    if checkpoint.params.vision is not None:
        tokenizer.image_id = checkpoint.params.vocab_size
    return tokenizer


def tokenizer_for_meta(checkpoint: Checkpoint) -> Path:
    """Return the file that Meta's layout has as the tokenizer of a Hugging Face folder.

    It is a tokenizer.model if there is one with the same tokens, as in Meta's own releases: it
    names none, so that a model with other special tokens keeps its tokenizer.json.

    Raises:
        OSError: There is no tokenizer, or a file cannot be read.
        ValueError: The tokenizer is not one of Llama 3, or belongs to another model.
    """
    for folder in (checkpoint.folder, checkpoint.folder / "original"):
        candidate = folder / "tokenizer.model"
        if candidate.is_file() and _has_tokens(candidate, checkpoint):
            return candidate
    return checkpoint.tokenizer_path()


def _has_tokens(path: Path, checkpoint: Checkpoint) -> bool:
    """Return whether a tokenizer.model has the tokens of a checkpoint, but for reserved ones."""
    tokenizer = load_tokenizer(checkpoint)
    try:
        metas = Tokenizer(path, llama_3_0=not checkpoint.params.use_scaled_rope)
    except ValueError:  # such as the SentencePiece model of another family
        return False
    named = {x: i for x, i in tokenizer.special_tokens.items() if not x.startswith(_RESERVED)}
    return (
        metas.n_words == tokenizer.n_words
        and named.items() <= metas.special_tokens.items()
        and metas.model.token_byte_values() == tokenizer.model.token_byte_values()
    )
