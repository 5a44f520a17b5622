"""A dialog and its tools as the ids of a prompt, in the format of the model's generation.

In: messages of OpenAI's form, with "tool_calls" and the role "tool" among them, and the tools that
the model may call. Out: ids. Text is encoded with no special token allowed; those of the format are
placed as ids, so that no text of a user, a tool or an argument can become one. It runs no tool.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, get_args

from llama.checks import brief
from llama.prompts.calls import is_of_name
from llama.prompts.formats import CODE, ToolFormat, Tools, check_json, function_of
from llama.prompts.turns import Turn, in_order, one_call_each
from llama.tokenizer import ChatFormat, Message, Role, Tokenizer

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
_LABELS = {"tool_call_id", "name", "refusal"}  # of OpenAI's messages; the format has no place
_ROLES: dict[str, Role] = {"tool": "ipython", "developer": "system"}


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Tools | Sequence[Mapping[str, Any]] | None = None,
    *,
    tool_format: ToolFormat = ToolFormat.LLAMA_3_1,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    date: str = _DATE,
) -> list[int]:
    """The ids of a dialog, from begin_of_text on. Without tools it is `ChatFormat`'s prompt.

    messages: {"role", "content"}; content may be a list of {"type": "text", "text"} parts. Those of
    the assistant may have "tool_calls"; the results follow with role "tool" or "ipython".
    tools: JSON objects that describe functions. An object with only the name of one of Meta's
    built-in tools (brave_search, wolfram_alpha, code_interpreter) turns that one on.
    tool_format: LLAMA_3_1 is the chat template of Meta's Llama 3.1 to 3.3 Instruct models;
    LLAMA_3_2 and the built-in tools are as in `llama_models`' pages on prompt formats.
    add_generation_prompt: a header for the assistant to go on from. continue_final_message: the
    last message stays open instead. TypeError or ValueError names the message that is wrong.
    """
    if continue_final_message and add_generation_prompt:
        raise ValueError("continue_final_message needs add_generation_prompt=False")
    if not isinstance(messages, list | tuple) or not messages:
        raise ValueError("messages must be a list of at least one message")
    if not isinstance(tools, Tools):
        tools = Tools.of(tools or ())
    check_tools(tokenizer, tools, tool_format)
    reader = _Reader(tools, tool_format)
    turns = [reader.turn(message, f"message {i}") for i, message in enumerate(messages)]
    turns = one_call_each(in_order(turns))
    if tools:
        turns = _with_tools(turns, tools, tool_format, date)
    chat = ChatFormat(tokenizer)
    ids = [tokenizer.bos_id]
    for turn in turns:
        ids += _encode(tokenizer, chat, turn)
    if continue_final_message:
        return ids[:-1]
    if add_generation_prompt:
        ids += chat.encode_header({"role": "assistant", "content": ""})
    return ids


def check_tools(tokenizer: Tokenizer, tools: Tools, tool_format: ToolFormat) -> None:
    """ValueError where the model has no calls for these tools."""
    if tools and tool_format is ToolFormat.NONE:
        raise ValueError(
            "tools cannot be used with this model: Llama 3.0 and Llama Guard were trained without. "
            "Use an Instruct model of Llama 3.1 or later"
        )
    if tools.built_in and tokenizer.python_tag_id is None:
        raise ValueError(
            f"tools: {tools.built_in[0]} needs the token <|python_tag|>, which this model's "
            "tokenizer does not have: describe it as a function with parameters"
        )


def _encode(tokenizer: Tokenizer, chat: ChatFormat, turn: Turn) -> Iterator[int]:
    message: Message = {"role": turn.role, "content": ""}
    yield from chat.encode_header(message)
    if turn.has_tag and tokenizer.python_tag_id is not None:
        yield tokenizer.python_tag_id
    for text in turn.texts:
        yield from tokenizer.encode(text, bos=False, eos=False)
    eom_id = tokenizer.eom_id if turn.ends_message else None
    yield tokenizer.eot_id if eom_id is None else eom_id


class _Reader:
    """Messages of OpenAI's form to turns; it remembers the calls, since results name them."""

    def __init__(self, tools: Tools, tool_format: ToolFormat) -> None:
        self._tools = tools
        self._format = tool_format
        self._numbers: dict[str, int] = {}  # of the calls of the last message that had any, by id

    def turn(self, message: Any, where: str) -> Turn:
        if not isinstance(message, dict):
            kind = type(message).__name__
            raise TypeError(f"{where} must be a dict of role and content, got {kind}")
        given = {key: value for key, value in message.items() if value is not None}
        unknown = sorted(given.keys() - {"role", "content", "tool_calls"} - _LABELS)
        if unknown:
            raise ValueError(f"{where} has unknown keys {unknown}: leave them out")
        role = given.get("role")
        if isinstance(role, str):
            role = _ROLES.get(role, role)
        if role not in get_args(Role):
            allowed = ", ".join([*get_args(Role), *(each for each in _ROLES if each != "tool")])
            raise ValueError(f"{where}: unknown role {brief(role)}: allowed are {allowed}")
        if given.get("tool_calls"):
            if role != "assistant":
                raise ValueError(f"{where}: tool_calls need the role assistant")
            return self._calls(given, where)
        if role == "ipython":
            return self._result(given, where)
        return Turn(role, [_text(given.get("content"), where).strip()])  # type: ignore[arg-type]

    def _result(self, given: dict[str, Any], where: str) -> Turn:
        content = given.get("content", "")
        text = _text(content, where) if isinstance(content, list) else content
        # Meta's pages write what a built-in tool returned as it is, and the template all as JSON.
        if not isinstance(text, str):
            check_json(f"{where}: content", text)
        is_raw = self._tools.built_in and not self._tools.functions and isinstance(text, str)
        number = self._numbers.get(str(given.get("tool_call_id")), len(self._numbers))
        return Turn("ipython", [text if is_raw else _to_json(text)], number=number)

    def _calls(self, given: dict[str, Any], where: str) -> Turn:
        calls = given["tool_calls"]
        if self._format is ToolFormat.NONE:
            raise ValueError(f"{where}: tool_calls cannot be used: this model has no tools")
        if not isinstance(calls, list):
            raise TypeError(f"{where}: tool_calls must be a list of calls")
        pairs = [_name_and_arguments(call, where) for call in calls]
        self._numbers = {str(call.get("id")): i for i, call in enumerate(calls)}
        content = given.get("content")
        texts = [_text(content, where).lstrip()] if content else []
        if self._format is ToolFormat.LLAMA_3_2:
            return self._python_calls(texts, pairs, where)
        first, *more = [self._call(name, arguments, where) for name, arguments in pairs]
        first.texts[:0] = texts
        first.more, first.where = tuple(more), where
        return first

    def _python_calls(
        self, texts: list[str], pairs: list[tuple[str, dict[str, Any]]], where: str
    ) -> Turn:
        if not any(name in self._tools.built_in for name, _ in pairs):
            calls = ", ".join(_python_call(*pair) for pair in pairs)
            return Turn("assistant", [*texts, f"[{calls}]"])
        if len(pairs) > 1:
            raise ValueError(f"{where}: tool_calls: the call of a built-in tool stands alone")
        turn = self._call(*pairs[0], where)
        turn.texts[:0] = texts
        return turn

    def _call(self, name: str, arguments: dict[str, Any], where: str) -> Turn:
        """One call, of a built-in tool or as JSON."""
        if name in self._tools.built_in:
            text = _built_in_call(name, arguments, where)
            return Turn("assistant", [text], has_tag=True, ends_message=True)
        text = f'{{"name": {_to_json(name)}, "parameters": {_to_json(arguments)}}}'
        ends_message = bool(self._tools.built_in)  # as the template has it
        return Turn("assistant", [text], ends_message=ends_message)


def _name_and_arguments(call: Any, where: str) -> tuple[str, dict[str, Any]]:
    try:
        unknown = sorted(call.keys() - {"id", "type", "index", "function"})
        function = call["function"]
        unknown += sorted(function.keys() - {"name", "arguments"})
        name, arguments = function["name"], function["arguments"]
        if isinstance(arguments, str):  # OpenAI's clients send them as JSON
            arguments = json.loads(arguments or "{}")
        if unknown or not isinstance(name, str) or not isinstance(arguments, dict):
            raise ValueError(f"unknown keys {unknown}" if unknown else "a value of another type")
    except (TypeError, KeyError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"{where}: a tool call must be {{'function': {{'name': ..., 'arguments': ...}}}}, with "
            f"arguments as a dict or as JSON ({type(error).__name__}: {error})"
        ) from None
    check_json(f"{where}: arguments", arguments)
    return name, arguments


def _to_json(value: Any, indent: int | None = None) -> str:
    """As `tojson` in transformers' chat templates writes it."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _text(content: Any, where: str) -> str:
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else [None]
    for part in parts:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        if not (is_text and isinstance(part.get("text"), str)):
            raise TypeError(f"{where}: content must be a str, or a list of parts of type text")
    return "\n".join(part["text"] for part in parts)


def _built_in_call(name: str, arguments: dict[str, Any], where: str) -> str:
    key = "code" if name == CODE else "query"
    if arguments.keys() != {key} or not isinstance(arguments[key], str):
        raise ValueError(f"{where}: the arguments of {name} must be one text, {key!r}")
    if name == CODE:
        return str(arguments[key])
    return f"{name}.call(query={_to_json(arguments[key])})"


def _python_call(name: str, arguments: dict[str, Any]) -> str:
    """f(a=1, b="x"); f(**{"a b": 1}) where a name is no keyword."""
    if not all(key and all(map(is_of_name, key)) for key in arguments):
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
        raise ValueError(
            "tools need a first message of the user, after the system's: there is none"
        )
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
