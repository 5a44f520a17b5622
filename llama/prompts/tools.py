"""The tools of a chat, and what it asks of them: JSON in, `Tools` out.

Every field is used, or is an error that names it. It runs no tool, and knows no tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    PrivateAttr,
    ValidationError,
    WrapValidator,
    model_validator,
)

from llama.checks import FieldError
from llama.prompts.fields import SKIP_OTHER_TYPES, Fields
from llama.prompts.messages import check_json
from llama.validation import custom_error, with_message

CODE = "code_interpreter"
SEARCHES = ("brave_search", "wolfram_alpha")  # called as brave_search.call(query="...")
MOST_TOOLS = 128  # of one request, as OpenAI has it
_NAME = (
    " must be 1 to 64 letters, digits, dots, dashes and underscores, and begin with a letter or an "
    "underscore"
)
_FUNCTIONS_ONLY = " must be 'function': other kinds of tools cannot be used"
_SHOWN = ("name", "description", "parameters")  # to the model
_NAMED = "{'type': 'function', 'function': {'name': ...}}"


class ToolFormat(Enum):
    NONE = "none"  # the model was trained without tools (3.0, Llama Guard)
    LLAMA_3_1 = "llama3.1"  # one JSON object per answer
    LLAMA_3_2 = "llama3.2"  # also of 3.3: a list of Python calls


def tool_format_of(rope_factor: float | None, *, is_guard: bool) -> ToolFormat:
    """The format that the checkpoint's files tell: 3.0 alone has no scaled rotary embedding, and
    3.2 alone scales it by 32. The files of 3.1 and 3.3 are alike, and 3.3 was trained on both
    formats: they get that of 3.1. `llama.checkpoint.find` knows Llama Guard by other files."""
    if is_guard or rope_factor is None:
        return ToolFormat.NONE
    return ToolFormat.LLAMA_3_2 if rope_factor == 32 else ToolFormat.LLAMA_3_1


@dataclass(frozen=True)
class Tools:
    """What a chat may call, and what it asks of the calls."""

    functions: tuple[Mapping[str, Any], ...] = ()  # JSON objects, as the caller gave them
    built_in: tuple[str, ...] = ()  # names of tools that Meta trained the models on
    must_call: bool = False  # the answer must be a call
    only: str | None = None  # the name of the one that it may call
    parallel: bool = True  # the answer may have several calls
    strict: frozenset[str] = frozenset()  # names of those whose arguments must fit their schema

    @classmethod
    def of(cls, given: Sequence[Any]) -> "Tools":
        """TypeError names one that is no object. A name alone of a built-in tool is that tool."""
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

    @cached_property
    def names(self) -> frozenset[str]:
        named = [function_of(tool).get("name") for tool in self.functions]
        return frozenset(name for name in [*named, *self.built_in] if isinstance(name, str))

    @property
    def searches(self) -> list[str]:
        return [name for name in self.built_in if name != CODE]

    @property
    def needs_grammar(self) -> bool:
        """See `call_grammar`."""
        return self.must_call or bool(self.strict)

    @property
    def several(self) -> bool:
        """Whether an answer may have more calls than one."""
        return self.parallel and self.only is None

    @property
    def callable_names(self) -> frozenset[str]:
        """Of those that the answer may call."""
        return self.names if self.only is None else self.names & {self.only}


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """The function in a tool of OpenAI's form; the tool itself where it is the bare function."""
    function = tool.get("function")
    return function if isinstance(function, dict) else tool


def _of_an_object(schema: dict[str, Any]) -> dict[str, Any]:
    """What the prompt needs to know of it; a grammar checks the rest."""
    if schema.get("type", "object") not in ("object", "dict"):
        raise custom_error(".type must be 'object'")
    if not isinstance(schema.get("properties", {}), dict):
        raise custom_error(".properties must be an object")
    if not isinstance(schema.get("required", []), list):
        raise custom_error(".required must be a list")
    return check_json(schema)


ToolName = Annotated[str, Field(pattern="^[a-zA-Z_][a-zA-Z0-9_.-]{0,63}$"), with_message(_NAME)]
Parameters = Annotated[dict[str, Any], AfterValidator(_of_an_object)]


class Function(Fields):
    """A function that the model may call. parameters: the JSON schema of its arguments."""

    name: ToolName
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None
    _given: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, value: Any, read: Any) -> Self:
        """The prompt has the fields in the order in which the caller gave them."""
        function: Self = read(value)
        if isinstance(value, dict):
            function._given = {name: each for name, each in value.items() if each is not None}
        return function

    def renamed(self, name: str) -> Self:
        function = self.model_copy(update={"name": name})
        function._given = self._given | {"name": name}
        return function

    def as_tool(self) -> dict[str, Any]:
        """As the prompt has it."""
        shown = {name: each for name, each in self._given.items() if name in _SHOWN}
        return {"type": "function", "function": shown}


class Tool(Fields):
    type: Annotated[
        Literal["function"],
        with_message(" must be 'function': other kinds of tools cannot be used"),
    ]
    function: Function


class FunctionName(Fields):
    name: str


class NamedFunction(Fields):
    type: Literal["function"]
    function: FunctionName


def _choice(value: Any, read: Any) -> Any:
    try:
        return read(value)
    except ValidationError:
        words = _NAMED if isinstance(value, dict) else "'none', 'auto', 'required' or a function"
        raise custom_error(f" must be {words}") from None


TOOLS: Any = Field(max_length=MOST_TOOLS, fail_fast=True)
ToolList = Annotated[list[Annotated[Tool, SKIP_OTHER_TYPES]], TOOLS]
ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedFunction, WrapValidator(_choice)]


class ToolFields(Fields):
    """The fields of a chat, of any caller, that have its tools."""

    tools: ToolList | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    def tool_request(self) -> Tools | None:
        choice = self.tool_choice
        wanted = choice.function if isinstance(choice, NamedFunction) else choice
        functions = [tool.function for tool in self.tools or ()]
        return tool_request(functions, wanted, self.parallel_tool_calls)


def tool_request(
    functions: Sequence[Function], choice: str | FunctionName | None, parallel: bool | None
) -> Tools | None:
    """The tools that may be called; None where there are none, or the choice is "none": the prompt
    does not name them then, so that no call is to be expected. `FieldError` names the field."""
    names = [function.name for function in functions]
    name = choice.name if isinstance(choice, FunctionName) else None
    for i, each in enumerate(names):
        if each in names[:i]:
            words = f" has the name {each!r}, as one before it: rename it"
            raise FieldError.of(f"tools[{i}]", words)
    if name is not None and name not in names:
        raise FieldError("tool_choice", "tool_choice names a function that is not among the tools")
    if choice == "required" and not names:
        raise FieldError.of("tool_choice", " asks for a call, and there are no tools to call")
    if not names or choice == "none":
        return None
    return replace(
        Tools.of([function.as_tool() for function in functions]),
        must_call=choice == "required" or name is not None,
        only=name,
        parallel=parallel is not False,
        strict=frozenset(function.name for function in functions if function.strict),
    )
