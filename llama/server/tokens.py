"""What a client may ask of the tokenizer: /tokenize, /detokenize and /tokenizer_info, as vLLM's."""

import asyncio
from typing import Annotated, ClassVar

from fastapi import APIRouter, Request
from pydantic import Field, Tag
from starlette.responses import Response

from llama.prompts import ToolFormat, encode_chat
from llama.prompts.fields import Fields, chosen_by
from llama.prompts.messages import Dialog
from llama.prompts.tools import ToolFields
from llama.server.encoding import JsonResponse
from llama.server.errors import ApiError
from llama.server.exchange import body_router
from llama.server.sampling import TokenId
from llama.server.service import Service
from llama.tokenizer import Tokenizer

_LONGEST = 1_000_000  # characters or ids: the answer is JSON, whose making holds everyone up


class _Tokenize(Fields):
    unknown_message: ClassVar[str] = "{names} cannot be used in /tokenize: leave it out"

    model: str | None = None
    return_token_strs: bool | None = None


class TokenizeText(_Tokenize):
    prompt: str
    add_special_tokens: bool | None = None

    def ids(self, tokenizer: Tokenizer, tool_format: ToolFormat) -> list[int]:
        if len(self.prompt) > _LONGEST:
            words = f"prompt has more than {_LONGEST} characters"
            raise ApiError(413, words, param="prompt")
        has_bos = self.add_special_tokens is not False
        # A client that has these names from /tokenizer_info, as lm-eval has, can ask for their ids
        # here. Beside other text they are text, so that encoded text of a user opens nothing.
        named = tokenizer.special_tokens.get(self.prompt)
        if not has_bos and named in (tokenizer.bos_id, tokenizer.eos_id):
            return [named]
        return tokenizer.encode(self.prompt, bos=has_bos, eos=False)


class TokenizeChat(_Tokenize, ToolFields):
    """The ids are those of a chat request."""

    messages: Dialog
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def ids(self, tokenizer: Tokenizer, tool_format: ToolFormat) -> list[int]:
        ids = encode_chat(
            tokenizer,
            self.messages,
            self.tool_request(),
            tool_format=tool_format,
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            keeps_space=True,
        )
        if len(ids) > _LONGEST:
            raise ApiError(413, f"messages have more than {_LONGEST} tokens", param="messages")
        return ids


TokenizeBody = Annotated[
    Annotated[TokenizeText, Tag("text")] | Annotated[TokenizeChat, Tag("chat")],
    chosen_by(
        lambda x: ("chat" if "messages" in x else "text") if isinstance(x, dict) else None,
        " must be an object",
    ),
]


class DetokenizeBody(Fields):
    unknown_message: ClassVar[str] = "{names} cannot be used in /detokenize: leave it out"

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


def routes(service: Service) -> APIRouter:
    router = body_router()

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody, http: Request) -> Response:
        """The ids of a text, or of a dialog as a chat request would encode it."""
        llama = service.loaded()
        ids = await asyncio.to_thread(body.ids, llama.tokenizer, service.tool_format)
        strings = None
        if body.return_token_strs:
            strings = await asyncio.to_thread(lambda: [llama.tokenizer.decode(t) for t in ids])
        longest = llama.model.params.max_seq_len
        counted = {"count": len(ids), "max_model_len": longest, "tokens": ids}
        return JsonResponse(counted | {"token_strs": strings})

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody, http: Request) -> Response:
        """The text of ids, special tokens by their names."""
        tokenizer = service.loaded().tokenizer
        try:
            return JsonResponse({"prompt": await asyncio.to_thread(tokenizer.decode, body.tokens)})
        except ValueError as e:
            raise ApiError(400, str(e), param="tokens") from None

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """Names and ids of the special tokens, as a Hugging Face tokenizer_config.json has them."""
        llama, tokenizer = service.loaded(), service.loaded().tokenizer
        names = {i: name for name, i in tokenizer.special_tokens.items()}
        special = {str(i): {"content": name, "special": True} for i, name in sorted(names.items())}
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": llama.model.params.max_seq_len,
            "bos_token": names[tokenizer.bos_id],
            "eos_token": names[tokenizer.eos_id],
            "pad_token": None,
            "unk_token": None,
            "add_bos_token": True,
            "clean_up_tokenization_spaces": False,
            "added_tokens_decoder": special,
        }
        return JsonResponse(config)

    return router
