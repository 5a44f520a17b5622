"""The input of OpenAI's Responses API: a text or items in, a chat's messages out.

Items are message, function_call and function_call_output; TypeError or ValueError names the place
of any other. It knows no network, and runs nothing.
"""

from typing import Any

from llama.server.openai.dialog import Dialog, text_parts
from llama.server.openai.json_types import object_at, of_type

# id, status and phase are labels: an item of an answer has them when it comes back.
_ITEMS: dict[str, set[str]] = {
    "message": {"role", "content", "phase"},
    "function_call": {"call_id", "name", "arguments"},
    "function_call_output": {"call_id", "output", "name"},
}
_LABELS = ("id", "status", "phase")
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}
_PARTS = {
    "input_text": {"type", "text"},
    "output_text": {"type", "text", "annotations", "logprobs"},
}


def read_input(given: Any, instructions: str | None) -> Dialog:
    """The dialog of a body; the instructions come first."""
    dialog, calls = Dialog(), set[str]()
    if instructions is not None:
        dialog.add({"role": "system", "content": instructions}, "instructions")
    if isinstance(given, str):
        dialog.add({"role": "user", "content": given}, "input")
        return dialog
    if not isinstance(given, list) or not given:
        raise TypeError("input must be a string, or a list of at least one item")
    for i, item in enumerate(given):
        _add(dialog, calls, item, f"input[{i}]")
    dialog.join_system()
    return dialog


def _add(dialog: Dialog, calls: set[str], item: Any, place: str) -> None:
    kind = of_type(item, dict, place).get("type", "message")
    if not isinstance(kind, str) or kind not in _ITEMS:
        named = repr(kind[:40]) if isinstance(kind, str) else "no type"
        raise ValueError(f"{place} is {named}: only {', '.join(_ITEMS)} can be used here")
    given = object_at(item, {"type", "id", "status"} | _ITEMS[kind], place)
    for name in _LABELS:
        of_type(given.get(name, ""), str, f"{place}.{name}")
    if kind == "message":
        role = given.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            raise ValueError(f"{place}.role must be one of {', '.join(_ROLES)}")
        content = _text(given.get("content"), f"{place}.content")
        dialog.add({"role": _ROLES[role], "content": content}, place)
        return
    call_id = of_type(given.get("call_id"), str, f"{place}.call_id")
    if kind == "function_call":
        function = {
            name: of_type(given.get(name), str, f"{place}.{name}") for name in ("name", "arguments")
        }
        _add_call(dialog, {"id": call_id, "function": function}, place)
        calls.add(call_id)
        return
    if call_id not in calls:
        raise ValueError(f"{place}.call_id names no function_call before it: there is no stored "
                         "state, so send the call as well")  # fmt: skip
    output = _text(given.get("output"), f"{place}.output")
    dialog.add({"role": "tool", "tool_call_id": call_id, "content": output}, place)


def _add_call(dialog: Dialog, call: dict[str, Any], place: str) -> None:
    """Words and calls that follow one another were one answer."""
    if not dialog.messages or dialog.messages[-1]["role"] != "assistant":
        dialog.add({"role": "assistant", "content": None}, place)
    dialog.messages[-1].setdefault("tool_calls", []).append(call)


def _text(content: Any, where: str) -> str | list[dict[str, str]]:
    """A string, or parts of text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list) or not content:
        raise TypeError(f"{where} must be a string, or a list of at least one part")
    texts = []
    for i, part in enumerate(content):
        place = f"{where}[{i}]"
        kind = of_type(part, dict, place).get("type")
        if not isinstance(kind, str) or kind not in _PARTS:
            raise ValueError(f"{place}.type must be {' or '.join(_PARTS)}: only text can be used")
        given = object_at(part, _PARTS[kind], place)
        for name in ("annotations", "logprobs"):
            if given.get(name):
                raise ValueError(f"{place}.{name} cannot be used: leave them out")
        texts.append(of_type(given.get("text"), str, f"{place}.text"))
    return text_parts(texts)
