"""The prompt of a chat request: its messages in, ids out, alike for the server and batch files."""

from collections.abc import Mapping, Sequence
from typing import Any

from llama.serving.openai.requests import OpenAIRequest
from llama.serving.tools import encode_chat
from llama.tokenizer import Tokenizer


def chat_prompt(request: OpenAIRequest, tokenizer: Tokenizer) -> list[int]:
    """The ids of a chat's dialog. TypeError or ValueError names the message that is wrong."""
    return encode_messages(
        tokenizer,
        request.messages,
        add_generation_prompt=request.add_generation_prompt,
        continue_final_message=request.continue_final_message,
    )


def encode_messages(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool,
    continue_final_message: bool,
) -> list[int]:
    """`encode_chat`'s ids; a message that stays open also keeps the white space at its end, so that
    the message and the answer, joined, are the text that the model sees."""
    ids = encode_chat(
        tokenizer,
        messages,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
    )
    text = messages[-1].get("content")
    if continue_final_message and isinstance(text, str):
        ids += tokenizer.encode(text[len(text.rstrip()) :], bos=False, eos=False)
    return ids
