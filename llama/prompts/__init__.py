"""Prompts of dialogs and tools in Llama's own formats, and the calls in the text of an answer.

In: messages and tools in OpenAI's format. Out: token ids of a prompt, and the parts of an answer.
Nothing here runs a tool or knows a server.
"""

from llama.prompts.parser import ToolCall, parse_tool_call
from llama.prompts.template import encode_chat
from llama.prompts.tools import ToolFormat

__all__ = ["ToolCall", "ToolFormat", "encode_chat", "parse_tool_call"]
