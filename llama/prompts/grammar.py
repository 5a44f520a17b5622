"""A grammar that constrains an answer to calls whose arguments fit their JSON schemas.

In: the tools of a request. Out: a grammar in llguidance's dialect of Lark, in which %json {...} is
a JSON schema and <|...|> a special token. `ToolCallParser` reads as a call whatever the grammar
accepts as one. A schema has its place in the request as "$comment"; it is lenient where the tool is
not strict, so that the compiler loosens what it cannot enforce.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from llama.prompts.parser import is_keyword
from llama.prompts.tools import CODE, ToolFormat, Tools, function_of

# Meta's prompts write JSON with these separators; they also keep a model from writing spaces
# without end.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_DEFINITIONS = ("$defs", "definitions")
_KEYWORD_RULES = {"type", "properties", "required", "additionalProperties", *_DEFINITIONS}
_NOTES = {"title", "description", "$schema", "$comment", "examples", "default"}
_INNER_REFERENCE = re.compile(r'"\$(?:id|anchor|dynamicRef|ref": "(?!#/(?:\$defs|definitions)/))')


def call_grammar(tools: Tools, tool_format: ToolFormat) -> str:
    """Return the grammar of calls in the tool format.

    Unless the answer must be a call, it may also be a text that begins with none of { [ <.

    Raises:
        ValueError: the model knows no tools, or none may be called.
    """
    names = tools.callable_names
    if tool_format is ToolFormat.NONE or not names:
        raise ValueError("tools: there are none that this model can call")
    functions = functions_of(tools)
    answers = [_built_in(name) for name in tools.built_in if name in names]
    if tool_format is not ToolFormat.LLAMA_3_2:
        rules = _json_rules(functions, tools)
        answers += [f"f{i}" for i in range(len(functions))]
    elif functions:
        rules = _python_rules(functions, tools)
        further = ' (", " function)*' if tools.several else ""
        answers.append(f'"[" function{further} "]"')
    else:
        rules = []
    if not tools.must_call:
        answers.append("TEXT")
        rules.append(f"TEXT: {texts_that_call_none('{[<')}")
    return "\n".join([f"start: {' | '.join(answers)}", *rules]) + "\n"


def functions_of(tools: Tools) -> list[Mapping[str, Any]]:
    """Return the functions that an answer may call."""
    names = tools.callable_names
    return [x for x in map(function_of, tools.functions) if x.get("name") in names]


def texts_that_call_none(first_characters: str) -> str:
    """Return a regular expression of texts that begin with none of these characters.

    They may have white space before it.
    """
    excluded = re.escape(first_characters).replace("/", r"\/")
    return rf"/([ \t\r\n]{{0,8}}[^ \t\r\n{excluded}](.|\n)*)?/"


def _json_rules(functions: list[Mapping[str, Any]], tools: Tools) -> list[str]:
    """Return the rules f0, f1, ... for calls as JSON."""
    rules: list[str] = []
    for i, function in enumerate(functions):
        head = f'{{"name": "{function["name"]}", "parameters": '
        rules.append(f'f{i}: {text_rule(head)} f{i}_json "}}"')
        rules.append(f"f{i}_json: {json_rule(function, tools)}")
    return rules


def _python_rules(functions: list[Mapping[str, Any]], tools: Tools) -> list[str]:
    """Return the rule `function` for calls in Python's notation, and the rules it is made of."""
    rules: list[str] = []
    for i, function in enumerate(functions):
        rules += _python_call(f"f{i}", function, _origin(function, tools))
    rules.append("function: " + " | ".join(f"f{i}" for i in range(len(functions))))
    return rules


def _built_in(name: str) -> str:
    if name == CODE:
        return r"<|python_tag|> /(.|\n)+/"
    return f'<|python_tag|> {text_rule(f"{name}.call(query=")} {_json({"type": "string"})} ")"'


def text_rule(text: str) -> str:
    """Return a text as a terminal of a grammar."""
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Mapping[str, Any]) -> str:
    first = {key: schema[key] for key in ("$comment",) if key in schema}
    return f"%json {json.dumps({**first, 'x-guidance': _SPACING, **schema})}"


def json_rule(function: Mapping[str, Any], tools: Tools) -> str:
    """Return a rule for the arguments of a function, as a JSON object."""
    return _json({**_schema(function), **_origin(function, tools)})


def _origin(function: Mapping[str, Any], tools: Tools) -> dict[str, Any]:
    """Return the place of a schema in the request, and whether the schema must be enforced."""
    name = function["name"]
    place = tools.places.get(name)
    path = "tools" if place is None else f"tools[{place}].function.parameters"
    return {"$comment": path, "x-guidance": {**_SPACING, "lenient": name not in tools.strict}}


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    return {**(function.get("parameters") or {"properties": {}}), "type": "object"}


def _python_call(
    rule: str, function: Mapping[str, Any], origin: Mapping[str, Any]
) -> Iterator[str]:
    """Yield rules for f(a=1, b="x"), or for f(**{...}) if keywords cannot express the schema."""
    schema = _schema(function)
    properties = schema.get("properties", {})
    if not _fits_keywords(schema, properties):
        yield f'{rule}: {text_rule(function["name"] + "(**")} {rule}_json ")"'
        yield f"{rule}_json: {_json({**schema, **origin})}"
        return
    definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    yield f'{rule}: {text_rule(function["name"] + "(")} {rule}_first0 ")"'
    required = set(schema.get("required", []))
    for i, (key, value) in enumerate(properties.items()):
        of_value = {**origin, "$comment": f"{origin['$comment']}.properties.{key}"}
        yield f"{rule}_value{i}: {_python_value(value, {**definitions, **of_value})}"
        # _first{i}: no argument has been written before the i-th; _next{i}: it needs a comma.
        for state, separator in (("first", ""), ("next", ", ")):
            if state == "next" and i == 0:
                continue
            written = f"{text_rule(f'{separator}{key}=')} {rule}_value{i} {rule}_next{i + 1}"
            skipped = "" if key in required else f" | {rule}_{state}{i + 1}"
            yield f"{rule}_{state}{i}: {written}{skipped}"
    last = len(properties)
    yield f'{rule}_first{last}: ""'
    if last:
        yield f'{rule}_next{last}: ""'


def _fits_keywords(schema: Mapping[str, Any], properties: Mapping[str, Any]) -> bool:
    """Return whether a grammar of keywords accepts exactly the arguments that the schema allows."""
    return (
        schema.keys() <= _KEYWORD_RULES | _NOTES
        and all(map(is_keyword, properties))
        and all(isinstance(value, dict) for value in properties.values())
        and all(key in properties for key in schema.get("required", []))
        and not _INNER_REFERENCE.search(json.dumps(schema))
    )


def _python_value(schema: Mapping[str, Any], further: Mapping[str, Any]) -> str:
    """Return a rule for a value: True, False or None of these types, else JSON.

    The parser reads both notations.

    Args:
        schema: the schema of the value.
        further: definitions of the schema of all arguments, and the origin of this one.
    """
    if schema.keys() <= {"type"} | _NOTES:
        if schema.get("type") == "boolean":
            return '"True" | "False"'
        if schema.get("type") == "null":
            return '"None"'
    return _json({**schema, **further})
