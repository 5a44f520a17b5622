"""How a chat template writes tool calls: the texts around names and arguments, as one object.

In: a function that renders dialogs, or the name of a known format. Out: a `CallFormat`, which the
grammar of forced calls and the parser of answers are made from, so that both agree. It knows
neither templates nor files.
"""

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from llama.common.checks import FieldError, brief
from llama.prompts.grammar import functions_of, json_rule, text_rule, texts_that_call_none
from llama.prompts.tools import Tools

# Names and values of the calls in a probe. No template writes them by itself.
_NAMES = ("probe_first_tool", "probe_second_tool")
_ARGUMENTS: dict[str, Any] = {"probe_key": "probe_value"}
_IDS = ("call00001", "call00002")
_ANSWER = "\ue000probe_answer"  # begins with a character that begins no call
NAME_KEY = re.compile(r'\{\s*"name"\s*:\s*"$')
_ARGUMENTS_KEY = re.compile(r'"\s*,\s*"(?:arguments|parameters)"\s*:\s*$')

Render = Callable[[list[dict[str, Any]]], str]


@dataclass(frozen=True)
class CallFormat:
    """The texts around the calls of one answer.

    An answer with two calls is open + before + NAME + between + ARGUMENTS + after + separator +
    before + NAME + between + ARGUMENTS + after + close.

    Attributes:
        before: the text before a name.
        between: the text between a name and its arguments, which are a JSON object.
        after: the text after the arguments.
        open: the text before the first call.
        close: the text after the last call.
        separator: the text between two calls; None if an answer has one call only.
    """

    before: str
    between: str
    after: str
    open: str = ""
    close: str = ""
    separator: str | None = None

    @property
    def is_object(self) -> bool:
        """Whether a call is a JSON object with the keys name and arguments (or parameters)."""
        has_name = NAME_KEY.search(self.before) is not None
        has_arguments = _ARGUMENTS_KEY.match(self.between) is not None
        return has_name and has_arguments and self.after.lstrip().startswith("}")

    def grammar(self, tools: Tools, special_tokens: Mapping[str, int]) -> str:
        """Return a grammar of the calls, in llguidance's dialect of Lark.

        Args:
            tools: the tools, and whether the answer must call one.
            special_tokens: ids of added tokens by name. A name in the format is that token.

        Raises:
            ValueError: there is no tool that may be called.
        """
        functions = functions_of(tools)
        if not functions:
            raise ValueError("tools: there are none that this model can call")

        def literal(text: str) -> str:
            return _literal(text, special_tokens)

        rules: list[str] = []
        for i, function in enumerate(functions):
            head = literal(self.before + function["name"] + self.between)
            rules.append(f"f{i}: {head} f{i}_json {literal(self.after)}")
            rules.append(f"f{i}_json: {json_rule(function, tools)}")
        rules.append("call: " + " | ".join(f"f{i}" for i in range(len(functions))))
        further = ""
        if tools.several and self.separator is not None:
            further = f" ({literal(self.separator)} call)*"
        answer = f"{literal(self.open)} call{further} {literal(self.close)}"
        if tools.must_call:
            return "\n".join([f"start: {answer}", *rules]) + "\n"
        rules.append(f"calls: {answer}")
        rules.append(f"TEXT: {texts_that_call_none(self._first_character)}")
        return "\n".join(["start: calls | TEXT", *rules]) + "\n"

    @property
    def _first_character(self) -> str:
        return (self.open + self.before).lstrip()[0]


def _literal(text: str, special_tokens: Mapping[str, int]) -> str:
    """Return a text in Lark, in which the names of added tokens are these tokens."""
    if not text:
        return '""'
    names = sorted((name for name in special_tokens if name in text), key=len, reverse=True)
    if not names:
        return text_rule(text)
    pattern = "|".join(map(re.escape, names))
    pieces = re.split(f"({pattern})", text)
    return " ".join(
        f"<[{special_tokens[piece]}]>" if piece in special_tokens else text_rule(piece)
        for piece in pieces
        if piece
    )


KNOWN_FORMATS: dict[str, CallFormat] = {
    "hermes": CallFormat(
        '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", separator="\n"
    ),
    "llama3_json": CallFormat('{"name": "', '", "parameters": ', "}"),
    "xlam": CallFormat('{"name": "', '", "arguments": ', "}", open="[", close="]", separator=", "),
    "nemotron": CallFormat(
        '{"name": "',
        '", "arguments": ',
        "}",
        open="<TOOLCALL>[",
        close="]</TOOLCALL>",
        separator=", ",
    ),
    "functionary": CallFormat("<function=", ">", "</function>", separator=""),
}


CALL_PARSERS = ("auto", *KNOWN_FORMATS, "pythonic", "none")  # vLLM's names where it has them


def check_call_parser(name: str) -> None:
    """Raise a FieldError for a name that is none of `CALL_PARSERS`."""
    if name not in CALL_PARSERS:
        text = f"={brief(name)} must be one of {', '.join(CALL_PARSERS)}"
        raise FieldError.of("tool_call_parser", text)


def find_call_format(render: Render, stop_texts: Collection[str]) -> CallFormat | None:
    """Return the format in which a template writes calls; None if it shows none, or not in JSON.

    A dialog with one call, one with two calls and one with an answer are rendered, and the texts
    around the names and arguments are compared.

    Args:
        render: renders a dialog without a header for the next answer; a ValueError means that the
            template refuses the dialog.
        stop_texts: names of the tokens that end an answer.
    """
    try:
        answered = render([_QUESTION, {"role": "assistant", "content": _ANSWER}])
        one = render([_QUESTION, _calls(1)])
    except ValueError:
        return None
    start = len(_common_start(answered, one))
    parts = _parts(one[start:], 1)
    if _ANSWER not in answered or parts is None:
        return None
    head, (between,), tail, _ = parts
    # What follows an answer is no part of its call.
    rest = answered.partition(_ANSWER)[2]
    tail = _without_end(tail, rest, stop_texts)
    single = CallFormat(head, between, tail)
    try:
        two = render([_QUESTION, _calls(2)])
    except ValueError:
        return single
    return _format_of_two(two[start:], single, rest, stop_texts)


_QUESTION: dict[str, Any] = {"role": "user", "content": "probe_question"}


def _calls(count: int) -> dict[str, Any]:
    """Return an assistant's message with calls."""
    functions = [{"name": name, "arguments": _ARGUMENTS} for name in _NAMES[:count]]
    calls = [
        {"id": _IDS[i], "type": "function", "function": function}
        for i, function in enumerate(functions)
    ]
    return {"role": "assistant", "tool_calls": calls}


def _parts(text: str, count: int) -> tuple[str, list[str], str, list[str]] | None:
    """Split a text at the names and arguments of its calls.

    Returns:
        what precedes the first name; what is between each name and its arguments; what follows
        the last arguments; what is between the arguments of a call and the next name.
    """
    arguments = json.dumps(_ARGUMENTS)
    betweens: list[str] = []
    middles: list[str] = []
    head = ""
    for i, name in enumerate(_NAMES[:count]):
        before, found_name, text = text.partition(name)
        between, found_arguments, text = text.partition(arguments)
        if not (found_name and found_arguments):
            return None
        betweens.append(between)
        if i == 0:
            head = before
        else:
            middles.append(_without_id(before))
    return head, betweens, _without_id(text), middles


def _without_id(text: str) -> str:
    """Return a text without the id of a call, which the model need not write."""
    return re.sub(rf',\s*"(?:id|tool_call_id)"\s*:\s*"(?:{"|".join(_IDS)})"', "", text)


def _without_end(tail: str, rest: str, stop_texts: Collection[str]) -> str:
    """Return what follows the arguments, up to the end of the turn."""
    stops = [tail.find(stop) for stop in stop_texts if stop in tail]
    if stops:
        return tail[: min(stops)]
    return tail.removesuffix(rest) if rest else tail


def _common_start(first: str, second: str) -> str:
    """Return the longest text that both texts begin with."""
    length = 0
    for one, other in zip(first, second, strict=False):
        if one != other:
            break
        length += 1
    return first[:length]


def _format_of_two(
    text: str, single: CallFormat, rest: str, stop_texts: Collection[str]
) -> CallFormat:
    """Return the format that two calls of one message show.

    Args:
        text: the message, from its content on.
        single: the format that one call shows. It is the result if two are shown otherwise.
        rest: what follows an answer without calls.
        stop_texts: names of the tokens that end an answer.
    """
    parts = _parts(text, 2)
    if parts is None or len(set(parts[1])) > 1:
        return single
    head, (between, _), tail, (middle,) = parts
    tail = _without_end(tail, rest, stop_texts)
    if any(stop in middle for stop in stop_texts):
        return single  # each call is a message of its own
    after = _common_start(middle, tail)
    remaining = middle[len(after) :]
    before = _common_start(remaining[::-1], head[::-1])[::-1]
    return CallFormat(
        before=before,
        between=between,
        after=after,
        open=head[: len(head) - len(before)],
        close=tail[len(after) :],
        separator=remaining[: len(remaining) - len(before)],
    )
