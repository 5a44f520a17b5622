"""The checks that every HTTP request passes before its route: its id, its host, its key.

In: an ASGI app and its routes. Out: an app that answers with the error object of the API where a
check fails, before any work is done for the request, and that tells routes whose request it is. It
knows no routes but the ones that need no key or another one.
"""

import hmac
import ipaddress
import re
import secrets
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from llama.server.encoding import JsonResponse
from llama.server.errors import MAX_HEADER_BYTES, ApiError, headers_too_large, log_refusal
from llama.server.memory import SharedMemory

# Paths of routes. A load balancer has no key, and the page asks a person for it.
_OPEN_PATHS = frozenset({"/health", "/ready", "/"})
# They show what all tenants do together.
_OPERATOR_PATHS = frozenset({"/metrics", "/load"})
ONE_TENANT = b""  # the prefix root of requests where there are no several keys
_SMALL_ANSWER = 16 * 1024  # bytes of a body that the system takes at once
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


class ApiKeys:
    """The keys of a server, and what each of them opens.

    With two or more API keys, each key is a tenant. The prefix root of a tenant is made of its key
    and of a secret: that of this run of the server, or of its folder of pages on disk. See
    `llama.requests.prepare`.
    """

    def __init__(
        self,
        api_keys: Iterable[str] = (),
        metrics_keys: Iterable[str] = (),
        secret: bytes | None = None,
    ) -> None:
        """Make a tenant of each key.

        Args:
            api_keys: the keys of the API; without any, it needs no key.
            metrics_keys: the keys of /metrics and /load; without any, these need an API key, and
                are closed where there are several.
            secret: the secret, 32 bytes, which the processes of a server share; None: a new one.
        """
        self._api_keys = list(dict.fromkeys(api_keys))
        self._metrics_keys = list(metrics_keys)
        self._has_tenants = len(self._api_keys) > 1
        secret = secret or secrets.token_bytes(32)
        self._roots = [
            hmac.digest(secret, key.encode(), "sha256") if self._has_tenants else ONE_TENANT
            for key in self._api_keys
        ]

    def tenant(self, key: str) -> bytes:
        """Return the prefix root of the tenant of an API key; raise ApiError 401 if it is wrong."""
        if not self._api_keys:
            return ONE_TENANT
        index = _index_of(key, self._api_keys)
        if index is None:
            message = "give the server's key as Authorization: Bearer KEY"
            raise ApiError(401, message, code="invalid_api_key")
        return self._roots[index]

    def check_operator(self, key: str, path: str) -> None:
        """Check the key of a request for a path of the operator.

        Raises:
            ApiError: 401 if the key is wrong, 403 if it is an API key that does not open the path.
        """
        if not (self._has_tenants or self._metrics_keys):
            self.tenant(key)
        elif _index_of(key, self._metrics_keys) is None:
            is_known = _index_of(key, self._api_keys) is not None
            message = f"{path} shows the requests of all keys: it needs one of --metrics_key_file"
            if is_known:
                raise ApiError(403, message)
            raise ApiError(401, message, code="invalid_api_key")


def _index_of(key: str, keys: Sequence[str]) -> int | None:
    """Return the index of a key, or None where it is not among `keys`."""
    # Every key is compared, in constant time, so that the time reveals nothing about them.
    matches = [hmac.compare_digest(key.encode(), known.encode()) for known in keys]
    return matches.index(True) if any(matches) else None


@dataclass(frozen=True)
class AuthAndLimits:
    """An ASGI app that checks each request before it passes it on.

    `scope["state"]` gets the id of the request, the prefix root of its tenant, and its sender: the
    tenant, or the address where there is one tenant. Senders share what the server has. The sender
    is empty where the address is not known, as at a Unix socket without a proxy. It also gets what
    the answer holds of the memory of all answers, until the client has read the last byte.

    Attributes:
        app: the app that gets the requests.
        keys: the keys of which a request must have one, as "Authorization: Bearer KEY" or as
            "x-api-key: KEY".
        answers: the memory of all answers.
        routes: the routes of the app. The one that answers decides which key is needed, as no other
            reading of a path would always find the same one.
        loopback: whether the server listens on this machine alone. Then the Host header must name
            this machine, so that no web page reaches the server through a name of its own (DNS
            rebinding).
        open_paths: paths that need no key, besides the built-in ones.
    """

    app: ASGIApp
    keys: ApiKeys
    answers: SharedMemory
    routes: Sequence[BaseRoute]
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
            elif not message.get("more_body") and len(message.get("body", b"")) > _SMALL_ANSWER:
                # The server sends a message once the client has taken the one before.
                await send({**message, "more_body": True})
                message = {"type": "http.response.body", "body": b""}
            await send(message)

        path = scope["path"]
        try:
            scope["state"]["tenant"] = self._check(scope, headers)
        except ApiError as error:
            log_refusal(request_id, scope["method"], path, error)
            body = error.body_for(path)
            response = JsonResponse(body, error.status, headers=error.headers())
            return await response(scope, receive, send_with_id)
        sender = scope["state"]["tenant"] or _address(scope, headers).encode()
        scope["state"]["sender"] = sender
        with self.answers.held(sender) as scope["state"]["answer"]:
            await self.app(scope, receive, send_with_id)

    def _check(self, scope: Scope, headers: Headers) -> bytes:
        """Return the prefix root of the tenant; raise an ApiError where a request must not pass."""
        if sum(len(name) + len(value) for name, value in headers.raw) > MAX_HEADER_BYTES:
            raise headers_too_large()
        if self.loopback:
            # A browser always sends the header; without one there is no wrong host.
            host = re.sub(r":\d+$", "", headers.get("host") or "localhost")
            if not is_loopback(host.removeprefix("[").removesuffix("]")):
                raise ApiError(400, "the Host header must name this machine: use localhost")
        if _CONTROL.search(scope["path"]):
            raise ApiError(400, "the path has a control character: leave it out")
        path = self._path_of_route(scope)
        if path in _OPEN_PATHS | self.open_paths:
            return ONE_TENANT
        scheme, _, value = headers.get("authorization", "").partition(" ")
        key = value if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        if path in _OPERATOR_PATHS:
            self.keys.check_operator(key, path)
            return ONE_TENANT
        return self.keys.tenant(key)

    def _path_of_route(self, scope: Scope) -> str:
        """Return the path of the route that will answer, empty where there is none.

        As in Starlette's router, it is the first one that takes the path and the method, or else
        the first one that takes the path.
        """
        paths: dict[Match, str] = {}
        for route in self.routes:
            match, _ = route.matches(scope)
            paths.setdefault(match, getattr(route, "path", ""))
            if match is Match.FULL:
                break
        return paths.get(Match.FULL) or paths.get(Match.PARTIAL, "")


def _address(scope: Scope, headers: Headers) -> str:
    """Return the address of a client.

    At a Unix socket it is what the proxy that listens there has added, which is the last one. At
    other sockets uvicorn has looked for it, where the proxy runs on this machine.
    """
    if scope.get("client"):
        return str(scope["client"][0])
    forwarded = ",".join(headers.getlist("x-forwarded-for"))
    return forwarded.rpartition(",")[2].strip()


def is_loopback(host: str) -> bool:
    """Return whether an address to listen on can be reached from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"
