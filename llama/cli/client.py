"""A client of a server with OpenAI's API, for `llama batch --url` and `llama chat --url`.

The server may be any that speaks OpenAI's API, so nothing in an answer is sure to be there. (The
package openai takes half a second to import.) A `Client` has an event loop of its own, which goes
on in `run`, so it belongs to one thread. Each wait has a limit: of sending and answer together.
"""

import asyncio
import contextlib
import json
import ssl
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from typing import Any, NamedTuple, TypeVar

import httpx2

from llama.requests.request import Usage

_CONNECT_S = 10.0
_ANSWER_S = 3600.0  # for a whole answer: one can be slow, but not so slow
_MAX_RETRY_AFTER_S = 60.0  # of what a server asks for
_MAX_QUOTED = 500  # characters of an error that is not in OpenAI's form
_TRANSIENT = {408, 429, 500, 502, 503, 504}  # another attempt, or another replica, may answer

_T = TypeVar("_T")


class ServerError(OSError):
    """The server cannot be reached, or refuses. status: of HTTP, if it answered."""

    def __init__(self, message: str, status: int | None = None, retry_after_s: float = 0.0) -> None:
        # What a server said must not move the cursor of a terminal, nor colour it.
        shown = (c if c.isprintable() else c.encode("unicode_escape").decode() for c in message)
        super().__init__("".join(shown))
        self.is_transient = status is None or status in _TRANSIENT  # it may answer later
        self.is_about_the_key = status in (401, 403)
        self.retry_after_s = retry_after_s


class Reply(NamedTuple):
    """A response with status 200. request_id: of the server, or ""."""

    body: Any
    request_id: str


class Client:
    """url: with or without /v1 at its end, or unix:PATH of a socket; else ValueError. The
    coroutines of this class run in `run`, or beside it in what `start` began."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        parts = urllib.parse.urlsplit(url)
        uds = parts.path if parts.scheme == "unix" else None
        if uds is None and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise ValueError(f"--url {url} must begin with http:// or https:// and name a host")
        if parts.username or parts.query or parts.fragment:
            raise ValueError(f"--url {url} must have no user, ? or #: a key goes into --api_key")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ValueError("the key must be printable ASCII: see --api_key and LLAMA_API_KEY")
        self.url = url
        base = parts._replace(path=parts.path.rstrip("/").removesuffix("/v1")).geturl()
        verify: Any = ssl.create_default_context() if parts.scheme == "https" else False
        key = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._runner = asyncio.Runner()
        self._http = httpx2.AsyncClient(  # proxies and keys of the environment are for others
            base_url=base if uds is None else "http://localhost",
            headers={"Content-Type": "application/json"} | key,
            timeout=httpx2.Timeout(None, connect=_CONNECT_S),
            transport=httpx2.AsyncHTTPTransport(
                verify=verify, trust_env=False, limits=httpx2.Limits(), uds=uds
            ),
            trust_env=False,
        )

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
        await self._http.aclose()

    async def model(self, name: str | None) -> tuple[str, int | None]:
        """The server's model of that name, or its first: its name, and its context, if known."""
        listing = found_at((await self._reply(_CONNECT_S, "GET", "/v1/models")).body, "data")
        cards = listing if isinstance(listing, list) else []
        contexts = {str(found_at(c, "id")): found_at(c, "max_model_len") for c in cards}
        if not contexts:
            words = "it lists no models at /v1/models: is it a server of OpenAI's API?"
            raise ValueError(f"{self.url}: {words}")
        if name is None:
            name = next(iter(contexts))
        if name not in contexts:
            names = ", ".join(list(contexts)[:20])
            raise ValueError(f"{self.url}: it has no model {name}: it has {names}")
        context = contexts[name]
        return name, context if type(context) is int else None

    async def post(self, path: str, body: Any, *, request_id: str = "") -> Reply:
        """The answer to one request. ServerError."""
        headers = {"X-Request-Id": request_id} if request_id else {}
        content = json.dumps(body)  # ASCII: a text may hold half of a pair of surrogates
        return await self._reply(_ANSWER_S, "POST", path, content=content, headers=headers)

    async def _reply(self, limit_s: float, method: str, path: str, **sent: Any) -> Reply:
        async with self._within(limit_s):
            response = await self._http.request(method, path, **sent)
            await self._check(response)
        body = self._json(response.content, response.status_code)
        return Reply(body, response.headers.get("X-Request-Id", ""))

    async def events(self, path: str, body: Any) -> AsyncIterator[Any]:
        """The data of each server-sent event of a POST, up to [DONE]. ServerError."""
        async with (
            self._within(_ANSWER_S),
            self._http.stream("POST", path, content=json.dumps(body)) as response,
        ):
            await self._check(response)
            rest = b""
            async for piece in response.aiter_bytes():
                *lines, rest = (rest + piece).split(b"\n")  # JSON may hold the ends of others
                for line in lines:
                    name, _, data = line.partition(b":")
                    if name != b"data":
                        continue
                    if data.strip() == b"[DONE]":
                        return
                    read = self._json(data)
                    if error := found_at(read, "error"):
                        raise ServerError(_message(error, data.decode(errors="replace")))
                    yield read

    async def _check(self, response: httpx2.Response) -> None:
        """ServerError unless the status is that of an answer."""
        status, after = response.status_code, response.headers.get("Retry-After", "")
        if status < 300:
            return
        raw = (await response.aread()).decode(errors="replace")
        error = None
        with contextlib.suppress(ValueError, RecursionError):
            error = found_at(body := json.loads(raw), "error") or body
        message = _message(error, raw)
        if status in (401, 403):
            message = f"the server refuses the key: give --api_key or LLAMA_API_KEY ({message})"
        seconds = min(float(after), _MAX_RETRY_AFTER_S) if after.isdecimal() else 0.0
        raise ServerError(f"{self.url}: status {status}: {message}", status, seconds)

    @contextlib.asynccontextmanager
    async def _within(self, limit_s: float) -> AsyncGenerator[None, None]:
        """All of an exchange with the server, whose errors become a ServerError."""
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            raise ServerError(f"{self.url} sent no whole answer within {limit_s:g} s") from None
        except httpx2.HTTPError as e:
            has_begun = not isinstance(e, httpx2.ConnectError | httpx2.ConnectTimeout)
            what = "broke off" if has_begun else "cannot be reached"
            raise ServerError(f"{self.url} {what}: {str(e) or type(e).__name__}") from None

    def _json(self, data: bytes, status: int | None = None) -> Any:
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            words = f"{self.url} answered with no JSON ({data[:80]!r})"
            raise ServerError(f"{words}: is it a server of OpenAI's API?", status) from None


def found_at(body: Any, *path: str | int) -> Any:
    """What lies at a path of names and indices in a JSON value; None where nothing does."""
    for key in path:
        try:
            body = body[key]
        except (IndexError, KeyError, TypeError):
            return None
    return body


def usage_of(body: Any) -> Usage | None:
    """The counts of tokens in a response or a chunk, 0 for what is missing; None if it has none."""
    usage = found_at(body, "usage")
    if not isinstance(usage, dict):
        return None
    paths = [("prompt_tokens",), ("completion_tokens",), ("prompt_tokens_details", "cached_tokens")]
    numbers = [found_at(usage, *path) for path in paths]
    return Usage(*(n if type(n) is int else 0 for n in numbers))


def _message(error: Any, raw: str) -> str:
    """What an error of OpenAI's form says, or else the beginning of the answer."""
    message = found_at(error, "message") or error
    if isinstance(message, str) and message:
        return message
    return raw[:_MAX_QUOTED].strip() or "no message"
