"""The messages of a chat that a body of another API becomes, each with its place in the body.

In: texts, calls and results, as the body has them. Out: messages of OpenAI's form, and the places
that errors name. It knows no API's fields.
"""

from typing import Any

from llama.checks import FieldError


class ConvertedChat:
    """messages: of OpenAI's form. places: where in the body each of them came from. Calls and their
    results are matched here, as there is no stored state to look for them in."""

    def __init__(self, instructions: str | None, place: str) -> None:
        self.messages: list[dict[str, Any]] = []
        self.places: list[str] = []
        self._call_ids: set[str] = set()
        if instructions is not None:
            self.say("system", instructions, place)

    def say(self, role: str, text: str | None, place: str) -> None:
        """Words. System messages at the beginning are one: the format has one place for them."""
        if role == "system" and len(self.messages) == 1 and self.messages[0]["role"] == "system":
            self.messages[0]["content"] += f"\n{text}"
            return
        self.messages.append({"role": role, "content": text})
        self.places.append(place)

    def call(self, call_id: str, name: str, arguments: str | dict[str, Any], place: str) -> None:
        """Words of the assistant and calls that follow one another were one answer."""
        if not self.messages or self.messages[-1]["role"] != "assistant":
            self.say("assistant", None, place)
        calls = self.messages[-1].setdefault("tool_calls", [])
        calls.append({"id": call_id, "function": {"name": name, "arguments": arguments}})
        self._call_ids.add(call_id)

    def result(self, call_id: str, content: Any, place: str, id_field: str, words: str) -> None:
        """What a call returned. FieldError, in these words, where no call has the id."""
        if call_id not in self._call_ids:
            raise FieldError(id_field, f"{id_field} names {words}")
        self.messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        self.places.append(place)
