"""FastChat's worker protocol as an ASGI app: POST requests in, JSON and streams of JSON out.

In: an `AsyncLLMEngine`, and whatever calls the app (uvicorn, or a test). Out: the answers that
FastChat 0.2.36 and later expect of a model worker, at the paths in `FastChatApp.routes`. It imports
neither FastChat nor a web framework, and knows nothing of controllers and command lines.
"""

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import replace
from http import HTTPStatus
from typing import Any

from llama.compat.host_defaults import FASTCHAT
from llama.compat.hosts import async_generate_stream
from llama.requests.async_engine import AsyncLLMEngine
from llama.server.asgi import ClientLeft, unless_client_leaves
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
_TEMPLATES: dict[str, dict[str, Any]] = {
    "llama-3": {
        "system_template": f"{_START}system{_END}{{system_message}}",
        "roles": [f"{_START}user{_END}{_MARK}", f"{_START}assistant{_END}{_MARK}"],
        "sep": _EOT,
        "sep2": _EOT,
    },
    "raw": {
        "system_template": "{system_message}",
        "roles": [_MARK, _MARK],
        "sep": "",
        "sep2": "",
    },
}

_NO_EMBEDDINGS = (
    "this model worker makes no embeddings: it generates text; ask for embeddings of a model that "
    "was trained for them"
)
_ENDED_EARLY = "the model worker is shutting down: send the request again"

_Message = dict[str, Any]
_Receive = Callable[[], Awaitable[_Message]]
_Send = Callable[[_Message], Awaitable[None]]


class FastChatApp:
    """One model as a FastChat worker. Many requests run in the engine at once.

    limit_concurrency: requests that the engine gets at once; more wait here, and their client may
    leave. stream_interval: tokens between two parts of a stream. A client that leaves a stream or
    a request aborts it.
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
        self.routes: dict[str, Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]] = {
            "/worker_generate": self._generate,
            "/worker_get_embeddings": self._embeddings,
            "/worker_get_status": self._status,
            "/worker_get_conv_template": self._conv_template,
            "/count_token": self._count_token,
            "/model_details": self._details,
        }

    def status(self) -> dict[str, Any]:
        """What the controller is told of this worker."""
        return {"model_names": self.model_names, "speed": 1, "queue_length": self.queue_length}

    async def __call__(self, scope: _Message, receive: _Receive, send: _Send) -> None:
        """Answer one request (ASGI 3)."""
        path = scope["path"]
        if path != "/worker_generate_stream" and path not in self.routes:
            return await _send_json(send, HTTPStatus.NOT_FOUND, _error(WRONG_TYPE, f"no {path}"))
        if scope["method"] != "POST":
            message = f"{path} takes POST, not {scope['method']}"
            return await _send_json(
                send, HTTPStatus.METHOD_NOT_ALLOWED, _error(WRONG_TYPE, message)
            )
        try:
            params = await _read_params(receive)
        except ConnectionError:  # nobody reads an answer
            return
        except ValueError as e:
            return await _send_json(send, HTTPStatus.BAD_REQUEST, _error(WRONG_TYPE, str(e)))
        if path == "/worker_generate_stream":
            answer = self._stream(params, send)
        else:
            answer = _answer(self.routes[path](params), send)
        with contextlib.suppress(ClientLeft):
            await unless_client_leaves(answer, receive)

    async def reports(self, params: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """FastChat's reports of one request; one with an error_code other than 0 is the last."""
        if isinstance(params.get("prompt"), str):
            params = {**params, "prompt": as_trained(params["prompt"])}
        self.queue_length += 1
        try:
            async with self._slots, contextlib.aclosing(self._outputs(params)) as outputs:
                async for report in outputs:
                    if "abort" in _reasons(report):
                        raise RuntimeError(_ENDED_EARLY)
                    yield report
        except ValueError as e:
            yield _error(OUT_OF_RANGE, str(e))
        except RuntimeError as e:  # of the model, or the engine is closed
            yield _error(INTERNAL, str(e))
        finally:
            self.queue_length -= 1

    async def _outputs(self, params: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The worker's reports with the first token, every `stream_interval` tokens, the last."""
        engine, reported = self.engine.engine, 1 - self.stream_interval
        async for report in async_generate_stream(
            self.engine,
            engine.tokenizer,
            params,
            "",
            engine.max_seq_len,
            benchmark=False,
            dialect=_DIALECT,
        ):
            count = report["usage"]["completion_tokens"]
            if None not in _reasons(report) or count - reported >= self.stream_interval:
                reported = count
                yield report

    async def _stream(self, params: dict[str, Any], send: _Send) -> None:
        """Reports as JSON, each with a zero byte after it."""
        await _start(send, HTTPStatus.OK, b"application/octet-stream")
        async with contextlib.aclosing(self.reports(params)) as reports:
            async for report in reports:
                # FastChat's own workers say alone, after all text, why the text has ended, and
                # there are clients that read no text beside a reason.
                if None not in _reasons(report):
                    await _send_part(send, {**report, "finish_reason": None})
                await _send_part(send, report)
        await send({"type": "http.response.body", "body": b""})

    async def _generate(self, params: dict[str, Any]) -> dict[str, Any]:
        last = _error(INTERNAL, _ENDED_EARLY)
        async with contextlib.aclosing(self.reports(params)) as reports:
            async for report in reports:
                last = report
        return last

    async def _count_token(self, params: dict[str, Any]) -> dict[str, Any]:
        prompt = params.get("prompt")
        if not isinstance(prompt, str):
            return _error(WRONG_TYPE, "the body has no 'prompt' that is a string")
        tokenizer = self.engine.engine.tokenizer
        encoded = await asyncio.to_thread(tokenizer, as_trained(prompt))  # a long text takes long
        return {"count": len(encoded.input_ids), "error_code": 0}

    async def _embeddings(self, params: dict[str, Any]) -> dict[str, Any]:
        return _error(NO_SUCH_MODEL, _NO_EMBEDDINGS)

    async def _status(self, params: dict[str, Any]) -> dict[str, Any]:
        return self.status()

    async def _conv_template(self, params: dict[str, Any]) -> dict[str, Any]:
        return {"conv": self.conv}

    async def _details(self, params: dict[str, Any]) -> dict[str, Any]:
        return {"context_length": self.engine.engine.max_seq_len}


def conversation_template(name: str, tokenizer: Tokenizer) -> dict[str, Any]:
    """The fields of FastChat's `Conversation`, from which its API server writes the prompt.

    "llama-3": with `as_trained`, Llama 3's chat format; the tokenizer adds begin_of_text. "raw":
    the messages one after the other, for models that know no chat.
    """
    return {
        "name": name,
        **_TEMPLATES[name],
        "system_message": "",
        "messages": [],
        "offset": 0,
        "sep_style": _ADD_COLON_TWO,
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


def _reasons(report: dict[str, Any]) -> list[str | None]:
    """Why each answer has ended; None for one that goes on."""
    reasons = report.get("finish_reason")
    return reasons if isinstance(reasons, list) else [reasons]


def _error(code: int, message: str) -> dict[str, Any]:
    """FastChat reads text and error_code; OpenAI's client, in a stream, raises what is in error."""
    return {"text": message, "error_code": code, "error": {"message": message, "code": code}}


async def _answer(answer: Awaitable[dict[str, Any]], send: _Send) -> None:
    await _send_json(send, HTTPStatus.OK, await answer)


async def _read_params(receive: _Receive) -> dict[str, Any]:
    """The JSON object of a request's body; an empty body is an empty object.

    ConnectionError where the client leaves before the end, ValueError for anything else in it.
    """
    parts, more = [], True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionResetError("the client has left")
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    try:
        params = json.loads(b"".join(parts) or b"{}")
    except (ValueError, RecursionError) as e:
        raise ValueError(f"the body is no JSON: {e}") from None
    if not isinstance(params, dict):
        raise ValueError("the body must be a JSON object")
    return params


async def _send_json(send: _Send, status: HTTPStatus, content: dict[str, Any]) -> None:
    await _start(send, status, b"application/json")
    await send({"type": "http.response.body", "body": json.dumps(content).encode()})


async def _start(send: _Send, status: HTTPStatus, content_type: bytes) -> None:
    headers = [(b"content-type", content_type)]
    await send({"type": "http.response.start", "status": status.value, "headers": headers})


async def _send_part(send: _Send, report: dict[str, Any]) -> None:
    body = json.dumps(report).encode() + b"\0"
    await send({"type": "http.response.body", "body": body, "more_body": True})
