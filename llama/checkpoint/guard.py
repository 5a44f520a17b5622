"""Whether a model is Llama Guard, by the names and the chat templates alongside its weights.

In: the folder of a model, or the header of a GGUF file. Out: yes or no. Sizes, tensors and
tokenizer are those of a Llama.
"""

import re
from pathlib import Path

from llama.storage import gguf

# Llama Guard is recognised by the name of its folder; or, in a file alongside the weights, by the
# name of the model that was saved or by the task in a chat template of Llama Guard 1 to 3.
_GUARD_FOLDER = re.compile(r"llama[-_ ]?guard", re.IGNORECASE)
_GUARD_FILE = re.compile(
    rb'<BEGIN UNSAFE CONTENT CATEGORIES>|"_name_or_path"\s*:\s*"[^"]*llama[-_ ]?guard',
    re.IGNORECASE,
)
_GUARD_FILE_NAMES = (
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "config.json",
)
_MAX_GUARD_BYTES = 4 << 20  # bytes of one of these files that are searched


def is_in_folder(model: Path) -> bool:
    """Return whether a folder holds Llama Guard."""
    # Hugging Face's cache has models--meta-llama--Llama-Guard-3-8B/snapshots/HASH.
    named = model.parent.parent if model.parent.name == "snapshots" else model
    if _GUARD_FOLDER.search(named.name):
        return True
    return any(_GUARD_FILE.search(_beginning(model / name)) for name in _GUARD_FILE_NAMES)


def is_in_gguf(header: gguf.Header) -> bool:
    """Return whether a GGUF file holds Llama Guard."""
    template = str(header.metadata.get("tokenizer.chat_template")).encode()
    return bool(_GUARD_FILE.search(template) or _GUARD_FOLDER.search(header.file.name))


def _beginning(path: Path) -> bytes:
    """Read the first bytes of a file; none if it is not a regular file or cannot be read."""
    try:
        if not path.is_file():  # reading a pipe could block forever
            return b""
        with path.open("rb") as file:
            return file.read(_MAX_GUARD_BYTES)
    except OSError:
        return b""
