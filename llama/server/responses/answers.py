"""Response bodies and events of OpenAI's Responses API: the engine's outputs in, objects out.

The last event of a stream has the whole response. It knows no network, and runs nothing.
"""

from collections.abc import Iterator
from typing import Any

from llama.prompts.fields import Fields
from llama.requests.request import RequestOutput
from llama.server.errors import ApiError
from llama.server.openai.answers import ResponseMeta, usage
from llama.server.openai.blocks import Block, Blocks, Step
from llama.server.openai.request import OpenAIRequest
from llama.server.responses.models import ResponsesBody
from llama.tokenizer import Tokenizer


class ResponseEvents:
    """A response, or the events of one that streams, for outputs as they come. Each has its type
    and its sequence_number."""

    def __init__(
        self, body: ResponsesBody, request: OpenAIRequest, tokenizer: Tokenizer, meta: ResponseMeta
    ) -> None:
        self._echo = _echo(body, request, meta)
        self._id = meta.id
        self._blocks = Blocks(request, tokenizer, meta.id)
        self._number = 0

    def whole(self, output: RequestOutput) -> dict[str, Any]:
        """The response to a finished request."""
        for _ in self._blocks.push(output, whole=True):
            pass
        return self.response()

    def of(self, output: RequestOutput) -> Iterator[dict[str, Any]]:
        """The events that an output brings."""
        if not self._number:
            for name in ("created", "in_progress"):
                response = {**self._echo, "status": "in_progress", "output": [], "usage": None}
                yield self._event(f"response.{name}", response=response)
        for step, block, text in self._blocks.push(output):
            yield from self._block_events(step, block, text)

    def last(self) -> Iterator[dict[str, Any]]:
        """After all outputs: the whole response."""
        response = self.response()
        yield self._event(f"response.{response['status']}", response=response)

    def failed(self, error: ApiError) -> dict[str, Any]:
        """The last event where the answer ends by an error."""
        message = error.message
        if not self._number:
            return self._event("error", code=error.kind, message=message, param=error.param)
        said = {"code": "server_error", "message": message}
        response = {**self.response(), "status": "failed", "error": said}
        return self._event("response.failed", response=response)

    def response(self) -> dict[str, Any]:
        output = self._blocks.output
        assert output is not None
        is_cut = self._blocks.finish_reason == "length"
        return {
            **self._echo,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item(block) for block in self._blocks.blocks],
            "usage": _usage(output),
        }

    def _event(self, kind: str, /, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _block_events(self, step: Step, block: Block, text: str) -> Iterator[dict[str, Any]]:
        item = self._item(block, "in_progress" if step is not Step.STOP else None)
        at = {"output_index": block.index}
        if step is Step.START:
            started = item | ({} if block.is_call else {"content": []})
            yield self._event("response.output_item.added", **at, item=started)
        within = {**at, "item_id": item["id"]}
        if block.is_call:
            name = "response.function_call_arguments"
            if step is Step.TEXT:
                yield self._event(f"{name}.delta", **within, delta=text)
            elif step is Step.STOP:
                whole = {"name": block.name, "arguments": block.text}
                yield self._event(f"{name}.done", **within, **whole)
        else:
            yield from self._text_events(step, block, text, {**within, "content_index": 0})
        if step is Step.STOP:
            yield self._event("response.output_item.done", **at, item=item)

    def _text_events(
        self, step: Step, block: Block, text: str, at: dict[str, Any]
    ) -> Iterator[dict[str, Any]]:
        name = "response.output_text"
        if step is Step.START:
            yield self._event("response.content_part.added", **at, part=_part(block))
        elif step is Step.TEXT:
            yield self._event(f"{name}.delta", **at, delta=text, logprobs=[])
        else:
            yield self._event(f"{name}.done", **at, text=block.text, logprobs=[])
            yield self._event("response.content_part.done", **at, part=_part(block))

    def _item(self, block: Block, status: str | None = None) -> dict[str, Any]:
        status = status or ("incomplete" if block.is_cut else "completed")
        number = f"{self._id}_{block.index}"
        if block.is_call:
            call = {"call_id": block.call_id, "name": block.name, "arguments": block.text}
            return {"id": f"fc_{number}", "type": "function_call", "status": status, **call}
        return {
            "id": f"msg_{number}",
            "type": "message",
            "role": "assistant",
            "status": status,
            "content": [_part(block)],
        }


def _part(block: Block) -> dict[str, Any]:
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _usage(output: RequestOutput) -> dict[str, Any]:
    counts = usage([output])
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": counts["total_tokens"],
    }


def _plain(fields: Fields) -> dict[str, Any]:
    """As the body has it."""
    given = {name.rstrip("_"): value for name, value in fields}
    return {name: value for name, value in given.items() if value is not None}


def _echo(body: ResponsesBody, request: OpenAIRequest, meta: ResponseMeta) -> dict[str, Any]:
    """What a response says of its request."""
    empty_tool = {"description": None, "parameters": None, "strict": False}
    form, choice = body.text and body.text.format, body.tool_choice
    params = request.params
    return {
        "id": f"resp_{meta.id}",
        "object": "response",
        "created_at": meta.created,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": params.max_tokens,
        "model": meta.model if request.model is None else request.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "background": False,
        "store": False,
        "temperature": params.temperature,
        "text": {"format": _plain(form) if form else {"type": "text"}},
        "tool_choice": _plain(choice) if isinstance(choice, Fields) else choice or "auto",
        "tools": [empty_tool | _plain(tool) for tool in body.tools or []],
        "top_p": params.top_p,
        "truncation": "disabled",
        "metadata": body.metadata or {},
        "user": body.user,
    }
