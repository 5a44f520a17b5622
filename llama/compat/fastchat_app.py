"""What FastChat expects of a model worker: its HTTP routes, and its place at the controller.

In: an `AsyncLLMEngine`, a port that listens, the addresses of controller and worker. Out: the
answers that FastChat 0.2.36 and later read, until a signal comes. It imports nothing of FastChat's,
and knows no command line.
"""

import asyncio
import contextlib
import http.client
import json
import signal
import socket
import urllib.request
from collections.abc import AsyncGenerator, Callable
from dataclasses import replace
from typing import Annotated, Any

import uvicorn
from fastapi import Depends, FastAPI, HTTPException, Request
from starlette.exceptions import HTTPException as AnyHTTPException
from starlette.requests import ClientDisconnect
from starlette.responses import Response, StreamingResponse

from llama.cli import ranks
from llama.compat.client_tokenizer import ClientTokenizer
from llama.compat.host_params import FASTCHAT
from llama.compat.hosts import Pace, async_generate_stream, reasons
from llama.requests.async_engine import AsyncLLMEngine
from llama.server.encoding import JsonResponse, unless_client_leaves
from llama.tokenizer import Tokenizer

# As FastChat's vLLM worker: a prompt too long for the wish is kept, and the answer is shorter.
_DIALECT = replace(FASTCHAT, keeps_prompt=True)

# fastchat.constants.ErrorCode
WRONG_TYPE, NO_SUCH_MODEL, OUT_OF_RANGE, INTERNAL = 40001, 40301, 40302, 50001

# fastchat.conversation.SeparatorStyle: system + sep, then role + ": " + message + sep for each
# message. It has this number in every release, and alone takes messages in parts, which FastChat
# makes a tuple of; the style for Llama 3 came after 0.2.36. `as_trained` removes _MARK + ": ".
_ADD_COLON_TWO = 2
_MARK = "\ue000"  # for private use: in nobody's messages
_START, _END, _EOT = "<|start_header_id|>", "<|end_header_id|>\n\n", "<|eot_id|>"

_NO_EMBEDDINGS = (
    "this model worker makes no embeddings: it generates text; ask for embeddings of a model that "
    "was trained for them"
)
_ENDED_EARLY = "the model worker is shutting down: send the request again"

_CONTROLLER_TIMEOUT_S, _RETRY_S, _SHUTDOWN_S = 5.0, 5.0, 10


class FastChatWorker:
    """One model as a FastChat worker. Many requests run in the engine at once.

    limit_concurrency: requests that the engine gets at once; more wait here, and their client may
    leave. stream_interval: tokens between two parts of a stream.
    """

    def __init__(
        self,
        engine: AsyncLLMEngine,
        model_names: list[str],
        *,
        conv_template: str = "llama-3",
        limit_concurrency: int = 1024,
        stream_interval: int = 2,
    ) -> None:
        self.engine = engine
        self.model_names = model_names
        self.conv = conversation_template(conv_template, engine.engine.tokenizer)
        self.stream_interval = stream_interval
        self.queue_length = 0  # requests that run or wait
        self._slots = asyncio.Semaphore(limit_concurrency)

    def status(self) -> dict[str, Any]:
        """What the controller is told of this worker."""
        return {"model_names": self.model_names, "speed": 1, "queue_length": self.queue_length}

    async def reports(self, params: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """FastChat's reports of one request; one with an error_code other than 0 is the last."""
        if isinstance(params.get("prompt"), str):
            params = {**params, "prompt": as_trained(params["prompt"])}
        engine, pace = self.engine.engine, Pace(self.stream_interval)
        self.queue_length += 1
        try:
            outputs: Any = async_generate_stream(
                self.engine,
                engine.tokenizer,
                params,
                "",
                engine.max_seq_len,
                benchmark=False,
                dialect=_DIALECT,
            )
            async with self._slots, contextlib.aclosing(outputs):
                async for report in outputs:
                    if "abort" in reasons(report):
                        raise RuntimeError(_ENDED_EARLY)
                    for told in pace.told(report):
                        yield told
        except ValueError as e:
            yield _error(OUT_OF_RANGE, str(e))
        except RuntimeError as e:  # of the model, or the engine is closed
            yield _error(INTERNAL, str(e))
        finally:
            self.queue_length -= 1

    async def stream(self, params: dict[str, Any]) -> AsyncGenerator[bytes, None]:
        """Reports as JSON, each with a zero byte after it."""
        async with contextlib.aclosing(self.reports(params)) as reports:
            async for report in reports:
                yield json.dumps(report).encode() + b"\0"

    async def last_report(self, params: dict[str, Any]) -> dict[str, Any]:
        async with contextlib.aclosing(self.reports(params)) as reports:
            return [report async for report in reports][-1]

    async def count_token(self, params: dict[str, Any]) -> dict[str, Any]:
        prompt = params.get("prompt")
        if not isinstance(prompt, str):
            return _error(WRONG_TYPE, "the body has no 'prompt' that is a string")
        count = ClientTokenizer(self.engine.engine.tokenizer).num_tokens
        number = await asyncio.to_thread(count, as_trained(prompt))  # a long text takes long
        return {"count": number, "error_code": 0}


async def _params(http: Request) -> dict[str, Any]:
    """The JSON object of a request's body; an empty body is an empty object."""
    try:
        params = json.loads(await http.body() or b"{}")
    except (ValueError, RecursionError) as e:
        raise HTTPException(400, f"the body is no JSON: {e}") from None
    if not isinstance(params, dict):
        raise HTTPException(400, "the body must be a JSON object")
    return params


_Params = Annotated[dict[str, Any], Depends(_params)]


def make_app(worker: FastChatWorker) -> FastAPI:
    """The worker's routes. A client that leaves a stream or a request aborts it."""
    app = FastAPI(openapi_url=None)

    @app.post("/worker_generate_stream")
    async def generate_stream(params: _Params) -> Response:
        return StreamingResponse(worker.stream(params), media_type="application/octet-stream")

    @app.post("/worker_generate")
    async def generate(params: _Params, http: Request) -> Response:
        return JsonResponse(await unless_client_leaves(worker.last_report(params), http.receive))

    @app.post("/count_token")
    async def count_token(params: _Params, http: Request) -> Response:
        return JsonResponse(await unless_client_leaves(worker.count_token(params), http.receive))

    @app.post("/worker_get_embeddings")
    async def embeddings() -> Response:
        return JsonResponse(_error(NO_SUCH_MODEL, _NO_EMBEDDINGS))

    @app.post("/worker_get_status")
    async def status() -> Response:
        return JsonResponse(worker.status())

    @app.post("/worker_get_conv_template")
    async def conv_template() -> Response:
        return JsonResponse({"conv": worker.conv})

    @app.post("/model_details")
    async def details() -> Response:
        return JsonResponse({"context_length": worker.engine.engine.max_seq_len})

    @app.exception_handler(AnyHTTPException)
    async def refuse(http: Request, error: AnyHTTPException) -> Response:
        message = f"{http.method} {http.url.path}: {error.detail}"
        return JsonResponse(_error(WRONG_TYPE, message), error.status_code)

    @app.exception_handler(ClientDisconnect)
    async def nobody_reads(http: Request, error: Exception) -> Response:
        return Response()

    return app


def conversation_template(name: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """The fields of FastChat's `Conversation`, from which its API server writes the prompt.

    "llama-3": with `as_trained`, Llama 3's chat format; the tokenizer adds begin_of_text. "raw":
    the messages one after the other, for models that know no chat.
    """
    roles, end = ("system", "user", "assistant"), _EOT
    system, *others = [f"{_START}{role}{_END}" for role in roles]
    if name == "raw":
        system, others, end = "", ["", ""], ""
    return {
        "name": name,
        "system_template": system + "{system_message}",
        "system_message": "",
        "roles": [header + _MARK for header in others],
        "messages": [],
        "offset": 0,
        "sep_style": _ADD_COLON_TWO,
        "sep": end,
        "sep2": end,
        "stop_str": None,
        "stop_token_ids": sorted(tokenizer.stop_tokens),
    }


def as_trained(prompt: str) -> str:
    """A prompt in the chat format as `ChatFormat` has it: as the model was trained.

    FastChat's templates write an empty system message where there is none, keep the whitespace
    around a message, leave out the end of an empty message, and add a colon. Any other text stays
    as it is.
    """
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


async def serve(
    worker: FastChatWorker,
    listener: socket.socket,
    address: str,
    *,
    controller: str | None,
    interval_s: int,
) -> int:
    """Answer requests until SIGINT or SIGTERM, then end what is not finished; the exit code.

    address: where others find the worker. controller: where to register, with a heartbeat each
    `interval_s` seconds.
    """
    config = uvicorn.Config(
        make_app(worker),
        lifespan="off",
        log_level="warning",
        timeout_graceful_shutdown=_SHUTDOWN_S,
    )
    server: Any = uvicorn.Server(config)
    exit_codes = {signal.SIGINT: ranks.INTERRUPTED, signal.SIGTERM: 0}
    loop, tasks, received = asyncio.get_running_loop(), set(), []

    def stop(number: signal.Signals) -> None:
        received.append(number)
        server.should_exit = True
        # Its open streams end with an error each. In a thread: it waits for the step to end.
        tasks.add(loop.create_task(asyncio.to_thread(worker.engine.close)))

    for number in exit_codes:
        loop.add_signal_handler(number, stop, number)
    server.capture_signals = contextlib.nullcontext  # uvicorn's own would end the process
    ranks.say(f"worker for {', '.join(worker.model_names)} at {address}; Ctrl-C ends it")
    beat = None
    if controller is not None:
        beat = loop.create_task(stay_registered(controller, address, worker.status, interval_s))
    await server.serve(sockets=[listener])
    if beat is not None:
        beat.cancel()
    await asyncio.gather(*tasks)
    return exit_codes[received[0]]


async def stay_registered(
    controller: str, worker: str, status: Callable[[], dict[str, Any]], interval_s: float
) -> None:
    """Register with the controller and send it heartbeats, until cancelled.

    A controller that is away is tried again; one that has forgotten the worker hears of it again.
    """
    is_known, trouble = False, ""
    while True:
        try:
            if is_known:
                beat = {"worker_name": worker, "queue_length": status()["queue_length"]}
                answer = await asyncio.to_thread(_post, controller + "/receive_heart_beat", beat)
                is_known = answer["exist"]
            if not is_known:
                card = {
                    "worker_name": worker, "check_heart_beat": True,
                    "worker_status": status(), "multimodal": False,
                }  # fmt: skip
                await asyncio.to_thread(_post, controller + "/register_worker", card)
                is_known, trouble = True, ""
                ranks.say(f"registered with the controller at {controller}")
            wait = interval_s
        except (OSError, http.client.HTTPException, ValueError, TypeError, KeyError) as e:
            if str(e) != trouble:  # once, not at each attempt
                ranks.say(f"no answer from the controller at {controller} ({e}); trying again")
            trouble, wait = str(e), min(interval_s, _RETRY_S)
        await asyncio.sleep(wait)


def _post(url: str, body: dict[str, Any]) -> Any:
    """POST a JSON object, and the JSON that comes back. A proxy would not know the controller."""
    request = urllib.request.Request(
        url, json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=_CONTROLLER_TIMEOUT_S) as response:
        return json.load(response)
