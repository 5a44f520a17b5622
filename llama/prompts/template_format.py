"""The chat template of a model's files as a `DialogFormat`.

In: messages and tools in OpenAI's format. Out: the token ids that transformers' apply_chat_template
has for them, except that no text of a message, a tool or an argument becomes a special token. What
the template expects and what it writes is found by rendering short dialogs when it is loaded. The
file has over 400 lines because the class is one format, whose parts share what was found.
"""

import json
from collections.abc import Collection, Mapping
from typing import Any

from llama.common.checks import FieldError, brief
from llama.prompts.call_format import (
    KNOWN_FORMATS,
    CallFormat,
    check_call_parser,
    find_call_format,
)
from llama.prompts.call_format_parser import CallFormatParser
from llama.prompts.dialog_format import (
    DialogFormat,
    Messages,
    MetaFormat,
    PromptOptions,
    ToolList,
)
from llama.prompts.grammar import call_grammar
from llama.prompts.jinja.chat_template import ChatTemplate, TemplateError
from llama.prompts.jinja.marked import MarkedEncoder, MarkedText, concatenate, trusted
from llama.prompts.messages import (
    AssistantMessage,
    ChatMessage,
    ImagePart,
    ToolCall,
    ToolMessage,
    has_images,
    read_messages,
    text_of,
)
from llama.prompts.parser import ToolCallParser
from llama.prompts.single_calls import has_several_calls, one_call_each
from llama.prompts.template_probes import PROBE_TOOL, Traits, find_traits, writes_alike
from llama.prompts.tools import ToolFormat, Tools
from llama.tokenizer import Tokenizer

DEFAULT = "default"  # the name of a model's only template, or of the one for chats without tools
TOOL_USE = "tool_use"
_ROLES = {"developer": "system", "ipython": "tool"}  # roles that templates do not know
_OURS = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
_THINK = ("<think>", "</think>")
_BUILT_IN = "builtin_tools"  # the variable of Meta's templates for the names of built-in tools
_CUT = "\ue0c5"  # a private character after the content of a message that is left open
_DEFAULT_OPTIONS = PromptOptions()
_NO_IMAGES = ": Meta's format takes any dialog with images: build with chat_template='llama3'"


def choose_format(
    templates: Mapping[str, str], meta: MetaFormat, tool_call_parser: str = "auto"
) -> DialogFormat:
    """Return Meta's format if the templates of a model's files write it, else a `TemplateFormat`.

    The templates of Llama 3.1 to 3.3 do not, as they add dates to each prompt. The tokens that the
    template writes after an answer also end the answers of the model.

    Args:
        templates: the sources of the templates by name.
        meta: Meta's format, with the tool calls of the model's generation.
        tool_call_parser: one of `CALL_PARSERS`; with another one than "auto" the template is used
            in any case.

    Raises:
        ValueError: a template cannot be used; the message says why, and the remedy.
    """
    template_format = TemplateFormat(meta.tokenizer, templates, tool_call_parser)
    if tool_call_parser == "auto":
        for meta_format in (meta, MetaFormat(meta.tokenizer)) if meta.has_tools else (meta,):
            if writes_alike(template_format, meta_format, template_format.variables):
                return meta_format
    meta.tokenizer.add_stop_tokens(template_format.traits.stop_ids)
    return template_format


class TemplateFormat(DialogFormat):
    """The format that a chat template in Jinja describes.

    Args:
        tokenizer: the tokenizer of the model.
        templates: the sources by name: "default", and "tool_use" for chats with tools.
        tool_call_parser: the format of calls: that which the template shows ("auto"), one of
            `KNOWN_FORMATS`, that of Llama 3.2 ("pythonic"), or none at all ("none").

    Attributes:
        traits: what the template expects and writes.
        call_format: how it writes the calls of an answer; None if that is not known.

    Raises:
        ValueError: a template cannot be used; the message says why, and the remedy.
    """

    is_confined = True

    def __init__(
        self,
        tokenizer: Tokenizer,
        templates: Mapping[str, str],
        tool_call_parser: str = "auto",
    ) -> None:
        """Compile the templates and find their traits."""
        super().__init__(tokenizer)
        check_call_parser(tool_call_parser)
        if DEFAULT not in templates:
            names = ", ".join(map(brief, templates)) or "none"
            raise ValueError(f"there is no chat template named {DEFAULT!r} (found: {names})")
        self._sources = {name: templates[name] for name in (DEFAULT, TOOL_USE) if name in templates}
        self._encoder = MarkedEncoder(tokenizer)
        self._has_reasoning = all(name in tokenizer.special_tokens for name in _THINK)
        name_of = {i: name for name, i in tokenizer.special_tokens.items()}
        roles = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id, **tokenizer.roles}
        constants = {role: name_of[i] for role, i in roles.items() if i in name_of}
        self._constants = constants.keys()
        try:
            self._templates = {
                name: ChatTemplate(source, constants) for name, source in self._sources.items()
            }
            self.traits: Traits = find_traits(self.render, self._encoder, tokenizer)
        except TemplateError as e:
            remedy = "give another one: --chat_template FILE, or llama3 for Meta's format"
            raise ValueError(f"this model's chat template cannot be used: {e}: {remedy}") from e
        self.stop_strings = self.traits.stop_strings
        self._tool_call_parser = tool_call_parser
        self.call_format = KNOWN_FORMATS.get(tool_call_parser)
        if tool_call_parser == "auto":
            stop_ids = tokenizer.stop_tokens | self.traits.stop_ids
            stop_texts = [*map(name_of.__getitem__, stop_ids), *self.stop_strings]
            self.call_format = self._find_call_format(stop_texts)

    @property
    def has_tools(self) -> bool:
        """Whether the template shows tools to the model."""
        return self.traits.shows_tools

    @property
    def variables(self) -> frozenset[str]:
        """The names of the variables that the template reads from a request."""
        readable = frozenset().union(*(t.variables for t in self._templates.values()))
        return readable - _OURS - self._constants

    @property
    def _has_meta_calls(self) -> bool:
        """Whether the template shows calls as Llama 3.1 writes them."""
        is_meta = self.call_format == KNOWN_FORMATS["llama3_json"]
        return is_meta and self._tool_call_parser == "auto"

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = False,
        **variables: Any,
    ) -> MarkedText:
        """Render messages and tools as they are.

        Raises:
            TemplateError: the template refuses them, or fails.
        """
        name = TOOL_USE if tools and TOOL_USE in self._templates else DEFAULT
        given = [message | {"role": trusted(message["role"])} for message in messages]
        ours = {
            "messages": given,
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
        }
        return self._templates[name].render({**variables, **ours})

    def _render_calls(self, given: list[dict[str, Any]], *args: Any, **others: Any) -> MarkedText:
        """Render messages, with one call in each where the template refuses several in one.

        Raises:
            TemplateError: the template refuses the dialog in both ways.
        """
        try:
            return self.render(given, *args, **others)
        except TemplateError as error:
            style = self.traits.call_style
            if style is None or not has_several_calls(given):
                raise
            try:
                return self.render(one_call_each(given, style.set_no_content), *args, **others)
            except TemplateError:
                raise error from None

    def encode(
        self,
        messages: Messages,
        tools: ToolList | None = None,
        options: PromptOptions = _DEFAULT_OPTIONS,
    ) -> list[int]:
        """Return the token ids of a dialog.

        They begin with a begin-of-sequence token exactly if the template writes one.

        Raises:
            TypeError, ValueError: names the message or the option at fault.
        """
        if options.continue_final_message and options.add_generation_prompt:
            text = " needs add_generation_prompt to be false"
            raise FieldError.of("continue_final_message", text)
        dialog = read_messages(messages)
        given_tools = tools if isinstance(tools, Tools) else Tools.of(tools or ())
        shown = self._shown(given_tools)
        variables = self._variables(options)
        if given_tools.built_in:
            variables[_BUILT_IN] = list(given_tools.built_in)
        given = [self._message(message, i) for i, message in enumerate(dialog)]
        cut = ""
        if options.continue_final_message:
            cut = _open_final_message(given)
        prompted = options.add_generation_prompt
        try:
            text = self._render_calls(given, shown, add_generation_prompt=prompted, **variables)
        except TemplateError as e:
            remedy = _NO_IMAGES if any(map(_num_images, dialog)) else ""
            raise FieldError("messages", f"{e}{remedy}") from e
        if cut:
            text = _cut_at(text, cut, keeps_space=options.keeps_space)
        ids = self._encoder.encode(text)
        num_images = sum(_num_images(message) for message in dialog)
        num_written = sum(i == self.tokenizer.image_id for i in ids) if num_images else 0
        if num_images != num_written:
            problem = f"the chat template writes {num_written} of {num_images} images{_NO_IMAGES}"
            raise FieldError("messages", problem)
        return ids

    def _shown(self, tools: Tools) -> list[Mapping[str, Any]] | None:
        """Return the tools as templates expect them; raise a FieldError if they cannot be shown."""
        if not tools:
            return None
        if not self.has_tools:
            raise FieldError("tools", "tools: this model's chat template has no tools")
        if tools.built_in and not (self._has_meta_calls and _BUILT_IN in self.variables):
            text = f": {tools.built_in[0]} is a tool of Meta's format: describe it as a function"
            raise FieldError.of("tools", text)
        functions = [
            tool if "function" in tool else {"type": "function", "function": tool}
            for tool in tools.functions
        ]
        return functions or None

    def _variables(self, options: PromptOptions) -> dict[str, Any]:
        """Return the variables of a request; only scalars that the template reads are allowed.

        The switch and the effort of the reasoning are left out where the template reads neither.
        """
        field = "chat_template_kwargs"
        readable = self.variables
        for name, value in options.template_kwargs.items():
            if name not in readable:
                known = ", ".join(sorted(readable)) or "none"
                text = (
                    f": this model's chat template has no variable {name!r:.60}; it reads {known}"
                )
                raise FieldError.of(field, text)
            if value is not None and not isinstance(value, str | int | float):
                text = f".{name} must be a text, a number, true or false, not {brief(value)}"
                raise FieldError.of(field, text)
        hints = {
            "enable_thinking": options.enable_thinking,
            "thinking": options.enable_thinking,  # the name in DeepSeek's and Hermes' templates
            "reasoning_effort": options.reasoning_effort,
        }
        given = {n: value for n, value in hints.items() if value is not None and n in readable}
        return {**given, **options.template_kwargs}

    def _message(self, message: ChatMessage, index: int) -> dict[str, Any]:
        """Return a message as the template expects it."""
        given: dict[str, Any] = {"role": _ROLES.get(message.role, message.role)}
        if isinstance(message, ToolMessage):
            given["content"] = _result_text(message)
        elif isinstance(message.content, list) and has_images(message.content):
            given["content"] = [_part_of(part) for part in message.content]
        else:
            given["content"] = text_of(message.content)
        labels = ("name", "tool_call_id") if isinstance(message, ToolMessage) else ("name",)
        for label in labels:
            if getattr(message, label) is not None:
                given[label] = getattr(message, label)
        if isinstance(message, AssistantMessage):
            given["content"] = self._with_reasoning_marks(given["content"])
            if message.reasoning_text is not None:
                given["reasoning_content"] = message.reasoning_text
                given["thinking"] = message.reasoning_text  # the name that gpt-oss reads
            if message.tool_calls:
                self._add_calls(given, message.tool_calls, index)
        return given

    def _with_reasoning_marks(self, text: str) -> str:
        """Return the text of an answer, with the marks that the model wrote as tokens.

        The first <think> at the beginning and the first </think> count as the template's; all that
        a client can do with them is to end its own reasoning.
        """
        if not self._has_reasoning:
            return text
        start, end = _THINK
        begin = len(text) - len(text.lstrip())
        pieces: list[str] = []
        if text.startswith(start, begin):
            pieces += [text[:begin], trusted(start)]
            begin += len(start)
        else:
            begin = 0
        position = text.find(end, begin)
        if position >= 0:
            pieces += [text[begin:position], trusted(end)]
            begin = position + len(end)
        return concatenate([*pieces, text[begin:]])

    def _add_calls(self, given: dict[str, Any], calls: list[ToolCall], index: int) -> None:
        """Add calls to a message in the way that the template renders completely."""
        style = self.traits.call_style
        where = f"message {index}: tool_calls"
        if style is None:
            raise FieldError(
                f"messages[{index}]", f"{where}: this model's chat template has no tool calls"
            )
        if any(isinstance(call.function.arguments, str) for call in calls):
            raise FieldError(
                f"messages[{index}]",
                f"{where} have incomplete arguments, which a chat template cannot show: leave the "
                "call out",
            )
        given["tool_calls"] = [
            style.call(call.function.name, call.function.arguments, call.id) for call in calls
        ]
        if not given["content"]:
            style.set_no_content(given)

    def _find_call_format(self, stop_texts: Collection[str]) -> CallFormat | None:
        """Return how the template writes calls, with a tool or where that fails without one."""
        for tools in ([PROBE_TOOL], None):

            def rendered(messages: list[dict[str, Any]], tools: Any = tools) -> str:
                dialog = read_messages(messages)
                given = [self._message(message, i) for i, message in enumerate(dialog)]
                return self.render(given, tools).plain

            call_format = find_call_format(rendered, stop_texts)
            if call_format is not None:
                return call_format
        return None

    def call_grammar(self, tools: Tools) -> str:
        """Return a grammar of calls as the template writes them.

        Raises:
            FieldError: it is not known how the model writes calls.
        """
        if self._tool_call_parser == "pythonic":
            return call_grammar(tools, ToolFormat.LLAMA_3_2)
        if self._has_meta_calls:
            return call_grammar(tools, ToolFormat.LLAMA_3_1)
        if self.call_format is None:
            raise FieldError(
                "tools",
                "tools: a call cannot be forced with this model, as its chat template does not "
                "show how calls are written: use tool_choice auto without strict and without a "
                "format of the answer, or start with --tool_call_parser NAME",
            )
        return self.call_format.grammar(tools, self.tokenizer.special_tokens)

    def call_parser(self, tools: Tools, *, is_tagged: bool = False) -> ToolCallParser:
        """Return a parser of calls as the template writes them.

        If it shows none, or Meta's, the parser understands the notations of Meta's models.
        """
        if self.call_format is not None and not self._has_meta_calls:
            return CallFormatParser(tools, self.call_format)
        callable_tools = Tools() if self._tool_call_parser == "none" else tools
        return ToolCallParser(callable_tools, is_tagged=is_tagged)

    def jinja_template(self) -> str:
        """Return the source of the template for chats without tools."""
        return self._sources[DEFAULT]

    def describe(self) -> str:
        """Return one line that says what the template writes."""
        calls = ""
        if self._tool_call_parser == "pythonic":
            calls = "; calls as in llama3.2"
        elif self.call_format is not None:
            calls = f"; calls begin with {self.call_format.open + self.call_format.before!r}"
        traits = self.traits.describe(self.tokenizer) + calls
        return f"a Jinja chat template; {traits}{self.describe_reasoning()}"


def _num_images(message: ChatMessage) -> int:
    """Return the number of images of a message."""
    content = message.content if isinstance(message.content, list) else []
    return sum(isinstance(part, ImagePart) for part in content)


def _part_of(part: Any) -> dict[str, str]:
    """Return a part of a message as templates expect it."""
    return {"type": "image"} if isinstance(part, ImagePart) else {"type": "text", "text": part.text}


def _result_text(message: ToolMessage) -> str:
    """Return the result of a tool as text; a value of JSON is written as JSON."""
    content: Any = message.content
    if isinstance(content, str | list):
        return text_of(content)
    return json.dumps(content, ensure_ascii=False)


def _open_final_message(messages: list[dict[str, Any]]) -> str:
    """Put a mark after the content of the last message, and return the mark."""
    final = messages[-1]
    if "tool_calls" in final:
        text = " needs a last message without tool calls"
        raise FieldError.of("continue_final_message", text)
    mark = _CUT
    while any(mark in (message.get("content") or "") for message in messages):
        mark += _CUT
    final["content"] = final["content"] + mark + " "
    return mark


def _cut_at(text: MarkedText, mark: str, *, keeps_space: bool) -> MarkedText:
    """Return the text up to a mark.

    Where the template has taken white space off the content, so is it before the mark, unless the
    caller keeps it.
    """
    position = text.rfind(mark)
    if position < 0:
        problem = " cannot be used: this model's chat template does not show the last message"
        raise FieldError.of("continue_final_message", problem)
    is_stripped = not text.startswith(mark + " ", position)
    before = text[:position]
    return before.rstrip() if is_stripped and not keeps_space else before
