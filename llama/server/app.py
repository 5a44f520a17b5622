"""The ASGI app: every route of the server, behind the checks of auth.py.

In: a `Service`. Out: an app for uvicorn, or any other ASGI server. What a route raises becomes
its API's error object here, and nowhere else.
"""

import logging
from collections.abc import Iterable

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

import llama
from llama.server import page, routes, tokens
from llama.server.auth import AuthAndLimits
from llama.server.encoding import JsonResponse
from llama.server.errors import ApiError, log_refusal
from llama.server.service import Service, State

log = logging.getLogger("llama.server")
_CLIENT_LEFT = 499  # nginx's word for it; nobody reads it


def make_app(service: Service, *, api_keys: Iterable[str] = (), loopback: bool = True) -> ASGIApp:
    """The server's app. See `AuthAndLimits` for the keys and loopback."""
    app = FastAPI(title="llama", version=llama.__version__, docs_url=None, redoc_url=None)
    app.state.max_body_bytes = service.limits.max_body_bytes
    for router in (routes.routes(service), tokens.routes(service), _status_routes(service)):
        app.include_router(router)
    app.include_router(page.routes())
    app.add_exception_handler(ApiError, _tell)
    app.add_exception_handler(HTTPException, _tell_http)
    app.add_exception_handler(ClientDisconnect, _tell_nobody)
    app.add_exception_handler(Exception, _tell_unexpected)
    return AuthAndLimits(app, api_keys=api_keys, loopback=loopback)


def _status_routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/health")
    async def health() -> Response:
        """200 while the process can work; 503 after a step failed."""
        return Response(status_code=503 if service.state is State.BROKEN else 200)

    @router.get("/ready")
    async def ready() -> Response:
        """200 while requests are taken; 503 while the model is loaded, and when the server ends."""
        is_ready = service.state is State.READY
        return JsonResponse({"status": service.state.value}, 200 if is_ready else 503)

    @router.get("/v1/models")
    async def models() -> Response:
        """The one model, with the longest context that it takes."""
        max_len = service.loaded().model.params.max_seq_len
        card = {
            "id": service.model_name,
            "object": "model",
            "created": service.created,
            "owned_by": "llama",
            "max_model_len": max_len,
        }
        return JsonResponse({"object": "list", "data": [card]})

    @router.get("/version")
    async def version() -> Response:
        return JsonResponse({"version": llama.__version__})

    @router.get("/load")
    async def load() -> Response:
        """Sequences that run or wait, for a load balancer."""
        return JsonResponse({"server_load": service.num_active})

    @router.get("/metrics")
    async def metrics() -> Response:
        """Prometheus's text format."""
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    return router


async def _tell(http: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    path = http.url.path
    if not error.is_logged:
        log_refusal(http.state.request_id, http.method, path, error)
    return JsonResponse(error.body_for(path), error.status, headers=error.headers())


async def _tell_http(http: Request, error: Exception) -> Response:
    """A path or a method that there is not."""
    assert isinstance(error, HTTPException)
    message = f"{http.method} {http.url.path[:200]}: {error.detail}"
    response = await _tell(http, ApiError(error.status_code, message))
    response.headers.update(error.headers or {})
    return response


async def _tell_nobody(http: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_LEFT)


async def _tell_unexpected(http: Request, error: Exception) -> Response:
    log.error("%s %s", http.method, http.url.path, exc_info=error)
    return await _tell(http, ApiError(500, "an error of the server: see its log"))
