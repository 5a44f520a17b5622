"""The checks that every HTTP request passes before its route: its id, its host, its key.

In: an ASGI app. Out: an app that answers with the error object of the API where a check fails,
before any work is done for the request. It knows no routes but the ones that need no key.
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

# A load balancer has no key, and the page asks a person for it.
_OPEN_PATHS = frozenset({"/health", "/ready", "/"})
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(frozen=True)
class AuthAndLimits:
    """An ASGI app that checks each request before it passes it on.

    Attributes:
        app: the app that gets the requests.
        api_keys: the keys of which a request must have one, as "Authorization: Bearer KEY" or as
            "x-api-key: KEY"; without any, no key is needed.
        loopback: whether the server listens on this machine alone. Then the Host header must name
            this machine, so that no web page reaches the server through a name of its own (DNS
            rebinding).
        open_paths: paths that need no key, beside the built-in ones.
    """

    app: ASGIApp
    api_keys: Sequence[str]
    loopback: bool
    open_paths: frozenset[str] = frozenset()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Check a request, and pass it on or answer with an error."""
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        headers = Headers(scope=scope)
        given_id = headers.get("x-request-id", "")
        request_id = given_id if _REQUEST_ID.fullmatch(given_id) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)["X-Request-Id"] = request_id
            await send(message)

        path = scope["path"]
        try:
            self._check(path, headers)
        except ApiError as error:
            log_refusal(request_id, scope["method"], path, error)
            body = error.body_for(path)
            response = JsonResponse(body, error.status, headers=error.headers())
            return await response(scope, receive, send_with_id)
        await self.app(scope, receive, send_with_id)

    def _check(self, path: str, headers: Headers) -> None:
        """Raise an ApiError where a request must not pass."""
        if sum(len(name) + len(value) for name, value in headers.raw) > MAX_HEADER_BYTES:
            raise headers_too_large()
        if self.loopback:
            host = re.sub(r":\d+$", "", headers.get("host", ""))
            if not is_loopback(host.removeprefix("[").removesuffix("]")):
                raise ApiError(400, "the Host header must name this machine: use localhost")
        if not self.api_keys or path in _OPEN_PATHS | self.open_paths:
            return
        scheme, _, value = headers.get("authorization", "").partition(" ")
        key = value if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        # Every key is compared, in constant time, so that the time reveals nothing about them.
        matches = [hmac.compare_digest(key.encode(), known.encode()) for known in self.api_keys]
        if not any(matches):
            message = "give the server's key as Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key")


def is_loopback(host: str) -> bool:
    """Return whether an address to listen on can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
