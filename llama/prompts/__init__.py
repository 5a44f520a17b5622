"""Tools in Llama's own formats: prompts with functions in, and the calls in an answer's text out.

Nothing here runs a tool, or knows a server.
"""

from llama.prompts.parser import ToolCall, parse_tool_call
from llama.prompts.template import encode_chat
from llama.prompts.tools import ToolFormat

__all__ = ["ToolCall", "ToolFormat", "encode_chat", "parse_tool_call"]
