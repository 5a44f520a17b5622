"""The tokenizer of a checkpoint.

In: the path of a tokenizer and the sizes of its model. Out: the Tokenizer, if they belong together.
"""

import os

from llama.model.args import ModelArgs
from llama.tokenizer import Tokenizer


def load_tokenizer(path: str | os.PathLike[str], params: ModelArgs) -> Tokenizer:
    """Load the tokenizer of a model, with the special tokens of the model's release.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is not a Llama 3 tokenizer, or has another vocabulary than the model.
    """
    # Only the rotary embedding tells 3.0 from later releases: their tokenizer files are equal.
    tokenizer = Tokenizer(path, llama_3_0=not params.use_scaled_rope)
    if tokenizer.n_words != params.vocab_size:
        raise ValueError(
            f"{os.fspath(path)} has {tokenizer.n_words} tokens, but the model has vocab_size="
            f"{params.vocab_size}: they do not belong together"
        )
    return tokenizer
