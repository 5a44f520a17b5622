"""A dialog and its tools as the ids of a prompt, in the format of the model's generation.

Text is encoded with no special token allowed; those of the format are placed as ids, so that no
text of a user, a tool or an argument can become one.
"""

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from llama.checks import FieldError
from llama.prompts.messages import (
    AssistantMessage,
    ChatMessage,
    ToolCall,
    ToolMessage,
    read_messages,
    text_of,
)
from llama.prompts.parser import is_keyword
from llama.prompts.tools import CODE, ToolFormat, Tools, function_of
from llama.tokenizer import ChatFormat, Role, Tokenizer

# What the models were trained on, word by word: without a space after the two full stops.
_DATES = "Cutting Knowledge Date: December 2023\nToday Date: {date}\n"
_DATE = "26 Jul 2024"  # the template's, where the caller gives none
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
    """The ids of a dialog, from begin_of_text on. Without tools it is `ChatFormat`'s prompt.

    messages: of OpenAI's form; see `llama.prompts.messages`.
    tools: JSON objects that describe functions. An object with only the name of one of Meta's
    built-in tools (brave_search, wolfram_alpha, code_interpreter) turns that one on.
    tool_format: LLAMA_3_1 is the chat template of Meta's Llama 3.1 to 3.3 Instruct models;
    LLAMA_3_2 and the built-in tools are as in `llama_models`' pages on prompt formats.
    add_generation_prompt: a header for the assistant to go on from. continue_final_message: the
    last message stays open instead; keeps_space: with the white space at its end.
    TypeError or ValueError names the message that is wrong.
    """
    if continue_final_message and add_generation_prompt:
        raise FieldError.of("continue_final_message", " needs add_generation_prompt to be false")
    dialog = read_messages(messages)
    if not isinstance(tools, Tools):
        tools = Tools.of(tools or ())
    if tools and tool_format is ToolFormat.NONE:
        words = " cannot be used with this model: Llama 3.0 and Llama Guard were trained without. "
        raise FieldError.of("tools", f"{words}Use an Instruct model of Llama 3.1 or later")
    if tools.built_in and tokenizer.python_tag_id is None:
        words = f": {tools.built_in[0]} needs the token <|python_tag|>, which this model's "
        words += "tokenizer does not have: describe it as a function with parameters"
        raise FieldError.of("tools", words)
    turns = _Reader(tools, tool_format).turns(dialog)
    if tools:
        turns = _with_tools(turns, tools, tool_format, date)
    chat = ChatFormat(tokenizer)
    ids = [tokenizer.bos_id]
    for turn in turns:
        ids += chat.encode_header({"role": turn.role, "content": ""})
        if turn.has_tag and tokenizer.python_tag_id is not None:
            ids.append(tokenizer.python_tag_id)
        for text in turn.texts:
            ids += tokenizer.encode(text, bos=False, eos=False)
        eom_id = tokenizer.eom_id if turn.ends_message else None
        ids.append(tokenizer.eot_id if eom_id is None else eom_id)
    if continue_final_message:
        last = dialog[-1].content
        space = last[len(last.rstrip()) :] if keeps_space and isinstance(last, str) else ""
        return ids[:-1] + tokenizer.encode(space, bos=False, eos=False)
    if add_generation_prompt:
        ids += chat.encode_header({"role": "assistant", "content": ""})
    return ids


def jinja_template(tool_format: ToolFormat) -> str:
    """The same prompts in Jinja, for programs that read a checkpoint of transformers."""
    given = {"tool_format": tool_format.value, "instruction": _INSTRUCTION}
    given["python_instruction"] = _PYTHON_INSTRUCTION
    lines = [f"{{%- set {name} = {json.dumps(text)} %}}\n" for name, text in given.items()]
    text = Path(__file__).with_name("chat_template.jinja").read_text(encoding="utf-8")
    return "".join(lines) + text


@dataclass
class Turn:
    """A message as the model sees it."""

    role: Role
    texts: list[str]
    has_tag: bool = False  # <|python_tag|> before the texts
    ends_message: bool = False  # <|eom_id|> behind them: the model waits for a result
    number: int = 0  # of the call that it is the result of
    more: tuple["Turn", ...] = ()  # calls of the same message, in a format that has one in each
    message: int = 0  # its number in the dialog


def _error(message: int, words: str) -> FieldError:
    return FieldError(f"messages[{message}]", f"message {message}: {words}")


class _Reader:
    """Messages to turns; it remembers the calls, since results name them."""

    def __init__(self, tools: Tools, tool_format: ToolFormat) -> None:
        self._tools = tools
        self._format = tool_format
        self._numbers: dict[str, int] = {}  # of the calls of the last message that had any, by id

    def turns(self, messages: Sequence[ChatMessage]) -> list[Turn]:
        """In the order that the format wants."""
        turns = [self._turn(each, i) for i, each in enumerate(messages)]
        ordered: list[Turn] = []  # the format has no ids: the order tells results apart
        for _, run in itertools.groupby(turns, lambda turn: turn.role):
            ordered += sorted(run, key=lambda turn: turn.number)
        return list(_one_call_each(iter(ordered)))

    def _turn(self, message: ChatMessage, i: int) -> Turn:
        if isinstance(message, ToolMessage):
            return self._result(message)
        if isinstance(message, AssistantMessage) and message.tool_calls:
            return self._calls(message, i)
        role: Role = "system" if message.role == "developer" else message.role
        return Turn(role, [text_of(message.content).strip()])

    def _result(self, message: ToolMessage) -> Turn:
        content: Any = message.content
        text = text_of(content) if isinstance(content, list) else content
        if isinstance(text, str) and not self._tools and not self._numbers:
            return Turn("ipython", [text.strip()])  # of no call: Meta's ChatFormat has it so
        # Meta's pages write what a built-in tool returned as it is, and the template all as JSON.
        is_raw = self._tools.built_in and not self._tools.functions and isinstance(text, str)
        number = self._numbers.get(str(message.tool_call_id), len(self._numbers))
        return Turn("ipython", [text if is_raw else _to_json(text)], number=number)

    def _calls(self, message: AssistantMessage, i: int) -> Turn:
        calls = message.tool_calls
        if self._format is ToolFormat.NONE:
            raise _error(i, "tool_calls cannot be used: this model has no tools")
        self._numbers = {str(call.id): number for number, call in enumerate(calls)}
        is_built_in = any(call.function.name in self._tools.built_in for call in calls)
        if self._format is ToolFormat.LLAMA_3_2 and not is_built_in:
            listed = ", ".join(_python_call(call) for call in calls)
            is_cut = isinstance(calls[-1].function.arguments, str)
            turn = Turn("assistant", [f"[{listed}" if is_cut else f"[{listed}]"])
        elif self._format is ToolFormat.LLAMA_3_2 and len(calls) > 1:
            raise _error(i, "tool_calls: the call of a built-in tool stands alone")
        else:
            turn, *more = [self._call(call, i) for call in calls]
            turn.more = tuple(more)
        turn.texts[:0] = [text_of(message.content).lstrip()] if message.content else []
        turn.message = i
        return turn

    def _call(self, call: ToolCall, i: int) -> Turn:
        """One call, of a built-in tool or as JSON."""
        name, arguments = call.function.name, call.function.arguments
        if name in self._tools.built_in:
            text = _built_in_call(name, arguments, i)
            ends_message = not isinstance(arguments, str)
            return Turn("assistant", [text], has_tag=True, ends_message=ends_message)
        if isinstance(arguments, str):
            return Turn("assistant", [f'{{"name": {_to_json(name)}, "parameters": {arguments}'])
        text = f'{{"name": {_to_json(name)}, "parameters": {_to_json(arguments)}}}'
        ends_message = bool(self._tools.built_in)  # as the template has it
        return Turn("assistant", [text], ends_message=ends_message)


def _one_call_each(turns: Iterator[Turn]) -> Iterator[Turn]:
    """The calls of one message as messages of their own, each with its result after it: Llama 3.1
    was trained on one call in a message, and Meta's template refuses more."""
    for turn in turns:
        if not turn.more:
            yield turn
            continue
        for call in (turn, *turn.more):
            result = next(turns, None)
            if result is None or result.role != "ipython":
                words = f"tool_calls has {1 + len(turn.more)} calls, and this model's format has "
                words += "one in a message: the result of each must follow, with role tool"
                raise _error(turn.message, words)
            yield from (call, result)


def _to_json(value: Any, indent: int | None = None) -> str:
    """As `tojson` in transformers' chat templates writes it."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _built_in_call(name: str, arguments: dict[str, Any] | str, message: int) -> str:
    key = "code" if name == CODE else "query"
    if isinstance(arguments, str):  # the answer was cut off in them
        if name == CODE:
            return str(from_json(arguments, allow_partial="trailing-strings").get(key, ""))
        query = arguments.removeprefix(f'{{"{key}": ')
        return f"{name}.call(query={query}"
    if arguments.keys() != {key} or not isinstance(arguments[key], str):
        raise _error(message, f"the arguments of {name} must be one text, {key!r}")
    if name == CODE:
        return str(arguments[key])
    return f"{name}.call(query={_to_json(arguments[key])})"


def _python_call(call: ToolCall) -> str:
    """f(a=1, b="x"); f(**{"a b": 1}) where a name is no keyword."""
    name, arguments = call.function.name, call.function.arguments
    if isinstance(arguments, str):  # the answer was cut off in them
        return f"{name}(**{arguments}"
    if not all(map(is_keyword, arguments)):
        return f"{name}(**{_python(arguments)})"
    return f"{name}({', '.join(f'{key}={_python(value)}' for key, value in arguments.items())})"


def _python(value: Any) -> str:
    """A value of JSON as a literal of Python."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_to_json(k)}: {_python(v)}' for k, v in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_python, value))}]"
    return str(value) if value is None or isinstance(value, bool) else _to_json(value)


def _with_tools(turns: list[Turn], tools: Tools, tool_format: ToolFormat, date: str) -> list[Turn]:
    """The dialog with the tools in its system message, and in 3.1's format before the question."""
    system = ""
    if turns[0].role == "system":
        system, turns = turns[0].texts[0], turns[1:]
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
        words = " need a first message of the user, after the system's: there is none"
        raise FieldError.of("tools", words)
    built_in = f"Tools: {', '.join(tools.searches)}\n\n" if tools.built_in else ""
    text = f"Environment: ipython\n{built_in}{dates}\n{system}"
    listed_text = "".join(_to_json(tool, indent=4) + "\n\n" for tool in tools.functions)
    question = Turn("user", [_INSTRUCTION + listed_text + turns[0].texts[0]])
    return [Turn("system", [text]), question, *turns[1:]]


def _environment(tools: Tools) -> str:
    searches = f"Tools: {', '.join(tools.searches)}" if tools.searches else ""
    return f"Environment: ipython\n{searches}\n"


def _described(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A function as 3.2's prompt has it: the type of its parameters is "dict" there."""
    function = function_of(tool)
    schema = function.get("parameters") or {}
    named = {key: function[key] for key in ("name", "description") if function.get(key) is not None}
    rest = {key: x for key, x in schema.items() if key not in ("type", "required", "properties")}
    parameters = {
        "type": "dict",
        "required": schema.get("required", []),
        "properties": schema.get("properties", {}),
    }
    return {**named, "parameters": {**parameters, **rest}}
