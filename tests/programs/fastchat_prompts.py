"""The program of compat/test_fastchat_host.py in FastChat's own environment: prompts of dialogs.

Input, on stdin: JSON, {"fields", "dialogs"}: the fields of a conversation template, and lists of
messages. Output: {"worker": the prompts by that template, "LLAMA3": those by FastChat's own style,
if it has one}.
"""

import json
import sys
from typing import Any

from fastchat.conversation import Conversation, SeparatorStyle


def prompt(fields: dict[str, Any], dialog: list[dict[str, str]]) -> str:
    """Return the prompt as FastChat's API server fills in a conversation."""
    fields = {**fields, "sep_style": SeparatorStyle(fields["sep_style"]), "messages": []}
    conv = Conversation(**fields)
    for message in dialog:
        if message["role"] == "system":
            conv.set_system_message(message["content"])
        else:
            conv.append_message(conv.roles[message["role"] == "assistant"], message["content"])
    conv.append_message(conv.roles[1], None)
    return conv.get_prompt()


def main() -> None:
    job = json.load(sys.stdin)
    assert SeparatorStyle.ADD_COLON_TWO == 2
    styles = {"worker": job["fields"]}
    if hasattr(SeparatorStyle, "LLAMA3"):
        own = {"roles": ("user", "assistant"), "sep_style": SeparatorStyle.LLAMA3.value, "sep": ""}
        styles["LLAMA3"] = job["fields"] | own
    found = {
        name: [prompt(fields, dialog) for dialog in job["dialogs"]]
        for name, fields in styles.items()
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
