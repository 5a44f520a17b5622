"""Tool calls in a batch file: a record has the answer that a server gives to the same body.

The job runs on the engine and by `--url`; the server is a real one, with a tiny random model whose
calls a grammar forces.
"""

import json
from pathlib import Path
from typing import Any

import jsonschema

from helpers.batch import answers, written
from helpers.server import run_server
from helpers.web import web
from llama import Llama
from llama.cli.batch.loop import BatchReport
from llama.cli.batch.server_job import run_server_batch
from llama.cli.model import sampling_params

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Zürich 🌧", "Bern"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
FORECAST: Any = {"type": "function", "function": {"name": "forecast", "parameters": SCHEMA}}
NAMED = {"type": "function", "function": {"name": "forecast"}}
ASKED = {"messages": [{"role": "user", "content": "How is it?"}], "tools": [FORECAST]}
# Without these, a batch job uses its own defaults, which its flags change.
DRAWN = {"temperature": 1.5, "top_p": 0.9, "seed": 2, "skip_special_tokens": True}
BODIES: list[dict[str, Any]] = [
    {**ASKED, **DRAWN, "tool_choice": NAMED, "max_tokens": 200, "n": 2},
    {**ASKED, "tool_choice": "required", "temperature": 0, "max_tokens": 200},
    {**ASKED, "tool_choice": NAMED, "temperature": 0, "max_tokens": 45},  # truncated
    {**ASKED, **DRAWN, "max_tokens": 20},  # plain text
]


def said(body: dict[str, Any]) -> list[Any]:
    """Return the finish reason, content and calls of each choice, whose call ids are unique."""
    found: list[Any] = []
    for choice in body["choices"]:
        calls = choice["message"].get("tool_calls") or []
        assert len({call["id"] for call in calls}) == len(calls)
        functions = [(call["type"], call["function"]) for call in calls]
        found.append((choice["finish_reason"], choice["message"]["content"], functions))
    return found


def test_records_hold_the_calls_of_the_servers_answers(make_checkpoint, tmp_path):
    folder: Path = make_checkpoint(use_scaled_rope=True)[0]
    flags = ("--max_seq_len", "2048", "--max_batch_size", "4", "--dtype", "fp32")
    llama = Llama.build(str(folder), None, 2048, 4, device="cpu", dtype="fp32")
    url = "/v1/chat/completions"
    lines = [{"custom_id": "c", "method": "POST", "url": url, "body": body} for body in BODIES]
    of_engine = answers(llama, tmp_path, lines)
    with run_server(*flags, "--device", "cpu", str(folder)) as server:
        wanted = [said(web.post(server.url + url, json=b, timeout=60).json()) for b in BODIES]
        (tmp_path / "in").write_bytes(written(lines))
        out = tmp_path / "by_url"
        report = run_server_batch(
            server.url, str(tmp_path / "in"), str(out), sampling_params(), concurrency=1
        )
    assert report == BatchReport(len(BODIES), 0)
    of_server = [json.loads(line) for line in out.read_text().splitlines()]
    for records in (of_engine, of_server):
        assert [record["error"] for record in records] == [None] * len(BODIES)
        assert [said(record["response"]["body"]) for record in records] == wanted
    named, required, cut, words = wanted
    for reason, content, calls in named + required:
        assert (reason, content) == ("tool_calls", None) and calls
        for kind, function in calls:
            assert (kind, function["name"]) == ("function", "forecast")
            jsonschema.validate(json.loads(function["arguments"]), SCHEMA)
    assert cut[0][0] == "length" and cut[0][2]
    assert words[0][1] and not words[0][2]
