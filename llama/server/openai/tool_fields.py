"""The fields of a chat that are about tools: JSON in, a checked `ToolRequest` and a prompt out.

Every field is used, or is an error that names it. It runs no tool, and knows no network.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from llama.prompts import ToolFormat, Tools, call_grammar
from llama.server.openai.json_types import json_type, refuse_fields

TOOL_FIELDS = {"tools", "tool_choice", "parallel_tool_calls"}
MOST_TOOLS = 128  # of one request, as OpenAI has it
_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_.-]{0,63}")


@dataclass(frozen=True)
class ToolRequest:
    """What a chat asks of its tools.

    must_call: the answer must be a call. name: of this tool alone. parallel: the answer may have
    several calls. strict: names of the functions whose arguments must fit their schema.
    """

    tools: Tools
    must_call: bool = False
    name: str | None = None
    parallel: bool = True
    strict: frozenset[str] = frozenset()

    @property
    def needs_grammar(self) -> bool:
        """Whether the answer must be held to a grammar: see `call_grammar`."""
        return self.must_call or bool(self.strict)

    def callable_tools(self) -> Tools:
        """Those that the answer may call."""
        return self.tools if self.name is None else self.tools.only(self.name)

    @property
    def several(self) -> bool:
        return self.parallel and self.name is None

    def grammar(self, tool_format: ToolFormat) -> str:
        """What holds the answer to its calls, as a Lark grammar of llguidance's dialect."""
        return call_grammar(
            self.callable_tools(), tool_format, must_call=self.must_call, parallel=self.several
        )


def read_tools(body: Mapping[str, Any]) -> ToolRequest | None:
    """The tools that may be called; None where there are none, or tool_choice is "none".

    With "none" the prompt does not name the tools, so that no call is to be expected.
    TypeError or ValueError names the field that is wrong.
    """
    given = body.get("tools", [])
    if not isinstance(given, list):
        raise TypeError(f"tools must be a list, got {json_type(given)}")
    if len(given) > MOST_TOOLS:
        raise ValueError(f"tools has {len(given)} entries: it must have at most {MOST_TOOLS}")
    functions = [_function(tool, f"tools[{i}]") for i, tool in enumerate(given)]
    names = [function["name"] for function in functions]
    for i, name in enumerate(names):
        if name in names[:i]:
            raise ValueError(f"tools[{i}] has the name {name!r}, as one before it: rename it")
    parallel = body.get("parallel_tool_calls", True)
    if not isinstance(parallel, bool):
        raise TypeError(f"parallel_tool_calls must be true or false, got {json_type(parallel)}")
    choice, name = _choice(body.get("tool_choice", "auto"), names)
    if not given or choice == "none":
        return None
    strict = frozenset(function["name"] for function in functions if function.pop("strict", False))
    return ToolRequest(
        Tools.of([{"type": "function", "function": function} for function in functions]),
        must_call=choice == "required",
        name=name,
        parallel=parallel,
        strict=strict,
    )


def _function(tool: Any, where: str) -> dict[str, Any]:
    """The function of a tool, without the fields that are null."""
    if not isinstance(tool, dict):
        raise TypeError(f"{where} must be an object, got {json_type(tool)}")
    if tool.get("type") != "function":
        raise ValueError(f"{where}.type must be 'function': other kinds of tools cannot be used")
    if not isinstance(tool.get("function"), dict):
        raise TypeError(f"{where}.function must be an object with a name")
    function = {key: value for key, value in tool["function"].items() if value is not None}
    unknown = {key for key in tool.keys() - {"type", "function"} if tool[key] is not None}
    _refuse(where, unknown | function.keys() - {"name", "description", "parameters", "strict"})
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(
            f"{where}.function.name must be 1 to 64 letters, digits, dots, dashes and underscores, "
            "and begin with a letter or an underscore"
        )
    for key, kind in (("description", str), ("strict", bool), ("parameters", dict)):
        if key in function and not isinstance(function[key], kind):
            raise TypeError(f"{where}.function.{key} must not be {json_type(function[key])}")
    _check_schema(f"{where}.function.parameters", function.get("parameters", {}))
    return function


def _check_schema(where: str, schema: dict[str, Any]) -> None:
    """What the prompt needs to know of it; a grammar checks the rest."""
    if schema.get("type", "object") not in ("object", "dict"):
        raise ValueError(f"{where}.type must be 'object'")
    if not isinstance(schema.get("properties", {}), dict):
        raise TypeError(f"{where}.properties must be an object")
    if not isinstance(schema.get("required", []), list):
        raise TypeError(f"{where}.required must be a list")


def _refuse(where: str, unknown: set[str]) -> None:
    try:
        refuse_fields(unknown, where)
    except ValueError as e:
        raise ValueError(f"{where}: {e}") from None


def _choice(choice: Any, names: list[str]) -> tuple[str, str | None]:
    """Of tool_choice: "none", "auto" or "required", and the name of the function that is wanted."""
    if isinstance(choice, dict):
        function = choice.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if choice.get("type") != "function" or choice.keys() != {"type", "function"}:
            raise ValueError("tool_choice must be {'type': 'function', 'function': {'name': ...}}")
        if name not in names:
            raise ValueError("tool_choice names a function that is not among the tools")
        return "required", name
    if choice not in ("none", "auto", "required"):
        raise ValueError("tool_choice must be 'none', 'auto', 'required' or a function to call")
    if choice == "required" and not names:
        raise ValueError("tool_choice is 'required', and there are no tools to call")
    return choice, None
