"""The server's app in this process, with a model that follows a script.

The checkpoint, the engine and the app are real; only the sampled ids come from a script.
"""

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import openai

from helpers.scheduling import FakeStep
from helpers.services import service_of
from llama import Llama
from llama.engine.rows import Tokens
from llama.engine.step import Step
from llama.prompts import ToolFormat
from llama.server.app import make_app


def openai_client(connection: Any) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url="http://localhost/v1", api_key="none", http_client=connection, max_retries=0
    )


class Script:
    """A replacement for the model's runner: each sequence gets the ids of `ids`, in order."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.async_scheduling = False

    def start(self, step: Step) -> FakeStep:
        given = {
            kind: Tokens([self.ids[x.sequence.num_output] for x in rows.items])
            for kind, rows in step.rows.items()
        }
        return FakeStep(lambda: given)

    def close(self) -> None:
        pass


class ScriptedServer:
    """A server whose `url` belongs to no machine: the requests go to the app in this process."""

    def __init__(self, llama: Llama) -> None:
        self.llama, self.script = llama, Script()
        self.runner = llama.engine.runner
        llama.engine.runner = self.script  # type: ignore[assignment]

    def says(self, text: str) -> None:
        """Set the next answers: special tokens by their names, and the end of the turn."""
        encode = self.llama.tokenizer.encode
        self.script.ids = encode(text + "<|eot_id|>", bos=False, eos=False, allowed_special="all")

    @contextlib.contextmanager
    def random_model(self) -> Iterator[None]:
        """Let the model's own random weights answer inside the block."""
        self.llama.engine.runner = self.runner
        try:
            yield
        finally:
            self.llama.engine.runner = self.script  # type: ignore[assignment]

    def call(
        self,
        work: Any,
        tool_format: ToolFormat | None = None,
        *,
        connect: Callable[[Any], Any] = openai_client,
        http: Any = httpx,
        lenient: bool = False,
        reasoning_field: str = "reasoning_content",
    ) -> Any:
        """Return the result of `work(client)`; `connect` wraps an HTTP client of this module."""

        async def run() -> Any:
            service = service_of("tiny", given_format=tool_format, reasoning_field=reasoning_field)
            service.start(self.llama)
            transport = http.ASGITransport(make_app(service, lenient=lenient))
            async with http.AsyncClient(transport=transport) as connection:
                try:
                    return await asyncio.wait_for(work(connect(connection)), 60)
                finally:
                    service.close()

        return asyncio.run(run())
