"""A model worker of FastChat: the routes of `llama serve` for FastChat's controller.

The input is a `Service` and the addresses of the controller and of this server. The output is the
answers that FastChat 0.2.36 and later read, and heartbeats while a model is loaded. This module
imports nothing of FastChat.
"""

import asyncio
import contextlib
import functools
import http.client
import json
import re
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fastapi import APIRouter, FastAPI
from starlette.responses import Response, StreamingResponse

from llama.compat.client_tokenizer import ClientTokenizer
from llama.compat.hosts import HostRequest, Pace, read_params, reports_of
from llama.prompts.dialog_format import DialogFormat, MetaFormat
from llama.prompts.messages import read_messages
from llama.server.answer_size import MAX_IN_LOOP, num_items
from llama.server.auth import ONE_TENANT
from llama.server.encoding import JsonResponse, unless_client_leaves
from llama.server.errors import ApiError, ErrorFields
from llama.server.exchange import Exchange, beside_if_confined, body_router
from llama.server.images import read_images
from llama.server.limits import State
from llama.server.request import ApiRequest, ImageSource
from llama.server.respond import hold_answer
from llama.server.service import Service
from llama.server.serving import Serving, log

_T = TypeVar("_T")
_INTERVAL = 2  # tokens between two reports of a stream; FastChat's default

# Codes of fastchat.constants.ErrorCode.
WRONG_TYPE = 40001
NO_SUCH_MODEL = 40301
OUT_OF_RANGE = 40302
INTERNAL = 50001

# ADD_COLON_TWO of fastchat.conversation.SeparatorStyle: the prompt is the system message and sep,
# then for each message its role, ": ", the text and sep. The style has this number in every
# release, and it is the only one that accepts messages in parts, which FastChat makes a tuple of;
# the style for Llama 3 came after 0.2.36. `as_trained` removes the colons, which follow a _MARK.
_ADD_COLON_TWO = 2
_MARK = "\ue000"  # a character for private use, which no message contains
_START = "<|start_header_id|>"
_END = "<|end_header_id|>\n\n"
_EOT = "<|eot_id|>"
# With a chat template, a prompt of FastChat only lists the messages of a dialog, each after the
# mark of its role, and `prompt_ids` encodes the dialog.
_ROLE = "\ue001{}\ue001"  # characters for private use
_ROLE_MARK = re.compile("\ue001(system|user|assistant)\ue001")
# IMAGE_PLACEHOLDER_STR of fastchat.conversation, which ADD_COLON_TWO writes before the text of a
# message, once for each of its images.
_IMAGE = "$$<image>$$"

_NO_EMBEDDINGS = "this worker does not compute embeddings: use a model that is trained for them"
_CONTROLLER_TIMEOUT_S = 5.0
_RETRY_S = 5.0  # longest wait after the controller did not answer
_POLL_S = 0.2  # interval of the checks whether the model is loaded


@dataclass(frozen=True)
class FastChatWorker:
    """One server as a FastChat worker."""

    service: Service
    controller: str  # URL of FastChat's controller
    address: str  # URL of this server, as others reach it
    interval_s: float  # time between heartbeats

    def router(self) -> APIRouter:
        """Return the routes of the worker, which need no key.

        The worker is registered while they are served.
        """
        router = body_router(self._registered)
        service = self.service

        @router.post("/worker_generate_stream")
        async def generate_stream(body: dict[str, Any], http: Exchange) -> Response:
            return StreamingResponse(self._parts(body, http), media_type="application/octet-stream")

        @router.post("/worker_generate")
        async def generate(body: dict[str, Any], http: Exchange) -> Response:
            async def last() -> dict[str, Any]:
                latest: dict[str, Any] = {}
                async for report in self.reports(body, http):
                    latest = report
                return latest

            report = await unless_client_leaves(last(), http.receive)
            return await _beside_if_large(report, JsonResponse)

        @router.post("/count_token")
        async def count_token(body: dict[str, Any], http: Exchange) -> Response:
            prompt = body.get("prompt")
            if not isinstance(prompt, str):
                return JsonResponse(_error(WRONG_TYPE, "the body has no 'prompt' that is a string"))
            dialog_format = service.of(body.get("model")).dialog_format
            num_tokens = await beside_if_confined(http, _count, prompt, dialog_format)
            return JsonResponse({"count": num_tokens, "error_code": 0})

        @router.post("/worker_get_embeddings")
        async def embeddings() -> Response:
            return JsonResponse(_error(NO_SUCH_MODEL, _NO_EMBEDDINGS))

        @router.post("/worker_get_status")
        async def status() -> Response:
            return JsonResponse(self.status())

        @router.post("/worker_get_conv_template")
        async def conv_template() -> Response:
            return JsonResponse({"conv": conversation_template(service.default.dialog_format)})

        @router.post("/model_details")
        async def details() -> Response:
            card = service.default.loaded().card
            return JsonResponse({"context_length": card.max_seq_len})

        return router

    def status(self) -> dict[str, Any]:
        """Return what the worker reports to the controller."""
        return {
            "model_names": list(self.service.servings),
            "speed": 1,
            "queue_length": self.service.num_unfinished(),
        }

    async def _parts(self, params: dict[str, Any], http: Exchange) -> AsyncGenerator[bytes, None]:
        """Yield the reports of one request as FastChat reads them."""
        async with contextlib.aclosing(self.reports(params, http)) as reports:
            async for report in reports:
                yield await _beside_if_large(report, _encoded)

    async def reports(
        self, params: dict[str, Any], http: Exchange
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield FastChat's reports of one request.

        A report with an error_code other than 0 is the last.
        """
        try:
            serving = self.service.of(params.get("model"))
            tokenizer = serving.loaded().tokenizer
            pace = Pace(_INTERVAL)
            images = _images(params) if serving.takes_images else []
            request = await beside_if_confined(http, _request, serving, params, images)
            fields = ErrorFields()
            sender = http.state.sender
            pictures = []
            if images:
                pictures = await read_images(serving, images, sender, http.state.answer)
            prepared = await serving.prepare(
                request.prompt,
                request.sampling,
                fields,
                tenant=ONE_TENANT,
                sender=sender,
                pictures=pictures,
            )
            has_echo = bool(request.echo)
            size = ApiRequest(request.sampling, prompts=(request.prompt,), echo=has_echo)
            hold_answer(http, size, [prepared])
            outputs = serving.outputs([prepared], http.state.request_id, sender, fields)
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    if not pace.is_due(output):
                        continue
                    # Each report has the text, and the logprobs, of all tokens so far.
                    is_small = num_items(size, output) <= MAX_IN_LOOP
                    make = functools.partial(reports_of, request, output, tokenizer)
                    latest = make() if is_small else await asyncio.to_thread(make)
                    for report in latest:
                        yield report
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
        """Register with the controller once a model is loaded, and send heartbeats.

        This ends when it is cancelled. It registers again with a controller that was away or has
        forgotten the worker.
        """
        while self.service.state is State.LOADING:
            await asyncio.sleep(_POLL_S)
        is_registered = False
        problem = ""
        while True:
            try:
                if is_registered:
                    is_registered = await self._send_heartbeat()
                if not is_registered:
                    await self._register()
                    is_registered = True
                    problem = ""
                wait_s = self.interval_s
            except (OSError, http.client.HTTPException, ValueError, TypeError, KeyError) as e:
                if str(e) != problem:  # Each problem is logged once, not at each attempt.
                    message = "no answer from the controller at %s (%s); trying again"
                    log.warning(message, self.controller, e)
                problem = str(e)
                wait_s = min(self.interval_s, _RETRY_S)
            await asyncio.sleep(wait_s)

    async def _send_heartbeat(self) -> bool:
        """Send a heartbeat, and return whether the controller knows the worker."""
        queue_length = self.status()["queue_length"]
        beat = {"worker_name": self.address, "queue_length": queue_length}
        reply = await self._send("/receive_heart_beat", beat)
        is_known: bool = reply["exist"]
        return is_known

    async def _register(self) -> None:
        card = {
            "worker_name": self.address,
            "check_heart_beat": True,
            "worker_status": self.status(),
            "multimodal": any(serving.takes_images for serving in self.service),
        }
        await self._send("/register_worker", card)
        log.info("registered with the controller at %s", self.controller)

    async def _send(self, path: str, body: dict[str, Any]) -> Any:
        return await asyncio.to_thread(_post, self.controller + path, body)


def _images(params: dict[str, Any]) -> list[ImageSource]:
    """Return the images of FastChat's request; raise a ValueError if they are no list of texts."""
    given = params.get("images") or []
    if not isinstance(given, list) or not all(isinstance(url, str) for url in given):
        raise ValueError("params.images must be a list of data: URLs, or of files in base64")
    return [ImageSource(url, f"params.images[{i}]") for i, url in enumerate(given)]


def _request(
    serving: Serving, params: dict[str, Any], images: Sequence[ImageSource]
) -> HostRequest:
    """Read the request of FastChat; raise a ValueError that names a wrong key."""
    llama = serving.loaded()
    dialog_format = serving.dialog_format
    if images:
        params = {name: value for name, value in params.items() if name != "images"}
    if isinstance(dialog_format, MetaFormat) and isinstance(params.get("prompt"), str):
        params = {**params, "prompt": as_trained(params["prompt"])}
    return read_params(
        params,
        None,
        llama.tokenizer,
        llama.card.max_seq_len,
        has_raw_echo=True,
        encode=lambda prompt: prompt_ids(prompt, dialog_format, has_images=bool(images)),
    )


def _post(url: str, body: dict[str, Any]) -> Any:
    """Send a JSON object by POST and return the JSON of the response.

    No proxy is used, because it would not know the controller.
    """
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=_CONTROLLER_TIMEOUT_S) as response:
        return json.load(response)


def conversation_template(dialog_format: DialogFormat) -> dict[str, Any]:
    """Return the fields of FastChat's `Conversation`, from which its API server makes the prompt.

    `prompt_ids` has the ids of such a prompt. For Meta's format its text is that format, after
    `as_trained`. For a chat template it lists the messages, because no `Conversation` could express
    every template.
    """
    roles = [_ROLE.format(role) for role in ("system", "user", "assistant")]
    separator = ""
    if isinstance(dialog_format, MetaFormat):
        roles = [f"{_START}{role}{_END}" for role in ("system", "user", "assistant")]
        roles[1:] = [role + _MARK for role in roles[1:]]
        separator = _EOT
    return {
        "name": "llama-3",
        "system_template": f"{roles[0]}{{system_message}}",
        "system_message": "",
        "roles": roles[1:],
        "messages": [],
        "offset": 0,
        "sep_style": _ADD_COLON_TWO,
        "sep": separator,
        "sep2": separator,
        "stop_str": list(dialog_format.stop_strings) or None,
        "stop_token_ids": sorted(dialog_format.tokenizer.stop_tokens),
    }


def prompt_ids(prompt: str, dialog_format: DialogFormat, *, has_images: bool = False) -> list[int]:
    """Return the ids of a prompt, which is a text or was made with `conversation_template`.

    Args:
        prompt: the prompt.
        dialog_format: the format of dialogs.
        has_images: whether FastChat's marks of images stand for images, or are text.

    Raises:
        ValueError: the dialog cannot be encoded; the message says why.
    """
    is_meta = isinstance(dialog_format, MetaFormat)
    if is_meta or not prompt.startswith(_ROLE.format("system")):
        text = as_trained(prompt) if is_meta else prompt
        tokenizer = ClientTokenizer(dialog_format.tokenizer)
        return tokenizer.encode_images(text, _IMAGE) if has_images else tokenizer.encode(text)
    _, *pieces = _ROLE_MARK.split(prompt)
    dialog = [
        {"role": role, "content": text if role == "system" else text.removeprefix(":")[1:]}
        for role, text in zip(pieces[::2], pieces[1::2], strict=True)
    ]
    # FastChat writes an empty system message, and ends with the beginning of the answer.
    first = 0 if dialog[0]["content"] else 1
    given = [_with_images(message) for message in dialog] if has_images else dialog
    return dialog_format.encode(read_messages(given[first:-1], takes_images=has_images))


def _with_images(message: dict[str, str]) -> dict[str, Any]:
    """Return a message of FastChat whose marks of images are parts, which are not read here."""
    first, *others = message["content"].split(_IMAGE)
    if not others:
        return message
    image = {"type": "image_url", "image_url": ""}
    parts = [{"type": "text", "text": first}]
    for text in others:
        parts += [image, {"type": "text", "text": text}]
    return {**message, "content": [part for part in parts if part.get("text") != ""]}


def _count(prompt: str, dialog_format: DialogFormat) -> int:
    """Return the number of ids of a prompt, or of its text if its dialog cannot be encoded.

    FastChat shows the error of a dialog only where it asks for the answer.
    """
    has_images = dialog_format.tokenizer.image_id is not None
    try:
        return len(prompt_ids(prompt, dialog_format, has_images=has_images))
    except ValueError:
        return ClientTokenizer(dialog_format.tokenizer).num_tokens(prompt)


def as_trained(prompt: str) -> str:
    """Return a prompt of FastChat in the chat format, as `ChatFormat` writes it.

    FastChat's templates write an empty system message, keep surrounding whitespace, leave out the
    end of an empty message, and add a colon.
    """
    prompt = prompt.replace(f"{_MARK}: ", "").replace(f"{_MARK}:", "")
    before, *turns = prompt.split(_START)
    for i, turn in enumerate(turns):
        role, end, rest = turn.partition(_END)
        content, eot, rest = rest.partition(_EOT)
        is_open = i == len(turns) - 1 and not eot  # The model continues this message.
        if end and not is_open:
            turns[i] = role + end + content.strip() + _EOT + rest
    if turns[:1] == [f"system{_END}{_EOT}"]:
        del turns[0]
    return _START.join([before, *turns])


def _error(code: int, message: str) -> dict[str, Any]:
    """Return an error. FastChat reads text and error_code, and OpenAI's client `error`."""
    return {"text": message, "error_code": code, "error": {"message": message, "code": code}}


def _encoded(report: dict[str, Any]) -> bytes:
    """Return a report as FastChat reads it."""
    return json.dumps(report).encode() + b"\0"


async def _beside_if_large(report: dict[str, Any], work: Callable[[dict[str, Any]], _T]) -> _T:
    """Call a function of a report in the event loop or, if the report is large, in a thread."""
    usage = report.get("usage", {})
    if report.get("logprobs") or usage.get("total_tokens", 0) > MAX_IN_LOOP:
        return await asyncio.to_thread(work, report)
    return work(report)
