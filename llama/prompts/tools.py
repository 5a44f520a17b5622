"""The tools of a chat, in OpenAI's form, and what it asks of them: JSON in, a `ToolRequest` out.

Every field is used, or is an error that names it. It runs no tool, and knows no text of an answer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    Field,
    PrivateAttr,
    ValidationError,
    WrapValidator,
    model_validator,
)

from llama.checks import FieldError
from llama.prompts.fields import Fields, said, wrong
from llama.prompts.formats import ToolFormat, Tools
from llama.prompts.grammar import call_grammar
from llama.prompts.messages import check_json

MOST_TOOLS = 128  # of one request, as OpenAI has it
_NAME = (
    " must be 1 to 64 letters, digits, dots, dashes and underscores, and begin with a letter or an "
    "underscore"
)
_SHOWN = ("name", "description", "parameters")  # to the model
_NAMED = "{'type': 'function', 'function': {'name': ...}}"


def _of_an_object(schema: dict[str, Any]) -> dict[str, Any]:
    """What the prompt needs to know of it; a grammar checks the rest."""
    if schema.get("type", "object") not in ("object", "dict"):
        raise wrong(".type must be 'object'")
    if not isinstance(schema.get("properties", {}), dict):
        raise wrong(".properties must be an object")
    if not isinstance(schema.get("required", []), list):
        raise wrong(".required must be a list")
    check_json(schema)
    return schema


ToolName = Annotated[str, Field(pattern="^[a-zA-Z_][a-zA-Z0-9_.-]{0,63}$"), said(_NAME)]
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
    def _keep(cls, value: Any, read: Any) -> "Function":
        """The prompt has the fields in the order in which the caller gave them."""
        function: Function = read(value)
        if isinstance(value, dict):
            function._given = {name: each for name, each in value.items() if each is not None}
        return function

    def described(self) -> dict[str, Any]:
        """As the prompt has it."""
        return {name: each for name, each in self._given.items() if name in _SHOWN}


class Tool(Fields):
    type: Annotated[
        Literal["function"], said(" must be 'function': other kinds of tools cannot be used")
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
        raise wrong(f" must be {words}") from None


ToolList = Annotated[list[Tool], Field(max_length=MOST_TOOLS, fail_fast=True)]
ToolChoice = Annotated[Literal["none", "auto", "required"] | NamedFunction, WrapValidator(_choice)]


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
        return self.tools if self.name is None else self.tools.subset(self.name)

    @property
    def several(self) -> bool:
        return self.parallel and self.name is None

    def grammar(self, tool_format: ToolFormat) -> str:
        """What holds the answer to its calls, as a Lark grammar of llguidance's dialect."""
        return call_grammar(
            self.callable_tools(), tool_format, must_call=self.must_call, parallel=self.several
        )


class ToolFields(Fields):
    """The fields of a chat, of any caller, that have its tools."""

    tools: ToolList | None = None
    tool_choice: ToolChoice | None = None
    parallel_tool_calls: bool | None = None

    def tool_request(self) -> ToolRequest | None:
        functions = [tool.function for tool in self.tools or ()]
        choice, parallel = self.tool_choice, self.parallel_tool_calls
        if isinstance(choice, NamedFunction):
            return tool_request(functions, None, parallel, name=choice.function.name)
        return tool_request(functions, choice, parallel)


def tool_request(
    functions: Sequence[Function],
    choice: str | None = None,
    parallel: bool | None = None,
    *,
    name: str | None = None,
) -> ToolRequest | None:
    """The tools that may be called; None where there are none, or the choice is "none": the prompt
    does not name them then, so that no call is to be expected. name: of the one that must be
    called. `FieldError` names the field."""
    names = [function.name for function in functions]
    for i, each in enumerate(names):
        if each in names[:i]:
            raise FieldError(
                f"tools[{i}]", f"tools[{i}] has the name {each!r}, as one before it: rename it"
            )
    if name is not None and name not in names:
        raise FieldError("tool_choice", "tool_choice names a function that is not among the tools")
    if choice == "required" and not names:
        raise FieldError("tool_choice", "tool_choice is 'required', and there are no tools to call")
    if not names or choice == "none":
        return None
    return ToolRequest(
        Tools.of([{"type": "function", "function": each.described()} for each in functions]),
        must_call=choice == "required" or name is not None,
        name=name,
        parallel=parallel is not False,
        strict=frozenset(function.name for function in functions if function.strict),
    )
