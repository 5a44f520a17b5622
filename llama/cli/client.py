"""A client of a server with OpenAI's API, for `llama batch --url` and `llama chat --url`.

In: a URL, a key, bodies. Out: the server's answers, or an error that says what to do. The package
openai carries the bytes; no model and no torch is needed. One `Client` has an event loop of its
own, which goes on in `run`, so a client belongs to one thread. Each wait has a limit: of a
request's sending and its answer together, however the bytes come.
"""

import asyncio
import contextlib
import json
import random
import ssl
import time
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, TypeVar

import httpx2
import openai

from llama.cli.client_bodies import ModelCard, error_message, model_card

_CONNECT_S = 10.0
_ANSWER_S = 3600.0  # for a whole answer: one can be slow, but not so slow
_MAX_ANSWER = 256 * 2**20  # bytes
_FIRST_WAIT_S, _MAX_WAIT_S = 0.5, 30.0  # between two attempts; doubled each time
_MAX_RETRY_AFTER_S = 60.0  # of what a server asks for
_TRANSIENT = {408, 429, 500, 502, 503, 504}  # another attempt, or another replica, may answer

_T = TypeVar("_T")


class ServerError(OSError):
    """The server cannot be reached, or refuses. status: of HTTP, if it answered."""

    def __init__(
        self, message: str, status: int | None = None, retry_after_s: float | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s

    @property
    def is_transient(self) -> bool:
        """Whether the same request may get an answer later."""
        return self.status is None or self.status in _TRANSIENT

    @property
    def is_about_the_key(self) -> bool:
        return self.status in (401, 403)


@dataclass(frozen=True)
class Reply:
    """A response with status 200. request_id: of the server, or ""."""

    body: Any
    request_id: str


class Client:
    """url: with or without /v1 at its end. ValueError for one that is no URL.

    The coroutines of this class run in `run`, or beside it in what `start` began.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"--url {url} must begin with http:// or https:// and name a host")
        if parts.username or parts.query or parts.fragment:
            raise ValueError(f"--url {url} must have no user, ? or #: a key goes into --api_key")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("the key must be printable ASCII: see --api_key and LLAMA_API_KEY")
        self.url = url
        self._runner = asyncio.Runner()
        self._headers: dict[str, Any] = {"Content-Type": "application/json"}
        if not api_key:
            self._headers["Authorization"] = openai.Omit()
        self._openai = openai.AsyncOpenAI(
            base_url=parts._replace(path=parts.path.rstrip("/").removesuffix("/v1")).geturl(),
            api_key=api_key or "",  # None would send that of OPENAI_API_KEY, which is another's
            admin_api_key="",
            max_retries=0,  # `with_retries` knows for how long, and stops for a signal
            timeout=httpx2.Timeout(None, connect=_CONNECT_S),
            http_client=openai.DefaultAsyncHttpxClient(
                verify=ssl.create_default_context(),  # the certificates of this system
                trust_env=False,  # a proxy may not know the server
                follow_redirects=False,
                limits=httpx2.Limits(),
            ),
        )
        self._openai.organization = self._openai.project = None  # nor those of the environment

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """What the work returns; what was started goes on meanwhile, and only then."""
        return self._runner.run(work)

    def start(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        return self._runner.get_loop().create_task(work)

    def close(self) -> None:
        """Cancel what was started, and end the connections."""
        self.run(self._close())
        self._runner.close()

    async def _close(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._openai.close()

    async def model(self, name: str | None) -> ModelCard:
        """The server's model of that name, or its first. ServerError or ValueError."""
        async with self._within(_CONNECT_S):
            data = await self._read(await self._openai.get("/v1/models", **self._options()))
        try:
            return model_card(_json(data), name)
        except ValueError as e:
            raise ValueError(f"{self.url}: {e}") from None

    async def post(self, path: str, body: Any, *, request_id: str = "") -> Reply:
        """The answer to one request. ServerError."""
        options = self._options({"X-Request-Id": request_id} if request_id else {})
        async with self._within(_ANSWER_S):
            content = json.dumps(body).encode()
            response = await self._openai.post(path, content=content, **options)
            data = await self._read(response)
        try:
            return Reply(_json(data), response.headers.get("X-Request-Id", ""))
        except ValueError as e:
            raise ServerError(f"{self.url}{path} {e}", response.status_code) from None

    async def events(self, path: str, body: Any) -> AsyncIterator[Any]:
        """The data of each server-sent event of a POST, up to [DONE]. ServerError."""
        options = self._options() | {"cast_to": object}
        async with self._within(_ANSWER_S):
            content = json.dumps(body).encode()
            async with await self._openai.post(path, content=content, **options) as stream:
                try:
                    async for event in stream:
                        yield event
                except (ValueError, RecursionError) as e:
                    raise ServerError(f"{self.url} sent an event that is no JSON: {e}") from None

    def _options(self, headers: dict[str, str] | None = None) -> dict[str, Any]:
        """Arguments of openai's get and post, whose response then is not read yet."""
        return {
            "cast_to": httpx2.Response,
            "options": {"headers": self._headers | (headers or {})},
            "stream": True,
            "stream_cls": openai.AsyncStream[object],
        }

    @contextlib.asynccontextmanager
    async def _within(self, limit_s: float) -> AsyncGenerator[None, None]:
        """All of an exchange with the server, whose errors become a ServerError."""
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            raise ServerError(f"{self.url} sent no whole answer within {limit_s:g} s") from None
        except openai.APIStatusError as e:
            raise self._refusal(e) from None
        except (openai.APIConnectionError, httpx2.HTTPError) as e:
            cause = e.__cause__ if isinstance(e, openai.APIConnectionError) else e
            has_begun = not isinstance(cause, httpx2.ConnectError | httpx2.ConnectTimeout)
            what = "broke off" if has_begun else "cannot be reached"
            why = str(cause) or type(cause).__name__
            raise ServerError(f"{self.url} {what}: {why}") from None
        except openai.APIError as e:  # an event of a stream
            raise ServerError(error_message({"error": e.body}, str(e).encode())) from None

    async def _read(self, response: httpx2.Response) -> bytes:
        data = bytearray()
        async with contextlib.aclosing(response):
            async for piece in response.aiter_bytes():
                data += piece
                if len(data) > _MAX_ANSWER:
                    raise ServerError(f"{self.url}: the answer has over {_MAX_ANSWER} bytes", 413)
        return bytes(data)

    def _refusal(self, error: openai.APIStatusError) -> ServerError:
        status, after = error.status_code, error.response.headers.get("Retry-After", "")
        message = error_message({"error": error.body}, error.response.content)
        if status in (401, 403):
            message = f"the server refuses the key: give --api_key or LLAMA_API_KEY ({message})"
        seconds = min(float(after), _MAX_RETRY_AFTER_S) if after.isdecimal() else None
        return ServerError(f"{self.url}: status {status}: {message}", status, seconds)


async def with_retries(
    attempt: Callable[[], Awaitable[Reply]], *, limit_s: float, stops: asyncio.Event
) -> Reply:
    """The reply of an attempt, after waits that grow from 0.5 to 30 s, or that the server asks for.

    A wait is between a half and the whole of that, at random, so that many clients do not come
    back at once. ServerError of the last attempt, if it is no transient one, if the next wait ends
    later than `limit_s` after the first failure, or once `stops` is set.
    """
    wait_s, end = _FIRST_WAIT_S, None
    while True:
        try:
            return await attempt()
        except ServerError as e:
            now = time.monotonic()
            end = now + limit_s if end is None else end
            pause_s = max(e.retry_after_s or 0.0, wait_s * random.uniform(0.5, 1.0))
            if not e.is_transient or now + pause_s > end:
                raise
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stops.wait(), pause_s)
            if stops.is_set():
                raise
        wait_s = min(2 * wait_s, _MAX_WAIT_S)


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        raise ValueError(
            f"answered with no JSON ({data[:80]!r}): is it a server of OpenAI's API?"
        ) from None
