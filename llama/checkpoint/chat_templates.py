"""The chat templates that a checkpoint's files hold, as text.

In: a checkpoint. Out: the Jinja source of each template by its name. No template is compiled here,
and what a template renders is not known.
"""

from pathlib import Path

from llama.checkpoint.find import Checkpoint
from llama.common.checks import brief
from llama.storage.downloads import read_json
from llama.storage.gguf import Header

DEFAULT = "default"  # the name of the only template, or of the one for dialogs without tools
TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"  # its NAME.jinja are further templates
GGUF_KEY = "tokenizer.chat_template"  # further templates are at tokenizer.chat_template.NAME
_JSON_FILES = ("chat_template.json", "tokenizer_config.json")
_MAX_BYTES = 1 << 20  # limit for the file of one template; the longest published one has 17 kB
_NO_TEMPLATE = "it is no chat template; give --chat_template FILE"


def find_chat_templates(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the chat templates of a checkpoint by name; none if its files hold none.

    The first of these sources that holds a template is the only one that counts, as in
    transformers: chat_template.jinja with additional_chat_templates/*.jinja, chat_template.json,
    tokenizer_config.json. A GGUF file has its templates in its metadata.

    Raises:
        OSError: A file cannot be read.
        ValueError: A file is damaged, or a template is not a text; the message names the file.
    """
    if checkpoint.header is not None:
        return _templates_in_gguf(checkpoint.header)
    folder = checkpoint.model_folder
    templates = {}
    for path in template_files(folder):
        name = DEFAULT if path.name == TEMPLATE_FILE else path.stem
        templates[name] = read_template(path)
    for file_name in _JSON_FILES:
        path = folder / file_name
        if not templates and path.is_file():
            templates = _templates_in_json(path)
    return templates


def template_files(folder: Path) -> list[Path]:
    """Return the files of a folder that are chat templates as a whole."""
    further = sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))
    return [path for path in (folder / TEMPLATE_FILE, *further) if path.is_file()]


def _templates_in_json(path: Path) -> dict[str, str]:
    """Return what a JSON file has as chat_template: a text, or a list of named texts."""
    value = read_json(path).get("chat_template")
    if value is None:
        return {}
    if isinstance(value, str):
        value = [{"name": DEFAULT, "template": value}]
    templates = {}
    for entry in value if isinstance(value, list) else [value]:
        try:
            name = entry["name"]
            template = entry["template"]
        except (TypeError, LookupError):
            name = template = None
        if not isinstance(name, str) or not isinstance(template, str):
            raise ValueError(
                f"{path}: chat_template must be a text, or a list of objects with name and "
                f"template, not {brief(value)}: give --chat_template FILE"
            )
        templates[name] = template
    return templates


def _templates_in_gguf(header: Header) -> dict[str, str]:
    templates = {}
    for key, value in header.metadata.items():
        base, _, name = key.partition(f"{GGUF_KEY}.")
        if key != GGUF_KEY and (base or not name):
            continue
        if not isinstance(value, str):
            raise ValueError(f"{header.file}: {key} must be a text, not {brief(value)}")
        templates[name or DEFAULT] = value
    return templates


def read_template(path: Path) -> str:
    """Return the text of a template's file, which unlike other files may begin as a web page.

    Raises:
        OSError: The file cannot be read.
        ValueError: It is too large, or not UTF-8.
    """
    if path.stat().st_size > _MAX_BYTES:
        raise ValueError(f"{path} is larger than {_MAX_BYTES:,} bytes: {_NO_TEMPLATE}")
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as e:
        raise ValueError(f"{path} is not UTF-8 at byte {e.start + 1}: {_NO_TEMPLATE}") from e
