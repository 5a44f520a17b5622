"""A chat with a server in a terminal, `llama chat --url`: no model is loaded, no torch imported.

In: a URL of a server with OpenAI's API, and the keyboard. Out: its answers as they stream. A thread
reads the connection, so that Ctrl-C stops an answer also while nothing comes.
"""

import contextlib
import queue
import threading
from collections.abc import Generator
from contextlib import closing
from typing import Any

from llama.cli.chat.conversation import Conversation, Turn
from llama.cli.chat.session import Answers, Part, talk
from llama.cli.chat.terminal import Terminal
from llama.cli.client import Client, ServerError
from llama.sampling_params import SamplingParams
from llama.server.openai.client_bodies import Delta, chat_body, delta_of
from llama.server.openai.requests import CHAT_URL

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
        card = client.model(model)
    conversation = Conversation(None, card.context, system=system, **settings)
    gone = talk(_of_server(url, api_key, card.name), conversation, Terminal())
    if gone is not None:
        raise gone


def _of_server(url: str, api_key: str | None, model: str) -> Answers:
    """Answers of a server; each has a connection, which ends with it: so the server stops too."""

    def answers(conversation: Conversation, turn: Turn) -> Generator[Part | None, None, None]:
        params = SamplingParams(**conversation.sampling(turn.attempt))
        body = chat_body(turn.dialog, params, model=model)
        text, reason, counts = "", "stop", (0, 0, 0)  # where the server does not say
        for delta in _deltas(Client(url, api_key), body):
            if delta is None:
                yield None
                continue
            if delta.error is not None:
                yield Part(text, "", "error", delta.error)
                return
            text += delta.text
            reason = delta.finish_reason or reason
            counts = delta.counts or counts
            if delta.text:  # the reason waits for the counts
                yield Part(text, delta.text)
        yield Part(text, "", reason, None, *counts)

    return answers


def _deltas(client: Client, body: dict[str, Any]) -> Generator[Delta | None, None, None]:
    """What the chunks bring, with None after each tenth of a second without any."""
    arrived: queue.SimpleQueue[Delta | None] = queue.SimpleQueue()  # None: the end

    def read() -> None:
        try:
            for chunk in client.events(CHAT_URL, body):
                arrived.put(delta_of(chunk))
        except ServerError as e:
            arrived.put(Delta(error=str(e)))
        finally:
            arrived.put(None)

    reader = threading.Thread(target=read, daemon=True)
    with closing(client):
        reader.start()
        while True:
            delta = None
            with contextlib.suppress(queue.Empty):
                delta = arrived.get(timeout=_LOOK_S)
                if delta is None:
                    return
            yield delta
