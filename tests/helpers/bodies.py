"""Bodies of completions and chats, read as the routes read them."""

from typing import Any

from pydantic import TypeAdapter

from llama.prompts.fields import read_as
from llama.sampling_params import SamplingParams
from llama.server.openai.models import ChatBody, CompletionBody
from llama.server.request import ApiRequest


def parse_body(body: Any, defaults: SamplingParams, *, chat: bool) -> ApiRequest:
    """Return the request in a body that is not checked yet; a FieldError names what is wrong."""
    model: Any = ChatBody if chat else CompletionBody
    request: ApiRequest = read_as(TypeAdapter(model), body).request(defaults)
    return request
