"""The traits of a chat template, found by rendering short dialogs.

In: a function that renders dialogs. Out: the `Traits` of the template, and whether it writes Meta's
format. The name of a model and the text of its template are not looked at.
"""

import itertools
import json
import logging
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any

from llama.prompts.dialog_format import DialogFormat, PromptOptions
from llama.prompts.jinja.chat_template import TemplateError
from llama.prompts.jinja.marked import MarkedEncoder, MarkedText, mask_of
from llama.tokenizer import Tokenizer

Render = Callable[..., MarkedText]

_QUESTION = "QUESTION"
_ANSWER = "ANSWER"
_USER = {"role": "user", "content": _QUESTION}
_ASSISTANT = {"role": "assistant", "content": _ANSWER}
_SYSTEM = {"role": "system", "content": "SYSTEM"}
_NEXT = {"role": "user", "content": "NEXT"}
_PARAMETER = {"type": "string", "description": "a text"}
_PARAMETERS = {"type": "object", "properties": {"key": _PARAMETER}, "required": ["key"]}
_FUNCTION = {"name": "TOOLNAME", "description": "a tool", "parameters": _PARAMETERS}
PROBE_TOOL: dict[str, Any] = {"type": "function", "function": _FUNCTION}
_CALL = {"id": "call00000", "function": {"name": "TOOLNAME", "arguments": {"key": "é"}}}
_CALLS = {"role": "assistant", "content": None, "tool_calls": [_CALL]}
_RESULT = {"role": "tool", "tool_call_id": "call00000", "content": "RESULT"}
# Dialogs, with and without tools, for which a template is compared with Meta's format.
_DIALOGS: tuple[tuple[list[dict[str, Any]], list[dict[str, Any]] | None], ...] = (
    ([_USER], None),
    ([_SYSTEM, _USER], None),
    ([_USER, _ASSISTANT, _NEXT], None),
    ([{"role": "system", "content": " S\n"}, {"role": "user", "content": "\n U "}], None),
    ([_USER, _ASSISTANT, _RESULT, _ASSISTANT, _NEXT], None),
    ([_USER], [PROBE_TOOL]),
    ([_SYSTEM, _USER], [PROBE_TOOL]),
    ([_SYSTEM, _USER, _CALLS, _RESULT, _ASSISTANT, _NEXT], [PROBE_TOOL]),
    ([_USER, _CALLS, _RESULT], None),
)
# A mark that is plain text, such as <|im_end|>.
_TEXT_MARK = re.compile(r"<[^<>\s]{1,40}>")
_log = logging.getLogger("llama")


@dataclass(frozen=True)
class CallStyle:
    """How a template expects the calls of a message.

    Attributes:
        arguments_are_text: arguments are JSON as text rather than an object.
        content: the content of a message that only has calls; no key is there if it is absent.
        has_content: whether such a message has the key content.
    """

    arguments_are_text: bool
    content: str | None
    has_content: bool

    def call(self, name: str, arguments: Any, call_id: str | None) -> dict[str, Any]:
        """Return a call of a message."""
        if self.arguments_are_text:
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": name, "arguments": arguments}
        call: dict[str, Any] = {"type": "function", "function": function}
        return call if call_id is None else {"id": call_id, **call}

    def set_no_content(self, message: dict[str, Any]) -> None:
        """Give a message the content of one that only has calls."""
        if self.has_content:
            message["content"] = self.content
        else:
            del message["content"]


_STYLES = [
    CallStyle(arguments_are_text, content, has_content)
    for arguments_are_text in (False, True)
    for content, has_content in ((None, True), (None, False), ("", True))
]


@dataclass(frozen=True)
class Traits:
    """All that a format has to know of a template.

    Attributes:
        num_begin: how many begin-of-sequence tokens a prompt begins with.
        stop_ids: the token that the template writes after an answer, if it is special.
        stop_strings: the mark after an answer, if that is plain text.
        shows_tools: whether prompts contain the tools of a request.
        call_style: how calls are given, or None if the template shows no calls.
        has_prompt: whether add_generation_prompt has an effect.
        marks_roles: whether special tokens mark whose turn it is. Else a message's text can
            imitate the beginning of another turn.
    """

    num_begin: int
    stop_ids: frozenset[int]
    stop_strings: tuple[str, ...]
    shows_tools: bool
    call_style: CallStyle | None
    has_prompt: bool
    marks_roles: bool

    def describe(self, tokenizer: Tokenizer) -> str:
        """Return the traits as one line for people."""
        begin = "no begin-of-sequence token"
        if self.num_begin:
            begin = f"begins with {tokenizer.decode(tokenizer.bos_id)}"
        if self.num_begin > 1:
            begin += f" {self.num_begin} times"
        ends = [*map(tokenizer.decode, sorted(self.stop_ids)), *self.stop_strings]
        parts = [
            begin,
            f"answers end with {', '.join(ends)}" if ends else "answers end with no mark",
            "shows tools" if self.shows_tools else "has no tools",
        ]
        if not self.has_prompt:
            parts.append("writes no header for an answer")
        if not self.marks_roles:
            parts.append("roles are plain text: contents can imitate them")
        return "; ".join(parts)


class _Probe:
    """Renders dialogs of a few words, and remembers the results."""

    def __init__(self, render: Render) -> None:
        self._render = render
        self.texts: list[MarkedText] = []

    def text(
        self, messages: list[dict[str, Any]], tools: Any = None, *, prompts: bool = False
    ) -> MarkedText:
        """Return what the template writes.

        Raises:
            TemplateError: the template refuses the dialog, or takes too long.
        """
        text = self._render(messages, tools, add_generation_prompt=prompts)
        self.texts.append(text)
        return text

    def try_text(self, messages: list[dict[str, Any]], tools: Any = None) -> MarkedText:
        """Return what the template writes, or an empty text if it refuses the dialog."""
        try:
            return self.text(messages, tools)
        except TemplateError:
            return MarkedText()


def find_traits(render: Render, encoder: MarkedEncoder, tokenizer: Tokenizer) -> Traits:
    """Return the traits of a template.

    Raises:
        TemplateError: the template does not even render a question, or takes too long.
    """
    probe = _Probe(render)
    question = probe.text([_USER], prompts=True)
    unprompted = probe.try_text([_USER])
    ids = encoder.encode(question)
    num_begin = next((i for i, x in enumerate(ids) if x != tokenizer.bos_id), len(ids))
    stop_ids, stop_strings = _stops(probe, encoder, tokenizer)
    with_tool = [probe.try_text(messages, [PROBE_TOOL]) for messages in ([_USER], [_SYSTEM, _USER])]
    traits = Traits(
        num_begin=num_begin,
        stop_ids=stop_ids,
        stop_strings=stop_strings,
        shows_tools=any("TOOLNAME" in text for text in with_tool),
        call_style=_call_style(probe),
        has_prompt=question != unprompted,
        marks_roles=_marks_roles(probe, encoder),
    )
    for name in sorted(set(_lost_names(probe.texts, encoder))):
        _log.warning(
            "the chat template writes %s in a way that cannot be told from the text of a message: "
            "it is encoded as text",
            name,
        )
    return traits


def _stops(
    probe: _Probe, encoder: MarkedEncoder, tokenizer: Tokenizer
) -> tuple[frozenset[int], tuple[str, ...]]:
    """Return the special token after an answer, or else the mark of text there."""
    text = probe.try_text([_USER, _ASSISTANT, _NEXT])
    if _ANSWER not in text:
        return frozenset(), ()
    behind = text[text.find(_ANSWER) + len(_ANSWER) :].lstrip()
    first = encoder.encode(behind)[:1]
    if first and first[0] in tokenizer.special_tokens.values():
        return frozenset(first), ()
    mark = _TEXT_MARK.match(behind)
    return frozenset(), (mark[0],) if mark else ()


def _call_style(probe: _Probe) -> CallStyle | None:
    """Return the first style in which the name and the arguments of a call are rendered.

    One in which the template writes a missing content as "None" is the last choice.
    """
    with_none: CallStyle | None = None
    for tools in (None, [PROBE_TOOL]):
        for style in _STYLES:
            message: dict[str, Any] = {"role": "assistant", "content": ""}
            message["tool_calls"] = [style.call("FNAME", {"KEY": "VAL"}, "call00000")]
            style.set_no_content(message)
            text = probe.try_text([_USER, message], tools)
            if not all(part in text for part in ("FNAME", "KEY", "VAL")):
                continue
            if "None" not in text:
                return style
            with_none = with_none or style
    return with_none


def _marks_roles(probe: _Probe, encoder: MarkedEncoder) -> bool:
    """Return whether a special token stands between a question and its answer."""
    text = probe.try_text([_USER, _ASSISTANT])
    start = text.find(_QUESTION)
    end = text.find(_ANSWER)
    return start >= 0 and bool(encoder.names_in(text[start:end]))


def _lost_names(texts: list[MarkedText], encoder: MarkedEncoder) -> Iterator[str]:
    """Yield the names of added tokens that a template wrote, but that its marks do not cover."""
    for text in texts:
        if "0" in mask_of(text):
            written = encoder.names_in(MarkedText(text, "1" * len(text)))
            yield from written - encoder.names_in(text)


def writes_alike(
    template_format: DialogFormat, meta: DialogFormat, variables: Collection[str]
) -> bool:
    """Return whether a chat template writes the ids of Meta's format for every probe.

    A dialog that the template refuses is none of its prompts, and so are the tools of a template
    that shows none.

    Args:
        template_format: the format of the template.
        meta: Meta's format, with the tool calls of a generation.
        variables: the names of the variables that the template reads.
    """
    all_options = [PromptOptions(), PromptOptions(add_generation_prompt=False)]
    if "date_string" in variables:
        all_options.append(PromptOptions(template_kwargs={"date_string": "1 Feb 2031"}))
    for (messages, tools), options in itertools.product(_DIALOGS, all_options):
        if tools and not template_format.has_tools:
            continue
        ids = _ids(template_format, messages, tools, options)
        if ids is not None and ids != _ids(meta, messages, tools, options):
            return False
    return True


def _ids(
    dialog_format: DialogFormat,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    options: PromptOptions,
) -> list[int] | None:
    """Return the ids of a dialog; None if the format refuses it."""
    try:
        return dialog_format.encode(messages, tools, options)
    except ValueError:
        return None
