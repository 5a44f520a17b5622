"""Response bodies and events of OpenAI's Responses API: the engine's outputs in, objects out."""

from typing import Any

from llama.prompts.fields import Fields
from llama.requests.request import RequestOutput
from llama.server.blocks import Block, BlockAnswer, Events
from llama.server.errors import ApiError
from llama.server.openai.answers import ResponseMeta
from llama.server.openai.request import OpenAIRequest
from llama.server.responses.models import ResponsesBody
from llama.tokenizer import Tokenizer

_EMPTY_TOOL = {"function": {"description": None, "parameters": None, "strict": False}}


class ResponseAnswer(BlockAnswer):
    """A response, or its events, each with its type and its sequence_number."""

    def __init__(
        self, body: ResponsesBody, request: OpenAIRequest, tokenizer: Tokenizer, meta: ResponseMeta
    ) -> None:
        super().__init__(request, tokenizer, meta)
        self._echo = _echo(body, request, meta)
        self._callees = {each.function.name: each for each in body.callees()}
        self._number = 0

    def body(self) -> dict[str, Any]:
        is_cut = self.finish_reason == "length"
        return {
            **self._echo,
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "output": [self._item(block) for block in self.blocks],
            "usage": _usage(self.output),
        }

    def begins(self) -> Events:
        response = {**self._echo, "status": "in_progress", "output": [], "usage": None}
        yield self._event("created", response=response)
        yield self._event("in_progress", response=response)

    def starts(self, block: Block) -> Events:
        item = self._item(block, "in_progress")
        if not block.is_call:
            item["content"] = []
        yield self._event("output_item.added", output_index=block.index, item=item)
        if not block.is_call:
            yield self._event("content_part.added", **self._at(block), part=_part(block))

    def grows(self, block: Block, text: str) -> Events:
        if self._kind(block) == "function":
            yield self._event("function_call_arguments.delta", **self._at(block), delta=text)
        elif not block.is_call:
            yield self._event("output_text.delta", **self._at(block), delta=text, logprobs=[])

    def stops(self, block: Block) -> Events:
        at, item, kind = self._at(block), self._item(block), self._kind(block)
        if kind == "function":
            whole = {"name": item["name"], "arguments": block.text}
            yield self._event("function_call_arguments.done", **at, **whole)
        elif kind == "custom":
            yield self._event("custom_tool_call_input.delta", **at, delta=item["input"])
            yield self._event("custom_tool_call_input.done", **at, input=item["input"])
        elif not block.is_call:
            yield self._event("output_text.done", **at, text=block.text, logprobs=[])
            yield self._event("content_part.done", **at, part=_part(block))
        yield self._event("output_item.done", output_index=block.index, item=item)

    def last(self) -> Events:
        response = self.body()
        yield self._event(response["status"], response=response)

    def failed(self, error: ApiError) -> dict[str, Any]:
        if not self.has_begun:
            told = {"code": error.kind, "message": error.message, "param": error.param}
            return {"type": "error", "sequence_number": self._number, **told}
        told = {"code": "server_error", "message": error.message}
        return self._event("failed", response={**self.body(), "status": "failed", "error": told})

    def _event(self, kind: str, **fields: Any) -> dict[str, Any]:
        self._number += 1
        return {"type": f"response.{kind}", "sequence_number": self._number - 1, **fields}

    def _at(self, block: Block) -> dict[str, Any]:
        """Where the text of a block is."""
        at = {"output_index": block.index, "item_id": self._item_id(block)}
        return at if block.is_call else {**at, "content_index": 0}

    def _kind(self, block: Block) -> str:
        """Of a call, the type of the tool."""
        return self._callees[block.name].kind if block.is_call else ""

    def _item_id(self, block: Block) -> str:
        return f"{'fc' if block.is_call else 'msg'}_{self.meta.id}_{block.index}"

    def _item(self, block: Block, status: str | None = None) -> dict[str, Any]:
        status = status or ("incomplete" if block.is_cut else "completed")
        item = {"id": self._item_id(block), "status": status}
        if block.is_call:
            return {**item, "call_id": block.call_id, **self._callees[block.name].item(block)}
        return {**item, "type": "message", "role": "assistant", "content": [_part(block)]}


def _part(block: Block) -> dict[str, Any]:
    return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}


def _usage(output: RequestOutput) -> dict[str, Any]:
    usage = output.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.total_tokens,
    }


def _plain(fields: Fields) -> dict[str, Any]:
    """As the body has it."""
    return fields.model_dump(by_alias=True, exclude_none=True)


def _echo(body: ResponsesBody, request: OpenAIRequest, meta: ResponseMeta) -> dict[str, Any]:
    """What a response says of its request."""
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
        "model": meta.model,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": None, "summary": None},
        "background": False,
        "store": False,
        "temperature": params.temperature,
        "text": {"format": _plain(form) if form else {"type": "text"}},
        "tool_choice": _plain(choice) if isinstance(choice, Fields) else choice or "auto",
        "tools": [_EMPTY_TOOL.get(tool.type, {}) | _plain(tool) for tool in body.tools or []],
        "top_p": params.top_p,
        "truncation": "disabled",
        "metadata": body.metadata or {},
        "user": body.user,
    }
