"""Response bodies and events of OpenAI's Responses API: the engine's outputs in, objects out.

This file knows no network and runs no model.
"""

from typing import Any

from llama.api import RequestOutput
from llama.prompts.dialog_format import DialogFormat
from llama.prompts.fields import Fields
from llama.server.blocks import Block, BlockAnswer, Events
from llama.server.endings import ending_of
from llama.server.errors import ApiError
from llama.server.openai.answers import ResponseMeta
from llama.server.openai.scores import chat_scores
from llama.server.request import ApiRequest
from llama.server.responses.models import ResponsesBody

# Fields of a tool that the API always returns, by the type of the tool.
_TOOL_DEFAULTS = {"function": {"description": None, "parameters": None, "strict": False}}


class ResponseAnswer(BlockAnswer):
    """A response, or its events, each with its type and its sequence_number."""

    def __init__(
        self,
        body: ResponsesBody,
        request: ApiRequest,
        dialog_format: DialogFormat,
        meta: ResponseMeta,
    ) -> None:
        super().__init__(request, dialog_format, meta)
        self._response = _response_fields(body, request, meta)
        self._callees = {callee.function.name: callee for callee in body.callees()}
        self._sequence_number = 0
        self._num_scored = 0  # tokens whose log-probabilities are in a block

    def body(self) -> dict[str, Any]:
        """Return the response object of a finished request."""
        incomplete = ending_of(self.finish_reason).incomplete
        return {
            **self._response,
            "status": "incomplete" if incomplete else "completed",
            "incomplete_details": {"reason": incomplete} if incomplete else None,
            "output": [self._item(block) for block in self.blocks],
            "usage": _usage(self.output),
        }

    def first_events(self) -> Events:
        """Yield the events that come before all items."""
        response = {**self._response, "status": "in_progress", "output": [], "usage": None}
        yield self._event("created", response=response)
        yield self._event("in_progress", response=response)

    def block_start(self, block: Block) -> Events:
        """Yield the events that open an item, and the part of a message."""
        item = self._item(block, "in_progress")
        if not block.is_call:
            item["content"] = []
        yield self._event("output_item.added", output_index=block.index, item=item)
        if not block.is_call:
            yield self._event("content_part.added", **self._position(block), part=_part(block))

    def block_delta(self, block: Block, text: str) -> Events:
        """Yield the event of new text; custom tools and shells do not stream theirs."""
        if self._tool_type(block) == "function":
            position = self._position(block)
            yield self._event("function_call_arguments.delta", **position, delta=text)
        elif not block.is_call:
            yield self.text_event(block, *self.event_values(), text)

    def text_event(self, block: Block, *values: Any) -> dict[str, Any]:
        """Return the event of new text, with its log-probabilities if they are asked for."""
        number, text = values
        fields = {**self._position(block), "delta": text}
        if block.is_reasoning:
            return _numbered("reasoning_text.delta", number, fields)
        fields["logprobs"] = self._new_logprobs(block)
        return _numbered("output_text.delta", number, fields)

    def event_values(self) -> tuple[Any, ...]:
        """Return the number of the next event, which counts it."""
        number = self._sequence_number
        self._sequence_number += 1
        return (number,)

    def block_stop(self, block: Block) -> Events:
        """Yield the events that close an item."""
        position = self._position(block)
        item = self._item(block)
        tool_type = self._tool_type(block)
        if tool_type == "function":
            call = {"name": item["name"], "arguments": block.text}
            yield self._event("function_call_arguments.done", **position, **call)
        elif tool_type == "custom":
            yield self._event("custom_tool_call_input.delta", **position, delta=item["input"])
            yield self._event("custom_tool_call_input.done", **position, input=item["input"])
        elif not block.is_call:
            if block.is_reasoning:
                yield self._event("reasoning_text.done", **position, text=block.text)
            else:
                self._new_logprobs(block)  # The end of the turn has tokens, too.
                done = {"text": block.text, "logprobs": block.logprobs}
                yield self._event("output_text.done", **position, **done)
            yield self._event("content_part.done", **position, part=_part(block))
        yield self._event("output_item.done", output_index=block.index, item=item)

    def last_events(self) -> Events:
        """Yield the event with the finished response."""
        response = self.body()
        yield self._event(response["status"], response=response)

    def error_event(self, error: ApiError) -> dict[str, Any]:
        """Return the event of a response that failed, or of a request that never began."""
        if not self.has_begun:
            return {
                "type": "error",
                "sequence_number": self._sequence_number,
                "code": error.kind,
                "message": error.message,
                "param": error.param,
            }
        failure = {"code": "server_error", "message": error.message}
        return self._event("failed", response={**self.body(), "status": "failed", "error": failure})

    def _event(self, name: str, /, **fields: Any) -> dict[str, Any]:
        (number,) = self.event_values()
        return _numbered(name, number, fields)

    def _position(self, block: Block) -> dict[str, Any]:
        """Return the fields that say where the text of a block belongs."""
        position = {"output_index": block.index, "item_id": self._item_id(block)}
        return position if block.is_call else {**position, "content_index": 0}

    def _new_logprobs(self, block: Block) -> list[dict[str, Any]]:
        """Return the log-probabilities of the tokens since the last call, and add them to a block.

        Those of the reasoning are passed over.
        """
        num_top = self.request.params.logprobs
        if num_top is None:
            return []
        answer = self.output.outputs[0]
        first = max(self._num_scored, answer.num_reasoning_tokens)
        scores = answer.new_scores(first)
        self._num_scored = first + len(scores)
        new: list[dict[str, Any]]
        new = chat_scores(scores, num_top, self.dialog_format.tokenizer)["content"]
        block.logprobs += new
        return new

    def _tool_type(self, block: Block) -> str:
        """Return the type of a called tool, or nothing for text."""
        return self._callees[block.name].kind if block.is_call else ""

    def _item_id(self, block: Block) -> str:
        prefix = "fc" if block.is_call else "rs" if block.is_reasoning else "msg"
        return f"{prefix}_{self.meta.id}_{block.index}"

    def _item(self, block: Block, status: str | None = None) -> dict[str, Any]:
        if status is None:
            status = "incomplete" if block.is_cut else "completed"
        item = {"id": self._item_id(block), "status": status}
        if block.is_call:
            return {**item, "call_id": block.call_id, **self._callees[block.name].item(block)}
        if block.is_reasoning:
            return {**item, "type": "reasoning", "summary": [], "content": [_part(block)]}
        return {**item, "type": "message", "role": "assistant", "content": [_part(block)]}


def _numbered(name: str, number: int, fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": f"response.{name}", "sequence_number": number, **fields}


def _part(block: Block) -> dict[str, Any]:
    """Return the content part of a message, or of the reasoning."""
    if block.is_reasoning:
        return {"type": "reasoning_text", "text": block.text}
    return {
        "type": "output_text",
        "text": block.text,
        "annotations": [],
        "logprobs": block.logprobs,
    }


def _usage(output: RequestOutput) -> dict[str, Any]:
    """Return the usage object of a response."""
    usage = output.usage
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def _as_given(fields: Fields) -> dict[str, Any]:
    """Return a part of the body as the client sent it."""
    return fields.model_dump(by_alias=True, exclude_none=True)


def _tools_as_given(body: ResponsesBody) -> list[dict[str, Any]]:
    """Return the tools of the body, with the fields that the API always returns."""
    return [_TOOL_DEFAULTS.get(tool.type, {}) | _as_given(tool) for tool in body.tools or []]


def _response_fields(
    body: ResponsesBody, request: ApiRequest, meta: ResponseMeta
) -> dict[str, Any]:
    """Return the fields of a response that follow from its request alone."""
    text_format = body.text and body.text.format
    choice: Any = body.tool_choice or "auto"
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
        "reasoning": {"effort": body.effort(), "summary": None},
        "background": False,
        "store": False,
        "temperature": params.temperature,
        "text": {"format": _as_given(text_format) if text_format else {"type": "text"}},
        "tool_choice": _as_given(choice) if isinstance(choice, Fields) else choice,
        "tools": _tools_as_given(body),
        "top_logprobs": body.top_logprobs or 0,
        "top_p": params.top_p,
        "truncation": "disabled",
        "metadata": body.metadata or {},
        "user": body.user,
    }
