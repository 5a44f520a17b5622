"""The schemas of the JSON Schema test suite as constraints: a compiled schema is enforced.

JSON_SCHEMA_SUITE names a folder of the suite that has tests/draft2020-12 and tests/draft7, such as
`json` in the source of the package jsonschema (MIT):
pip download --no-deps --no-binary :all: jsonschema==4.26.0; tar xf jsonschema-4.26.0.tar.gz
"""

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from llama import Llama, SamplingParams

SUITE = os.environ.get("JSON_SCHEMA_SUITE", "")
VALIDATORS = {
    "draft2020-12": jsonschema.Draft202012Validator,
    "draft7": jsonschema.Draft7Validator,
}
SAMPLES = 4
ENDINGS = '"}]'  # made likelier: random weights would hardly end a string
# For these Python's re, which jsonschema uses, has other character sets than ECMA 262, or none.
_ECMA = re.compile(r"\\[wWdDsSpPcb]")


@pytest.fixture(scope="module")
def llama(make_checkpoint) -> Llama:
    """A model with random weights, and a token for each byte."""
    folder, _, _ = make_checkpoint()
    return Llama.build(str(folder), max_seq_len=256, max_batch_size=64, device="cpu", dtype="fp32")


def schemas(draft: str) -> list[tuple[str, Any]]:
    """Return (path, schema), each schema with the identifier of its draft."""
    found = []
    for path in sorted(Path(SUITE, "tests", draft).rglob("*.json")):
        for i, group in enumerate(json.loads(path.read_text())):
            schema = group["schema"]
            if isinstance(schema, dict):
                schema = {"$schema": VALIDATORS[draft].META_SCHEMA["$schema"]} | schema
            found.append((f"{path.stem}[{i}] {group['description']}", schema))
    return found


@pytest.mark.hosts
@pytest.mark.skipif(not SUITE, reason="JSON_SCHEMA_SUITE names no folder of the test suite")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("draft", list(VALIDATORS))
def test_what_compiles_is_held(llama, draft):
    """A schema that compiles is enforced.

    Each schema is refused before any work, or each of its answers validates, or ended by its
    length.
    """
    engine, judge, bias = llama.llm_engine, VALIDATORS[draft], {}
    for text in ENDINGS:
        (token,) = llama.tokenizer.encode(text, bos=False, eos=False)
        bias[token] = 6
    asked, refused, requests = schemas(draft), Counter[str](), list[Any]()
    for name, schema in asked:
        try:
            params = SamplingParams(
                structured_output={"json": schema}, max_tokens=120, n=SAMPLES, seed=len(requests),
                logit_bias=bias,
            )  # fmt: skip
            request = engine.prepare("", "x", params, index=len(requests))
        except ValueError as e:
            reason = str(e).removeprefix("structured_output.json").removeprefix(" cannot be used")
            refused[reason.removeprefix(": ")[:60]] += 1
            continue
        requests.append((name, schema, request))
    outputs = engine.run([request for _, _, request in requests])
    ends, wrong = Counter[str](), []
    for (name, schema, _), output in zip(requests, outputs, strict=True):
        assert output.error is None, (name, output.error)
        for answer in output.outputs:
            assert answer.finish_reason in ("stop", "length"), name
            ends[answer.finish_reason] += 1
            if answer.finish_reason == "stop" and _ECMA.search(json.dumps(schema)):
                ends["not judged"] += 1
            elif answer.finish_reason == "stop":
                validator = judge(schema, format_checker=judge.FORMAT_CHECKER)
                if not validator.is_valid(json.loads(answer.text)):
                    wrong.append((name, json.dumps(schema)[:200], answer.text))
    print(f"\n{draft}: {len(asked)} schemas, {len(requests)} compiled, answers: {dict(ends)}")
    for reason, count in refused.most_common():
        print(f"  {count:4} refused: {reason}")
    for each in wrong:
        print("  WRONG", *each)
    assert not wrong
    assert len(requests) > len(asked) / 3 and ends["stop"] > len(requests)
