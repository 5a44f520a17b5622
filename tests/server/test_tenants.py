"""No request learns of another tenant's requests, whichever way it comes into the engine.

With several API keys each key is a tenant; a cache_salt splits a tenant further. What tenants could
learn from each other by is the prefix cache: each check of a miss is paired with one of a hit.
"""

import asyncio
import json
import re
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from helpers.batch import answers
from helpers.launch import REPO
from helpers.services import service_of
from llama import Llama, SamplingParams
from llama.cli.flags import UsageError
from llama.cli.serve import _metrics_keys
from llama.compat import vllm
from llama.requests.async_engine import AsyncLLMEngine
from llama.requests.beam_search import beam_search
from llama.requests.grammar import GrammarCompiler
from llama.requests.prepare import prefix_root
from llama.server.app import make_app
from llama.server.process import Server

STORY = " once upon a time there was a little cat who lived in a big house and liked to play" * 2
MESSAGES: Any = [{"role": "user", "content": STORY}]
ONE = {"max_tokens": 1}
SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}

# Each way of HTTP: its path, and a body whose first words are unlike those of all others.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", {"prompt": "One" + STORY, **ONE}),
    "completion of ids": ("/v1/completions", {"prompt": [*range(300, 350)], **ONE}),
    "completions": ("/v1/completions", {"prompt": ["Two" + STORY, "x"], **ONE}),
    "streamed completion": ("/v1/completions", {"prompt": "Three" + STORY, **ONE, **USAGE}),
    "completion of a grammar": (
        "/v1/completions",
        {"prompt": "Four" + STORY, **ONE, "structured_outputs": {"regex": "[a-z]+"}},
    ),
    "chat": ("/v1/chat/completions", {"messages": MESSAGES, **ONE}),
    "streamed chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "system", "content": "Six" + STORY}, *MESSAGES], **ONE, **USAGE},
    ),
    "response": ("/v1/responses", {"input": "Seven" + STORY, "max_output_tokens": 1}),
    "streamed response": (
        "/v1/responses",
        {"input": "Eight" + STORY, "max_output_tokens": 1, "stream": True},
    ),
    "message": ("/v1/messages", {"messages": MESSAGES, "system": "Nine" + STORY, **ONE}),
    "streamed message": (
        "/v1/messages",
        {"messages": MESSAGES, "system": "Ten" + STORY, **ONE, "stream": True},
    ),
}  # fmt: skip
_CACHED = re.compile(r'"(?:cached_tokens|cache_read_input_tokens)": ?(\d+)')


@pytest.fixture(scope="module")
def llama(demo) -> Llama:
    """Return an engine of its own, whose cache no other file has filled."""
    return Llama(demo.model, demo.tokenizer)


@pytest.fixture(scope="module")
def client(llama) -> Iterator[httpx.Client]:
    """Return a client of a server with the keys "a" and "b"."""
    keys = ["a", "b", "a"]
    server = Server(service_of(), host="127.0.0.1", port=0, api_keys=keys)
    server.start()
    server.service.start(llama)
    with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=60) as opened:
        yield opened
    server.service.close()
    server.stop()


def post(client: httpx.Client, path: str, key: str, body: dict[str, Any], **headers: str) -> Any:
    return client.post(path, json=body, headers={"Authorization": f"Bearer {key}", **headers})


@pytest.mark.parametrize("way", WAYS)
def test_keys_and_salts_share_no_prefix(client, way):
    path, body = WAYS[way]

    def num_cached(key: str, salt: str | None) -> int:
        answer = post(client, path, key, body | {"cache_salt": salt})
        assert answer.status_code == 200, answer.text
        return int(_CACHED.findall(answer.text)[-1])

    tenants = [(key, salt) for key in "ab" for salt in (None, "x", "y")]
    assert [num_cached(*tenant) for tenant in tenants] == [0] * 6
    assert min(num_cached(*tenant) for tenant in tenants) >= 32


def _num_cached_by_engine(llama: Llama, salt: str | None, prompt: str) -> int:
    params = SamplingParams(max_tokens=1, cache_salt=salt)
    request = llama.llm_engine.prepare("", prompt, params)
    return llama.llm_engine.run([request])[0].usage.cached_tokens


def _num_cached_by_asyncio(llama: Llama, salt: str | None, prompt: str) -> int:
    async def run() -> int:
        engine = AsyncLLMEngine(llama)
        params = SamplingParams(max_tokens=1, cache_salt=salt)
        outputs = [output async for output in engine.generate(prompt, params, "name")]
        engine.close()
        return outputs[-1].usage.cached_tokens

    return asyncio.run(run())


def _vllm_prompt(salt: str | None, prompt: str) -> dict[str, Any]:
    return {"prompt": prompt} if salt is None else {"prompt": prompt, "cache_salt": salt}


def _num_cached_by_vllm(llama: Llama, salt: str | None, prompt: str) -> int:
    engine = vllm.LLMEngine(llama)
    engine.add_request("name", _vllm_prompt(salt, prompt), vllm.SamplingParams(max_tokens=1))
    outputs: list[vllm.RequestOutput] = []
    while engine.has_unfinished_requests():
        outputs += engine.step()
    return outputs[-1].num_cached_tokens or 0


def _num_cached_by_async_vllm(llama: Llama, salt: str | None, prompt: str) -> int:
    async def run() -> int:
        engine = vllm.AsyncLLMEngine(llama)
        params = vllm.SamplingParams(max_tokens=1)
        given = _vllm_prompt(salt, prompt)
        outputs = [output async for output in engine.generate(given, params, "name")]
        return outputs[-1].num_cached_tokens or 0

    return asyncio.run(run())


def _num_cached_by_beams(llama: Llama, salt: str | None, prompt: str) -> int:
    """Search beams of one token, and return how much of the prompt was not computed."""
    params = SamplingParams(max_tokens=1, temperature=0, cache_salt=salt)
    before = llama.engine.stats.prompt_tokens
    ids = llama.tokenizer.encode(prompt, bos=True, eos=False)
    beam_search(llama.llm_engine, [llama.llm_engine.prepare("", ids, params)], 2, 1.0, False)
    return len(ids) - (llama.engine.stats.prompt_tokens - before)


def _num_cached_by_batch(llama: Llama, salt: str | None, prompt: str, folder: Path) -> int:
    body = {"prompt": prompt, "max_tokens": 1, "cache_salt": salt}
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": body}
    (record,) = answers(llama, folder, [line])
    return int(_CACHED.findall(json.dumps(record))[-1])


PYTHON: dict[str, Callable[..., int]] = {
    "engine": _num_cached_by_engine,
    "asyncio": _num_cached_by_asyncio,
    "vLLM": _num_cached_by_vllm,
    "vLLM's asyncio": _num_cached_by_async_vllm,
    "beams": _num_cached_by_beams,
    "batch": _num_cached_by_batch,
}


@pytest.mark.parametrize("way", PYTHON)
def test_salts_of_python_and_of_batch_files_share_no_prefix(llama, way, tmp_path):
    more = (tmp_path,) if way == "batch" else ()
    salts = (None, "x", "y")
    found = [PYTHON[way](llama, salt, way + STORY, *more) for salt in salts]
    assert max(found) < 16, "another salt's pages were found"
    assert min(PYTHON[way](llama, salt, way + STORY, *more) for salt in salts) >= 32


def test_roots_are_made_in_one_place_and_are_alike_on_all_ranks():
    """The Preparer alone specifies sequences, and a root depends on nothing of the process.

    That of the largest step, which a GPU runs before there are requests, shares no page.
    """
    paths = [path for path in (REPO / "llama").rglob("*.py") if "SequenceSpec(" in path.read_text()]
    assert {path.name for path in paths} == {"prepare.py", "largest_step.py"}
    assert prefix_root(b"", None) == b""
    digest = "4cbc96099a6467ce002461f10549b489"
    roots = [prefix_root(tenant, salt) for tenant in (b"", b"t") for salt in (None, "x", "y")]
    assert len(set(roots)) == 6 and prefix_root(b"", "x").hex().startswith(digest)
    assert prefix_root(b"", "\ud800")


@pytest.mark.parametrize("salt", ["", "x" * 513, 1, "\ud800", ["x"]])
@pytest.mark.parametrize("way", ["completion", "chat", "response", "message"])
def test_a_salt_has_1_to_512_characters(client, way, salt):
    path, body = WAYS[way]
    answer = client.post(
        path,
        content=json.dumps(body | {"cache_salt": salt}),
        headers={"Authorization": "Bearer a", "Content-Type": "application/json"},
    )
    assert answer.status_code == 400 and "cache_salt" in answer.json()["error"]["message"]
    assert post(client, path, "a", body | {"cache_salt": "x" * 512}).status_code == 200


def test_one_key_is_one_tenant():
    """One key, given once or twice, shares what it would share without a key."""
    roots = []
    for keys in ([], ["k"], ["k", "k"]):
        app = make_app(service_of(), api_keys=keys, loopback=False)
        roots.append(app.keys.tenant("k"))  # type: ignore[attr-defined]
    assert roots == [b""] * 3


def test_grammars_are_compiled_for_each_tenant(client, monkeypatch):
    """The time of a request does not tell whether another tenant has sent its schema."""
    compiled: list[Any] = []
    compile_format = GrammarCompiler._compile

    def count(self: GrammarCompiler, form: Any) -> Any:
        compiled.append(form)
        return compile_format(self, form)

    monkeypatch.setattr(GrammarCompiler, "_compile", count)
    body = {"prompt": "x", **ONE, "structured_outputs": {"json": SCHEMA}}
    for key in "aabb":
        assert post(client, "/v1/completions", key, body).status_code == 200
    assert len(compiled) == 2
    assert post(client, "/v1/completions", "b", body | {"cache_salt": "x"}).status_code == 200
    assert len(compiled) == 3


def test_ids_of_other_tenants_mean_nothing(client):
    """A request id that another tenant uses now is free, and no answer can be asked for by id."""
    body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": True}
    headers = {"Authorization": "Bearer a", "X-Request-Id": "mine"}
    with client.stream("POST", "/v1/completions", json=body, headers=headers) as running:
        next(running.iter_bytes())
        small = {"input": "x", "max_output_tokens": 1}
        answer = post(client, "/v1/responses", "b", small, **{"X-Request-Id": "mine"})
        assert answer.status_code == 200 and answer.headers["X-Request-Id"] == "mine"
        for path in ("/v1/responses/{}", "/v1/chat/completions/{}", "/v1/batches/{}"):
            for name in ("resp_mine", "cmpl-mine", "resp_other"):
                headers = {"Authorization": "Bearer b"}
                found = client.get(path.format(name), headers=headers)
                assert found.status_code == 404 and found.json()["error"]["param"] is None


@pytest.mark.parametrize("path", ["/metrics", "/load"])
@pytest.mark.parametrize(
    ("api_keys", "metrics_keys", "statuses"),
    [
        # without a key, then with the keys a, b, m and another one
        ([], [], [200, 200, 200, 200, 200]),
        (["a"], [], [401, 200, 401, 401, 401]),
        (["a", "b"], [], [401, 403, 403, 401, 401]),
        (["a", "b"], ["m"], [401, 403, 403, 200, 401]),
        (["a", "b"], ["m", "b"], [401, 403, 200, 200, 401]),
        (["a"], ["m"], [401, 403, 401, 200, 401]),
        ([], ["m"], [401, 401, 401, 200, 401]),
    ],
)
def test_what_all_tenants_do_is_for_the_operator(path, api_keys, metrics_keys, statuses):
    """Metrics of several keys need a key of their own, which opens nothing else.

    That is also so below a path that a proxy adds.
    """
    keys: Any = {"api_keys": api_keys, "metrics_keys": metrics_keys}
    app = make_app(service_of(), loopback=False, **keys)
    for root in ("", "/llama"):
        web = TestClient(app, root_path=root, base_url="http://testserver")
        found = []
        for key in (None, "a", "b", "m", "n"):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            answer = web.get(root + path, headers=headers)
            found.append(answer.status_code)
            assert ("WWW-Authenticate" in answer.headers) == (answer.status_code == 401)
            if answer.status_code == 403:
                assert "--metrics_key_file" in answer.json()["error"]["message"]
                assert answer.json()["error"]["type"] == "permission_error"
            other = web.get(f"{root}/version", headers=headers).status_code
            assert other == (200 if not api_keys or key in api_keys else 401)
        assert found == statuses, root


def test_keys_of_the_operator_come_from_a_file(tmp_path):
    file = tmp_path / "keys"
    options = Namespace(metrics_key_file=str(file))
    for text, problem in [("\n \n", "has no key"), ("schlüssel", "see --metrics_key_file")]:
        file.write_text(text, encoding="utf-8")
        with pytest.raises(UsageError, match=problem):
            _metrics_keys(options)
    file.write_text("m\n\nn\n")
    assert _metrics_keys(options) == ["m", "n"]
    assert _metrics_keys(Namespace(metrics_key_file=None)) == []
