"""The format of a model's dialogs: Meta's, or that of a chat template.

In: a checkpoint, its tokenizer and what the user asked for. Out: the `DialogFormat` that writes
prompts and reads answers, with the marks of the model's reasoning.
"""

from dataclasses import replace
from pathlib import Path

from llama.checkpoint.chat_templates import DEFAULT, find_chat_templates, read_template
from llama.checkpoint.find import Checkpoint
from llama.common.checks import path_like
from llama.prompts.call_format import check_call_parser
from llama.prompts.dialog_format import DialogFormat
from llama.prompts.format_source import FormatSource
from llama.prompts.tools import tool_format_of
from llama.storage.downloads import shown
from llama.tokenizer import Tokenizer

_META_TEMPLATE = "llama3"  # the value of chat_template that means Meta's format


def find_dialog_format(
    checkpoint: Checkpoint,
    tokenizer: Tokenizer,
    *,
    chat_template: str | None = None,
    reasoning_parser: str = "auto",
    tool_call_parser: str = "auto",
) -> DialogFormat:
    """Return the format of the dialogs of a checkpoint, with the marks of its reasoning.

    Args:
        checkpoint: The model.
        tokenizer: Its tokenizer, which gets the stop tokens of the format.
        chat_template: The argument of `Llama.build`.
        reasoning_parser: The argument of `Llama.build`.
        tool_call_parser: The argument of `Llama.build`.

    Raises:
        OSError: The file of the template cannot be read.
        ValueError: A chat template cannot be used.
    """
    rope_factor = checkpoint.params.rope_factor
    source = FormatSource(
        tool_format_of(rope_factor, is_guard=checkpoint.is_guard),
        tool_call_parser=tool_call_parser,
        reasoning_parser=reasoning_parser,
    )
    check_call_parser(tool_call_parser)
    if chat_template == _META_TEMPLATE:
        return source.make(tokenizer)
    if chat_template is not None:
        templates = {DEFAULT: _given_template(chat_template)}
    else:
        templates = find_chat_templates(checkpoint)
    # Further templates alone, such as the one for tools, leave chats without a template.
    if DEFAULT in templates:
        return replace(source, templates=templates).make(tokenizer)
    # Meta's own files hold no templates, and those of its layout that a conversion wrote do.
    is_base = checkpoint.source_layout in ("hf", "gguf") and not checkpoint.is_guard
    return replace(source, is_missing=is_base).make(tokenizer)


def _given_template(chat_template: str) -> str:
    """Return the text of the template that `Llama.build` was given."""
    path = Path(path_like("chat_template", chat_template))
    if not path.is_file():
        raise FileNotFoundError(
            f"chat_template={shown(path)} is no file: give the path of a Jinja template, or "
            f"{_META_TEMPLATE} for Meta's format"
        )
    return read_template(path)
