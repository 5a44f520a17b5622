"""A grammar that holds an answer to calls whose arguments fit their JSON schemas.

In: the tools of a request. Out: a text in llguidance's dialect of Lark, in which %json {...} is a
JSON schema and <|...|> a special token. What the grammar takes, `ToolCallParser` reads as a call.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from llama.prompts.parser import is_keyword
from llama.prompts.tools import CODE, ToolFormat, Tools, function_of

# As Meta's prompts write JSON; it also keeps a model from writing spaces without end.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_DEFINITIONS = ("$defs", "definitions")
_HELD_BY_KEYWORDS = {"type", "properties", "required", "additionalProperties", *_DEFINITIONS}
_NOTES = {"title", "description", "$schema", "$comment", "examples", "default"}
_WORDS = r"/([ \t\r\n]{0,8}[^ \t\r\n{\[<](.|\n)*)?/"  # no text in which a call can begin at once
_WITHIN = re.compile(r'"\$(?:id|anchor|dynamicRef|ref": "(?!#/(?:\$defs|definitions)/))')


def call_grammar(tools: Tools, tool_format: ToolFormat) -> str:
    """Calls in the format's own form; where none must come, words may, which begin with none of
    the characters { [ <. ValueError for a model without tools."""
    names = tools.callable_names
    if tool_format is ToolFormat.NONE or not names:
        raise ValueError("tools: there are none that this model can call")
    rules: list[str] = []
    built_in = [_built_in(name) for name in tools.built_in if name in names]
    functions = [x for x in map(function_of, tools.functions) if x.get("name") in names]
    if tool_format is ToolFormat.LLAMA_3_2:
        for i, function in enumerate(functions):
            rules += _python_call(f"f{i}", function)
        if functions:
            named = " | ".join(f"f{i}" for i in range(len(functions)))
            rules.append(f"function: {named}")
            more = ' (", " function)*' if tools.several else ""
            built_in.append(f'"[" function{more} "]"')
    else:
        for i, function in enumerate(functions):
            head = f'{{"name": "{function["name"]}", "parameters": '
            rules.append(f'f{i}: {_text(head)} f{i}_json "}}"')
            rules.append(f"f{i}_json: {_json(_schema(function))}")
            built_in.append(f"f{i}")
    words = [] if tools.must_call else ["WORDS"]
    rules.insert(0, "start: " + " | ".join([*built_in, *words]))
    if words:
        rules.append(f"WORDS: {_WORDS}")
    return "\n".join(rules) + "\n"


def _built_in(name: str) -> str:
    if name == CODE:
        return r"<|python_tag|> /(.|\n)+/"
    return f'<|python_tag|> {_text(f"{name}.call(query=")} {_json({"type": "string"})} ")"'


def _text(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _json(schema: Mapping[str, Any]) -> str:
    return f"%json {json.dumps({**schema, 'x-guidance': _SPACING})}"


def _schema(function: Mapping[str, Any]) -> dict[str, Any]:
    return {**(function.get("parameters") or {"properties": {}}), "type": "object"}


def _python_call(rule: str, function: Mapping[str, Any]) -> Iterator[str]:
    """Rules for f(a=1, b="x"), or, where keywords cannot say what the schema says, f(**{...})."""
    schema = _schema(function)
    properties = schema.get("properties", {})
    if not _fits_keywords(schema, properties):
        yield f'{rule}: {_text(function["name"] + "(**")} {rule}_json ")"'
        yield f"{rule}_json: {_json(schema)}"
        return
    definitions = {key: schema[key] for key in _DEFINITIONS if key in schema}
    yield f'{rule}: {_text(function["name"] + "(")} {rule}_first0 ")"'
    required = set(schema.get("required", []))
    for i, (key, value) in enumerate(properties.items()):
        yield f"{rule}_value{i}: {_python_value(value, definitions)}"
        # first: nothing was written yet; next: a comma is needed.
        for state, separator in (("first", ""), ("next", ", ")):
            written = f"{_text(f'{separator}{key}=')} {rule}_value{i} {rule}_next{i + 1}"
            skipped = "" if key in required else f" | {rule}_{state}{i + 1}"
            if state == "first" or i > 0:
                yield f"{rule}_{state}{i}: {written}{skipped}"
    last = len(properties)
    yield f'{rule}_first{last}: ""'
    if last:
        yield f'{rule}_next{last}: ""'


def _fits_keywords(schema: Mapping[str, Any], properties: Mapping[str, Any]) -> bool:
    return (
        schema.keys() <= _HELD_BY_KEYWORDS | _NOTES
        and all(map(is_keyword, properties))
        and all(isinstance(value, dict) for value in properties.values())
        and all(key in properties for key in schema.get("required", []))
        and not _WITHIN.search(json.dumps(schema))
    )


def _python_value(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> str:
    """True, False and None where the schema says no more; else JSON, which the parser reads too."""
    if schema.keys() <= {"type"} | _NOTES:
        if schema.get("type") == "boolean":
            return '"True" | "False"'
        if schema.get("type") == "null":
            return '"None"'
    return _json({**schema, **definitions})
