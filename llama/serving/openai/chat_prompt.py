"""What a chat request asks of the engine: its prompt and parameters, for server and batch files."""

from dataclasses import replace

from llama.sampling_params import SamplingParams
from llama.serving.openai.requests import OpenAIRequest
from llama.serving.tools import ToolFormat, encode_chat
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
    tools = None if request.tools is None else request.tools.tools
    return encode_chat(
        tokenizer,
        request.messages,
        tools,
        tool_format=tool_format,
        add_generation_prompt=not continues,
        continue_final_message=continues,
    )


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
