"""How a checkpoint's files say that answers are drawn where a request does not.

In: a checkpoint. Out: the sampling parameters of its generation_config.json or of the metadata of
its GGUF file. Meta's own layout has neither.
"""

from typing import Any

from llama.checkpoint.find import Checkpoint
from llama.storage.downloads import read_json

GENERATION_FILE = "generation_config.json"
# By the key of generation_config.json: the key of a GGUF file, after "general.sampling.".
SAMPLING_KEYS = {
    "temperature": "temp",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "penalty_repeat",
}


def generation_content(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the content of generation_config.json; nothing where there is no such file."""
    path = checkpoint.model_folder / GENERATION_FILE
    return read_json(path) if path.is_file() else {}


def sampling_defaults(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return how answers are drawn by default, as generation_config.json spells it.

    The result is empty where answers are not drawn, but are the most likely ones.

    Raises:
        ValueError: A value is no number; the error names the file.
    """
    if checkpoint.header is None:
        source = checkpoint.model_folder / GENERATION_FILE
        settings = generation_content(checkpoint)
        if settings.get("do_sample") is False:
            return {}
    else:
        source = checkpoint.weights_path
        metadata = checkpoint.header.metadata
        keys = {key: f"general.sampling.{SAMPLING_KEYS[key]}" for key in SAMPLING_KEYS}
        settings = {key: metadata.get(gguf_key) for key, gguf_key in keys.items()}
    sampling: dict[str, Any] = {}
    for key in SAMPLING_KEYS:
        value = settings.get(key)
        if value is None:
            continue
        allowed = int if key == "top_k" else int | float
        if isinstance(value, bool) or not isinstance(value, allowed):
            raise ValueError(f"{source}: {key}={value!r} must be a number")
        # GGUF has 0.6 rounded to float32.
        sampling[key] = value if key == "top_k" else float(f"{value:.6g}")
    return sampling
