"""What every HTTP request passes before its route: its id, its host, its key.

A request that fails a check gets its API's error object, and no work is done for it.
"""

import hmac
import ipaddress
import re
import uuid
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llama.server.encoding import JsonResponse
from llama.server.errors import MAX_HEADER_BYTES, ApiError, headers_too_large, log_refusal

# A load balancer has no key, and the page asks for it.
_OPEN = frozenset({"/health", "/ready", "/"})
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True)
class AuthAndLimits:
    """loopback: the server listens on this machine alone; then only its names are accepted as Host,
    so that no web page can reach it by a name of its own (DNS rebinding)."""

    app: ASGIApp
    api_keys: Sequence[str]  # one must come, if any, as "Authorization: Bearer" or "x-api-key"
    loopback: bool
    open_paths: frozenset[str] = frozenset()  # without a key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
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
        except ApiError as e:
            log_refusal(request_id, scope["method"], scope["path"], e)
            response = JsonResponse(e.body_for(scope["path"]), e.status, headers=e.headers())
            return await response(scope, receive, send_with_id)
        await self.app(scope, receive, send_with_id)

    def _check(self, path: str, headers: Headers) -> None:
        if sum(len(name) + len(value) for name, value in headers.raw) > MAX_HEADER_BYTES:
            raise headers_too_large()
        if self.loopback:
            host = re.sub(r":\d+$", "", headers.get("host", ""))
            if not is_loopback(host.removeprefix("[").removesuffix("]")):
                raise ApiError(400, "the Host header must name this machine: use localhost")
        if not self.api_keys or path in _OPEN | self.open_paths:
            return
        kind, _, value = headers.get("authorization", "").partition(" ")
        key = (value if kind.lower() == "bearer" else headers.get("x-api-key", "")).encode()
        matches = [hmac.compare_digest(key, known.encode()) for known in self.api_keys]
        if not any(matches):
            words = "give the server's key as Authorization: Bearer KEY"
            raise ApiError(401, words, code="invalid_api_key")


def is_loopback(host: str) -> bool:
    """Whether no other machine can reach an address to listen on."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
