"""Every format of a batch line, each bad line with its message, and the records of the answers.

The oracle is Meta's own API: the same prompts through text_completion and chat_completion.
"""

import csv
import io
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from helpers.batch import answers
from llama.cli import main
from llama.cli.batch.csv_rows import ends_in_quotes, fields_of
from llama.cli.batch.job import run_batch
from llama.cli.batch.lines import MAX_LINE, LineFormat, parse_line
from llama.cli.batch.work import prepare_line
from llama.cli.model import sampling_params
from llama.requests.seeds import derived_seed
from llama.sampling_params import SamplingParams
from llama.server.openai.models import CHAT_URL, TEXT_URL

HELLO = [{"role": "user", "content": "Hello"}]
PROMPTS = ["Hello", "Bonjour", "an apple  a day ", "1, 2, 3", "é漢😀"]


def text_of(record: dict[str, Any], choice: int = 0) -> str:
    assert record["error"] is None, record
    found = record["response"]["body"]["choices"][choice]
    return found["text"] if "text" in found else found["message"]["content"]


def openai(body: dict[str, Any], **more: Any) -> dict[str, Any]:
    url = CHAT_URL if "messages" in body else TEXT_URL
    return {"custom_id": "me", "method": "POST", "url": url, "body": body, **more}


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_form_gives_the_answers_of_the_api(llama, tmp_path, temperature):
    """Each format gives the answers of the API.

    OpenAI's batch format, plain lines and a text file have the texts of text_completion, whatever
    ran alongside them; chats have those of chat_completion. The samples are those of one call with
    all lines and the build's seed, also when the other lines were done before.
    """
    done = llama.text_completion(PROMPTS, temperature, 0.9, 12, seed=llama.seed)
    wanted = [r["generation"] for r in done]
    dialogs: list[Any] = [HELLO, [{"role": "system", "content": "Be brief."}, *HELLO]]
    replies = [
        llama.chat_completion([d], temperature, 0.9, 12, seed=derived_seed(llama.seed, line))[0]
        for line, d in enumerate(dialogs, len(PROMPTS))
    ]
    chats = [r["generation"]["content"] for r in replies]
    plain = [{"prompt": prompt} for prompt in PROMPTS] + [{"messages": d} for d in dialogs]
    found = answers(llama, tmp_path, plain, temperature=temperature, max_gen_len=12)
    assert [text_of(record) for record in found] == wanted + chats
    found = answers(llama, tmp_path, PROMPTS, temperature=temperature, max_gen_len=12)
    assert [text_of(record) for record in found] == wanted
    settings = {"temperature": temperature, "top_p": 0.9, "max_tokens": 12}
    lines = [openai({**request, **settings}) for request in plain]
    found = answers(llama, tmp_path, lines)
    assert [text_of(record) for record in found] == wanted + chats


def test_records_are_openais(llama, tmp_path):
    """Records are OpenAI's.

    They have every key of the batch output object, its completion and its usage; blank lines count
    in line numbers.
    """
    lines = ["", {"prompt": "Hi", "model": "mine"}, "   ", openai({"messages": HELLO})]
    text, chat = answers(llama, tmp_path, lines, temperature=0.0, max_gen_len=3, model="tiny")
    assert text["id"].startswith("batch_req_000000000002_")
    assert (text["custom_id"], chat["custom_id"]) == ("line-2", "me")
    assert text["response"] == {
        "status_code": 200,
        "request_id": "line-2",
        "body": {
            "id": "cmpl-line-2",
            "object": "text_completion",
            "created": 0,
            "model": "mine",
            "choices": [
                {
                    "index": 0,
                    "text": text_of(text),
                    "logprobs": None,
                    "finish_reason": "length",
                    "stop_reason": None,
                }
            ],
            "usage": {
                "prompt_tokens": 3,
                "completion_tokens": 3,
                "total_tokens": 6,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
        },
    }
    body = chat["response"]["body"]
    assert (body["object"], body["model"]) == ("chat.completion", "tiny")
    assert body["choices"][0]["message"] == {"role": "assistant", "content": text_of(chat)}


def test_log_probabilities(llama, tmp_path):
    """Both of OpenAI's layouts have the log probabilities of text_completion(logprobs=True)."""
    body = {"prompt": "Hello", "max_tokens": 6, "temperature": 0}
    dialog: Any = HELLO
    messages = {"messages": dialog, "max_completion_tokens": 6, "temperature": 0, "logprobs": True}
    lines = [body | {"logprobs": 2}, messages | {"top_logprobs": 3}, messages]
    text, chat, bare = answers(llama, tmp_path, lines)
    (wanted,) = llama.text_completion(["Hello"], 0.0, 0.9, 6, logprobs=True)
    scores = text["response"]["body"]["choices"][0]["logprobs"]
    assert scores["tokens"] == wanted["tokens"]
    assert scores["token_logprobs"] == pytest.approx(wanted["logprobs"], abs=1e-4)
    assert scores["text_offset"][0] == 0 and len(scores["text_offset"]) == 6
    for token, score, top in zip(
        scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True
    ):
        assert 1 <= len(top) <= 2 and max(top.values()) == score  # greedy: the most likely token
        assert token in top
    (answer,) = llama.chat_completion([dialog], 0.0, 0.9, 6, logprobs=True)
    content = chat["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == answer["tokens"]
    assert [e["logprob"] for e in content] == pytest.approx(answer["logprobs"], abs=1e-4)
    assert all(len(entry["top_logprobs"]) == 3 for entry in content)
    assert all(entry["top_logprobs"][0]["bytes"] == entry["bytes"] for entry in content)
    content = bare["response"]["body"]["choices"][0]["logprobs"]["content"]
    assert all(entry["top_logprobs"] == [] for entry in content)


def test_several_answers_a_line(llama, tmp_path):
    lines = [{"prompt": "Hello", "n": 3, "best_of": 4, "seed": 5, "max_tokens": 8}] * 2
    one, other = answers(llama, tmp_path, lines, temperature=1.0)
    texts = [text_of(one, i) for i in range(3)]
    assert texts == [text_of(other, i) for i in range(3)] and len(set(texts)) > 1
    assert [c["index"] for c in one["response"]["body"]["choices"]] == [0, 1, 2]


def test_a_text_file_is_prompts_as_they_stand(llama, tmp_path):
    """A text file has one verbatim prompt per line.

    Spaces count, a line end of either kind does not, and JSON in a later line is text.
    """
    lines = [b"\xef\xbb\xbfHello  \r", '{"prompt": "x"}', b"caf\xe9", "last"]
    found = answers(llama, tmp_path, lines, temperature=0.0, max_gen_len=4)
    wanted = llama.text_completion(["Hello  ", '{"prompt": "x"}', "last"], 0.0, 0.9, 4)
    texts = [text_of(found[i]) for i in (0, 1, 3)]
    assert texts == [result["generation"] for result in wanted]
    assert found[2]["error"]["message"] == "the line is not UTF-8 at byte 4: unexpected end of data"
    (tmp_path / "in").write_bytes(b"no end")
    (tmp_path / "out").unlink()
    paths = str(tmp_path / "in"), str(tmp_path / "out")
    run_batch(llama, *paths, sampling_params(max_gen_len=2))
    assert len((tmp_path / "out").read_text().splitlines()) == 1


NOW = {"type": "function", "function": {"name": "now"}}
BAD: list[tuple[Any, str]] = [
    ('{"prompt": ', "the line is not JSON: Expecting value at character 12"),
    ("plain words", "the line is not JSON: Expecting value at character 1"),
    ("[1]", "the line must be a JSON object, as the first line of the file is"),
    (b'{"prompt": "\xff"}', "the line is not UTF-8 at byte 13: invalid start byte"),
    ("[" * 100_000, "the line's JSON is nested too deeply"),
    ('{"seed": %s}' % ("9" * 5000), "Exceeds the limit (4300 digits)"),
    (b'{"prompt": "' + b"a" * MAX_LINE, f"the line has more than {MAX_LINE} bytes"),
    ({"messages": HELLO, "prompt": "x"}, "must have a prompt, messages, or a url and a body"),
    ({"custom_id": "me"}, "must have a prompt, messages, or a url and a body"),
    ({"prompt": "x", "custom_id": 7}, "custom_id must be a string, got a number"),
    ({"prompt": ["a", "b"]}, "prompt has 2 entries: write each entry on a line of its own"),
    ({"prompt": [1, "b"]}, "prompt[1]='b' must be a whole number"),
    ({"prompt": "a", "stream": True}, "stream must be false: a line gets one record"),
    ({"prompt": [512]}, "holds 512"),
    ({"prompt": "x" * 300}, "has 301 tokens"),
    ('{"prompt": "x", "temperature": NaN}', "temperature=nan must be a number from 0 to 100"),
    ({"prompt": "x", "logit_bias": {"999": 1}}, "logit_bias has the token id 999"),
    ({"prompt": "x", "tools": []}, "'tools' cannot be used in a completion request"),
    ({"messages": HELLO, "tools": [NOW]}, "tools cannot be used with this model"),
    ({"messages": []}, "messages must be a list of at least one"),
    ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role must be one of"),
    ({"messages": [{"role": "user", "content": [{}]}]}, "messages[0].content must be a str, or a"),
    (openai({"prompt": "x"}, method="GET"), "method='GET' must be POST"),
    (openai({"prompt": "x"}, url="/v1/moderations"), "url='/v1/moderations' must be one of /v1/"),
    (openai({"prompt": "x"}, url="/v1/embeddings"), "input is needed"),
    ({**openai({"prompt": "x"}), "body": None}, "body must be an object, got null"),
    (openai({"prompt": "x"}, url=CHAT_URL), "'prompt' cannot be used in a chat request"),
    (openai({"prompt": "x"}, extra=1), "'extra' cannot be used in the line, next to its body"),
    ({"body": {"prompt": "x"}}, "url=None must be one of /v1/chat/completions, /v1/completions"),
]


def test_each_bad_line_is_a_record_with_its_number(llama, tmp_path):
    """Each bad line gives a record with its number and error; the good lines are answered."""
    lines: list[Any] = [{"prompt": "first"}]
    for bad, _ in BAD:
        lines += [bad, {"prompt": "between"}]
    found = answers(llama, tmp_path, lines, temperature=0.0, max_gen_len=2)
    assert len(found) == len(lines)
    for i, (_, message) in enumerate(BAD):
        record = found[2 * i + 1]
        assert record["response"] is None
        assert record["error"]["line"] == 2 * i + 2
        assert record["error"]["code"] == "invalid_request"
        assert message in record["error"]["message"], record
        assert len(record["error"]["message"]) <= 1000
    assert len({text_of(record) for record in found[2::2]}) == 1
    named = next(record for record in found if record["custom_id"] == "me")
    assert named["error"], "a bad line keeps the id that it was given"


def test_a_broken_first_line_does_not_make_text_of_the_rest(llama, tmp_path):
    found = answers(
        llama, tmp_path, ['{"prompt": "x', {"prompt": "Hello"}], temperature=0.0, max_gen_len=4
    )
    assert found[0]["error"]["line"] == 1
    assert text_of(found[1]) == llama.text_completion(["Hello"], 0.0, 0.9, 4)[0]["generation"]


def test_a_line_of_nan_gets_an_error_and_its_neighbours_their_answers(llama, tmp_path, monkeypatch):
    """A line of NaN gets an error, and its neighbours get their answers.

    A past fault: one such line ended the whole job, and again at every resume.
    """
    lines = [{"prompt": prompt, "max_tokens": 5, "temperature": 0} for prompt in ("a", "b", "c")]
    wanted = answers(llama, tmp_path, lines)
    logits = llama.model.logits

    def with_a_bad_row(hidden):
        found = logits(hidden)
        if len(found) == 3:
            found[1] = math.nan
        return found

    monkeypatch.setattr(llama.model, "logits", with_a_bad_row)
    found = answers(llama, tmp_path, lines)
    assert found[0] == wanted[0] and found[2] == wanted[2]
    assert found[1]["response"] is None
    error = found[1]["error"]
    assert (error["code"], error["line"]) == ("server_error", 2) and "NaN" in error["message"]
    files = str(tmp_path / "in"), str(tmp_path / "out")
    report = run_batch(llama, *files, sampling_params(), resume=True)
    assert (report.written, report.failed) == (0, 1), "it counts as done"


def test_parsing_never_raises_anything_else(llama):
    """Parsing raises no other exception.

    The lines are odd but valid JSON: duplicate keys, lone surrogates, huge numbers, empty names.
    """
    for line in (
        '{"prompt": "a", "prompt": "b"}', '{"prompt": "\\ud800"}', '{"": 1}',
        '{"prompt": "x", "seed": 1e999}', '{"prompt": "x", "\\ud800": 1}',
        '{"prompt": "x", "stop": {"a": "b"}}', '{"prompt": "x", "logit_bias": {"٣": 1}}',
        '{"url": [1], "body": 2, "method": {}}', '{"prompt": "x", "n": 99999999999999999999}',
    ):  # fmt: skip
        try:
            fields = parse_line(line.encode(), LineFormat(is_json=True))
            prepare_line(llama, 1, "a", fields, SamplingParams(), "m")
        except (TypeError, ValueError) as e:
            assert str(e)


CSV = """\ufeffid,prompt,custom_id
1,"Once, upon ""a"" time",first
2,"two
lines",
3,plain,third
4,"broken
5,x,fifth
"""


def csv_answers(llama: Any, folder: Path, text: str) -> list[dict[str, Any]]:
    (folder / "in.CSV").write_text(text, newline="")
    (folder / "out").unlink(missing_ok=True)
    paths = str(folder / "in.CSV"), str(folder / "out")
    run_batch(llama, *paths, sampling_params(max_gen_len=4, temperature=0))
    assert run_batch(llama, *paths, sampling_params(max_gen_len=4, temperature=0), resume=True)[
        0
    ] == 0, "a resumed job has nothing to do"  # fmt: skip
    records = [json.loads(line) for line in (folder / "out").read_text().splitlines()]
    return sorted(records, key=lambda record: record["id"])


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_the_prompt_column_of_a_csv_file_is_read(llama, tmp_path, end):
    """The column `prompt` of a CSV file is read; a row has the number of its first line."""
    found = csv_answers(llama, tmp_path, CSV.replace("\n", end))
    prompts = ['Once, upon "a" time', f"two{end}lines", "plain"]
    wanted = answers(
        llama, tmp_path, [{"prompt": x} for x in prompts], max_gen_len=4, temperature=0
    )
    assert [text_of(x) for x in found[:3]] == [text_of(x) for x in wanted]
    assert [x["custom_id"] for x in found] == ["first", "line-3", "third", "line-6"]
    assert "field 2 has a quote that does not match" in found[3]["error"]["message"]
    assert found[3]["error"]["line"] == 6


def test_a_bad_row_is_a_record_and_the_rows_after_it_are_read(llama, tmp_path):
    rows = 'prompt,n\na,1\nb\n\nc,"x"y\nd,""\n'
    found = csv_answers(llama, tmp_path, rows)
    assert [x["error"] and x["error"]["line"] for x in found] == [None, 3, 5, None]
    assert "the row has 1 fields, but the file has 2 columns" in found[1]["error"]["message"]
    other = rows.replace("prompt,n", "n,prompt").encode()
    (tmp_path / "in.CSV").write_bytes(other)
    paths = str(tmp_path / "in.CSV"), str(tmp_path / "out")
    with pytest.raises(ValueError, match="resume with the same input"):
        run_batch(llama, *paths, sampling_params(max_gen_len=4, temperature=0), resume=True)


@pytest.mark.parametrize(
    "row",
    [
        [""], ["a"], ["a", ""], ["", ""], ['"'], ['a"b', ",", "\n"], ['""', '","', 'x\r\ny "z"'],
        ["", '"', ""], [" a ", 'b" c'],
    ],
)  # fmt: skip
def test_rows_are_those_of_pythons_csv_module(row):
    """Rows are read as the module csv has written them, and end where it ends them."""
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator="", quoting=csv.QUOTE_ALL).writerow(row)
    assert fields_of(file.getvalue()) == row
    file = io.StringIO(newline="")
    csv.writer(file, lineterminator="").writerow(row)
    text = file.getvalue()
    assert fields_of(text) == row
    is_quoted = False
    *lines, last = text.encode().splitlines(keepends=True) or [b""]
    for line in lines:
        is_quoted = ends_in_quotes(line, is_quoted)
        assert is_quoted
    assert not ends_in_quotes(last, is_quoted)
    assert not ends_in_quotes(b'5" disk,x\n')


@pytest.mark.parametrize(
    ("name", "data", "message"),
    [
        ("a.csv", b"question,answer\nx,y\n",
         "must have one column named prompt; its columns are 'question, answer': rename one"),
        ("a.csv", b"prompt,prompt\n", "its columns are 'prompt, prompt'"),
        ("a.csv", b'"prompt";"id"\nx;1\n', "separates its columns by ';', and only commas are"),
        ("a.csv", b"id\tprompt\n1\tx\n", r"a.csv', sep='\\t'\)\[\['prompt'\]\].to_json\('prompts"),
        ("a.csv", b"id|prompt \n1|x\n", "save it with commas, or convert it"),
        ("a.csv", b'"prompt\nx', "field 1 has a quote that does not match"),
        ("a.parquet", b"PAR1\x00\x00", "a.parquet is a Parquet file, which is not read here: conv"),
        ("a.json", b'[{"custom_id": "1", "body": {}}]', "a.json is a JSON array, and each line"),
        ("a.jsonl", b"[\n  {}\n]", "JSON lines.: convert it, for example with jq -c"),
        ("a.txt", b'["Once", "Twice"]\n', "is a JSON array"),
        ("-", b"PAR1\x15", r"to_json\('prompts.jsonl', orient='records', lines=True\)"),
    ],
)  # fmt: skip
def test_other_csv_and_parquet_are_refused_before_the_model_is_loaded(
    tmp_path, capfd, name, data, message
):
    (tmp_path / name).write_bytes(data)
    assert main(["batch", str(tmp_path / name), str(tmp_path / "out"), "--ckpt_dir", "/no"]) == 2
    said = capfd.readouterr().err
    assert re.search(message, said) and str(tmp_path / name) in said and said.count("\n") == 1
    assert not (tmp_path / "out").exists()


def test_columns_without_effect_are_named(tmp_path, capfd, monkeypatch):
    (tmp_path / "in.csv").write_text("id,prompt,temperature\n1,x,0\n")
    monkeypatch.setattr("llama.cli.commands._batch_on_engine", lambda options: (1, 0))
    assert main(["batch", str(tmp_path / "in.csv"), str(tmp_path / "out")]) == 0
    assert "in.csv: these columns have no effect: id, temperature\n" in capfd.readouterr().err
