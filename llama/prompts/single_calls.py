"""Messages with several tool calls, for templates that accept one call per message.

In: a dialog as a chat template gets it. Out: the same dialog, in which each call is a message of
its own with its result after it. The format of calls is not known here.
"""

from collections.abc import Callable
from typing import Any

from llama.common.checks import FieldError

Dialog = list[dict[str, Any]]


def has_several_calls(messages: Dialog) -> bool:
    """Return whether any message has more than one call."""
    return any(len(message.get("tool_calls") or ()) > 1 for message in messages)


def one_call_each(messages: Dialog, set_no_content: Callable[[dict[str, Any]], None]) -> Dialog:
    """Return the dialog with one call per message, each followed by its result.

    Args:
        messages: the dialog.
        set_no_content: gives a message the content of one that only has calls.

    Raises:
        FieldError: a call of a message with several ones has no result.
    """
    split: Dialog = []
    position = 0
    while position < len(messages):
        message = messages[position]
        calls = message.get("tool_calls") or []
        end = position + 1
        if len(calls) < 2:
            split.append(message)
            position = end
            continue
        while end < len(messages) and messages[end]["role"] == "tool":
            end += 1
        results = messages[position + 1 : end]
        if len(results) != len(calls):
            raise FieldError(
                f"messages[{position}]",
                f"message {position}: tool_calls has {len(calls)} calls, and this model's chat "
                "template takes one call per message: the result of each must follow, with role "
                "tool",
            )
        for i, call in enumerate(calls):
            single = {**message, "tool_calls": [call]}
            if i:
                set_no_content(single)
            split += [single, _result_of(call, i, results)]
        position = end
    return split


def _result_of(call: dict[str, Any], index: int, results: Dialog) -> dict[str, Any]:
    """Return the result that names a call, or else the one at its position."""
    named = (x for x in results if x.get("tool_call_id") is not None)
    return next((x for x in named if x["tool_call_id"] == call.get("id")), results[index])
