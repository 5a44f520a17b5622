"""The dialog of Anthropic's Messages API: messages with blocks in, a chat's messages out.

In: `messages` and `system` of a body. Out: a `Dialog`. Blocks are text, tool_use and tool_result,
and thinking, which is left out, as Anthropic's API does with that of earlier turns; TypeError or
ValueError names the place of any other. It knows no network, and runs nothing.
"""

from typing import Any

from llama.server.openai.dialog import Dialog, text_parts
from llama.server.openai.json_types import object_at, of_type

_BLOCKS: dict[str, set[str]] = {
    "text": {"text", "citations"},
    "tool_use": {"id", "name", "input", "caller"},
    "tool_result": {"tool_use_id", "content", "is_error"},
    "thinking": {"thinking", "signature"},
    "redacted_thinking": {"data"},
}
_THINKING = ("thinking", "redacted_thinking")  # of another model: a dialog may have begun with one
_OF_ROLE = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", *_THINKING),
    "system": ("text",),
}


def read_messages(messages: Any, system: Any) -> tuple[Dialog, bool]:
    """The dialog, and whether its last message is the beginning of the answer."""
    dialog, calls = Dialog(), set[str]()
    if system is not None:
        dialog.add({"role": "system", "content": _text(system, "system")}, "system")
    if not of_type(messages, list, "messages"):
        raise ValueError("messages must be a list of at least one message")
    for i, message in enumerate(messages):
        place = f"messages[{i}]"
        given = object_at(message, {"role", "content"}, place)
        role = given.get("role")
        if not isinstance(role, str) or role not in _OF_ROLE:
            raise ValueError(f"{place}.role must be 'user', 'assistant' or 'system'")
        content = given.get("content")
        if isinstance(content, str):
            dialog.add({"role": role, "content": content}, place)
        else:
            blocks = _blocks(content, _OF_ROLE[role], f"{place}.content")
            read = _assistant if role == "assistant" else _others
            read(dialog, calls, role, blocks, place)
    dialog.join_system()
    continues = dialog.messages[-1]["role"] == "assistant"
    if continues:
        _check_beginning(dialog.messages[-1], dialog.places[-1])
    return dialog, continues


def _check_beginning(message: dict[str, Any], place: str) -> None:
    """Of the answer, which goes on from its last character."""
    content = message.get("content") or ""
    texts = [content] if isinstance(content, str) else [part["text"] for part in content]
    if "tool_calls" in message:
        raise ValueError(f"{place}: the results of its tool_use blocks must follow")
    if not texts[-1] or texts[-1][-1].isspace():
        raise ValueError(
            f"{place}: the beginning of an answer must not be empty, or end with a space"
        )


def _blocks(content: Any, kinds: tuple[str, ...], where: str) -> list[dict[str, Any]]:
    """Checked blocks, without what is null."""
    if not isinstance(content, list) or not content:
        raise TypeError(f"{where} must be a string, or a list of at least one block")
    blocks = []
    for i, block in enumerate(content):
        place = f"{where}[{i}]"
        kind = of_type(block, dict, place).get("type")
        if not isinstance(kind, str) or kind not in kinds:
            named = repr(kind[:40]) if isinstance(kind, str) else "no type"
            raise ValueError(f"{place} is {named}: only {', '.join(kinds)} can be used here")
        given = object_at(block, {"type", "cache_control"} | _BLOCKS[kind], place)
        of_type(given.get("cache_control", {}), dict, f"{place}.cache_control")
        _check_block(given, kind, place)
        if kind not in _THINKING:
            blocks.append(given)
    return blocks


def _check_block(given: dict[str, Any], kind: str, place: str) -> None:
    if kind == "text":
        of_type(given.get("text"), str, f"{place}.text")
        if given.get("citations"):
            raise ValueError(f"{place}.citations cannot be used: leave them out")
    elif kind == "tool_use":
        for name, of in (("id", str), ("name", str), ("input", dict)):
            of_type(given.get(name), of, f"{place}.{name}")
        if given.get("caller", {"type": "direct"}) != {"type": "direct"}:
            raise ValueError(f"{place}.caller must have the type 'direct'")
    elif kind == "tool_result":
        of_type(given.get("tool_use_id"), str, f"{place}.tool_use_id")
        of_type(given.get("is_error", False), bool, f"{place}.is_error")
    else:
        for name in _BLOCKS[kind]:
            of_type(given.get(name, ""), str, f"{place}.{name}")


def _text(content: Any, where: str) -> str | list[dict[str, str]]:
    """A string, or text blocks as parts."""
    if isinstance(content, str):
        return content
    return text_parts([block["text"] for block in _blocks(content, ("text",), where)])


def _assistant(
    dialog: Dialog, calls: set[str], role: str, blocks: list[dict[str, Any]], place: str
) -> None:
    """One message: its words, then its calls."""
    texts = [block["text"] for block in blocks if block["type"] == "text"]
    uses = [block for block in blocks if block["type"] == "tool_use"]
    message: dict[str, Any] = {"role": role, "content": text_parts(texts) if texts else None}
    if uses:
        message["tool_calls"] = [
            {"id": use["id"], "function": {"name": use["name"], "arguments": use["input"]}}
            for use in uses
        ]
        calls.update(use["id"] for use in uses)
    dialog.add(message, place)


def _others(
    dialog: Dialog, calls: set[str], role: str, blocks: list[dict[str, Any]], place: str
) -> None:
    """The results, each a message, and the texts between them."""
    texts: list[str] = []
    for i, block in enumerate(blocks):
        if block["type"] == "text":
            texts.append(block["text"])
            continue
        if texts:
            dialog.add({"role": role, "content": text_parts(texts)}, place)
            texts = []
        dialog.add(_result(block, calls, f"{place}.content[{i}]"), place)
    if texts:
        dialog.add({"role": role, "content": text_parts(texts)}, place)


def _result(block: dict[str, Any], calls: set[str], place: str) -> dict[str, Any]:
    """A result that is an error goes to the model as {"error": text}: the format has no flag."""
    call_id = block["tool_use_id"]
    if call_id not in calls:
        raise ValueError(f"{place}.tool_use_id names no tool_use block of a message before it")
    given = block.get("content")
    content: Any = "" if given is None or given == [] else _text(given, f"{place}.content")
    if block.get("is_error"):
        texts = [content] if isinstance(content, str) else [part["text"] for part in content]
        content = {"error": "\n".join(texts)}
    return {"role": "tool", "tool_call_id": call_id, "content": content}
