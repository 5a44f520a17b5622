"""The server's app, in this process or another one, with a model that follows a script.

The checkpoint, the engine and the app are real; only the sampled ids come from a script.
"""

import asyncio
import contextlib
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import httpx
import openai

from helpers.scheduling import FakeStep
from helpers.services import service_of
from llama import Llama
from llama.cli.serve import unix_listener
from llama.engine.rows import Tokens
from llama.engine.step import Step
from llama.prompts import ToolFormat
from llama.server.api_options import ApiOptions
from llama.server.app import make_app
from llama.server.split import SplitServer


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


class ApiProcesses:
    """Servers of a model of this process, one for each set of options, with an API process each."""

    def __init__(self, llama: Llama, stack: contextlib.ExitStack) -> None:
        self._llama, self._stack = llama, stack
        self._sockets: dict[str, str] = {}

    def socket(self, **options: Any) -> str:
        """Return the path of the Unix domain socket of the server with these `ApiOptions`."""
        key = repr(options)
        if key not in self._sockets:
            path = f"{self._stack.enter_context(tempfile.TemporaryDirectory())}/socket"
            given = ApiOptions(name="tiny", **options)
            server = SplitServer(given, 1, host="localhost", port=0, listener=unix_listener(path))
            self._stack.callback(server.stop)
            server.start()
            server.host.open(self._llama)
            self._sockets[key] = path
        return self._sockets[key]


@contextlib.contextmanager
def apis_of(llama: Llama, num_api_processes: int) -> Iterator[ApiProcesses | None]:
    """Yield the API processes of a model; None without any."""
    with contextlib.ExitStack() as stack:
        yield ApiProcesses(llama, stack) if num_api_processes else None


class ScriptedServer:
    """A server whose `url` belongs to no machine, and whose model follows a script.

    The requests go to the app in this process, or to API processes of the model.
    """

    def __init__(self, llama: Llama, apis: ApiProcesses | None = None) -> None:
        self.llama, self.script = llama, Script()
        self.runner = llama.engine.runner
        self._apis = apis
        llama.engine.runner = self.script  # type: ignore[assignment]

    def close(self) -> None:
        """Give the model its own runner again."""
        self.llama.engine.runner = self.runner

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
        options: Any = {"given_format": tool_format, "reasoning_field": reasoning_field}

        async def run() -> Any:
            async with (
                self._transport(http, lenient=lenient, **options) as transport,
                http.AsyncClient(transport=transport, timeout=60) as connection,
            ):
                return await asyncio.wait_for(work(connect(connection)), 60)

        return asyncio.run(run())

    @contextlib.asynccontextmanager
    async def _transport(self, http: Any, *, lenient: bool, **model: Any) -> AsyncIterator[Any]:
        """Yield the transport to a server with these options."""
        if self._apis is not None:
            path = self._apis.socket(lenient=lenient, **model)
            yield http.AsyncHTTPTransport(uds=path)
            return
        service = service_of("tiny", **model)
        service.start(self.llama)
        try:
            yield http.ASGITransport(make_app(service, lenient=lenient))
        finally:
            service.close()
