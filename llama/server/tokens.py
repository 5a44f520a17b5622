"""The routes of the tokenizer: /tokenize, /detokenize and /tokenizer_info, as vLLM has them.

In: texts, dialogs or token ids. Out: JSON objects. No model runs.
"""

from typing import Annotated, Any, ClassVar

from fastapi import APIRouter
from pydantic import Field, Tag
from starlette.responses import Response

from llama.prompts.chat import PromptFields
from llama.prompts.dialog_format import DialogFormat, PromptOptions
from llama.prompts.fields import Fields, chosen_by
from llama.prompts.messages import Dialog
from llama.prompts.tools import ToolFields
from llama.server.encoding import JsonResponse
from llama.server.errors import ApiError
from llama.server.exchange import Exchange, beside_if_confined, beside_if_large, body_router
from llama.server.sampling import TokenId
from llama.server.service import Service
from llama.tokenizer import Tokenizer

# Characters of a text or ids of a dialog: the answer has up to ten times as many bytes.
_MAX_LENGTH = 1_000_000


class _Tokenize(Fields):
    """The fields of both kinds of bodies of /tokenize."""

    unknown_message: ClassVar[str] = "{names} cannot be used in /tokenize: leave it out"

    model: str | None = None
    return_token_strs: bool | None = None


class TokenizeText(_Tokenize):
    """A text whose ids are asked for."""

    prompt: str
    add_special_tokens: bool | None = None

    def ids(self, dialog_format: DialogFormat) -> list[int]:
        """Return the ids of the text; ApiError 413 if it is too long."""
        if len(self.prompt) > _MAX_LENGTH:
            message = f"prompt has more than {_MAX_LENGTH} characters"
            raise ApiError(413, message, param="prompt")
        tokenizer = dialog_format.tokenizer
        has_bos = self.add_special_tokens is not False
        # A client that has these names from /tokenizer_info, as lm-eval has, can ask for their ids
        # here. Within other text they are text, so that a user's text cannot contain the tokens.
        special_id = tokenizer.special_tokens.get(self.prompt)
        if not has_bos and special_id in (tokenizer.bos_id, tokenizer.eos_id):
            return [special_id]
        return tokenizer.encode(self.prompt, bos=has_bos, eos=False)


class TokenizeChat(_Tokenize, ToolFields, PromptFields):
    """A dialog whose ids are asked for; they are those of a chat request."""

    messages: Dialog
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None

    def ids(self, dialog_format: DialogFormat) -> list[int]:
        """Return the ids of the dialog; ApiError 413 if there are too many."""
        options = PromptOptions(
            add_generation_prompt=self.add_generation_prompt is not False,
            continue_final_message=bool(self.continue_final_message),
            keeps_space=True,
            **self.prompt_options(),
        )
        ids = dialog_format.encode(self.messages, self.tool_request(), options)
        if len(ids) > _MAX_LENGTH:
            raise ApiError(413, f"messages have more than {_MAX_LENGTH} tokens", param="messages")
        return ids


def _body_tag(body: Any) -> str | None:
    """Return the tag of the type that reads a body of /tokenize."""
    if not isinstance(body, dict):
        return None
    return "chat" if "messages" in body else "text"


TokenizeBody = Annotated[
    Annotated[TokenizeText, Tag("text")] | Annotated[TokenizeChat, Tag("chat")],
    chosen_by(_body_tag, " must be an object"),
]


class DetokenizeBody(Fields):
    """Ids whose text is asked for."""

    unknown_message: ClassVar[str] = "{names} cannot be used in /detokenize: leave it out"

    model: str | None = None
    tokens: Annotated[list[TokenId], Field(fail_fast=True)]


def routes(service: Service) -> APIRouter:
    """Return the routes of the tokenizer."""
    router = body_router()

    @router.post("/tokenize")
    async def tokenize(body: TokenizeBody, http: Exchange) -> Response:
        """Return the ids of a text, or of a dialog as a chat request would encode it."""
        llama = http.serving.loaded()
        ids = await beside_if_confined(http, body.ids, http.serving.dialog_format)
        strings = None
        if body.return_token_strs:
            strings = await beside_if_large(http, _strings, llama.tokenizer, ids)
        content = {
            "count": len(ids),
            "max_model_len": llama.card.max_seq_len,
            "tokens": ids,
            "token_strs": strings,
        }
        return await beside_if_large(http, JsonResponse, content)

    @router.post("/detokenize")
    async def detokenize(body: DetokenizeBody, http: Exchange) -> Response:
        """Return the text of ids, in which special tokens are their names."""
        tokenizer = http.serving.loaded().tokenizer
        try:
            text = await beside_if_large(http, tokenizer.decode, body.tokens)
        except ValueError as error:
            raise ApiError(400, str(error), param="tokens") from None
        return await beside_if_large(http, JsonResponse, {"prompt": text})

    @router.get("/tokenizer_info")
    async def tokenizer_info() -> Response:
        """Return names and ids of the special tokens, as in a tokenizer_config.json."""
        llama = service.default.loaded()
        return JsonResponse(_tokenizer_config(llama.tokenizer, llama.card.max_seq_len))

    return router


def _strings(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """Return the text of each id by itself."""
    return [tokenizer.decode(token) for token in ids]


def _tokenizer_config(tokenizer: Tokenizer, max_seq_len: int) -> dict[str, Any]:
    """Return the content of Hugging Face's tokenizer_config.json."""
    names = {token: name for name, token in tokenizer.special_tokens.items()}
    special = {
        str(token.id): {"content": name, "special": token.special}
        for name, token in sorted(tokenizer.added_tokens.items(), key=lambda item: item[1].id)
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": max_seq_len,
        "bos_token": names[tokenizer.bos_id],
        "eos_token": names[tokenizer.eos_id],
        "pad_token": None,
        "unk_token": None,
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "added_tokens_decoder": special,
    }
