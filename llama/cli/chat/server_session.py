"""A chat with a server in a terminal, `llama chat --url`: no model is loaded, no torch imported.

In: a URL of a server with OpenAI's API, and the keyboard. Out: its answers as they stream. A look
at the server lasts a tenth of a second, so that Ctrl-C stops an answer also while nothing comes.
"""

import asyncio
from collections.abc import Generator
from contextlib import closing
from typing import Any

from llama.cli.chat.conversation import Conversation, Turn
from llama.cli.chat.session import Answers, Part, talk
from llama.cli.chat.terminal import Terminal
from llama.cli.client import Client, ServerError
from llama.cli.client_bodies import Delta, chat_body, delta_of
from llama.sampling_params import SamplingParams
from llama.server.openai.models import CHAT_URL

_LOOK_S = 0.1  # between two looks at whether Ctrl-C was pressed


def chat_on_server(
    url: str,
    *,
    api_key: str | None = None,
    model: str | None = None,
    system: str | None = None,
    **settings: Any,
) -> None:
    """Talk until the person leaves or input ends. settings: those of `/set`.

    ServerError or ValueError for a server that cannot be used, ValueError for a bad setting.
    """
    with closing(Client(url, api_key)) as client:
        card = client.run(client.model(model))
    conversation = Conversation(None, card.context, system=system, **settings)
    gone = talk(_of_server(url, api_key, card.name), conversation, Terminal())
    if gone is not None:
        raise gone


def _of_server(url: str, api_key: str | None, model: str) -> Answers:
    """Answers of a server; each has a connection, which ends with it: so the server stops too."""

    def answers(conversation: Conversation, turn: Turn) -> Generator[Part | None, None, None]:
        params = SamplingParams(**conversation.sampling(turn.attempt))
        body = chat_body(turn.dialog, params, model=model)
        text, reason, counts = "", None, None
        with closing(Client(url, api_key)) as client:
            for delta in _deltas(client, body):
                if delta.error is not None:
                    yield Part(text, "", "error", delta.error)
                    return
                text += delta.text
                reason = delta.finish_reason or reason
                counts = delta.counts or counts
                yield Part(text, delta.text) if delta.text else None  # the reason waits for counts
        if reason is None and counts is None:
            yield Part(text, "", "error", f"{url}: the stream ended without its last event")
            return
        yield Part(text, "", reason or "stop", None, *(counts or (0, 0, 0)))

    return answers


def _deltas(client: Client, body: dict[str, Any]) -> Generator[Delta, None, None]:
    """What the chunks bring, with an empty one after each tenth of a second without any."""
    arrived: asyncio.Queue[Delta | None] = asyncio.Queue()  # None: the end

    async def read() -> None:
        try:
            async for chunk in client.events(CHAT_URL, body):
                arrived.put_nowait(delta_of(chunk))
        except ServerError as e:
            arrived.put_nowait(Delta(error=str(e)))
        finally:
            arrived.put_nowait(None)

    async def look() -> Delta | None:
        try:
            return await asyncio.wait_for(arrived.get(), _LOOK_S)
        except TimeoutError:
            return Delta()

    client.start(read())
    while (delta := client.run(look())) is not None:
        yield delta
