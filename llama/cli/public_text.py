"""The file of `llama serve --shared_prefix`, which is checked before a model is loaded."""

import argparse
from pathlib import Path

from llama.cli.flags import UsageError
from llama.cli.model import demo_dir, quick_imports


def read_public_text(options: argparse.Namespace) -> str:
    """Return the text whose pages all tenants share; empty for none.

    Raises:
        UsageError: The file cannot be read, has no text, or does not fit the context.
    """
    path = options.shared_prefix
    if path is None:
        return ""
    try:
        text = Path(path).read_text(encoding="utf-8").rstrip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no text in UTF-8"
        raise UsageError(f"--shared_prefix {path}: {reason}") from None
    if not text:
        raise UsageError(f"--shared_prefix {path} is empty: write the system prompt into it")
    with quick_imports():
        from llama.api import find, load_tokenizer
    checkpoint = find(options.ckpt_dir or demo_dir())
    tokenizer = load_tokenizer(checkpoint, options.tokenizer_path)
    num_tokens = len(tokenizer.encode(text, bos=True, eos=False))
    context = options.max_seq_len or checkpoint.params.longest_context
    if num_tokens >= context:
        raise UsageError(
            f"--shared_prefix {path} has {num_tokens:,} tokens, and the context {context:,}: no "
            "prompt could begin with it"
        )
    return text
