"""How a model writes dialogs: the interface of all formats, and Meta's own formats.

In: messages and tools in OpenAI's format. Out: the token ids of a prompt, and what is needed to
constrain and to read the answer. Nothing here reads files or knows an engine.
"""

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from llama.common.checks import FieldError
from llama.prompts.grammar import call_grammar
from llama.prompts.messages import ChatMessage
from llama.prompts.parser import ToolCallParser
from llama.prompts.reasoning import ReasoningMarks
from llama.prompts.template import encode_chat, jinja_template
from llama.prompts.tools import ToolFormat, Tools
from llama.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]] | Sequence[ChatMessage]
ToolList = Tools | Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class PromptOptions:
    """How the prompt of a dialog ends, the variables of its template, and whether it reasons.

    Attributes:
        add_generation_prompt: end with the header of the assistant's answer.
        continue_final_message: leave the last message open instead.
        keeps_space: keep the white space at the end of a message that is left open.
        template_kwargs: variables of the chat template, `chat_template_kwargs` in a request.
        enable_thinking: whether the answer may begin with reasoning; None leaves it to the model.
            A template that has a variable of this name gets it.
        reasoning_effort: how much to reason, for a template that has a variable of this name.
        thinking_budget: maximum number of tokens of the reasoning; None has no limit.
    """

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    keeps_space: bool = False
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    enable_thinking: bool | None = None
    reasoning_effort: str | None = None
    thinking_budget: int | None = None

    @classmethod
    def for_answer(cls, *, continues: bool, **others: Any) -> "PromptOptions":
        """Return the options of a request whose last message is continued, or answered."""
        return cls(
            add_generation_prompt=not continues,
            continue_final_message=continues,
            keeps_space=True,
            **others,
        )


_DEFAULT_OPTIONS = PromptOptions()


class DialogFormat(ABC):
    """The format in which one model reads dialogs and writes answers.

    Attributes:
        tokenizer: the tokenizer of the model.
        stop_strings: texts that end the answer of a chat, where the end of a turn is no token.
        reasoning: the marks of the reasoning that answers begin with; None for a model without it.
        is_confined: whether `encode` waits for another process, which may take seconds.
        source: the `FormatSource` that it was made of; None if it was made by itself.
    """

    stop_strings: tuple[str, ...] = ()
    is_confined: ClassVar[bool] = False
    reasoning: ReasoningMarks | None = None
    source: object = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Make the format of a model with this tokenizer."""
        self.tokenizer = tokenizer

    @property
    @abstractmethod
    def has_tools(self) -> bool:
        """Whether the format shows tools to the model."""

    @abstractmethod
    def encode(
        self,
        messages: Messages,
        tools: ToolList | None = None,
        options: PromptOptions = _DEFAULT_OPTIONS,
    ) -> list[int]:
        """Return the token ids of a dialog, with its begin-of-sequence token if it has one.

        No text of a message, a tool or an argument becomes a special token.

        Raises:
            TypeError, ValueError: names the message or the option at fault.
        """

    @abstractmethod
    def call_grammar(self, tools: Tools) -> str:
        """Return a grammar, in llguidance's dialect of Lark, of calls of the tools.

        Unless the answer must be a call, the grammar also accepts a text that begins none.

        Raises:
            ValueError: the model cannot call tools.
        """

    @abstractmethod
    def call_parser(self, tools: Tools, *, is_tagged: bool = False) -> ToolCallParser:
        """Return a parser of the calls in one answer.

        Args:
            tools: the tools of the request.
            is_tagged: the answer began with the token <|python_tag|>, which its text lacks.
        """

    @abstractmethod
    def jinja_template(self) -> str:
        """Return a Jinja template of the same prompts, for other programs."""

    @abstractmethod
    def describe(self) -> str:
        """Return one line that says which format this is, for people."""

    def describe_reasoning(self) -> str:
        """Return the end of the line of `describe` for a model that reasons, else an empty text."""
        return "" if self.reasoning is None else f"; {self.reasoning.describe()}"

    def with_tool_format(self, tool_format: ToolFormat) -> "DialogFormat":
        """Return Meta's format with another format of calls.

        Raises:
            ValueError: this is the chat template of a fine-tune, which has its own format of calls.
        """
        raise ValueError(
            f"--tool_format {tool_format.value} chooses among Meta's formats, and this model's "
            "files have a chat template of their own: leave it out, or give --chat_template llama3 "
            "to use Meta's format"
        )


class MissingFormat(DialogFormat):
    """The place of the format of a model whose files hold no chat template, as base models do.

    It refuses every dialog. Texts can be completed.
    """

    _MESSAGE: ClassVar[str] = (
        "this model's files hold no chat template, as those of base models do not: complete texts "
        "(/v1/completions, text_completion); or, if it was trained on chats, give --chat_template "
        "FILE, or --chat_template llama3 for Meta's format"
    )

    @property
    def has_tools(self) -> bool:
        """False: there are no chats that could have tools."""
        return False

    def encode(
        self,
        messages: Messages,
        tools: ToolList | None = None,
        options: PromptOptions = _DEFAULT_OPTIONS,
    ) -> list[int]:
        """Raise a ValueError that says what to do."""
        raise ValueError(self._MESSAGE)

    def call_grammar(self, tools: Tools) -> str:
        """Raise a ValueError that says what to do."""
        raise ValueError(self._MESSAGE)

    def call_parser(self, tools: Tools, *, is_tagged: bool = False) -> ToolCallParser:
        """Raise a ValueError that says what to do."""
        raise ValueError(self._MESSAGE)

    def jinja_template(self) -> str:
        """Return an empty template."""
        return ""

    def describe(self) -> str:
        """Return one line that says that there is no format."""
        return "no chat template: completions only"


class MetaFormat(DialogFormat):
    """The format that Llama 3 was trained on, with the tool calls of one generation.

    Attributes:
        tool_format: the format of tools and calls.
    """

    _VARIABLES: ClassVar[frozenset[str]] = frozenset({"date_string"})

    def __init__(
        self, tokenizer: Tokenizer, tool_format: ToolFormat = ToolFormat.LLAMA_3_1
    ) -> None:
        """Make the format of a generation; see `tool_format_of`."""
        super().__init__(tokenizer)
        self.tool_format = tool_format

    @property
    def has_tools(self) -> bool:
        """Whether the generation was trained with tools."""
        return self.tool_format is not ToolFormat.NONE

    def encode(
        self,
        messages: Messages,
        tools: ToolList | None = None,
        options: PromptOptions = _DEFAULT_OPTIONS,
    ) -> list[int]:
        """Return the token ids of a dialog; see `encode_chat`."""
        variables = {}
        if options.template_kwargs:
            variables = self._variables(options.template_kwargs)
        return encode_chat(
            self.tokenizer,
            messages,
            tools,
            tool_format=self.tool_format,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            keeps_space=options.keeps_space,
            **variables,
        )

    def _variables(self, given: Mapping[str, Any]) -> dict[str, str]:
        """Return the arguments of `encode_chat` that variables of Meta's template stand for."""
        unknown = [name for name in given if name not in self._VARIABLES]
        if unknown:
            raise FieldError(
                "chat_template_kwargs",
                f"chat_template_kwargs: this model's chat template has no variable {unknown[0]!r}",
            )
        date = given["date_string"]
        if not isinstance(date, str):
            text = "chat_template_kwargs.date_string must be a text"
            raise FieldError("chat_template_kwargs", text)
        return {"date": date}

    def call_grammar(self, tools: Tools) -> str:
        """Return a grammar of calls; see `llama.prompts.grammar.call_grammar`."""
        return call_grammar(tools, self.tool_format)

    def call_parser(self, tools: Tools, *, is_tagged: bool = False) -> ToolCallParser:
        """Return a parser that understands the notations of all generations."""
        return ToolCallParser(tools, is_tagged=is_tagged)

    def jinja_template(self) -> str:
        """Return the template that converted folders get."""
        return jinja_template(self.tool_format)

    def describe(self) -> str:
        """Return one line that says which format this is."""
        tools = f"tool calls as in {self.tool_format.value}" if self.has_tools else "no tools"
        return f"Meta's chat format, {tools}{self.describe_reasoning()}"

    def with_tool_format(self, tool_format: ToolFormat) -> "MetaFormat":
        """Return Meta's format with another format of calls."""
        twin = copy.copy(self)
        twin.tool_format = tool_format
        return twin
