"""The tools of OpenAI's Responses, each as a function that the model sees, and their calls.

In: the tools of a body. Out: functions, and the items of an answer that call them. Llama's formats
have functions only: a custom tool is one with the argument `input`, the local shell one with the
fields of its action, and one of a namespace has the namespace in its name. It runs nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from llama.prompts.fields import SKIP_OTHER_TYPES, Fields
from llama.prompts.tools import TOOLS, Function, ToolName
from llama.server.blocks import Block

LOCAL_SHELL = "local_shell"
_TEXT: dict[str, Any] = {"type": "string"}
_INPUT = {"type": "object", "properties": {"input": _TEXT}, "required": ["input"]}
_COMMAND = {"command": {"type": "array", "items": _TEXT}, "working_directory": _TEXT}
_ACTION = {"type": "object", "properties": _COMMAND, "required": ["command"]}


class NamedTool(Function):
    """format: of a custom tool's input; the model is told of it, and not held to it."""

    type: Literal["function", "custom"]
    format: dict[str, str] | None = None
    defer_loading: bool | None = None

    def function(self) -> Function:
        if self.type == "function":
            return self
        parts = (self.description or "", (self.format or {}).get("definition", ""))
        words = "\n".join(filter(None, parts))
        return Function(name=self.name, description=words, parameters=_INPUT)


class LocalShell(Fields):
    type: Literal["local_shell"]

    def function(self) -> Function:
        words = "Run a program with its arguments on the user's machine."
        return Function(name=LOCAL_SHELL, description=words, parameters=_ACTION)


class Namespace(Fields):
    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[list[Annotated[NamedTool, SKIP_OTHER_TYPES]], TOOLS]


_Tool = NamedTool | LocalShell | Namespace
_AnyTool = Annotated[_Tool, Field(discriminator="type"), SKIP_OTHER_TYPES]
ToolList = Annotated[list[_AnyTool], TOOLS]


@dataclass(frozen=True)
class Callee:
    """A tool that may be called, and the function that the model sees. kind: the tool's type."""

    kind: str
    name: str
    namespace: str | None
    function: Function

    def item(self, block: Block) -> dict[str, Any]:
        """What the API calls the call."""
        if self.kind == LOCAL_SHELL:
            action = {"command": [], "env": {}, **block.arguments, "type": "exec"}
            return {"type": "local_shell_call", "action": action}
        named = {"name": self.name} | ({"namespace": self.namespace} if self.namespace else {})
        if self.kind == "custom":
            given = str(block.arguments.get("input", ""))
            return {"type": "custom_tool_call", **named, "input": given}
        return {"type": "function_call", **named, "arguments": block.text}


def name_of(name: str, namespace: str | None) -> str:
    """As the model sees it."""
    return f"{namespace}.{name}" if namespace else name


def callees(tools: Sequence[_Tool], namespace: str | None = None) -> Iterator[Callee]:
    for tool in tools:
        if isinstance(tool, Namespace):
            yield from callees(tool.tools, tool.name)
        else:
            shown = tool.function()
            renamed = shown.renamed(name_of(shown.name, namespace))
            yield Callee(tool.type, shown.name, namespace, renamed)
