"""A chat with a server: `llama chat --url`.

No model is loaded and torch is not imported.
"""

import asyncio
import json
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from llama.cli.chat.conversation import Conversation, Turn
from llama.cli.chat.session import Part, talk
from llama.cli.chat.terminal import Terminal
from llama.cli.client import Client, ServerError, json_at, sampling_fields, usage_of
from llama.sampling_params import SamplingParams
from llama.server.openai.models import CHAT_URL

_POLL_S = 0.1  # interval of the checks for Ctrl-C
# Not every server counts tokens. This is for the first question: the answers have the true counts.
_TOKENS_PER_CHAR = 0.4


def chat_on_server(
    url: str,
    *,
    api_key: str | None = None,
    model: str | None = None,
    history: Path | None = None,
    **settings: Any,
) -> None:
    """Chat until the user leaves or the input ends.

    Args:
        url: The server; see `Client`.
        api_key: The key of the server.
        model: One of the server's models; its first one by default.
        history: The file that keeps what is typed; None: it is not kept.
        settings: Initial values of the settings of `/set`, and `system`.

    Raises:
        ServerError: The server cannot be reached, or it refuses.
        ValueError: The server cannot be used, or a setting is not allowed.
    """
    with closing(Client(url, api_key)) as client:
        name, context = client.run(client.model(model))
    conversation = Conversation(None, context, **settings)
    tokens_per_char = _TOKENS_PER_CHAR

    def estimate(dialog: Sequence[Mapping[str, Any]]) -> int:
        return round(_num_chars(dialog) * tokens_per_char)

    def answers(turn: Turn) -> Generator[Part, None, None]:
        """Yield the parts of an answer.

        Each answer has a connection of its own, so that closing it makes the server stop too.
        """
        nonlocal tokens_per_char
        params = conversation.sampling(turn.attempt)
        dialog = conversation.window.fit(turn.dialog, params.max_tokens or 0, estimate)
        reason = None
        usage = None
        rate = None
        with closing(Client(url, api_key)) as client:
            for part in _parts(client, chat_body(dialog, params, model=name)):
                reason = part.finish_reason or reason
                usage = part.usage or usage
                rate = part.rate or rate
                # The reason is held back until the usage has come.
                yield Part(part.new_text, new_reasoning=part.new_reasoning)
        if usage is not None and usage.prompt_tokens:
            tokens_per_char = usage.prompt_tokens / _num_chars(dialog)
        if reason is None and usage is None:
            raise ValueError(f"{url}: the stream ended without its last event")
        yield Part("", reason or "stop", usage, rate)

    talk(answers, conversation, Terminal(history=history))


def _num_chars(dialog: Sequence[Mapping[str, Any]]) -> int:
    """Return the size of a dialog, in which the keys of a message stand for its header.

    The file of an image is left out: it is one token.
    """
    texts = [
        {**message, "content": [{**part, "image_url": ""} for part in message["content"]]}
        if isinstance(message["content"], list) else message
        for message in dialog
    ]  # fmt: skip
    return len(json.dumps(texts, ensure_ascii=False))


def _parts(client: Client, body: dict[str, Any]) -> Generator[Part, None, None]:
    """Yield a part per chunk, and an empty part whenever none has come for `_POLL_S`."""
    arrived: asyncio.Queue[Part | None] = asyncio.Queue()  # None marks the end.

    async def read() -> None:
        try:
            async for chunk in client.events(CHAT_URL, body):
                arrived.put_nowait(part_of(chunk))
        except ServerError as e:  # This ends the answer, not the chat.
            raise ValueError(str(e)) from None
        finally:
            arrived.put_nowait(None)

    async def poll() -> Part | None:
        try:
            return await asyncio.wait_for(arrived.get(), _POLL_S)
        except TimeoutError:
            return Part()

    reading = client.start(read())
    while (part := client.run(poll())) is not None:
        yield part
    reading.result()  # This raises the error of the task, if it had one.


def chat_body(
    messages: Sequence[Mapping[str, Any]], params: SamplingParams, *, model: str
) -> dict[str, Any]:
    """Return the body of a streamed chat completion."""
    return {
        "model": model,
        "messages": messages,
        **sampling_fields(params),
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def part_of(chunk: Any) -> Part:
    """Return the part in a chunk of a stream with one choice.

    Tool calls are not text and are left out. Servers send reasoning under one of two names.
    """
    text = json_at(chunk, "choices", 0, "delta", "content")
    reasoning = json_at(chunk, "choices", 0, "delta", "reasoning_content")
    if not isinstance(reasoning, str):
        reasoning = json_at(chunk, "choices", 0, "delta", "reasoning")
    reason = json_at(chunk, "choices", 0, "finish_reason")
    rate = json_at(chunk, "timings", "predicted_per_second")
    if not isinstance(rate, float):  # It is null for an answer of one token.
        rate = None
    return Part(
        new_text=text if isinstance(text, str) else "",
        finish_reason=reason,
        usage=usage_of(chunk),
        rate=rate,
        new_reasoning=reasoning if isinstance(reasoning, str) else "",
    )
