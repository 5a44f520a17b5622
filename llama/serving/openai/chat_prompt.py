"""The prompt of a chat request: messages and tools in, ids out; for server and batch files."""

from llama.serving.openai.requests import OpenAIRequest
from llama.serving.tools import ToolFormat, encode_chat
from llama.tokenizer import Tokenizer


def chat_prompt(request: OpenAIRequest, tokenizer: Tokenizer, tool_format: ToolFormat) -> list[int]:
    """The ids of a chat's dialog. TypeError or ValueError begins with the field that is wrong, or
    names the message."""
    tools = request.tools
    if tools is not None and tools.needs_grammar:
        # Until answers can be held to `tools.grammar(tool_format)`, nothing holds this one.
        field = "tool_choice" if tools.must_call else "tools"
        raise ValueError(f"{field}: a call cannot be forced, nor held to strict, by this version")
    return encode_chat(
        tokenizer,
        request.messages,
        None if tools is None else tools.tools,
        tool_format=tool_format,
    )
