"""The tools of OpenAI's Responses, each as a function that the model sees, and their calls.

In: the tools of a body. Out: functions, and the items of an answer that call them. Llama's formats
have only functions: a custom tool becomes one with the argument `input`, the local shell one with
the fields of its action, and a tool of a namespace has the namespace in its name. This file runs no
tool.
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
_INPUT_SCHEMA = {"type": "object", "properties": {"input": _TEXT}, "required": ["input"]}
_ACTION_SCHEMA = {
    "type": "object",
    "properties": {"command": {"type": "array", "items": _TEXT}, "working_directory": _TEXT},
    "required": ["command"],
}


class NamedTool(Function):
    """A function or a custom tool.

    The format of a custom tool's input is shown to the model, but does not constrain it.
    """

    type: Literal["function", "custom"]
    format: dict[str, str] | None = None
    defer_loading: bool | None = None

    def function(self) -> Function:
        """Return the function that the model sees."""
        if self.type == "function":
            return self
        grammar = (self.format or {}).get("definition", "")
        description = "\n".join(filter(None, (self.description, grammar)))
        return Function(name=self.name, description=description, parameters=_INPUT_SCHEMA)


class LocalShell(Fields):
    """The shell of the user's machine, which the client runs."""

    type: Literal["local_shell"]

    def function(self) -> Function:
        """Return the function that the model sees."""
        description = "Run a program with its arguments on the user's machine."
        return Function(name=LOCAL_SHELL, description=description, parameters=_ACTION_SCHEMA)


class Namespace(Fields):
    """Tools with a common name before their own."""

    type: Literal["namespace"]
    name: ToolName
    description: str | None = None
    tools: Annotated[list[Annotated[NamedTool, SKIP_OTHER_TYPES]], TOOLS]


_Tool = NamedTool | LocalShell | Namespace
_AnyTool = Annotated[_Tool, Field(discriminator="type"), SKIP_OTHER_TYPES]
ToolList = Annotated[list[_AnyTool], TOOLS]


@dataclass(frozen=True)
class Callee:
    """A tool that may be called.

    Attributes:
        kind: type of the tool.
        name: name of the tool in its namespace.
        namespace: its namespace, if any.
        function: the function that the model sees.
        path: the place of its schema in the body.
    """

    kind: str
    name: str
    namespace: str | None
    function: Function
    path: str

    def item(self, block: Block) -> dict[str, Any]:
        """Return the fields of the item that a call of this tool becomes."""
        if self.kind == LOCAL_SHELL:
            action = {"command": [], "env": {}, **block.arguments, "type": "exec"}
            return {"type": "local_shell_call", "action": action}
        named = {"name": self.name}
        if self.namespace:
            named["namespace"] = self.namespace
        if self.kind == "custom":
            text = str(block.arguments.get("input", ""))
            return {"type": "custom_tool_call", **named, "input": text}
        return {"type": "function_call", **named, "arguments": block.text}


def qualified_name(name: str, namespace: str | None) -> str:
    """Return the name of a tool as the model sees it."""
    return f"{namespace}.{name}" if namespace else name


def callees(tools: Sequence[_Tool], path: str, namespace: str | None = None) -> Iterator[Callee]:
    """Yield what the model may call, with the tools of namespaces in their place."""
    for i, tool in enumerate(tools):
        if isinstance(tool, Namespace):
            yield from callees(tool.tools, f"{path}[{i}].tools", tool.name)
        else:
            function = tool.function()
            renamed = function.renamed(qualified_name(function.name, namespace))
            schema_path = f"{path}[{i}].parameters"
            yield Callee(tool.type, function.name, namespace, renamed, schema_path)
