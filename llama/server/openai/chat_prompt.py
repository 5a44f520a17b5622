"""What a chat request asks of the engine: its prompt and parameters, for server and batch files."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from llama.prompts import ToolFormat, Tools, encode_chat
from llama.sampling_params import SamplingParams
from llama.server.openai.requests import OpenAIRequest
from llama.structured_output import StructuredOutput
from llama.tokenizer import Tokenizer


def chat_prompt(
    request: OpenAIRequest,
    tokenizer: Tokenizer,
    tool_format: ToolFormat,
    *,
    continues: bool = False,
) -> list[int]:
    """The ids of a chat's dialog; continues: the answer goes on from its last message.

    TypeError or ValueError begins with the field that is wrong, or names the message.
    """
    return encode_messages(
        tokenizer,
        request.messages,
        None if request.tools is None else request.tools.tools,
        tool_format=tool_format,
        add_generation_prompt=request.add_generation_prompt and not continues,
        continue_final_message=request.continue_final_message or continues,
    )


def encode_messages(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    tools: Tools | None,
    *,
    tool_format: ToolFormat,
    add_generation_prompt: bool,
    continue_final_message: bool,
) -> list[int]:
    """`encode_chat`'s ids; a message that stays open also keeps the white space at its end, so that
    the message and the answer, joined, are the text that the model sees."""
    ids = encode_chat(
        tokenizer,
        messages,
        tools,
        tool_format=tool_format,
        add_generation_prompt=add_generation_prompt,
        continue_final_message=continue_final_message,
    )
    text = messages[-1].get("content")
    if continue_final_message and isinstance(text, str):
        ids += tokenizer.encode(text[len(text.rstrip()) :], bos=False, eos=False)
    return ids


def chat_params(request: OpenAIRequest, tool_format: ToolFormat) -> SamplingParams:
    """The request's parameters, with the grammar of its calls where they must be held to one.

    ValueError where the answer has another form already.
    """
    tools, params = request.tools, request.params
    if tools is None or not tools.needs_grammar:
        return params
    if params.structured_output is not None:
        field = "tool_choice" if tools.must_call else "tools"
        raise ValueError(
            f"{field}: a call that is forced, or strict, cannot have {request.form_field} beside it"
        )
    form = StructuredOutput(grammar=tools.grammar(tool_format))
    return replace(params, structured_output=form)
