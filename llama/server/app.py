"""The ASGI app: every route of the server, behind the checks of auth.py.

In: a `Service`. Out: an app for uvicorn, or any other ASGI server. What a route raises becomes its
API's error object here, and nowhere else. The page holds its own style and script.
"""

import base64
import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.resources import files
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect
from starlette.responses import Response
from starlette.types import ASGIApp

import llama
from llama.checks import FieldError, brief
from llama.server import routes, tokens
from llama.server.auth import AuthAndLimits
from llama.server.encoding import JsonResponse
from llama.server.errors import ApiError, first_name, log_refusal
from llama.server.exchange import IGNORED, BodyMemory
from llama.server.service import Service, State

log = logging.getLogger("llama.server")
_CLIENT_LEFT = 499  # nginx's word for it; nobody reads it


def make_app(
    service: Service,
    *,
    api_keys: Iterable[str] = (),
    loopback: bool = True,
    allowed_origins: Sequence[str] = (),
    host_routes: APIRouter | None = None,
    lenient: bool = False,
) -> ASGIApp:
    """api_keys, loopback: see `AuthAndLimits`. allowed_origins: of web pages; "*" is all.
    host_routes: without a key. lenient: fields without use are left out, and named in a header."""
    app = FastAPI(title="llama", version=llama.__version__, docs_url=None, redoc_url=None)
    app.state.lenient = lenient
    limits = service.limits
    app.state.bodies = BodyMemory(limits.max_body_bytes, limits.max_bodies_bytes)
    host = host_routes or APIRouter()
    for router in (routes.routes(service), tokens.routes(service), _own_routes(service), host):
        app.include_router(router)
    for kind in (ApiError, FieldError, HTTPException, ClientDisconnect, Exception):
        app.add_exception_handler(kind, _tell)
    no_key = frozenset(getattr(route, "path", "") for route in host.routes)
    checked = AuthAndLimits(app, list(api_keys), loopback, no_key)
    if not allowed_origins:
        return checked
    return CORSMiddleware(  # outside: a browser asks without a key first, and reads errors, too
        checked,
        allow_origins=allowed_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["X-Request-Id", "Retry-After", IGNORED],
    )


def _own_routes(service: Service) -> APIRouter:
    """The page, and what tells of the server."""
    router, page = APIRouter(), _page()

    @router.get("/", include_in_schema=False)
    async def index() -> Response:
        return page()

    @router.get("/health")
    async def health() -> Response:
        """200 while the process can work; 503 after a step failed."""
        return Response(status_code=503 if service.state is State.BROKEN else 200)

    @router.get("/ready")
    async def ready() -> Response:
        """503 while the model is loaded, when a rank is stopped or gone, when the server ends."""
        status = service.state.value
        if service.llama is not None and not all(service.llama.model.parallel.ranks_alive()):
            status = "a rank is stopped or gone"
        return JsonResponse({"status": status}, 200 if status == State.READY.value else 503)

    def card() -> dict[str, Any]:
        return {
            "id": service.model_name,
            "object": "model",
            "created": service.created,
            "owned_by": "llama",
            "max_model_len": service.loaded().model.params.max_seq_len,
        }

    @router.get("/v1/models")
    async def models() -> Response:
        """The one model, with the longest context that it takes."""
        return JsonResponse({"object": "list", "data": [card()]})

    @router.get("/v1/models/{name:path}")  # a name may have a slash
    async def model(name: str) -> Response:
        if name != service.model_name:
            words = f"there is no model {brief(name)}: this server has {service.model_name!r}"
            raise ApiError(404, words, param="model", code="model_not_found")
        return JsonResponse(card())

    @router.get("/version")
    async def version() -> Response:
        return JsonResponse({"version": llama.__version__})

    @router.get("/load")
    async def load() -> Response:
        """Sequences that run or wait, for a load balancer."""
        return JsonResponse({"server_load": service.num_unfinished()})

    @router.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4")

    return router


def _page() -> Callable[[], Response]:
    page = files("llama.server").joinpath("page.html").read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": _content_security_policy(page),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }
    return partial(Response, page, media_type="text/html", headers=headers)


def _content_security_policy(page: str) -> str:
    """What the page may do (https://www.w3.org/TR/CSP3/): its own script, style and server."""

    def hashed(tag: str) -> str:
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", page, re.DOTALL)
        digest = hashlib.sha256(content.encode()).digest()
        return f"'sha256-{base64.b64encode(digest).decode()}'"

    allowed = {
        "default-src": "'none'",
        "script-src": hashed("script"),
        "style-src": hashed("style"),
        "connect-src": "'self'",
        "img-src": "data:",
        "base-uri": "'none'",
        "form-action": "'none'",
        "frame-ancestors": "'none'",
        "trusted-types": "'none'",  # nothing makes HTML or script of text
        "require-trusted-types-for": "'script'",
    }
    return "; ".join(f"{name} {source}" for name, source in allowed.items())


async def _tell(http: Request, error: Exception) -> Response:
    if isinstance(error, ClientDisconnect):
        return Response(status_code=_CLIENT_LEFT)
    told = _as_api_error(http, error)
    if not told.is_logged:
        log_refusal(http.state.request_id, http.method, http.url.path, told)
    response = JsonResponse(told.body_for(http.url.path), told.status, headers=told.headers())
    if isinstance(error, HTTPException):
        response.headers.update(error.headers or {})
    return response


def _as_api_error(http: Request, error: Exception) -> ApiError:
    if isinstance(error, ApiError):
        return error
    if isinstance(error, FieldError):  # of a body, by itself or beside the others of the body
        return ApiError(400, str(error), param=first_name(error.field) or None)
    if isinstance(error, HTTPException):  # a path or a method that there is not
        words = f"{http.method} {http.url.path[:200]}: {error.detail}"
        return ApiError(error.status_code, words)
    log.error("%s %s", http.method, http.url.path, exc_info=error)
    return ApiError(500, "an error of the server: see its log")
