"""What every HTTP request passes before its route: its id, its host, its key, its size.

In: an ASGI app. Out: the same app, behind these checks. A request that fails one gets its
API's error object, and no work is done for it.
"""

import base64
import hmac
import re
import time
import uuid
from collections.abc import Iterable

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llama.server.encoding import JsonResponse
from llama.server.errors import ApiError, log_refusal
from llama.server.protocol import MAX_HEADER_BYTES, too_large

_OPEN = {"/health", "/ready"}  # a load balancer has no key
_PAGE = "/"
_LOOPBACK = {"localhost", "127.0.0.1", "[::1]"}
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_BODY_S = 60.0  # for a client to send its request
# To read JSON holds every thread up: 100,000 lists or fields of objects take as long as a million
# numbers, 0.1 s. The signs are counted in texts, too, which have them rarely.
_MOST_SIGNS = {b"[": 100_000, b"{": 100_000, b":": 100_000, b",": 1_000_000}


class AuthAndLimits:
    """api_keys: one of them must come as "Authorization: Bearer KEY" or "x-api-key: KEY", or from a
    browser as the password of HTTP's Basic scheme, if there are any.
    loopback: the server listens on this machine alone; then only its names are accepted as Host, so
    that no web page can reach it by a name of its own (DNS rebinding)."""

    def __init__(
        self, app: ASGIApp, *, api_keys: Iterable[str], loopback: bool, max_body_bytes: int
    ) -> None:
        self._app = app
        self._api_keys = [key.encode() for key in api_keys]
        self._loopback = loopback
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        headers = Headers(scope=scope)
        given = headers.get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        try:
            self._check(scope["path"], headers)
            body = await self._body(headers, receive)
        except ApiError as e:
            log_refusal(request_id, scope["method"], scope["path"], e)
            response = JsonResponse(e.body_for(scope["path"]), e.status, headers=e.headers())
            return await response(scope, receive, send_with_id)
        except ConnectionError:  # nobody reads an answer
            return None
        await self._app(scope, _replay(body, receive), send_with_id)

    def _check(self, path: str, headers: Headers) -> None:
        if sum(len(name) + len(value) for name, value in headers.raw) > MAX_HEADER_BYTES:
            raise too_large()
        if self._loopback:
            host = re.sub(r":\d+$", "", headers.get("host", ""))
            if host.lower() not in _LOOPBACK:
                raise ApiError(400, "the Host header must name this machine: use localhost")
        if self._api_keys and path not in _OPEN:
            key = _key_of(headers)
            matches = [hmac.compare_digest(key, known) for known in self._api_keys]
            if not any(matches):
                # A browser asks for a password where it reads Basic, and would ask in the middle
                # of the page, too, if its requests got that: those name the field for the key.
                raise ApiError(
                    401,
                    "give the server's key as Authorization: Bearer KEY",
                    code="invalid_api_key",
                    challenge='Basic realm="the password is the API key", charset="UTF-8"'
                    if path == _PAGE
                    else "Bearer",
                )

    async def _body(self, headers: Headers, receive: Receive) -> bytes:
        """All of the body; ApiError 413 or 408 as soon as it is too long or too slow."""
        too_large = ApiError(
            413, f"the request has more than {self._max_body_bytes} bytes: send less at once"
        )
        length = headers.get("content-length", "0")
        if length.isdecimal() and int(length) > self._max_body_bytes:
            raise too_large
        parts, size, end = [], 0, time.monotonic() + _BODY_S
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ConnectionResetError("the client has left")
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if size > self._max_body_bytes:
                raise too_large
            if not message.get("more_body", False):
                return _checked(b"".join(parts))
            if time.monotonic() > end:
                raise ApiError(408, f"the request did not come within {_BODY_S:.0f} s")


def _key_of(headers: Headers) -> bytes:
    """The key that a request brings; b"" if none.

    A browser sends a password with whatever asks this server, so it counts for the page's own
    requests alone: other sites' have another Origin (RFC 6454, RFC 7617).
    """
    kind, _, value = headers.get("authorization", "").partition(" ")
    if kind.lower() == "bearer":
        return value.encode()
    if "x-api-key" in headers:
        return headers["x-api-key"].encode()
    host = headers.get("origin", "").partition("://")[2]
    if kind.lower() != "basic" or ("origin" in headers and host != headers.get("host")):
        return b""
    try:
        return base64.b64decode(value.strip(), validate=True).partition(b":")[2]
    except ValueError:
        return b""


def _checked(body: bytes) -> bytes:
    for sign, most in _MOST_SIGNS.items():
        if body.count(sign) > most:
            raise ApiError(
                413, f"the request has more than {most} times {sign.decode()!r}: send less at once"
            )
    return body


def _replay(body: bytes, receive: Receive) -> Receive:
    """The body once, then whatever comes, which is the client's leaving."""
    is_given = False

    async def receive_again() -> Message:
        nonlocal is_given
        if is_given:
            return await receive()
        is_given = True
        return {"type": "http.request", "body": body, "more_body": False}

    return receive_again
