"""What a checked body asks for, of whichever API: the one form that all routes and batch files use.

In: prompts, or messages with tools, and parameters. Out: what the engine needs of a chat, and what
reads the calls in its answer. It knows no JSON and no network.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from llama.checks import FieldError
from llama.prompts import encode_chat
from llama.prompts.answer import AnswerDeltas
from llama.prompts.chat import chat_params
from llama.prompts.tools import ToolFormat, Tools
from llama.requests.request import CompletionOutput, RequestOutput
from llama.sampling_params import SamplingParams
from llama.server.errors import ErrorFields, first_name
from llama.tokenizer import Tokenizer


@dataclass(frozen=True)
class OpenAIRequest:
    """What a body asks for; a body of another chat API becomes one, too. See `encode_chat`."""

    params: SamplingParams
    prompts: tuple[str | list[int], ...] = ()  # of a chat none
    messages: Sequence[Any] = ()
    model: str | None = None
    echo: bool = False
    stream: bool = False
    has_usage: bool = False  # a stream ends with the counts of tokens
    tools: Tools | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    fields: ErrorFields = field(default_factory=ErrorFields)

    @property
    def chat(self) -> bool:
        return not self.prompts

    @property
    def num_answers(self) -> int:
        """Sequences that it asks the engine for."""
        return max(len(self.prompts), 1) * (self.params.best_of or self.params.n)

    def chat_ids(self, tokenizer: Tokenizer, tool_format: ToolFormat) -> list[int]:
        """The ids of a chat's dialog. FieldError names the field that is wrong, or the message."""
        return encode_chat(
            tokenizer,
            self.messages,
            self.tools,
            tool_format=tool_format,
            add_generation_prompt=self.add_generation_prompt,
            continue_final_message=self.continue_final_message,
            keeps_space=True,
        )

    def chat_params(self, tool_format: ToolFormat) -> SamplingParams:
        """The parameters, with the grammar of the calls where a chat must be held to one."""
        return chat_params(self.params, self.tools, tool_format, first_name(self.fields.form))

    def deltas(
        self,
        tokenizer: Tokenizer,
        response_id: str,
        output: RequestOutput,
        answer: CompletionOutput,
    ) -> AnswerDeltas:
        """What reads the calls in an answer."""
        key = (response_id, output.prompt_token_ids, output.index, answer.index)
        shows_special = not self.params.skip_special_tokens
        return AnswerDeltas(self.tools, tokenizer, key, shows_special=shows_special)


class ConvertedChat:
    """The dialog of a body of another API. places: where in the body each message came from, which
    errors name. Calls and their results are matched here: there is no stored state."""

    def __init__(self, instructions: str | None, place: str) -> None:
        self._messages: list[dict[str, Any]] = []  # words as a list of texts
        self.places: list[str] = []
        self._call_ids: set[str] = set()
        if instructions is not None:
            self.say("system", instructions, place)

    def say(self, role: str, text: str | None, place: str) -> None:
        """Words: one message, if they are of one place, or of the system at the beginning."""
        is_more = self.places[-1:] == [place] or (role == "system" and len(self.places) == 1)
        if not is_more or self._messages[-1]["role"] != role:
            self._messages.append({"role": role, "content": []})
            self.places.append(place)
        if text is not None:
            self._messages[-1]["content"].append(text)

    def call(self, call_id: str, name: str, arguments: str | dict[str, Any], place: str) -> None:
        """Words of the assistant and calls that follow one another were one answer."""
        if not self._messages or self._messages[-1]["role"] != "assistant":
            self.say("assistant", None, place)
        calls = self._messages[-1].setdefault("tool_calls", [])
        calls.append({"id": call_id, "function": {"name": name, "arguments": arguments}})
        self._call_ids.add(call_id)

    def result(self, call_id: str, content: Any, place: str, id_field: str, words: str) -> None:
        """What a call returned. FieldError, in these words, where no call has the id."""
        if call_id not in self._call_ids:
            raise FieldError(id_field, f"{id_field} names {words}")
        self._messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        self.places.append(place)

    def messages(self) -> list[dict[str, Any]]:
        """In OpenAI's form."""
        for message in self._messages:
            if isinstance(message["content"], list):
                message["content"] = "\n".join(message["content"]) if message["content"] else None
        return self._messages
