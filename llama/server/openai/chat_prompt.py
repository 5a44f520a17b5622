"""What a chat request asks of the engine: its prompt and parameters, for server and batch files."""

from llama.prompts import chat
from llama.prompts.formats import ToolFormat
from llama.sampling_params import SamplingParams
from llama.server.openai.requests import OpenAIRequest
from llama.tokenizer import Tokenizer


def chat_prompt(
    request: OpenAIRequest,
    tokenizer: Tokenizer,
    tool_format: ToolFormat,
    *,
    continues: bool = False,
) -> list[int]:
    """The ids of a chat's dialog; continues: the answer goes on from its last message.

    FieldError names the field that is wrong, or the message.
    """
    return chat.chat_ids(
        tokenizer,
        request.messages,
        request.tools,
        tool_format=tool_format,
        add_generation_prompt=request.add_generation_prompt and not continues,
        continue_final_message=request.continue_final_message or continues,
    )


def chat_params(request: OpenAIRequest, tool_format: ToolFormat) -> SamplingParams:
    """The request's parameters, with the grammar of its calls where they must be held to one."""
    form_field = request.form_field or "structured_output"
    return chat.chat_params(request.params, request.tools, tool_format, form_field)
