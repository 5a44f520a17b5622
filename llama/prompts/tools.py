"""The tools of a chat and the choice among them: JSON in, `Tools` out.

Each field either has an effect or is an error that names it. It runs no tool and knows no tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    PrivateAttr,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    model_validator,
)

from llama.common.checks import FieldError
from llama.common.validation import with_message
from llama.prompts.fields import SKIP_OTHER_TYPES, Fields
from llama.prompts.messages import check_json

CODE = "code_interpreter"
SEARCHES = ("brave_search", "wolfram_alpha")  # a call is written brave_search.call(query="...")
MAX_TOOLS = 128  # tools in one request, OpenAI's limit
_NAME = " must be 1 to 128 letters, digits, dots, dashes and underscores"
_FUNCTIONS_ONLY = " must be 'function': other kinds of tools cannot be used"
_SHOWN = ("name", "description", "parameters")  # the fields that the prompt contains
_NAMED = "{'type': 'function', 'function': {'name': ...}}"


class ToolFormat(Enum):
    """The format of tools and calls that a generation of models was trained on."""

    NONE = "none"  # the model was trained without tools (3.0, Llama Guard)
    LLAMA_3_1 = "llama3.1"  # one JSON object per answer
    LLAMA_3_2 = "llama3.2"  # a list of Python calls; 3.3 also knows it


def tool_format_of(rope_factor: float | None, *, is_guard: bool) -> ToolFormat:
    """Return the tool format of a checkpoint.

    Only 3.0 has no scaled rotary embedding, and only 3.2 scales it by 32. The files of 3.1 and 3.3
    do not differ, and 3.3 was trained on both formats: both get the format of 3.1.

    Args:
        rope_factor: the factor of the scaled rotary embedding, or None without one.
        is_guard: whether this is Llama Guard, which `llama.checkpoint.find` recognizes.
    """
    if is_guard or rope_factor is None:
        return ToolFormat.NONE
    return ToolFormat.LLAMA_3_2 if rope_factor == 32 else ToolFormat.LLAMA_3_1


@dataclass(frozen=True)
class Tools:
    """The tools that a chat may call, and the rules for the calls.

    Attributes:
        functions: JSON objects, as the caller gave them.
        built_in: names of the tools that Meta trained the models on.
        must_call: the answer must be a call.
        only: the name of the only tool that may be called.
        parallel: the answer may have several calls.
        strict: names of the tools whose arguments must fit their schema.
        has_format: an answer that is no call must have a format of its own.
        places: the index of each function in the request, by name.
    """

    functions: tuple[Mapping[str, Any], ...] = ()
    built_in: tuple[str, ...] = ()
    must_call: bool = False
    only: str | None = None
    parallel: bool = True
    strict: frozenset[str] = frozenset()
    has_format: bool = False
    places: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, given: Sequence[Any]) -> "Tools":
        """Make tools of JSON objects.

        An object that only has the name of a built-in tool stands for that tool.

        Raises:
            TypeError: names the tool that is no object.
            FieldError: names the tool that is nested too deeply.
        """
        functions: list[Mapping[str, Any]] = []
        built_in: list[str] = []
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
        """Names of all tools."""
        names = [function_of(tool).get("name") for tool in self.functions]
        return frozenset(name for name in [*names, *self.built_in] if isinstance(name, str))

    @property
    def searches(self) -> list[str]:
        """Names of the built-in tools that take a query."""
        return [name for name in self.built_in if name != CODE]

    @property
    def needs_grammar(self) -> bool:
        """Whether a grammar must constrain the answer; see `call_grammar`."""
        return self.must_call or bool(self.strict) or self.has_format

    @property
    def several(self) -> bool:
        """Whether an answer may have more than one call."""
        return self.parallel and self.only is None

    @property
    def callable_names(self) -> frozenset[str]:
        """Names of the tools that the answer may call."""
        return self.names if self.only is None else self.names & {self.only}


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the function of a tool in OpenAI's format; a bare function is returned as it is."""
    function = tool.get("function")
    return function if isinstance(function, dict) else tool


def _of_an_object(schema: dict[str, Any]) -> dict[str, Any]:
    """Check what the prompt needs of the schema of a function; a grammar checks the rest."""
    if schema.get("type", "object") not in ("object", "dict"):
        raise FieldError("", ".type must be 'object'")
    if not isinstance(schema.get("properties", {}), dict):
        raise FieldError("", ".properties must be an object")
    if not isinstance(schema.get("required", []), list):
        raise FieldError("", ".required must be a list")
    return check_json(schema)


ToolName = Annotated[str, Field(pattern="^[a-zA-Z0-9_.-]{1,128}$"), with_message(_NAME)]
Parameters = Annotated[dict[str, Any], AfterValidator(_of_an_object)]


class Function(Fields):
    """A function that the model may call; `parameters` is the JSON schema of its arguments."""

    name: ToolName
    description: str | None = None
    parameters: Parameters | None = None
    strict: bool | None = None
    _given: dict[str, Any] = PrivateAttr(default_factory=dict)

    @model_validator(mode="wrap")
    @classmethod
    def _keep(cls, value: Any, read: ValidatorFunctionWrapHandler) -> Self:
        """Keep the fields in the order in which the caller gave them, which the prompt has, too."""
        function: Self = read(value)
        if isinstance(value, dict):
            function._given = {name: item for name, item in value.items() if item is not None}
        return function

    def renamed(self, name: str) -> Self:
        """Return the function under another name."""
        function = self.model_copy(update={"name": name})
        function._given = self._given | {"name": name}
        return function

    def as_tool(self) -> dict[str, Any]:
        """Return the tool as the prompt has it."""
        shown = {name: value for name, value in self._given.items() if name in _SHOWN}
        return {"type": "function", "function": shown}


class Tool(Fields):
    """A tool of a chat request."""

    type: Annotated[
        Literal["function"],
        with_message(" must be 'function': other kinds of tools cannot be used"),
    ]
    function: Function


class FunctionName(Fields):
    """The name of a function."""

    name: str


class NamedFunction(Fields):
    """The choice of one function."""

    type: Literal["function"]
    function: FunctionName


def _choice(value: Any, read: ValidatorFunctionWrapHandler) -> Any:
    try:
        return read(value)
    except ValidationError:
        allowed = _NAMED if isinstance(value, dict) else "'none', 'auto', 'required' or a function"
        raise FieldError("", f" must be {allowed}") from None


TOOLS: Any = Field(max_length=MAX_TOOLS, fail_fast=True)
ToolList = Annotated[list[Annotated[Tool, SKIP_OTHER_TYPES]], TOOLS]


class AllowedFunctions(Fields):
    """Some of the functions, and whether one of them must be called."""

    mode: Literal["auto", "required"]
    tools: list[NamedFunction]


class AllowedTools(Fields):
    """The choice among some of the functions."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedFunctions


@dataclass(frozen=True)
class Allowed:
    """The choice among the functions with these names; `mode` is "auto" or "required"."""

    mode: str
    names: frozenset[str]


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedFunction | AllowedTools, WrapValidator(_choice)
]


class ToolFields(Fields):
    """The fields of a chat that are about tools, for every API and for Python callers."""

    tools: ToolList | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    def tool_request(self) -> Tools | None:
        """Return the tools that may be called; see the function `tool_request`."""
        functions = [tool.function for tool in self.tools or ()]
        chosen: Any = self.tool_choice
        if isinstance(chosen, NamedFunction):
            chosen = chosen.function
        elif isinstance(chosen, AllowedTools):
            among = chosen.allowed_tools
            chosen = Allowed(among.mode, frozenset(tool.function.name for tool in among.tools))
        return tool_request(functions, chosen, self.parallel_tool_calls)


def tool_request(
    functions: Sequence[Function],
    choice: str | FunctionName | Allowed | None,
    parallel: bool | None,
) -> Tools | None:
    """Return the tools that may be called.

    Without tools, or with the choice "none", this is None: the prompt does not name the tools, so
    that no call is to be expected. Nor does it name tools that are not among the allowed ones.

    Raises:
        FieldError: names the field.
    """
    names = [function.name for function in functions]
    name = choice.name if isinstance(choice, FunctionName) else None
    for i, repeated in enumerate(names):
        if repeated in names[:i]:
            text = f" has the name {repeated!r} of an earlier tool: rename it"
            raise FieldError.of(f"tools[{i}]", text)
    if isinstance(choice, Allowed):
        if choice.names - set(names):
            problem = f" names {min(choice.names - set(names))!r}, which is not among the tools"
            raise FieldError.of("tool_choice", problem)
        functions = [function for function in functions if function.name in choice.names]
        choice = choice.mode
    if name is not None and name not in names:
        raise FieldError("tool_choice", "tool_choice names a function that is not among the tools")
    if choice == "required" and not functions:
        raise FieldError.of("tool_choice", " asks for a call, and there are no tools to call")
    if not functions or choice == "none":
        return None
    return replace(
        Tools.of([function.as_tool() for function in functions]),
        must_call=choice == "required" or name is not None,
        only=name,
        parallel=parallel is not False,
        strict=frozenset(function.name for function in functions if function.strict),
        places={name: i for i, name in enumerate(names)},
    )
