"""Tools in Llama's own formats: prompts with functions in, and the calls in an answer's text out.

`encode_chat` makes the prompt, `ToolCallParser` reads the answer, `call_grammar` holds it to a
call. Nothing here runs a tool, or knows a server.
"""

from llama.prompts.formats import ToolFormat, Tools, tool_format_of
from llama.prompts.grammar import call_grammar
from llama.prompts.parser import (
    CallArguments,
    CallStart,
    Content,
    Event,
    ToolCall,
    ToolCallParser,
    parse_tool_call,
)
from llama.prompts.template import encode_chat

__all__ = [
    "CallArguments",
    "CallStart",
    "Content",
    "Event",
    "ToolCall",
    "ToolCallParser",
    "ToolFormat",
    "Tools",
    "call_grammar",
    "encode_chat",
    "parse_tool_call",
    "tool_format_of",
]
