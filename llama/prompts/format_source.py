"""The source of the format of a model's dialogs, as data that another process can be sent.

In: the templates that a model's files hold, and the names that a user gave. Out: the
`DialogFormat`, the same one wherever it is made.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from llama.prompts.dialog_format import DialogFormat, MetaFormat, MissingFormat
from llama.prompts.reasoning import find_marks
from llama.prompts.tools import ToolFormat
from llama.tokenizer import Tokenizer


@dataclass(frozen=True)
class FormatSource:
    """The source of a dialog format.

    Attributes:
        tool_format: Meta's format of tool calls for the model's generation.
        templates: The Jinja templates by name; empty for Meta's format.
        is_missing: Whether the model has no format of dialogs.
        tool_call_parser: The argument of `Llama.build`.
        reasoning_parser: The argument of `Llama.build`.
    """

    tool_format: ToolFormat
    templates: Mapping[str, str] = field(default_factory=dict)
    is_missing: bool = False
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"

    def make(self, tokenizer: Tokenizer) -> DialogFormat:
        """Return the format, with the marks of the model's reasoning.

        Args:
            tokenizer: The tokenizer of the model, which gets the stop tokens of the format.

        Raises:
            ValueError: A template cannot be used.
        """
        dialog_format = self._chosen(tokenizer)
        template = dialog_format.jinja_template()
        dialog_format.reasoning = find_marks(tokenizer, template, self.reasoning_parser)
        dialog_format.source = self
        return dialog_format

    def _chosen(self, tokenizer: Tokenizer) -> DialogFormat:
        if self.is_missing:
            return MissingFormat(tokenizer)
        meta = MetaFormat(tokenizer, self.tool_format)
        if not self.templates:
            return meta
        # Jinja takes a fiftieth of the time that a command needs to start; Meta's files need none.
        from llama.prompts.template_format import choose_format

        return choose_format(self.templates, meta, self.tool_call_parser)
