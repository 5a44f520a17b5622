"""The prompt of a dialog and its tools, in the format of the model's generation.

In: messages and tools in OpenAI's format. Out: token ids. Texts are encoded without special tokens,
and the special tokens of the format are inserted as ids, so that no text of a user, a tool or an
argument can become one. It knows no engine and no sampling parameters.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from llama.common.checks import FieldError
from llama.prompts.messages import (
    HEADER_ROLES,
    AssistantMessage,
    ChatMessage,
    ImagePart,
    ToolCall,
    ToolMessage,
    has_images,
    read_messages,
    text_of,
)
from llama.prompts.parser import is_keyword
from llama.prompts.tools import CODE, ToolFormat, Tools, function_of
from llama.storage.token_files import IMAGE
from llama.tokenizer import ChatFormat, Role, Tokenizer

# The models were trained on exactly these texts, without a space after the full stops.
_DATES = "Cutting Knowledge Date: December 2023\nToday Date: {date}\n"
_DATE = "26 Jul 2024"  # the default of Meta's template
_INSTRUCTION = (
    "Given the following functions, please respond with a JSON for a function call with its proper "
    "arguments that best answers the given prompt.\n\n"
    'Respond in the format {"name": function name, "parameters": dictionary of argument name and '
    "its value}.Do not use variables.\n\n"
)
_PYTHON_INSTRUCTION = (
    "You are an expert in composing functions. You are given a question and a set of possible "
    "functions.\nBased on the question, you will need to make one or more function/tool calls to "
    "achieve the purpose.\nIf none of the function can be used, point it out. If the given "
    "question lacks the parameters required by the function,\nalso point it out. You should only "
    "return the function call in tools call sections.\n\nIf you decide to invoke any of the "
    "function(s), you MUST put it in the format of [func_name1(params_name1=params_value1, "
    "params_name2=params_value2...), func_name2(params)]\nYou SHOULD NOT include any other text in "
    "the response.\n\nHere is a list of functions in JSON format that you can invoke.\n\n"
)


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]] | Sequence[ChatMessage],
    tools: Tools | Sequence[Mapping[str, Any]] | None = None,
    *,
    tool_format: ToolFormat = ToolFormat.LLAMA_3_1,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    keeps_space: bool = False,
    date: str = _DATE,
) -> list[int]:
    """Return the token ids of a dialog, from begin_of_text on.

    Without tools this is the prompt of `ChatFormat`.

    Args:
        tokenizer: the tokenizer of the model.
        messages: the dialog in OpenAI's format; see `llama.prompts.messages`.
        tools: JSON objects that describe functions. An object with only the name of one of Meta's
            built-in tools (brave_search, wolfram_alpha, code_interpreter) turns that tool on.
        tool_format: LLAMA_3_1 is the chat template of Meta's Llama 3.1 to 3.3 Instruct models;
            LLAMA_3_2 and the built-in tools follow the prompt format pages of `llama_models`.
        add_generation_prompt: end with a header, after which the assistant's message follows.
        continue_final_message: leave the last message open instead.
        keeps_space: keep the white space at the end of a message that is left open.
        date: today's date in the prompt.

    Raises:
        TypeError, ValueError: names the message or the option at fault.
    """
    if continue_final_message and add_generation_prompt:
        raise FieldError.of("continue_final_message", " needs add_generation_prompt to be false")
    dialog = read_messages(messages)
    if not isinstance(tools, Tools):
        tools = Tools.of(tools or ())
    _check_tools(tokenizer, tools, tool_format)
    turns = _Reader(tools, tool_format).turns(dialog)
    if tools:
        turns = _with_tools(turns, tools, tool_format, date)
    chat = ChatFormat(tokenizer)
    ids = [tokenizer.bos_id]
    for turn in turns:
        ids += chat.encode_header({"role": turn.role, "content": ""})
        if turn.has_tag and tokenizer.python_tag_id is not None:
            ids.append(tokenizer.python_tag_id)
        ids += _content_ids(tokenizer, turn.texts)
        eom_id = tokenizer.eom_id if turn.ends_message else None
        ids.append(chat.eot_id if eom_id is None else eom_id)
    if continue_final_message:
        content = dialog[-1].content
        space = ""
        if keeps_space and isinstance(content, str):
            space = content[len(content.rstrip()) :]
        return ids[:-1] + tokenizer.encode(space, bos=False, eos=False)
    if add_generation_prompt:
        ids += chat.encode_header({"role": "assistant", "content": ""})
    return ids


def _content_ids(tokenizer: Tokenizer, parts: Sequence[str | ImagePart]) -> list[int]:
    """Return the token ids of a message, in which each image is one token.

    Without images content and the call after it are one text, since tokens may span their border.
    With images each text is encoded for itself, as in Meta's package.

    Raises:
        FieldError: There is an image, and the model reads text alone.
    """
    texts = [part for part in parts if isinstance(part, str)]
    if len(texts) == len(parts):
        return tokenizer.encode("".join(texts), bos=False, eos=False)
    if tokenizer.image_id is None:
        raise FieldError("messages", "messages have an image, and the model reads text alone")
    ids: list[int] = []
    for part in parts:
        if isinstance(part, str):
            ids += tokenizer.encode(part, bos=False, eos=False)
        else:
            ids.append(tokenizer.image_id)
    return ids


def _check_tools(tokenizer: Tokenizer, tools: Tools, tool_format: ToolFormat) -> None:
    """Raise a FieldError for tools that this model cannot use."""
    if tools and tool_format is ToolFormat.NONE:
        raise FieldError.of(
            "tools",
            " cannot be used with this model, as Llama 3.0 and Llama Guard were trained without "
            "tools: use an Instruct model of Llama 3.1 or later",
        )
    if tools.built_in and tokenizer.python_tag_id is None:
        raise FieldError.of(
            "tools",
            f": {tools.built_in[0]} needs the token <|python_tag|>, which this model's tokenizer "
            "does not have: describe it as a function with parameters",
        )


def jinja_template(tool_format: ToolFormat, *, has_images: bool = False) -> str:
    """Return a Jinja template of the same prompts, for programs that read Hugging Face folders."""
    constants = {
        "image": IMAGE if has_images else "",
        "tool_format": tool_format.value,
        "instruction": _INSTRUCTION,
        "python_instruction": _PYTHON_INSTRUCTION,
    }
    lines = [f"{{%- set {name} = {json.dumps(text)} %}}\n" for name, text in constants.items()]
    text = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
    return "".join(lines) + text


@dataclass
class Turn:
    """A message as the prompt has it.

    Attributes:
        role: the role in the header.
        texts: the parts of the text, and images between them.
        has_tag: <|python_tag|> precedes the text.
        ends_message: <|eom_id|> follows the text, as the model waits for a result.
        call_index: index of the call that this is the result of.
        further_calls: the other calls of the same message, if the format has one call per message.
        message_index: index of the message in the dialog.
    """

    role: Role
    texts: list[str | ImagePart]
    has_tag: bool = False
    ends_message: bool = False
    call_index: int = 0
    further_calls: tuple["Turn", ...] = ()
    message_index: int = 0


def _error(message_index: int, text: str) -> FieldError:
    return FieldError(f"messages[{message_index}]", f"message {message_index}: {text}")


class _Reader:
    """Converts messages to turns; it remembers calls, as the results refer to them."""

    def __init__(self, tools: Tools, tool_format: ToolFormat) -> None:
        self._tools = tools
        self._format = tool_format
        # Index by id, of the calls of the last message that had any.
        self._call_indices: dict[str, int] = {}

    def turns(self, messages: Sequence[ChatMessage]) -> list[Turn]:
        """Return the turns in the order of the prompt."""
        turns = [self._turn(message, i) for i, message in enumerate(messages)]
        # The prompt has no ids, so the order of the results tells which call each belongs to.
        ordered: list[Turn] = []
        for _, same_role in itertools.groupby(turns, lambda turn: turn.role):
            ordered += sorted(same_role, key=lambda turn: turn.call_index)
        return list(_one_call_each(iter(ordered)))

    def _turn(self, message: ChatMessage, message_index: int) -> Turn:
        if isinstance(message, ToolMessage):
            return self._result(message)
        if isinstance(message, AssistantMessage) and message.tool_calls:
            return self._calls(message, message_index)
        role = HEADER_ROLES[message.role]
        content: Any = message.content
        if has_images(content):
            parts = [part if isinstance(part, ImagePart) else part.text for part in content]
            return Turn(role, parts)
        return Turn(role, [text_of(content).strip()])

    def _result(self, message: ToolMessage) -> Turn:
        content: Any = message.content
        text = text_of(content) if isinstance(content, list) else content
        if isinstance(text, str) and not self._tools and not self._call_indices:
            return Turn(
                "ipython", [text.strip()]
            )  # a result without a call, as in Meta's ChatFormat
        # Meta's pages write the result of a built-in tool unchanged, and the template all as JSON.
        is_raw = self._tools.built_in and not self._tools.functions and isinstance(text, str)
        index = self._call_indices.get(str(message.tool_call_id), len(self._call_indices))
        return Turn("ipython", [text if is_raw else _to_json(text)], call_index=index)

    def _calls(self, message: AssistantMessage, message_index: int) -> Turn:
        calls = message.tool_calls
        if self._format is ToolFormat.NONE:
            raise _error(message_index, "tool_calls cannot be used: this model has no tools")
        self._call_indices = {str(call.id): i for i, call in enumerate(calls)}
        is_built_in = any(call.function.name in self._tools.built_in for call in calls)
        if self._format is ToolFormat.LLAMA_3_2 and not is_built_in:
            listed = ", ".join(_python_call(call) for call in calls)
            is_cut_off = isinstance(calls[-1].function.arguments, str)
            turn = Turn("assistant", [f"[{listed}" if is_cut_off else f"[{listed}]"])
        elif self._format is ToolFormat.LLAMA_3_2 and len(calls) > 1:
            raise _error(
                message_index, "tool_calls: the call of a built-in tool must be the only call"
            )
        else:
            turn, *further_calls = [self._call(call, message_index) for call in calls]
            turn.further_calls = tuple(further_calls)
        if message.content:
            turn.texts.insert(0, text_of(message.content).lstrip())
        turn.message_index = message_index
        return turn

    def _call(self, call: ToolCall, message_index: int) -> Turn:
        """Return one call, of a built-in tool or as JSON."""
        name = call.function.name
        arguments = call.function.arguments
        if name in self._tools.built_in:
            text = _built_in_call(name, arguments, message_index)
            ends_message = not isinstance(arguments, str)
            return Turn("assistant", [text], has_tag=True, ends_message=ends_message)
        if isinstance(arguments, str):
            return Turn("assistant", [f'{{"name": {_to_json(name)}, "parameters": {arguments}'])
        text = f'{{"name": {_to_json(name)}, "parameters": {_to_json(arguments)}}}'
        ends_message = bool(self._tools.built_in)  # Meta's template has it, too
        return Turn("assistant", [text], ends_message=ends_message)


def _one_call_each(turns: Iterator[Turn]) -> Iterator[Turn]:
    """Yield each call of a message as a message of its own, followed by its result.

    Llama 3.1 was trained on one call per message, and Meta's template refuses more.
    """
    for turn in turns:
        if not turn.further_calls:
            yield turn
            continue
        for call in (turn, *turn.further_calls):
            result = next(turns, None)
            if result is None or result.role != "ipython":
                raise _error(
                    turn.message_index,
                    f"tool_calls has {1 + len(turn.further_calls)} calls, and this model's format "
                    "has one call per message: the result of each must follow, with role tool",
                )
            yield call
            yield result


def _to_json(value: Any, indent: int | None = None) -> str:
    """Return JSON as `tojson` writes it in the chat templates of transformers."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _built_in_call(name: str, arguments: dict[str, Any] | str, message_index: int) -> str:
    key = "code" if name == CODE else "query"
    if isinstance(arguments, str):  # the answer was cut off inside of the arguments
        if name == CODE:
            return str(from_json(arguments, allow_partial="trailing-strings").get(key, ""))
        query = arguments.removeprefix(f'{{"{key}": ')
        return f"{name}.call(query={query}"
    if arguments.keys() != {key} or not isinstance(arguments[key], str):
        raise _error(message_index, f"the arguments of {name} must be one text, {key!r}")
    if name == CODE:
        return str(arguments[key])
    return f"{name}.call(query={_to_json(arguments[key])})"


def _python_call(call: ToolCall) -> str:
    """Return a call as f(a=1, b="x"), or as f(**{"a b": 1}) if a name is no keyword."""
    name = call.function.name
    arguments = call.function.arguments
    if isinstance(arguments, str):  # the answer was cut off inside of the arguments
        return f"{name}(**{arguments}"
    if not all(map(is_keyword, arguments)):
        return f"{name}(**{_python(arguments)})"
    keywords = [f"{key}={_python(value)}" for key, value in arguments.items()]
    return f"{name}({', '.join(keywords)})"


def _python(value: Any) -> str:
    """Return a JSON value as a Python literal."""
    if isinstance(value, dict):
        items = [f"{_to_json(key)}: {_python(item)}" for key, item in value.items()]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    return str(value) if value is None or isinstance(value, bool) else _to_json(value)


def _with_tools(turns: list[Turn], tools: Tools, tool_format: ToolFormat, date: str) -> list[Turn]:
    """Return the dialog with the tools in its system message.

    The format of 3.1 has the functions before the text of the first question instead.
    """
    system = ""
    if turns[0].role == "system":
        system = "".join(part for part in turns[0].texts if isinstance(part, str))
        if system not in turns[0].texts:
            raise _error(0, "a system message with images cannot have tools")
        turns = turns[1:]
    dates = _DATES.format(date=date)
    if not tools.functions:
        text = _environment(tools) + dates + (f"\n{system}\n" if system else "")
        return [Turn("system", [text]), *turns]
    if tool_format is ToolFormat.LLAMA_3_2:
        head = _environment(tools) if tools.built_in else ""
        listed = [_described(tool) for tool in tools.functions]
        text = head + _PYTHON_INSTRUCTION + _to_json(listed, indent=4)
        return [Turn("system", [f"{text}\n{system}" if system else text]), *turns]
    if not turns or turns[0].role != "user":
        raise FieldError.of(
            "tools", " need a first message of the user, after the system message: there is none"
        )
    built_in = f"Tools: {', '.join(tools.searches)}\n\n" if tools.built_in else ""
    text = f"Environment: ipython\n{built_in}{dates}\n{system}"
    functions = "".join(_to_json(tool, indent=4) + "\n\n" for tool in tools.functions)
    first, *others = turns[0].texts
    instruction = _INSTRUCTION + functions
    texts = [instruction + first] if isinstance(first, str) else [instruction, first]
    question = Turn("user", [*texts, *others])
    return [Turn("system", [text]), question, *turns[1:]]


def _environment(tools: Tools) -> str:
    searches = f"Tools: {', '.join(tools.searches)}" if tools.searches else ""
    return f"Environment: ipython\n{searches}\n"


def _described(tool: Mapping[str, Any]) -> dict[str, Any]:
    """Return a function as in the prompt of 3.2, where the type of its parameters is "dict"."""
    function = function_of(tool)
    schema = function.get("parameters") or {}
    described: dict[str, Any] = {
        key: function[key] for key in ("name", "description") if function.get(key) is not None
    }
    described["parameters"] = {
        "type": "dict",
        "required": schema.get("required", []),
        "properties": schema.get("properties", {}),
    }
    for key, value in schema.items():
        described["parameters"].setdefault(key, value)
    return described
