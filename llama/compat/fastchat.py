"""`llama serve` as a model worker of FastChat: its routes, and its place at the controller.

In: a `Service`, and the addresses of the controller and of this server. Out: the answers that
FastChat 0.2.36 and later read, and heartbeats while there is a model. It imports none of FastChat.
"""

import asyncio
import contextlib
import http.client
import json
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from starlette.responses import Response, StreamingResponse

from llama.compat.client_tokenizer import ClientTokenizer
from llama.compat.hosts import Pace, read_params, report_of
from llama.server.encoding import JsonResponse, unless_client_leaves
from llama.server.errors import ApiError, ErrorFields
from llama.server.exchange import body_router
from llama.server.service import Service, State, log
from llama.tokenizer import Tokenizer

_INTERVAL = 2  # tokens between two parts of a stream, FastChat's own default

# fastchat.constants.ErrorCode
WRONG_TYPE, NO_SUCH_MODEL, OUT_OF_RANGE, INTERNAL = 40001, 40301, 40302, 50001

# fastchat.conversation.SeparatorStyle: system + sep, then role + ": " + message + sep for each
# message. It has this number in every release, and alone takes messages in parts, which FastChat
# makes a tuple of; the style for Llama 3 came after 0.2.36. `as_trained` removes _MARK + ": ".
_ADD_COLON_TWO = 2
_MARK = "\ue000"  # for private use: in nobody's messages
_START, _END, _EOT = "<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>"

_NO_EMBEDDINGS = "this worker makes no embeddings: ask for those of a model trained for them"
_CONTROLLER_TIMEOUT_S, _RETRY_S, _LOOK_S = 5.0, 5.0, 0.2


@dataclass(frozen=True)
class FastChatWorker:
    """One server as a FastChat worker."""

    service: Service
    controller: str  # the URL of FastChat's
    address: str  # the URL of this server, as others reach it
    interval_s: float  # between heartbeats

    def router(self) -> APIRouter:
        """The worker's routes, which need no key. While they are served, it is registered."""
        router = body_router(self._registered)

        @router.post("/worker_generate_stream")
        async def generate_stream(body: dict[str, Any], http: Request) -> Response:
            reports = self.reports(body, http.state.request_id)
            parts = (json.dumps(report).encode() + b"\0" async for report in reports)
            return StreamingResponse(parts, media_type="application/octet-stream")

        @router.post("/worker_generate")
        async def generate(body: dict[str, Any], http: Request) -> Response:
            async def last() -> dict[str, Any]:
                return [x async for x in self.reports(body, http.state.request_id)][-1]

            return JsonResponse(await unless_client_leaves(last(), http.receive))

        @router.post("/count_token")
        async def count_token(body: dict[str, Any], http: Request) -> Response:
            prompt = body.get("prompt")
            if not isinstance(prompt, str):
                return JsonResponse(_error(WRONG_TYPE, "the body has no 'prompt' that is a string"))
            count = ClientTokenizer(self.service.loaded().tokenizer).num_tokens
            number = await asyncio.to_thread(count, as_trained(prompt))  # a long text takes long
            return JsonResponse({"count": number, "error_code": 0})

        @router.post("/worker_get_embeddings")
        async def embeddings() -> Response:
            return JsonResponse(_error(NO_SUCH_MODEL, _NO_EMBEDDINGS))

        @router.post("/worker_get_status")
        async def status() -> Response:
            return JsonResponse(self.status())

        @router.post("/worker_get_conv_template")
        async def conv_template() -> Response:
            return JsonResponse({"conv": conversation_template(self.service.loaded().tokenizer)})

        @router.post("/model_details")
        async def details() -> Response:
            params = self.service.loaded().model.params
            return JsonResponse({"context_length": params.max_seq_len})

        return router

    def status(self) -> dict[str, Any]:
        """What the controller is told of this worker."""
        names, queue = [self.service.model_name], self.service.num_unfinished()
        return {"model_names": names, "speed": 1, "queue_length": queue}

    async def reports(
        self, params: dict[str, Any], request_id: str
    ) -> AsyncGenerator[dict[str, Any], None]:
        """FastChat's reports of one request; one with an error_code other than 0 is the last."""
        if isinstance(params.get("prompt"), str):
            params = {**params, "prompt": as_trained(params["prompt"])}
        try:
            llama = self.service.loaded()
            tokenizer, pace = llama.tokenizer, Pace(_INTERVAL)
            longest = llama.llm_engine.max_seq_len
            request = read_params(params, None, tokenizer, longest, has_raw_echo=True)
            fields = ErrorFields()
            prepared = await self.service.prepare(request.prompt, request.sampling, fields)
            outputs = self.service.outputs([prepared], request_id, fields)
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    for told in pace.told(report_of(request, output, tokenizer)):
                        yield told
        except ValueError as e:
            yield _error(OUT_OF_RANGE, str(e))
        except ApiError as e:
            yield _error(OUT_OF_RANGE if e.status == 400 else INTERNAL, e.message)

    @contextlib.asynccontextmanager
    async def _registered(self, _app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(self.stay_registered())
        yield
        task.cancel()

    async def stay_registered(self) -> None:
        """Once there is a model, register with the controller and send it heartbeats, until
        cancelled. One that is away, or has forgotten the worker, hears of it again."""
        while self.service.state is State.LOADING:
            await asyncio.sleep(_LOOK_S)
        is_known, trouble = False, ""
        while True:
            try:
                if is_known:
                    queue = self.status()["queue_length"]
                    beat = {"worker_name": self.address, "queue_length": queue}
                    is_known = (await self._tell("/receive_heart_beat", beat))["exist"]
                if not is_known:
                    card = {
                        "worker_name": self.address, "check_heart_beat": True,
                        "worker_status": self.status(), "multimodal": False,
                    }  # fmt: skip
                    await self._tell("/register_worker", card)
                    is_known, trouble = True, ""
                    log.info("registered with the controller at %s", self.controller)
                wait = self.interval_s
            except (OSError, http.client.HTTPException, ValueError, TypeError, KeyError) as e:
                if str(e) != trouble:  # once, not at each attempt
                    words = "no answer from the controller at %s (%s); trying again"
                    log.warning(words, self.controller, e)
                trouble, wait = str(e), min(self.interval_s, _RETRY_S)
            await asyncio.sleep(wait)

    async def _tell(self, path: str, body: dict[str, Any]) -> Any:
        return await asyncio.to_thread(_post, self.controller + path, body)


def _post(url: str, body: dict[str, Any]) -> Any:
    """POST a JSON object, and the JSON that comes back. A proxy would not know the controller."""
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), kind)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=_CONTROLLER_TIMEOUT_S) as response:
        return json.load(response)


def conversation_template(tokenizer: Tokenizer) -> dict[str, Any]:
    """The fields of FastChat's `Conversation`, from which its API server writes the prompt: with
    `as_trained`, Llama 3's chat format; the tokenizer adds begin_of_text."""
    system, *others = [f"{_START}{role}{_END}" for role in ("system", "user", "assistant")]
    return {
        "name": "llama-3",
        "system_template": system + "{system_message}",
        "system_message": "",
        "roles": [header + _MARK for header in others],
        "messages": [],
        "offset": 0,
        "sep_style": _ADD_COLON_TWO,
        "sep": _EOT,
        "sep2": _EOT,
        "stop_str": None,
        "stop_token_ids": sorted(tokenizer.stop_tokens),
    }


def as_trained(prompt: str) -> str:
    """A prompt in the chat format as `ChatFormat` has it: FastChat's templates write an empty
    system message, keep whitespace, leave out the end of an empty message, and add a colon."""
    prompt = prompt.replace(f"{_MARK}: ", "").replace(f"{_MARK}:", "")
    before, *turns = prompt.split(_START)
    for i, turn in enumerate(turns):
        role, end, rest = turn.partition(_END)
        content, eot, rest = rest.partition(_EOT)
        is_answer = i == len(turns) - 1 and not eot  # the model goes on from here
        if end and not is_answer:
            turns[i] = role + end + content.strip() + _EOT + rest
    if turns[:1] == [f"system{_END}{_EOT}"]:
        del turns[0]
    return _START.join([before, *turns])


def _error(code: int, message: str) -> dict[str, Any]:
    """FastChat reads text and error_code; OpenAI's client, in a stream, raises what is in error."""
    return {"text": message, "error_code": code, "error": {"message": message, "code": code}}
