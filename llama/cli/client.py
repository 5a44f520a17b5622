"""A client of a server with OpenAI's API, for `llama batch --url` and `llama chat --url`.

The server may be any program that speaks OpenAI's API, so no field of a response can be relied on.
(The package openai is not used because it takes half a second to import.) A `Client` has an event
loop of its own, which runs only within `run`, so a client belongs to one thread. Every exchange has
a time limit for the request and the response together.
"""

import asyncio
import contextlib
import json
import ssl
import urllib.parse
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine
from dataclasses import fields
from typing import Any, NamedTuple, TypeVar

import httpx2

from llama.api import Usage
from llama.cli.flags import UsageError
from llama.common.checks import printable
from llama.sampling_params import SamplingParams

_CONNECT_S = 10.0
_ANSWER_S = 3600.0  # time limit of a whole answer, which can be slow
_MAX_RETRY_AFTER_S = 60.0  # upper limit of what a server may ask for
_MAX_QUOTED = 500  # characters quoted of an error that does not have OpenAI's fields
_TRANSIENT = {408, 429, 500, 502, 503, 504}  # Another attempt, or another replica, may succeed.

_DEFAULTS = SamplingParams(max_tokens=None)
_ALWAYS_SENT = ("temperature", "top_p")  # fields for which servers have other defaults

_T = TypeVar("_T")


class ServerError(OSError):
    """The server cannot be reached, or it refuses a request.

    Attributes:
        is_transient: Whether the server may answer later.
        is_key_refused: Whether the server does not accept the API key.
        retry_after_s: The seconds that the server asks to wait before another attempt.
    """

    def __init__(self, message: str, status: int | None = None, retry_after_s: float = 0.0) -> None:
        """Make an error.

        Args:
            message: The message. Control characters are escaped, as a server may have sent it.
            status: The HTTP status, if the server answered.
            retry_after_s: See the attribute.
        """
        super().__init__(printable(message))
        self.is_transient = status is None or status in _TRANSIENT
        self.is_key_refused = status in (401, 403)
        self.retry_after_s = retry_after_s


class Reply(NamedTuple):
    """A response with status 200."""

    body: Any  # JSON value
    request_id: str  # empty if the server did not send one


class Client:
    """A connection to one server.

    The coroutines of this class are awaited within `run`, or within a task that `start` made.
    """

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """Make a client; nothing is sent yet.

        Args:
            url: The address of the server, with or without /v1 at its end, or unix:PATH of a
                Unix domain socket.
            api_key: The key that is sent with every request.

        Raises:
            UsageError: The URL or the key cannot be used.
        """
        parts = urllib.parse.urlsplit(url)
        socket_path = parts.path if parts.scheme == "unix" else None
        if socket_path is None and (parts.scheme not in ("http", "https") or not parts.hostname):
            raise UsageError(f"--url {url} must begin with http:// or https:// and name a host")
        if parts.username or parts.query or parts.fragment:
            raise UsageError(
                f"--url {url} must not have a user, a query (?) or a fragment (#): a key is given "
                "with --api_key"
            )
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise UsageError("the key must be printable ASCII: see --api_key and LLAMA_API_KEY")
        self.url = url
        base = parts._replace(path=parts.path.rstrip("/").removesuffix("/v1")).geturl()
        headers = {"Content-Type": "application/json"}
        if api_key:
            headers["Authorization"] = f"Bearer {api_key}"
        self._runner = asyncio.Runner()
        # Proxies and keys in the environment are meant for other servers: hence trust_env=False.
        self._http = httpx2.AsyncClient(
            base_url=base if socket_path is None else "http://localhost",
            headers=headers,
            timeout=httpx2.Timeout(None, connect=_CONNECT_S),
            transport=httpx2.AsyncHTTPTransport(
                verify=ssl.create_default_context() if parts.scheme == "https" else False,
                trust_env=False,
                limits=httpx2.Limits(),
                uds=socket_path,
            ),
            trust_env=False,
        )

    def run(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine to its end and return its result.

        Tasks that `start` made proceed meanwhile, and only then.
        """
        return self._runner.run(work)

    def start(self, work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
        """Make a task that proceeds whenever `run` is called."""
        return self._runner.get_loop().create_task(work)

    def close(self) -> None:
        """Cancel all tasks and close the connections."""
        self.run(self._close())
        self._runner.close()

    async def _close(self) -> None:
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._http.aclose()

    async def model(self, name: str | None) -> tuple[str, int | None]:
        """Return the name of a model of the server, and its context length if that is known.

        Args:
            name: The name of the model; by default the server's first one.

        Raises:
            ServerError: The server cannot be reached, or it refuses.
            ValueError: The server has no model of that name, or lists none.
        """
        reply = await self._reply(_CONNECT_S, "GET", "/v1/models")
        listing = json_at(reply.body, "data")
        cards = listing if isinstance(listing, list) else []
        contexts = {str(json_at(card, "id")): json_at(card, "max_model_len") for card in cards}
        if not contexts:
            raise ValueError(
                f"{self.url} lists no models at /v1/models: is it a server with OpenAI's API?"
            )
        if name is None:
            name = next(iter(contexts))
        if name not in contexts:
            names = ", ".join(list(contexts)[:20])
            raise ValueError(f"{self.url} has no model {name}: its models are {names}")
        context = contexts[name]
        return name, context if type(context) is int else None

    async def post(self, path: str, body: Any, *, request_id: str = "") -> Reply:
        """Send a request and return its response.

        Raises:
            ServerError: The server cannot be reached, or it refuses.
        """
        headers = {"X-Request-Id": request_id} if request_id else {}
        content = json.dumps(body)  # ASCII, because a text may hold half of a surrogate pair
        return await self._reply(_ANSWER_S, "POST", path, content=content, headers=headers)

    async def _reply(self, limit_s: float, method: str, path: str, **arguments: Any) -> Reply:
        async with self._exchange(limit_s):
            response = await self._http.request(method, path, **arguments)
            await self._check(response)
        body = self._json(response.content, response.status_code)
        return Reply(body, response.headers.get("X-Request-Id", ""))

    async def events(self, path: str, body: Any) -> AsyncIterator[Any]:
        """Yield the data of each server-sent event of a POST request, up to [DONE].

        Raises:
            ServerError: The server cannot be reached, it refuses, or an event holds an error.
        """
        async with (
            self._exchange(_ANSWER_S),
            self._http.stream("POST", path, content=json.dumps(body)) as response,
        ):
            await self._check(response)
            rest = b""
            async for piece in response.aiter_bytes():
                # Only b"\n" ends a line: JSON strings may hold other line separators.
                *lines, rest = (rest + piece).split(b"\n")
                for line in lines:
                    name, _, data = line.partition(b":")
                    if name != b"data":
                        continue
                    if data.strip() == b"[DONE]":
                        return
                    yield self._event(data)

    def _event(self, data: bytes) -> Any:
        event = self._json(data)
        error = json_at(event, "error")
        if error:
            raise ServerError(_error_message(error, data.decode(errors="replace")))
        return event

    async def _check(self, response: httpx2.Response) -> None:
        """Raise ServerError unless the status is that of a success."""
        status = response.status_code
        if status < 300:
            return
        text = (await response.aread()).decode(errors="replace")
        error = None
        with contextlib.suppress(ValueError, RecursionError):
            body = json.loads(text)
            error = json_at(body, "error") or body
        message = _error_message(error, text)
        if status in (401, 403):
            message = f"the server refuses the key: give --api_key or LLAMA_API_KEY ({message})"
        retry_after = response.headers.get("Retry-After", "")
        wait_s = min(float(retry_after), _MAX_RETRY_AFTER_S) if retry_after.isdecimal() else 0.0
        raise ServerError(f"{self.url}: status {status}: {message}", status, wait_s)

    @contextlib.asynccontextmanager
    async def _exchange(self, limit_s: float) -> AsyncGenerator[None, None]:
        """Limit the time of an exchange with the server, and turn its errors into ServerError."""
        try:
            async with asyncio.timeout(limit_s):
                yield
        except TimeoutError:
            raise ServerError(f"{self.url} sent no complete answer within {limit_s:g} s") from None
        except httpx2.HTTPError as e:
            is_connect_error = isinstance(e, httpx2.ConnectError | httpx2.ConnectTimeout)
            problem = "cannot be reached" if is_connect_error else "lost the connection"
            raise ServerError(f"{self.url} {problem}: {str(e) or type(e).__name__}") from None

    def _json(self, data: bytes, status: int | None = None) -> Any:
        try:
            return json.loads(data)
        except (ValueError, RecursionError):
            raise ServerError(
                f"{self.url} did not answer with JSON ({data[:80]!r}): is it a server with "
                "OpenAI's API?",
                status,
            ) from None


def json_at(body: Any, *path: str | int) -> Any:
    """Return the value at a path of names and indices in a JSON value, or None."""
    for key in path:
        try:
            body = body[key]
        except (IndexError, KeyError, TypeError):
            return None
    return body


def usage_of(body: Any) -> Usage | None:
    """Return the token counts of a response or a chunk; None if it has no usage.

    A count that is missing is 0. In the Responses API, the counts have other names.
    """
    usage = json_at(body, "usage")
    if not isinstance(usage, dict):
        return None

    def count(*path: str) -> int:
        value = json_at(usage, *path)
        return value if type(value) is int else 0

    return Usage(
        prompt_tokens=count("prompt_tokens") or count("input_tokens"),
        completion_tokens=count("completion_tokens") or count("output_tokens"),
        cached_tokens=count("prompt_tokens_details", "cached_tokens"),
    )


def _error_message(error: Any, text: str) -> str:
    """Return the message of an error in OpenAI's format, or else the beginning of the answer."""
    message = json_at(error, "message") or error
    if isinstance(message, str) and message:
        return message
    return text[:_MAX_QUOTED].strip() or "no message"


def sampling_fields(params: SamplingParams) -> dict[str, Any]:
    """Return the fields of a request's body that ask for these parameters.

    Parameters at their defaults are left out, except for `_ALWAYS_SENT`, because a server may not
    know them.
    """
    values = {field.name: getattr(params, field.name) for field in fields(SamplingParams)}
    return {
        name: value
        for name, value in values.items()
        if name in _ALWAYS_SENT or value != getattr(_DEFAULTS, name)
    }
