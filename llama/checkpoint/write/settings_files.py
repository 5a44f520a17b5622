"""Settings in the files of a checkpoint, alongside weights, sizes and vocabulary, for conversions.

In: a checkpoint. Out: files with the same content for a new folder, or the metadata of a GGUF file:
chat templates, settings of generation, settings of a tokenizer.json, further keys of config.json;
and the keys that a target has no place for. What they mean is not known here.
"""

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from llama.checkpoint.chat_templates import (
    DEFAULT,
    GGUF_KEY,
    TEMPLATE_FILE,
    TEMPLATE_FOLDER,
    find_chat_templates,
    template_files,
)
from llama.checkpoint.find import Checkpoint
from llama.checkpoint.generation_config import (
    GENERATION_FILE,
    SAMPLING_KEYS,
    generation_content,
    sampling_defaults,
)
from llama.storage.downloads import read_json, shown

FileContent = Path | str | dict[str, Any]  # a file to copy, a text, or the content of a JSON file

PROCESSOR_FILE = "preprocessor_config.json"  # how images are read
# Files that belong to a tokenizer.json, or hold a chat template alongside it.
_TOKENIZER_SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "chat_template.json")
# Keys of config.json that a conversion replaces. The code that auto_map names is not copied.
_REPLACED = {"quantization_config", "dtype", "rope_parameters", "auto_map"}
_ID_KEYS = ("bos_token_id", "eos_token_id", "pad_token_id")
# Keys that only record which program wrote the file and for which class.
_RECORDS = {
    "architectures",
    "do_sample",
    "model_type",
    "transformers_version",
    "use_cache",
    "_from_model_config",
    "_name_or_path",
}
# Metadata of a GGUF file that describes the file, not the model.
_GGUF_RECORDS = {
    f"general.{name}"
    for name in ("alignment", "architecture", "file_type", "quantization_version", "type")
}
_MAX_NAMED = 8  # keys that one message names


def settings_files(
    checkpoint: Checkpoint, ids: dict[str, Any], *, has_config: bool
) -> dict[str, FileContent]:
    """Return the files of a new folder that say what those of a checkpoint say.

    Args:
        checkpoint: The checkpoint.
        ids: The special ids of its tokenizer, which are written where only GGUF has them.
        has_config: Whether the new folder has a config.json, which holds special ids as well.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is damaged; the message names it.
    """
    templates = find_chat_templates(checkpoint)
    files: dict[str, FileContent] = {}
    if _keeps_tokenizer_json(checkpoint):
        folder = checkpoint.model_folder
        paths = [folder / name for name in _TOKENIZER_SETTINGS if (folder / name).is_file()]
        for path in paths + template_files(folder):
            files[str(path.relative_to(folder))] = path
    else:
        for name, template in templates.items():
            files[_template_file(name)] = template
    processor = checkpoint.model_folder / PROCESSOR_FILE
    if checkpoint.params.vision is not None and has_config and processor.is_file():
        files[PROCESSOR_FILE] = processor
    generation = _generation_config(checkpoint, ids, has_config=has_config)
    if generation:
        files[GENERATION_FILE] = generation
    return files


def gguf_settings(checkpoint: Checkpoint) -> dict[str, Any]:
    """Return the chat templates and settings of a checkpoint as metadata of a GGUF file."""
    templates = find_chat_templates(checkpoint)
    metadata: dict[str, Any] = {}
    names = []
    for name, template in templates.items():
        if name == DEFAULT:
            metadata[GGUF_KEY] = template
        else:
            names.append(_plain(name))
            metadata[f"{GGUF_KEY}.{names[-1]}"] = template
    if names:
        metadata[f"{GGUF_KEY}s"] = names
    for key, value in sampling_defaults(checkpoint).items():
        metadata[f"general.sampling.{SAMPLING_KEYS[key]}"] = value
    return metadata


def further_config(checkpoint: Checkpoint, config: dict[str, Any]) -> dict[str, Any]:
    """Return the keys of a checkpoint's config.json that a new config.json keeps.

    Args:
        checkpoint: The checkpoint.
        config: The new config.json, whose sizes and dtype stay; the special ids do not.
    """
    if checkpoint.layout != "hf":
        return {}
    source = read_json(checkpoint.params_path)
    if source["model_type"] != config.get("model_type", source["model_type"]):
        return {}  # The text model of another family has keys of that family.
    kept = {}
    for key, value in source.items():
        if key in _ID_KEYS or (key not in config and key not in _REPLACED):
            kept[key] = value
    return kept


def left_out(checkpoint: Checkpoint, target: str, config: Collection[str] = ()) -> list[str]:
    """Return a line for each file that holds keys for which a conversion has no place.

    Args:
        checkpoint: The checkpoint.
        target: "hf", "meta", "gguf" or "packed".
        config: The keys of config.json that the target's sizes express.
    """
    lost: dict[str, list[str]] = {}
    if checkpoint.header is not None:
        kept = _GGUF_RECORDS | {f"general.sampling.{key}" for key in SAMPLING_KEYS.values()}
        general = [key for key in checkpoint.header.metadata if key.startswith("general.")]
        lost[checkpoint.header.file.name] = [key for key in general if key not in kept]
    if checkpoint.layout == "hf":
        kept = _RECORDS | _REPLACED - {"auto_map"}
        if target == "hf":
            kept |= further_config(checkpoint, {}).keys()
        else:
            kept |= {*config, *_ID_KEYS}
        lost["config.json"] = [x for x in read_json(checkpoint.params_path) if x not in kept]
    if target == "gguf":
        kept = _RECORDS | {*_ID_KEYS, *sampling_defaults(checkpoint)}
        lost[GENERATION_FILE] = [key for key in generation_content(checkpoint) if key not in kept]
    lines = []
    for name, keys in lost.items():
        if keys:
            more = f" and {len(keys) - _MAX_NAMED} more" if keys[_MAX_NAMED:] else ""
            listed = ", ".join(map(shown, keys[:_MAX_NAMED])) + more
            lines.append(
                f"{name}: keys left out, as the new files have no place for them: {listed}"
            )
    return lines


def _keeps_tokenizer_json(checkpoint: Checkpoint) -> bool:
    """Return whether the checkpoint's tokenizer.json, if it has one, is copied as it is."""
    if checkpoint.header is not None:
        return False
    try:
        return checkpoint.tokenizer_path().name == "tokenizer.json"
    except FileNotFoundError:
        return True


def _template_file(name: str) -> str:
    return TEMPLATE_FILE if name == DEFAULT else f"{TEMPLATE_FOLDER}/{_plain(name)}.jinja"


def _plain(name: str) -> str:
    """Return the name of a template as a part of a path or a key, as gguf-py spells it."""
    return re.sub(r"[^0-9A-Za-z]", "_", name)


def _generation_config(
    checkpoint: Checkpoint, ids: dict[str, Any], *, has_config: bool
) -> FileContent | None:
    """Return the generation_config.json of a new folder; None if there is nothing to write."""
    if checkpoint.header is not None:
        settings = sampling_defaults(checkpoint)
        return ids | settings | ({"do_sample": True} if settings else {})
    settings = generation_content(checkpoint)
    if checkpoint.layout == "hf" and not has_config:
        config = read_json(checkpoint.params_path)
        stops = _ids(settings.get("eos_token_id"))
        further = _ids(config.get("eos_token_id")) - stops
        if further:
            of_config = {key: config[key] for key in _ID_KEYS if config.get(key) is not None}
            return of_config | settings | {"eos_token_id": sorted(stops | further)}
    return checkpoint.model_folder / GENERATION_FILE if settings else None


def _ids(value: object) -> set[int]:
    """Return the ids that a key holds, which may be one or a list."""
    return {x for x in (value if isinstance(value, list) else [value]) if isinstance(x, int)}
