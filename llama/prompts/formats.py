"""Which format of tool calls a model has, and the tools of one request.

In: the sizes of a model, and JSON objects that describe functions. Out: a `ToolFormat` and checked
`Tools`. It knows no tokens and no text of an answer.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from llama.checks import FieldError
from llama.prompts.messages import check_json

CODE = "code_interpreter"
SEARCHES = ("brave_search", "wolfram_alpha")  # called as brave_search.call(query="...")


class ToolFormat(Enum):
    """LLAMA_3_1: one JSON object per answer. LLAMA_3_2, also of 3.3: a list of Python calls.
    NONE: the model was trained without tools (3.0, Llama Guard)."""

    NONE = "none"
    LLAMA_3_1 = "llama3.1"
    LLAMA_3_2 = "llama3.2"


def tool_format_of(rope_factor: float | None, *, is_guard: bool) -> ToolFormat:
    """The format that the checkpoint's files tell.

    3.0 alone has no scaled rotary embedding, and 3.2 alone scales it by 32. The files of 3.1 and
    3.3 are alike, and 3.3 was trained on both formats: they get that of 3.1. Llama Guard has the
    sizes of the model that it was made from; `llama.checkpoint.guard` knows it by other files.
    """
    if is_guard or rope_factor is None:
        return ToolFormat.NONE
    return ToolFormat.LLAMA_3_2 if rope_factor == 32 else ToolFormat.LLAMA_3_1


@dataclass(frozen=True)
class Tools:
    """functions: the JSON objects that describe a request's functions, as the caller gave them.
    built_in: names of the tools that Meta trained the models on, of those that are wanted."""

    functions: tuple[Mapping[str, Any], ...] = ()
    built_in: tuple[str, ...] = ()
    names: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        named = [function_of(tool).get("name") for tool in self.functions]
        names = frozenset(name for name in [*named, *self.built_in] if isinstance(name, str))
        object.__setattr__(self, "names", names)

    @classmethod
    def of(cls, given: Sequence[Any]) -> "Tools":
        """TypeError names the one that is no object. One with nothing but the name of a built-in
        tool is that tool."""
        functions, built_in = [], []
        for i, tool in enumerate(given):
            if not isinstance(tool, dict):
                raise TypeError(f"tools[{i}] must be a dict, got {type(tool).__name__}")
            try:
                check_json(tool)
            except ValueError as e:
                raise FieldError(f"tools[{i}]", f"tools[{i}]: {e}") from None
            function = function_of(tool)
            name = function.get("name")
            if name in (CODE, *SEARCHES) and len(function) == 1:
                built_in.append(name)
            else:
                functions.append(tool)
        return cls(tuple(functions), tuple(built_in))

    def __bool__(self) -> bool:
        return bool(self.functions or self.built_in)

    def subset(self, name: str) -> "Tools":
        """The one of this name alone."""
        functions = [tool for tool in self.functions if function_of(tool).get("name") == name]
        return Tools(tuple(functions), tuple(each for each in self.built_in if each == name))

    @property
    def searches(self) -> list[str]:
        return [name for name in self.built_in if name != CODE]


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function in a tool of OpenAI's form; the tool itself where it is the bare function."""
    function = tool.get("function")
    return function if isinstance(function, dict) else tool
