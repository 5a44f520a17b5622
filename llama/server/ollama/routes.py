"""The routes of Ollama's API.

In: bodies. Out: JSON objects, or lines of them. What a body may contain is known to the models
alone; what changes the models of a server is refused with status 501.
"""

import time

from fastapi import APIRouter, Request
from starlette.responses import Response

from llama.api import Request as EngineRequest
from llama.common.checks import FieldError, brief
from llama.server.encoding import JsonResponse
from llama.server.errors import ApiError
from llama.server.exchange import (
    Exchange,
    UndeclaredBodyRoute,
    beside_if_large,
    body_router,
    prepare_chat,
)
from llama.server.ollama import catalog, embed
from llama.server.ollama.answers import ChatAnswer, GenerateAnswer
from llama.server.ollama.models import (
    CHAT_URL,
    DEFAULTS,
    GENERATE_URL,
    SHOW_URL,
    ChatBody,
    GenerateBody,
    ShowBody,
)
from llama.server.openai.answers import ResponseMeta
from llama.server.request import ApiRequest
from llama.server.respond import respond
from llama.server.service import Service

# The version of Ollama whose API these routes have. Clients compare it with the version that they
# need; this program's own version is at /version.
API_VERSION = "0.12.0"
_ONE_MODEL = "this server has the one model that it was started with: start it with another one"
_UNSUPPORTED = {
    "/api/pull": (["POST"], f"{_ONE_MODEL}, which `llama download` fetches"),
    "/api/push": (["POST"], f"models cannot be published from here: {_ONE_MODEL}"),
    "/api/create": (["POST"], _ONE_MODEL),
    "/api/copy": (["POST"], f"{_ONE_MODEL}, or under another name with --served_model_name"),
    "/api/delete": (["DELETE"], f"models cannot be deleted from here: {_ONE_MODEL}"),
    "/api/blobs/{digest}": (["HEAD", "POST"], _ONE_MODEL),
}


def routes(service: Service) -> APIRouter:
    """Return the routes of Ollama's API (https://docs.ollama.com/api)."""
    router = body_router(route_class=UndeclaredBodyRoute)

    async def answer(
        body: ChatBody | GenerateBody,
        http: Exchange,
        make_answer: type[ChatAnswer | GenerateAnswer],
    ) -> Response:
        serving = http.serving
        if body.only_loads:
            meta = ResponseMeta("", body.model or serving.name, int(time.time()))
            nothing = make_answer(ApiRequest(DEFAULTS), serving.dialog_format, meta)
            return JsonResponse(nothing.loaded_body(unloads=body.unloads))
        if body.think and serving.dialog_format.reasoning is None:
            _ignore(http, "think", " must be false: the model does not support thinking")
        request = await beside_if_large(http, body.request)
        prepared = await _prepare(http, request)
        return await respond(http, request, [prepared], make_answer)

    @router.post(CHAT_URL)
    async def chat(body: ChatBody, http: Exchange) -> Response:
        """Answer a dialog."""
        return await answer(body, http, ChatAnswer)

    @router.post(GENERATE_URL)
    async def generate(body: GenerateBody, http: Exchange) -> Response:
        """Answer a question, or continue a text."""
        return await answer(body, http, GenerateAnswer)

    _add_catalog(router, service)
    embed.add_routes(router)
    for path, (methods, message) in _UNSUPPORTED.items():
        _refuse(router, path, methods, message)
    return router


def _add_catalog(router: APIRouter, service: Service) -> None:
    """Add the routes that describe the server and its models."""

    @router.head("/api/version", include_in_schema=False)
    @router.get("/api/version")
    async def version() -> Response:
        """Return the version of Ollama's API that the routes follow."""
        return JsonResponse({"version": API_VERSION})

    @router.head("/api/tags", include_in_schema=False)
    @router.get("/api/tags")
    async def tags() -> Response:
        """List the models."""
        return JsonResponse({"models": [catalog.listed(serving) for serving in service]})

    @router.get("/api/ps")
    async def ps() -> Response:
        """List the models, which are always loaded."""
        return JsonResponse({"models": [catalog.running(serving) for serving in service]})

    @router.post(SHOW_URL)
    async def show(body: ShowBody, http: Exchange) -> Response:
        """Describe a model."""
        name = body.model or body.name
        if not name:
            raise FieldError.of("model", " is needed")
        serving = service.of(name)
        if catalog.tagged(name) != catalog.tagged(serving.name):
            message = f"model {brief(name)} not found: this server has {serving.name!r}"
            raise ApiError(404, message, param="model")
        return JsonResponse(catalog.shown(serving))


def _ignore(http: Request, field: str, problem: str) -> None:
    """Name a field that a lenient server drops, or raise a FieldError."""
    if http.state.ignored is None:
        raise FieldError.of(field, problem)
    http.state.ignored.append(field)


def _refuse(router: APIRouter, path: str, methods: list[str], message: str) -> None:
    """Add a route that is refused with a message."""

    async def refuse(http: Request) -> Response:
        raise ApiError(501, message)

    router.add_route(path, refuse, methods=methods, include_in_schema=False)


async def _prepare(http: Exchange, request: ApiRequest) -> EngineRequest:
    """Return the engine's request; the answer may end with the context, before its limit."""
    if request.chat:
        return await prepare_chat(http, request, must_fit=False)
    serving = http.serving
    serving.check_capacity(request.num_answers, http.state.sender)
    return await serving.prepare(
        request.prompts[0],
        request.params,
        request.fields,
        tenant=http.state.tenant,
        sender=http.state.sender,
        must_fit=False,
        max_context=request.max_context,
        model=request.model,
    )
