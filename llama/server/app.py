"""The ASGI app: every route of the server, behind the checks of auth.py.

In: a `Service`. Out: an app for uvicorn, or any other ASGI server. Exceptions of routes become the
error object of their API here, and nowhere else.
"""

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

import llama
from llama.common.checks import FieldError
from llama.server import adapters, markdown, pooled, routes, tokens
from llama.server.auth import ApiKeys, AuthAndLimits
from llama.server.encoding import JsonResponse
from llama.server.errors import ApiError, first_name, log_refusal, unknown_model
from llama.server.exchange import IGNORED, body_memory
from llama.server.limits import State
from llama.server.ollama import routes as ollama
from llama.server.page import content_security_policy, read_page
from llama.server.respond import answer_memory
from llama.server.service import Service

log = logging.getLogger("llama.server")
_CLIENT_LEFT = 499  # nginx's status of a request whose client is gone; nobody reads it


def make_app(
    service: Service,
    *,
    api_keys: Iterable[str] = (),
    metrics_keys: Iterable[str] = (),
    loopback: bool = True,
    allowed_origins: Sequence[str] = (),
    host_routes: APIRouter | None = None,
    lenient: bool = False,
    secret: bytes | None = None,
    num_processes: int = 1,
) -> ASGIApp:
    """Return the ASGI app of a service.

    Args:
        service: the models and their limits.
        api_keys: the keys that are accepted; without any, no key is needed. See `ApiKeys`.
        metrics_keys: the keys that open /metrics and /load. See `ApiKeys`.
        loopback: whether the server listens on this machine alone. See `AuthAndLimits`.
        allowed_origins: origins whose web pages may send requests; "*" allows all.
        host_routes: more routes, which need no key.
        lenient: whether fields without effect are dropped and named in a header of the response,
            instead of being an error.
        secret: the secret that the processes of the server share. See `ApiKeys`.
        num_processes: the processes of the server that answer requests, among which the memory of
            all bodies and answers is divided.
    """
    # A redirect to the path without a slash would have the scheme that a proxy hides.
    app = FastAPI(
        title="llama",
        version=llama.__version__,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.lenient = lenient
    limits = service.limits
    largest = max(limits.max_body_bytes, limits.max_image_body_bytes)
    share = max(largest, limits.max_bodies_bytes // num_processes)
    app.state.bodies = body_memory(min(limits.max_bodies_bytes, share))
    answers = answer_memory(limits.max_answer_mb, num_processes)
    host = host_routes or APIRouter()
    app.state.service = service
    apis = [module.routes(service) for module in (tokens, ollama, adapters)]
    apis += [module.routes() for module in (routes, pooled, markdown)]
    routers = [*apis, _server_routes(service), host]
    for router in routers:
        app.include_router(router)
    for kind in (ApiError, FieldError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _error_response)
    keyless_paths = frozenset(getattr(route, "path", "") for route in host.routes)
    routes_of_all = [route for router in routers for route in router.routes]
    keys = ApiKeys(api_keys, metrics_keys, secret)
    checked = AuthAndLimits(app, keys, answers, routes_of_all, loopback, keyless_paths)
    if not allowed_origins:
        return checked
    # CORS comes before the key, because a browser's first request has none, and because pages
    # should be able to read errors.
    return CORSMiddleware(
        checked,
        allow_origins=allowed_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", "Retry-After", IGNORED],
    )


def _server_routes(service: Service) -> APIRouter:
    """Return the routes of the page and of the server's state."""
    router = APIRouter()
    page = _page()

    @router.head("/", include_in_schema=False)  # Ollama's command looks for a server by it.
    @router.get("/", include_in_schema=False)
    async def index() -> Response:
        return page()

    @router.get("/health")
    async def health() -> Response:
        """Return 200 while the process can work, and 503 after a step failed."""
        is_broken = any(serving.state is State.BROKEN for serving in service)
        return Response(status_code=503 if is_broken else 200)

    @router.get("/ready")
    async def ready() -> Response:
        """Return 503 while the model loads, without a rank, and while the server shuts down."""
        status = service.state.value
        if not await service.ranks_alive():
            status = "a rank is stopped or gone"
        return JsonResponse({"status": status}, 200 if status == State.READY.value else 503)

    def cards() -> list[dict[str, Any]]:
        return [card for serving in service for card in adapters.cards(serving)]

    @router.get("/v1/models")
    async def models() -> Response:
        """List the models and their adapters, with the longest context that they take."""
        return JsonResponse({"object": "list", "data": cards()})

    @router.get("/v1/models/{name:path}")  # A name may contain a slash.
    async def model(name: str) -> Response:
        for card in cards():
            if card["id"] == name:
                return JsonResponse(card)
        raise unknown_model(name, service.servings)

    @router.get("/version")
    async def version() -> Response:
        return JsonResponse({"version": llama.__version__})

    @router.get("/load")
    async def load() -> Response:
        """Return the number of sequences that run or wait, for a load balancer."""
        return JsonResponse({"server_load": await service.load()})

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(await service.metrics_text(), media_type="text/plain; version=0.0.4")

    return router


def _page() -> Callable[[], Response]:
    """Read the page, and return a function that makes a response of it."""
    page = read_page()
    headers = {
        "Content-Security-Policy": content_security_policy(page),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return partial(Response, page, media_type="text/html", headers=headers)


async def _error_response(http: Request, error: Exception) -> Response:
    """Return the response to a request that failed, and write its line of the log."""
    if isinstance(error, ClientDisconnect):
        return Response(status_code=_CLIENT_LEFT)
    api_error = _as_api_error(http, error)
    path = http.url.path
    if not api_error.is_logged:
        log_refusal(http.state.request_id, http.method, path, api_error)
    body = api_error.body_for(path)
    response = JsonResponse(body, api_error.status, headers=api_error.headers())
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})
    return response


def _as_api_error(http: Request, error: Exception) -> ApiError:
    """Return what a client may know of an exception."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, FieldError):
        return ApiError(400, str(error), param=first_name(error.field) or None)
    if isinstance(error, HTTPException):  # an unknown path or method
        message = f"{http.method} {http.url.path[:200]}: {error.detail}"
        return ApiError(error.status_code, message)
    log.error("%s %s", http.method, http.url.path, exc_info=error)
    return ApiError(500, "an internal error of the server: see its log")
