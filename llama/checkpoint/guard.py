"""Is a checkpoint Llama Guard? In: its folder. Out: yes or no.

Llama Guard 3 has the sizes, the tensors and the tokenizer of the Llama that it was made from, and
was trained to judge dialogs, not to call tools. Only what lies beside the weights tells it: the
chat template, which holds its task, and the names that downloads have. Nothing here is an error: a
file that cannot be read tells nothing.
"""

import json
import re
from pathlib import Path

_NAME = re.compile(r"llama[-_ ]?guard", re.IGNORECASE)
_TASK = b"<BEGIN UNSAFE CONTENT CATEGORIES>"  # of the prompt that Llama Guard 1 to 3 expect
_TEMPLATES = ("tokenizer_config.json", "chat_template.jinja", "chat_template.json")
_MAX_BYTES = 4 * 2**20  # of a file that is looked at


def is_guard(folder: Path) -> bool:
    """folder: where the weights lie; Meta's files may be in a folder original/ of the model's."""
    folder = folder.absolute()
    model = folder.parent if folder.name == "original" else folder
    if any(_TASK in _content(model / name) for name in _TEMPLATES):
        return True
    # Hugging Face's cache has models--meta-llama--Llama-Guard-3-8B/snapshots/HASH.
    named = model.parent.parent if model.parent.name == "snapshots" else model
    return any(_NAME.search(name) for name in (named.name, _made_from(model / "config.json")))


def _made_from(config: Path) -> str:
    """The name that transformers wrote when it saved the model; "" if none."""
    try:
        name = json.loads(_content(config))["_name_or_path"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return ""
    return name if isinstance(name, str) else ""


def _content(path: Path) -> bytes:
    try:
        if not path.is_file():  # a pipe would be waited for
            return b""
        with path.open("rb") as file:
            return file.read(_MAX_BYTES)
    except OSError:
        return b""
