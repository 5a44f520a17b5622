"""Structured answers: regular expressions, choices, grammars and JSON schemas, sampled at random.

The oracles are Python's re, the package jsonschema, and the rules of each grammar, written down
here.
"""

import json
import random
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
from llama_models.llama3 import tokenizer as oracle_module

from helpers.launch import DEMO, environment
from llama import SamplingParams
from llama.requests.grammar import GrammarCompiler
from llama.sampling_params import StructuredOutput
from llama.tokenizer import Tokenizer

FORMS: list[tuple[dict[str, Any], str]] = [
    ({"regex": r"[0-9]{3}-[a-z]{1,9}"}, r"[0-9]{3}-[a-z]{1,9}"),
    ({"regex": "🎈+(ja|nein)é?"}, "🎈+(ja|nein)é?"),
    ({"choice": ["yes", "no", 'a "quoted" \\ text', "line\nbreak", "🎈"]}, ""),
    ({"grammar": 'start: "a" start "b" | "c"'}, "a*cb*"),
    ({"grammar": 'root ::= ab  # GBNF\nab ::= "a" ab "b" |\n  "c"'}, "a*cb*"),
    (
        {"grammar": r'root ::= "\\u00e9" [\u00e9-\u0101]{2} "\x41" [^\x01-\x7f]?'},
        r"\\u00e9[é-ā]{2}A[^\x01-\x7f]?",
    ),
]


def answers(llama, forms: list[dict], **params: Any) -> list:
    engine = llama.llm_engine
    asked = [
        engine.prepare(
            "", "Once upon a time", SamplingParams(structured_output=form, seed=i, **params),
            index=i,
        )
        for i, form in enumerate(forms)
    ]  # fmt: skip
    return engine.run(asked)


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_an_answer_has_the_form(demo, temperature):
    """An answer matches its constraint; the row next to it is as it would be alone."""
    params: dict[str, Any] = {"max_tokens": 40, "temperature": temperature, "n": 3}
    free = SamplingParams(**params, seed=9)
    (alone,) = demo.llm_engine.run([demo.llm_engine.prepare("", "The dog", free)])
    asked = [
        demo.llm_engine.prepare(
            "", "Once", SamplingParams(structured_output=form, seed=i, **params)
        )
        for i, (form, _) in enumerate(FORMS)
    ]
    *found, beside = demo.llm_engine.run([*asked, demo.llm_engine.prepare("", "The dog", free)])
    assert [a.text for a in beside.outputs] == [a.text for a in alone.outputs]
    for output, (form, pattern) in zip(found, FORMS, strict=True):
        for answer in output.outputs:
            if answer.finish_reason == "length":
                continue
            if "choice" in form:
                assert answer.text in form["choice"]
            else:
                assert re.fullmatch(pattern, answer.text), answer.text
            if pattern == "a*cb*":
                assert answer.text.count("a") == answer.text.count("b")
    assert sum(a.finish_reason == "stop" for o in found for a in o.outputs) >= 8


def random_schema(choose: random.Random, depth: int = 0) -> dict[str, Any]:
    """Return a random JSON schema of common keywords."""
    kinds = ["string", "integer", "number", "boolean", "null", "enum", "const"]
    kind = choose.choice(kinds + ["object", "array", "anyOf"] * (depth < 3))
    if kind == "string":
        return choose.choice(
            [
                {"type": "string", "maxLength": choose.randrange(1, 9)},
                {"type": "string", "pattern": "^[a-f]{2,4}$"},
                {"type": "string", "format": choose.choice(["date", "uuid", "ipv4"])},
            ]
        )
    if kind == "integer":
        low = choose.randrange(-50, 50)
        return {"type": "integer", "minimum": low, "maximum": low + choose.randrange(1, 200)}
    if kind == "number":
        return {"type": "number", "minimum": 0, "exclusiveMaximum": choose.randrange(1, 99)}
    if kind == "enum":
        return {"enum": choose.sample(["red", 3, None, True, "é🎈", 'a"b'], choose.randrange(1, 6))}
    if kind == "const":
        return {"const": choose.choice(["x", 7, {"a": [1, None]}])}
    if kind == "anyOf":
        return {"anyOf": [random_schema(choose, depth + 1) for _ in range(2)]}
    if kind == "array":
        items = random_schema(choose, depth + 1)
        return {"type": "array", "items": items, "minItems": 1, "maxItems": choose.randrange(1, 4)}
    if kind == "object":
        names = choose.sample(["a", "b c", "é", "name", "x-1"], choose.randrange(1, 4))
        return {
            "type": "object",
            "properties": {name: random_schema(choose, depth + 1) for name in names},
            "required": choose.sample(names, choose.randrange(len(names) + 1)),
            "additionalProperties": False,
        }
    return {"type": kind}


def test_json_is_valid_under_its_schema(demo):
    """JSON is valid under its schema: of 300 schemas, each answer validates, or ended by its
    length.
    """
    choose = random.Random(11)
    schemas = [random_schema(choose) for _ in range(300)]
    found = answers(demo, [{"json": s} for s in schemas], max_tokens=60, temperature=1.0)
    finished = 0
    for schema, output in zip(schemas, found, strict=True):
        (answer,) = output.outputs
        if answer.finish_reason != "length":
            jsonschema.validate(json.loads(answer.text), schema)
            finished += 1
    assert finished > 150
    (output,) = answers(demo, [{"json_object": True}], max_tokens=400, temperature=0.5)
    assert output.outputs[0].text.startswith("{")


PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 20},
        "likes": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 4},
        "age": {"type": "integer", "minimum": 0, "maximum": 130},
    },
    "required": ["name", "likes", "age"],
    "additionalProperties": False,
}


def test_json_is_not_made_of_blanks(demo):
    """JSON does not consist of white space.

    The demo model has never seen JSON: where white space is allowed it writes little else.
    """
    for output in answers(demo, [{"json": PERSON}] * 10, max_tokens=160, temperature=0.7):
        (answer,) = output.outputs
        assert answer.finish_reason == "stop", answer.text
        jsonschema.validate(json.loads(answer.text), PERSON)
        bare = re.sub(r'"(\\.|[^"\\])*"', "s", answer.text)
        assert not re.search(r"[^\S ]|   ", bare), answer.text
        assert sum(map(str.isspace, bare)) < 0.3 * len(answer.text)


_OBJECT = {f"k{i}": {"type": "string"} for i in range(20)}
HUGE = {
    "anyOf": [
        {"type": "object", "properties": {f"{name}{i}": kind for name, kind in _OBJECT.items()}}
        for i in range(60)
    ]
}
BAD: list[tuple[Any, str]] = [
    ({}, "must have one of json, json_object, regex, choice, grammar, got none"),
    ({"regex": "a", "json": {}}, "got json and regex"),
    ({"regex": 3}, "structured_output.regex=3 must be a string"),
    ({"regex": ""}, "structured_output.regex must have 1 to 100000 characters, not 0"),
    ({"json": 3}, "structured_output.json=3 must be a JSON schema"),
    ({"json": "{"}, "structured_output.json is not JSON"),
    ({"json": {"a": float("nan")}}, "structured_output.json is not JSON"),
    ({"choice": "yes"}, "choice='yes' must be a list or tuple of 1 to 1024 entries"),
    ({"choice": []}, "must have 1 to 1024 entries, not 0"),
    ({"choice": ["a", 1]}, r"structured_output.choice[1]=1 must be a string"),
    ({"json_object": 1}, "structured_output.json_object=1 must be True or None"),
    ({"regexp": "a"}, "structured_output has no field 'regexp'"),
    ("json", "structured_output='json' must be a StructuredOutput"),
    ({"regex": "["}, "structured_output.regex cannot be used"),
    ({"regex": "(?=a)b"}, "structured_output.regex cannot be used"),
    ({"regex": "(a{1000}){1000}"}, "structured_output.regex cannot be used: lexer error: too many"),
    ({"grammar": "start: other"}, "structured_output.grammar cannot be used: at 1(8): unknown"),
    ({"grammar": "root ::= other"}, "grammar cannot be used: as GBNF: Rule 'other' not found"),
    ({"grammar": 'root ::= "a\\'}, "structured_output.grammar cannot be used: as GBNF: "),
    ({"grammar": "root ::= " + "(" * 9999}, "structured_output.grammar cannot be used: as GBNF"),
    ({"json": {"type": "banana"}}, "structured_output.json cannot be used: Invalid type: banana"),
    ({"json": {"not": {}}}, "structured_output.json cannot be used: Unimplemented keys"),
    ({"json": {"$ref": "http://127.0.0.1/x"}}, "structured_output.json cannot be used: Resource"),
    ({"json": HUGE}, "structured_output.json cannot be used: Parser Error"),
]  # fmt: skip


@pytest.mark.parametrize(("form", "message"), BAD)
def test_a_bad_form_is_an_error_before_any_work(demo, form, message):
    with pytest.raises((TypeError, ValueError), match=re.escape(message)):
        demo.llm_engine.prepare("", "x", SamplingParams(structured_output=form))


def test_a_form_ends_the_answer_itself():
    cases: list[dict[str, Any]] = [{"ignore_eos": True}, {"min_tokens": 1}]
    for fields in cases:
        with pytest.raises(ValueError, match="cannot be used with structured_output"):
            SamplingParams(structured_output={"regex": "a"}, **fields)


def test_a_form_is_compiled_once_and_a_broken_matcher_allows_nothing(demo, monkeypatch):
    compiler = GrammarCompiler(demo.tokenizer)
    form = StructuredOutput(json={"type": "integer"})
    compiler.matcher(form)
    monkeypatch.setattr("llama.requests.grammar._grammar", lambda form: 1 / 0)
    matcher = compiler.matcher(StructuredOutput(json='{"type":   "integer"}'))
    bits = np.full((1, -(-demo.tokenizer.n_words // 32)), -1, np.int32)
    matcher.fill_allowed([], 0, [], bits)
    assert 0 < np.unpackbits(bits.view(np.uint8)).sum() < 2000
    matcher.fill_allowed(demo.tokenizer.encode("x", bos=False, eos=False), 0, [], bits)
    assert not bits.any()


def test_an_object_of_many_properties_goes_on_after_its_brace():
    """An object of many properties continues after its brace.

    A past fault with the real vocabulary: the library's own limits ended the answer there.
    """
    tokenizer = Tokenizer(Path(oracle_module.__file__).with_name("tokenizer.model"))
    compiler = GrammarCompiler(tokenizer)
    properties = {f"p{i}": {"type": "string"} for i in range(400)}
    form = StructuredOutput(json={"type": "object", "properties": properties})
    bits = np.zeros((1, -(-tokenizer.n_words // 32)), np.int32)
    for text in ("{", '{"'):
        output = tokenizer.encode(text, bos=False, eos=False)
        compiler.matcher(form).fill_allowed(output, 0, [], bits)
        assert bits.any(), text


def test_a_constraint_that_fails_ends_its_own_request_only(demo):
    class Broken:
        failure = None

        def fill_allowed(self, tokens, first, drafts, bits):
            raise RuntimeError("a bug")

    engine = demo.llm_engine
    params = SamplingParams(max_tokens=4, temperature=0)
    requests = [engine.prepare("", "The dog", params, index=i) for i in range(2)]
    seq = requests[0].answers[0].sequence
    seq.constraint = Broken()
    seq.spec = replace(seq.spec, is_constrained=True)
    broken, good = engine.run(requests)
    assert broken.error is not None and "no token to choose" in broken.error
    assert good.error is None and len(good.outputs[0].token_ids) == 4


def test_a_form_that_is_too_large_says_so(demo):
    """A constraint that is too large gives its own error.

    The library stops it while it runs: no token is possible then, but for another reason.
    """
    form = StructuredOutput(regex="(.{1,300}){1,300}")
    banned = dict.fromkeys(demo.tokenizer.stop_tokens, -100.0)
    params = SamplingParams(max_tokens=400, structured_output=form, logit_bias=banned)
    engine = demo.llm_engine
    (output,) = engine.run([engine.prepare("", "x", params)])
    assert output.error_field == "structured_output"
    assert output.error is not None and "structured_output is too large to go on" in output.error


@pytest.mark.parametrize("rule", ['gen[stop=""]: /.*/', "gen[max_tokens=999999999]: /.*/"])
def test_rules_with_an_end_of_their_own(demo, rule):
    form = StructuredOutput(grammar=f"start: gen\n{rule}")
    engine = demo.llm_engine
    params = SamplingParams(max_tokens=8, temperature=0, structured_output=form)
    (output,) = engine.run([engine.prepare("", "Once upon a time", params)])
    assert output.error is None and output.outputs[0].text


CHAINS = """
import sys
from itertools import product
from llama.requests.grammar import GrammarCompiler
from llama.sampling_params import StructuredOutput
from llama.tokenizer import Tokenizer

letters = "abcdefghijklmnopqrstuvwxyz"
names = ["".join(part) for n in (1, 2, 3) for part in product(letters, repeat=n)]
rules = "".join(f"{name}:{after}\\n" for name, after in zip(names[:12_500], names[1:]))
grammar = f'start:a\\n{rules}{names[12_500]}:"e"'
definitions = {names[2000]: {"type": "string"}}
for name, after in zip(names[:2000], names[1:]):
    definitions[name] = {"items": {"$ref": f"#/$defs/{after}"}}
compiler = GrammarCompiler(Tokenizer(sys.argv[1]))
compiler.matcher(StructuredOutput(grammar=grammar))
compiler.matcher(StructuredOutput(json={"$ref": "#/$defs/a", "$defs": definitions}))
print("compiled")
"""


def test_the_longest_chains_of_rules_do_not_end_the_process():
    """Chains of rules as long as a request can have are compiled, in any thread.

    llguidance follows them by recursion, so that an ordinary stack overflows and the process ends.
    """
    command = [sys.executable, "-c", CHAINS, str(next(DEMO.glob("tokenizer.*")))]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "compiled\n"), done.stderr


@pytest.mark.parametrize("form", ["choice", "regex"])
def test_compiled_formats_are_kept_up_to_a_size(monkeypatch, form):
    """The formats that were used last are kept, as many as have a million characters together."""
    compiler = GrammarCompiler(Tokenizer(str(DEMO / "tokenizer.model")))
    compiled: list[Any] = []
    compile_one = GrammarCompiler._compile

    def counted(self: GrammarCompiler, response_format: StructuredOutput) -> Any:
        compiled.append(response_format)
        return compile_one(self, StructuredOutput(regex="a"))

    monkeypatch.setattr(GrammarCompiler, "_compile", counted)

    def large(i: int) -> StructuredOutput:
        text = f"{i}".ljust(90_000, "x")
        return (
            StructuredOutput(choice=(text,)) if form == "choice" else StructuredOutput(regex=text)
        )

    for i in range(30):
        compiler.matcher(large(i))
        compiler.matcher(large(i))
        compiler.matcher(StructuredOutput(regex="yes|no"))
    assert len(compiled) == 31, "what has just been used is compiled again"
    compiler.matcher(large(25))
    assert len(compiled) == 31
    compiler.matcher(large(10))
    assert len(compiled) == 32, "more is kept than has a million characters"
    for i in range(300):
        compiler.matcher(StructuredOutput(regex=f"{i}"))
    compiler.matcher(StructuredOutput(regex="290"))
    assert len(compiled) == 332
    compiler.matcher(StructuredOutput(regex="20"))
    assert len(compiled) == 333
