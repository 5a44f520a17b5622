"""A chat with a server in a terminal, `llama chat --url`: no model is loaded, no torch imported."""

import asyncio
from collections.abc import Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import fields
from typing import Any

from llama.cli.chat.conversation import Conversation, Turn
from llama.cli.chat.session import Part, talk
from llama.cli.chat.terminal import Terminal
from llama.cli.client import Client, ServerError, found_at, usage_of
from llama.sampling_params import SamplingParams
from llama.server.openai.models import CHAT_URL

_LOOK_S = 0.1  # between two looks at whether Ctrl-C was pressed
_DEFAULTS = SamplingParams(max_tokens=None)
_ALWAYS_SAID = ("temperature", "top_p")  # servers have defaults of their own


def chat_on_server(
    url: str, *, api_key: str | None = None, model: str | None = None, **settings: Any
) -> None:
    """Talk until the person leaves or input ends. settings: of `Conversation`. ServerError or
    ValueError for a server that cannot be used, ValueError for a bad setting."""
    with closing(Client(url, api_key)) as client:
        name, context = client.run(client.model(model))
    conversation = Conversation(None, context, **settings)

    def answers(turn: Turn) -> Generator[Part, None, None]:
        """Each has a connection, which ends with it: so the server stops too."""
        params = conversation.sampling(turn.attempt)
        reason, usage, rate = None, None, None
        with closing(Client(url, api_key)) as client:
            for part in _parts(client, chat_body(turn.dialog, params, model=name)):
                reason, usage = part.finish_reason or reason, part.usage or usage
                rate = part.rate or rate
                yield Part(part.new_text)  # the reason waits for the counts of tokens
        if reason is None and usage is None:
            raise ValueError(f"{url}: the stream ended without its last event")
        yield Part("", reason or "stop", usage, rate)

    talk(answers, conversation, Terminal())


def _parts(client: Client, body: dict[str, Any]) -> Generator[Part, None, None]:
    """What the chunks bring, with an empty part after each tenth of a second without any."""
    arrived: asyncio.Queue[Part | None] = asyncio.Queue()  # None: the end

    async def read() -> None:
        try:
            async for chunk in client.events(CHAT_URL, body):
                arrived.put_nowait(part_of(chunk))
        except ServerError as e:  # of this answer alone
            raise ValueError(str(e)) from None
        finally:
            arrived.put_nowait(None)

    async def look() -> Part | None:
        try:
            return await asyncio.wait_for(arrived.get(), _LOOK_S)
        except TimeoutError:
            return Part()

    reading = client.start(read())
    while (part := client.run(look())) is not None:
        yield part
    reading.result()  # or its error


def chat_body(
    messages: Sequence[Mapping[str, Any]], params: SamplingParams, *, model: str
) -> dict[str, Any]:
    """The body of a chat that streams. Of others no default is said: servers may not know them."""
    values = {field.name: getattr(params, field.name) for field in fields(SamplingParams)}
    said = {n: x for n, x in values.items() if n in _ALWAYS_SAID or x != getattr(_DEFAULTS, n)}
    return {
        "model": model,
        "messages": messages,
        **said,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def part_of(chunk: Any) -> Part:
    """A chunk of a stream with one choice. Tool calls and reasoning are not text."""
    text = found_at(chunk, "choices", 0, "delta", "content")
    reason = found_at(chunk, "choices", 0, "finish_reason")
    rate = found_at(chunk, "timings", "predicted_per_second")
    rate = rate if isinstance(rate, float) else None  # null of an answer of one token
    return Part(text if isinstance(text, str) else "", reason, usage_of(chunk), rate)
