"""The format of a model's dialogs: Meta's, or that of a chat template.

In: a checkpoint, its tokenizer and what the user asked for. Out: the `DialogFormat` that writes
prompts and reads answers, with the marks of the model's reasoning.
"""

from pathlib import Path

from llama.checkpoint.chat_templates import DEFAULT, find_chat_templates, read_template
from llama.checkpoint.find import Checkpoint
from llama.common.checks import path_like
from llama.prompts.call_format import check_call_parser
from llama.prompts.dialog_format import DialogFormat, MetaFormat, MissingFormat
from llama.prompts.reasoning import find_marks
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
    dialog_format = _chosen_format(checkpoint, tokenizer, chat_template, tool_call_parser)
    template = dialog_format.jinja_template()
    dialog_format.reasoning = find_marks(tokenizer, template, reasoning_parser)
    return dialog_format


def _chosen_format(
    checkpoint: Checkpoint, tokenizer: Tokenizer, chat_template: str | None, tool_call_parser: str
) -> DialogFormat:
    """Return Meta's format, that of a template, or the one of a model without a template."""
    check_call_parser(tool_call_parser)
    rope_factor = checkpoint.params.rope_factor
    tool_format = tool_format_of(rope_factor, is_guard=checkpoint.is_guard)
    meta = MetaFormat(tokenizer, tool_format)
    if chat_template == _META_TEMPLATE:
        return meta
    if chat_template is not None:
        templates = {DEFAULT: _given_template(chat_template)}
    else:
        templates = find_chat_templates(checkpoint)
    # Further templates alone, such as the one for tools, leave chats without a template.
    if DEFAULT in templates:
        # Jinja takes a fiftieth of the time that a command needs to start; Meta's files need none.
        from llama.prompts.template_format import choose_format

        return choose_format(templates, meta, tool_call_parser)
    # Meta's own files hold no templates, and those of its layout that a conversion wrote do.
    is_base = checkpoint.source_layout in ("hf", "gguf") and not checkpoint.is_guard
    return MissingFormat(tokenizer) if is_base else meta


def _given_template(chat_template: str) -> str:
    """Return the text of the template that `Llama.build` was given."""
    path = Path(path_like("chat_template", chat_template))
    if not path.is_file():
        raise FileNotFoundError(
            f"chat_template={shown(path)} is no file: give the path of a Jinja template, or "
            f"{_META_TEMPLATE} for Meta's format"
        )
    return read_template(path)
