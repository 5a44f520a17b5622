"""What a client may ask of the tokenizer: /tokenize, /detokenize and /tokenizer_info, as vLLM's.

In: text, a dialog or ids. Out: ids or text, and the names of the special tokens.
"""

import asyncio
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import Response

from llama.prompts import ToolFormat
from llama.prompts.chat import chat_ids
from llama.prompts.tools import TOOL_FIELDS, read_tools
from llama.server.encoding import JsonResponse
from llama.server.errors import ApiError
from llama.server.exchange import described, read_json
from llama.server.openai.json_types import json_type, refuse_fields
from llama.server.openai.requests import field_of
from llama.server.service import Service
from llama.tokenizer import Tokenizer

_TOKENIZE = {
    "type": "object",
    "properties": {
        "prompt": {"type": "string"},
        "add_special_tokens": {"type": ["boolean", "null"]},
        "return_token_strs": {"type": ["boolean", "null"]},
    },
    "required": ["prompt"],
    "additionalProperties": False,
}
_DETOKENIZE = {
    "type": "object",
    "properties": {"tokens": {"type": "array", "items": {"type": "integer", "minimum": 0}}},
    "required": ["tokens"],
    "additionalProperties": False,
}


_LONGEST = 1_000_000  # characters or ids: the answer is JSON, whose making holds everyone up


def routes(service: Service) -> APIRouter:
    router = APIRouter()

    @router.post("/tokenize", openapi_extra=described(_TOKENIZE))
    async def tokenize(http: Request) -> Response:
        """The ids of a text, or of a dialog as a chat request would encode it."""
        body = await read_json(http)
        llama = service.loaded()
        ids = await asyncio.to_thread(_encode, llama.tokenizer, service.tool_format, _given(body))
        strings = None
        if body.get("return_token_strs"):
            strings = await asyncio.to_thread(lambda: [llama.tokenizer.decode(t) for t in ids])
        return JsonResponse(
            {
                "count": len(ids),
                "max_model_len": llama.model.params.max_seq_len,
                "tokens": ids,
                "token_strs": strings,
            }
        )

    @router.post("/detokenize", openapi_extra=described(_DETOKENIZE))
    async def detokenize(http: Request) -> Response:
        """The text of ids, special tokens by their names."""
        body = _given(await read_json(http))
        tokenizer = service.loaded().tokenizer
        _refuse(body.keys() - {"model", "tokens"}, "/detokenize")
        tokens = body.get("tokens")
        if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
            raise ApiError(400, "tokens must be a list of token ids", param="tokens")
        try:
            return JsonResponse({"prompt": await asyncio.to_thread(tokenizer.decode, tokens)})
        except ValueError as e:
            raise ApiError(400, str(e), param="tokens") from None

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """Names and ids of the special tokens, as a Hugging Face tokenizer_config.json has them."""
        llama = service.loaded()
        tokenizer = llama.tokenizer
        names = {i: name for name, i in tokenizer.special_tokens.items()}
        return JsonResponse(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": llama.model.params.max_seq_len,
                "bos_token": names[tokenizer.bos_id],
                "eos_token": names[tokenizer.eos_id],
                "pad_token": None,
                "unk_token": None,
                "add_bos_token": True,
                "clean_up_tokenization_spaces": False,
                "added_tokens_decoder": {
                    str(i): {"content": name, "special": True} for i, name in sorted(names.items())
                },
            }
        )

    return router


def _given(body: Any) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise ApiError(400, f"body must be an object, got {json_type(body)}")
    return {name: value for name, value in body.items() if value is not None}


def _refuse(unknown: set[str], place: str) -> None:
    try:
        refuse_fields(unknown, place)
    except ValueError as e:
        raise ApiError(400, str(e), param=min(unknown)) from None


def _encode(tokenizer: Tokenizer, tool_format: ToolFormat, body: dict[str, Any]) -> list[int]:
    """ApiError 400 names the field that is wrong."""
    common = {"model", "return_token_strs"}
    flags = {"add_generation_prompt": True, "continue_final_message": False}
    text_fields, chat_fields = (
        {"prompt", "add_special_tokens"},
        {"messages", *flags, *TOOL_FIELDS},
    )
    is_chat = "messages" in body
    _refuse(body.keys() - common - (chat_fields if is_chat else text_fields), "/tokenize")
    for name in ("add_special_tokens", "return_token_strs", *flags):
        if not isinstance(body.get(name, True), bool):
            raise ApiError(400, f"{name} must be true or false", param=name)
    if is_chat:
        given = {name: body.get(name, default) for name, default in flags.items()}
        try:
            tools = read_tools(body.get("tools"), body.get("tool_choice"))
            ids = chat_ids(tokenizer, body["messages"], tools, tool_format=tool_format, **given)
        except (TypeError, ValueError) as e:
            raise ApiError(400, str(e), param=field_of(e, body) or "messages") from None
        if len(ids) > _LONGEST:
            raise ApiError(413, f"messages have more than {_LONGEST} tokens", param="messages")
        return ids
    prompt = body.get("prompt")
    if not isinstance(prompt, str):
        raise ApiError(400, f"prompt must be a string, got {json_type(prompt)}", param="prompt")
    if len(prompt) > _LONGEST:
        raise ApiError(413, f"prompt has more than {_LONGEST} characters", param="prompt")
    has_bos = body.get("add_special_tokens", True)
    if not has_bos and prompt in (names := _ends(tokenizer)):
        return [names[prompt]]
    return tokenizer.encode(prompt, bos=has_bos, eos=False)


def _ends(tokenizer: Tokenizer) -> dict[str, int]:
    """The ids of bos_token and eos_token: a client that has their names from /tokenizer_info, as
    lm-eval has, can ask for their ids here alone. Beside other text they are text, as all others
    are, so that encoded text of a user opens nothing."""
    ids = (tokenizer.bos_id, tokenizer.eos_id)
    return {name: i for name, i in tokenizer.special_tokens.items() if i in ids}
