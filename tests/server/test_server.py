"""The HTTP server, with OpenAI's own client: a real process, the demo model, real sockets."""

import json
import os
import threading
import time
from typing import Any

import httpx
import jsonschema
import openai
import pytest

from helpers.launch import PROGRAMS, REPO
from helpers.server import post_and_leave, raw_events, run_server
from helpers.waiting import wait_until
from helpers.web import web
from llama import Llama, SamplingParams

MODEL = "demo"
STORY: Any = [{"role": "user", "content": "Tell me a story about a cat"}]

NOW: Any = {"type": "function", "function": {"name": "now"}}


@pytest.fixture(scope="module")
def client(server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def greedy(llama: Llama, prompts: list, count: int, **params: Any) -> list[Any]:
    """Return the engine's greedy answers in this process."""
    asked = SamplingParams(max_tokens=count, temperature=0, skip_special_tokens=True, **params)
    engine = llama.llm_engine
    return engine.run(
        [engine.prepare("", prompt, asked, index=i) for i, prompt in enumerate(prompts)]
    )


def test_every_form_of_a_prompt_gets_the_engines_answer(client, demo):
    texts = ["Once upon a time", "The dog", "Hello <|eot_id|> 🎈"]
    ids = [demo.tokenizer.encode(text, bos=True, eos=False) for text in texts]
    wanted = greedy(demo, texts, 12)
    for prompt in (texts, ids):
        found = client.completions.create(model=MODEL, prompt=prompt, max_tokens=12, temperature=0)
        assert [choice.text for choice in found.choices] == [o.outputs[0].text for o in wanted]
        assert [choice.index for choice in found.choices] == [0, 1, 2]
        assert found.usage.prompt_tokens == sum(map(len, ids))
        count = sum(output.usage.completion_tokens for output in wanted)
        assert found.usage.completion_tokens == count
    for one in (texts[0], ids[0]):
        found = client.completions.create(model=MODEL, prompt=one, max_tokens=12, temperature=0)
        assert [choice.text for choice in found.choices] == [wanted[0].outputs[0].text]
    named = f"<|begin_of_text|>{texts[0]}"  # lm-eval sends this; there is still one begin_of_text
    found = client.completions.create(model=MODEL, prompt=named, max_tokens=12, temperature=0)
    assert found.usage.prompt_tokens == len(ids[0])
    assert found.choices[0].text == wanted[0].outputs[0].text
    dialog = demo.formatter.encode_dialog_prompt(STORY)
    (answer,) = greedy(demo, [dialog], 20)
    parts = [{"role": "user", "content": [{"type": "text", "text": STORY[0]["content"]}]}]
    for messages in (STORY, parts):
        chat = client.chat.completions.create(
            model=MODEL, messages=messages, max_completion_tokens=20, temperature=0
        )
        assert chat.choices[0].message.content == answer.outputs[0].text
        assert chat.usage.prompt_tokens == len(dialog)


def test_a_prediction_changes_no_answer_and_its_tokens_are_counted(client, demo):
    """A prediction changes no answer, and its tokens are counted.

    OpenAI's predicted outputs are sent with and without streaming: the prediction's tokens that are
    in the answer count as accepted, and all others as rejected.
    """
    ask: Any = {"model": MODEL, "messages": STORY, "max_tokens": 30, "temperature": 0}
    create = client.chat.completions.create
    plain = create(**ask)
    assert plain.usage.completion_tokens_details is None
    text = plain.choices[0].message.content
    words = text.split(" ")
    edited = " ".join([*words[:6], "QQQ", "ZZZ", *words[7:]])
    for content, least, most in [(text, 30, 30), (edited, 20, 29), ("12 34", 0, 0)]:
        num_given = len(demo.tokenizer.encode(content, bos=False, eos=False))
        parts = [{"type": "text", "text": content}]
        asked = {**ask, "prediction": {"type": "content", "content": parts}}
        whole = create(**asked)
        assert whole.choices == plain.choices
        *_, last = create(**asked, stream=True, stream_options={"include_usage": True})
        for usage in (whole.usage, last.usage):
            details = usage.completion_tokens_details
            assert least <= details.accepted_prediction_tokens <= most
            rejected = num_given - details.accepted_prediction_tokens
            assert details.rejected_prediction_tokens == rejected


def test_a_message_that_stays_open_is_continued(server, client, demo):
    """An open message is continued.

    The answer continues the last message, whose white space counts; /tokenize agrees.
    """
    start = "Once upon a time, \n"
    messages = [*STORY, {"role": "assistant", "content": start}]
    ids = demo.formatter.encode_dialog_prompt(STORY)
    ids += demo.tokenizer.encode("Once upon a time,", bos=False, eos=False)
    ids += demo.tokenizer.encode(" \n", bos=False, eos=False)
    flags = {"continue_final_message": True, "add_generation_prompt": False}
    found = web.post(f"{server.url}/tokenize", json={"messages": messages, **flags}).json()
    assert found["tokens"] == ids
    (wanted,) = greedy(demo, [ids], 12)
    chat = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=12, temperature=0, extra_body=flags
    )
    assert chat.choices[0].message.content == wanted.outputs[0].text
    assert chat.usage.prompt_tokens == len(ids)
    closed = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=1, extra_body={"add_generation_prompt": False}
    )
    dialog = demo.formatter.encode_dialog_prompt(messages)
    header = demo.formatter.encode_header({"role": "assistant", "content": ""})
    assert closed.usage.prompt_tokens == len(dialog) - len(header)


def test_token_counters_go_on_while_a_request_runs(server):
    """Token counters advance while a request runs.

    prompt_tokens and generation_tokens are the engine's and do not wait for a request's end.
    """

    def counts() -> list[float]:
        lines = web.get(f"{server.url}/metrics").text.splitlines()
        names = ("prompt_tokens_total", "generation_tokens_total", "prefix_cache_queries_total")
        return [float(x.split()[1]) for n in names for x in lines if x.startswith(f"llama:{n} ")]

    before = counts()
    # 32 answers take long enough for the figures to be read; then the client leaves
    body = {"prompt": "Some words", "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 32}
    with web.stream("POST", f"{server.url}/v1/completions", json=body) as response:
        parts = response.iter_bytes()
        assert b"data: " in next(parts)
        during = counts()
        running = web.get(f"{server.url}/load").json()["server_load"]
    assert running == 32 and all(a < b for a, b in zip(before, during, strict=True))


def test_echo_scores_the_prompt(client, demo):
    """`echo` scores the prompt.

    With max_tokens 0 only the prompt is scored. The first entry is null; a token's own value is the
    same float among the top entries; the values are the model's own, whatever the temperature. The
    server runs another number of threads, which changes how torch rounds sums in float32.
    """
    prompt = "Once upon a time 🎈"
    (wanted,) = greedy(demo, [prompt], 0, prompt_logprobs=2, logprobs=2)
    ids = wanted.prompt_token_ids
    values = [dict_[t] for t, dict_ in zip(ids[1:], wanted.prompt_logprobs[1:], strict=True)]
    for count in (0, 3):
        (choice,) = client.completions.create(
            model=MODEL, prompt=prompt, max_tokens=count, echo=True, logprobs=2, temperature=0.7
        ).choices
        scores = choice.logprobs
        assert choice.text.startswith(prompt) and (count or choice.text == prompt)
        assert scores.token_logprobs[0] is None and scores.top_logprobs[0] is None
        assert scores.token_logprobs[1 : len(ids)] == pytest.approx(values, abs=1e-4)
        assert len(scores.tokens) == len(ids) + count
        for i in range(1, len(scores.tokens)):
            top = scores.top_logprobs[i]
            assert top[scores.tokens[i]] == scores.token_logprobs[i]
            assert 2 <= len(top) <= 3, "two tokens with one text would be one entry"
    assert any(token.startswith("bytes:\\x") for token in scores.tokens)


REQUESTS: list[dict[str, Any]] = [
    {"prompt": "Once upon a time", "max_tokens": 24, "seed": 4, "n": 2},
    {
        "prompt": ["Once", "The dog"],
        "max_tokens": 10,
        "temperature": 0,
        "echo": True,
        "logprobs": 1,
    },
    {"prompt": [1792, 300, 301], "max_tokens": 40, "temperature": 2.0, "seed": 1},
    {"prompt": "One day", "max_tokens": 60, "temperature": 0, "stop": [" a ", "the cat"]},
    {"messages": STORY, "max_tokens": 30, "seed": 2, "logprobs": True, "top_logprobs": 2},
    {"messages": STORY, "max_tokens": 30, "temperature": 1.5, "seed": 3, "n": 3},
    {"prompt": "One", "max_tokens": 40, "seed": 6, "structured_outputs": {"regex": "[a-z]{9}🎈!"}},
]


@pytest.mark.parametrize("body", REQUESTS)
def test_a_stream_is_the_answer_that_does_not_stream(server, body):
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    whole = web.post(server.url + path, json=body, timeout=60).json()
    options = {"stream": True, "stream_options": {"include_usage": True}}
    began = time.monotonic()
    events = raw_events(server.url + path, body | options)
    taken_ms = 1000 * (time.monotonic() - began)
    assert events[-1] == "[DONE]" and events.count("[DONE]") == 1
    *chunks, usage = [json.loads(event) for event in events[:-1]]
    assert usage["choices"] == [] and all(chunk["usage"] is None for chunk in chunks)
    count = usage["usage"]["completion_tokens"]
    assert count == whole["usage"]["completion_tokens"]
    if len(whole["choices"]) == 1:
        timings = usage["timings"]
        assert timings["predicted_n"] == count
        # no unit but milliseconds; most of the time may be the client's on a busy machine
        assert taken_ms / 500 < timings["predicted_ms"] < taken_ms
        rate = 1000 * (count - 1) / timings["predicted_ms"]
        assert timings["predicted_per_second"] == pytest.approx(rate)
    else:
        assert "timings" not in usage, "of several answers there is no one speed"
    assert len({chunk["id"] for chunk in chunks}) == 1
    for choice in whole["choices"]:
        parts = [c for chunk in chunks for c in chunk["choices"] if c["index"] == choice["index"]]
        reasons = [part["finish_reason"] for part in parts]
        assert reasons == [None] * (len(parts) - 1) + [choice["finish_reason"]]
        if "messages" in body:
            roles = [part["delta"].get("role") for part in parts]
            assert roles == ["assistant"] + [None] * (len(parts) - 1)
            text = "".join(part["delta"].get("content", "") for part in parts)
            assert text == choice["message"]["content"]
            found = [e for p in parts if p["logprobs"] for e in p["logprobs"]["content"]]
            assert_same(found, (choice["logprobs"] or {"content": []})["content"])
        else:
            assert "".join(part["text"] for part in parts) == choice["text"]
            for name, values in (choice["logprobs"] or {}).items():
                found = [v for p in parts if p["logprobs"] for v in p["logprobs"][name]]
                assert_same(found, values)


def test_an_answer_of_a_given_form(client):
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": schema}}
    for seed in range(5):
        answer = client.chat.completions.create(
            model=MODEL, messages=STORY, response_format=form, seed=seed, max_tokens=200
        )
        (choice,) = answer.choices
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content), schema)
    chosen = client.completions.create(
        model=MODEL, prompt="x", extra_body={"structured_outputs": {"choice": ["yes", "no"]}}, n=4
    )
    assert {choice.text for choice in chosen.choices} <= {"yes", "no"}


def assert_same(found: Any, wanted: Any) -> None:
    """Check equality up to the order of sums: a stream finds more of its prompt cached."""
    if isinstance(wanted, float):
        assert found == pytest.approx(wanted, abs=1e-4)
    elif isinstance(wanted, dict | list):
        assert len(found) == len(wanted)
        keys = wanted if isinstance(wanted, dict) else range(len(wanted))
        for key in keys:
            assert_same(found[key], wanted[key])
    else:
        assert found == wanted


def test_what_it_says_of_itself(server, demo):
    get = lambda path, **kw: web.get(server.url + path, **kw)  # noqa: E731
    (card,) = get("/v1/models").json()["data"]
    assert (card["id"], card["max_model_len"]) == (MODEL, 512)
    assert get(f"/v1/models/{MODEL}").json() == card
    missing = get("/v1/models/meta-llama/other")
    assert missing.status_code == 404
    assert missing.json()["error"] == {
        "message": "there is no model 'meta-llama/other': this server has 'demo'",
        "type": "not_found_error", "param": "model", "code": "model_not_found",
    }  # fmt: skip
    assert get("/health").status_code == 200
    assert get("/ready").json() == {"status": "ready"}
    assert get("/version").json()["version"]
    assert get("/load").json() == {"server_load": 0}
    figures = get("/metrics").text
    assert "llama:num_requests_running 0.0" in figures
    assert get("/health", headers={"X-Request-Id": "abc"}).headers["x-request-id"] == "abc"
    text = "Hello <|eot_id|> 🎈"
    post = lambda path, body: web.post(server.url + path, json=body).json()  # noqa: E731
    tokens = post("/tokenize", {"prompt": text})
    assert tokens["tokens"] == demo.tokenizer.encode(text, bos=True, eos=False)
    assert (tokens["count"], tokens["max_model_len"]) == (len(tokens["tokens"]), 512)
    plain = post("/tokenize", {"prompt": text, "add_special_tokens": False})["tokens"]
    assert post("/detokenize", {"tokens": plain}) == {"prompt": text}
    info = get("/tokenizer_info").json()
    for name, wanted in (
        ("bos_token", demo.tokenizer.bos_id),
        ("eos_token", demo.tokenizer.eos_id),
    ):
        alone = {"prompt": info[name], "add_special_tokens": False}
        assert post("/tokenize", alone)["tokens"] == [wanted], "as lm-eval asks for its id"
        for other in (info[name] + " ", info[name] * 2, "<|eot_id|>"):
            ids = post("/tokenize", {"prompt": other, "add_special_tokens": False})["tokens"]
            assert ids == demo.tokenizer.encode(other, bos=False, eos=False)
    dialog = post("/tokenize", {"messages": STORY})["tokens"]
    assert dialog == demo.formatter.encode_dialog_prompt(STORY)
    assert get("/tokenizer_info").json()["bos_token"] == "<|begin_of_text|>"


def wait_for_load(url: str, load: int, **headers: str) -> None:
    wait_until(
        lambda: web.get(f"{url}/load", headers=headers).json() == {"server_load": load},
        lambda: web.get(f"{url}/load", headers=headers).json(),
    )


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_pages(server, stream):
    body = {"prompt": "Once", "max_tokens": 500, "ignore_eos": True, "n": 4, "stream": stream}
    url = f"{server.url}/v1/completions"
    if stream:
        with web.stream("POST", url, json=body) as response:
            next(response.iter_bytes())
    else:
        load = f"{server.url}/load"
        post_and_leave(url, body, lambda: web.get(load).json() != {"server_load": 0})
    wait_for_load(server.url, 0)
    wait_until(lambda: "kv_cache_usage_perc 0.0\n" in web.get(f"{server.url}/metrics").text)


def test_signals_drain_and_a_full_queue_is_refused(tmp_path):
    """Signals drain the server, and a full queue refuses requests.

    With one slot and a queue of one, the third request is refused at once. After SIGTERM the two
    are answered, with drafts, another one is refused, and the exit code is 0. Before that, a flag
    gives tools to a model of Llama 3.0. The load is asked for with the key of the operator.
    """
    flags = ("--max_seq_len", "512", "--max_batch_size", "1", "--max_queue", "1")
    body = {"prompt": "Once", "max_tokens": 300, "ignore_eos": True}
    keys = tmp_path / "metrics_keys"
    keys.write_text("m\n")
    more = ["--api_key", "k", "--tool_format", "llama3.2", "--speculate", "lookup"]
    more += ["--metrics_key_file", str(keys)]
    hold = tmp_path / "hold"  # while it exists, no request advances
    program = (str(PROGRAMS / "faulty_server.py"),)
    # the number of threads is the user's
    env = {**os.environ, "PYTHONPATH": str(REPO), "HOLD_FILE": str(hold)}
    with run_server(*flags, *more, program=program, env=env) as server:
        url, headers = f"{server.url}/v1/completions", {"Authorization": "Bearer k"}
        messages = f"{server.url}/v1/messages"
        assert web.post(messages, json={}, headers={"x-api-key": "k"}).status_code == 400
        assert web.get(f"{server.url}/ready").status_code == 200
        chat = {"messages": STORY, "tools": [NOW]}
        tokens = web.post(f"{server.url}/tokenize", json=chat, headers=headers).json()["tokens"]
        prompt = {"tokens": tokens}
        prompt = web.post(f"{server.url}/detokenize", json=prompt, headers=headers).json()
        assert "MUST put it in the format of [func_name1(" in prompt["prompt"]
        answers: list[httpx.Response] = []

        def ask() -> None:
            answers.append(web.post(url, json=body, headers=headers, timeout=60))

        hold.touch()
        threads = [threading.Thread(target=ask) for _ in range(2)]
        for thread in threads:
            thread.start()
        assert web.get(f"{server.url}/metrics", headers=headers).status_code == 403
        wait_for_load(server.url, 2, Authorization="Bearer m")
        refused = web.post(url, json=body, headers=headers)
        assert (refused.status_code, int(refused.headers["retry-after"]) > 0) == (503, True)
        server.process.terminate()
        wait_until(lambda: web.get(f"{server.url}/ready").status_code != 200)
        late = web.post(url, json=body, headers=headers)
        assert (late.status_code, "shutting down" in late.text) == (503, True)
        hold.unlink()
        for thread in threads:
            thread.join(60)
        assert [answer.status_code for answer in answers] == [200, 200]
        assert all(answer.json()["usage"]["completion_tokens"] == 300 for answer in answers)
        code, log = server.ended()
        assert (code, log.count("300 generated (")) == (0, 2), log  # (7 drafted, 5 accepted)
