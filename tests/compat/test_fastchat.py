"""FastChat's worker without FastChat: the routes called in this process, registration, flags.

tests/compat/test_fastchat_host.py has the same worker under FastChat itself.
"""

import asyncio
import contextlib
import dataclasses
import http.server
import json
import queue
import signal
import threading
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from helpers.fastchat import DIALOGS, FINE_TUNES, HOSTILE, NO_SYSTEM, format_of, written
from helpers.launch import environment
from helpers.server import run_server
from helpers.services import service_of
from llama import Llama, cli
from llama.compat import fastchat
from llama.compat.client_tokenizer import ClientTokenizer
from llama.compat.fastchat import FastChatWorker, as_trained, conversation_template, prompt_ids
from llama.prompts.dialog_format import MissingFormat
from llama.server.app import make_app
from llama.server.limits import Limits
from llama.tokenizer import ChatFormat

LIMIT_S = 30.0
START_LIMIT_S = 120.0  # two processes that import torch, on a busy machine
FRANCE = {"role": "user", "content": "What is the capital of France?"}


class Client:
    """One request to an ASGI app, which the client may abandon."""

    def __init__(
        self, worker: FastChatWorker, path: str, body: bytes = b"", method: str = "POST", **app: Any
    ) -> None:
        self.left, self.got_part = asyncio.Event(), asyncio.Event()
        self.status = 0
        self.parts: list[bytes] = []
        self._body: bytes | None = body
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json")]
        scope = {
            "type": "http",
            "path": path,
            "method": method,
            "headers": headers,
            "query_string": b"",
        }
        served = make_app(worker.service, host_routes=worker.router(), **app)
        self.task = asyncio.create_task(served(scope, self._receive, self._send))  # type: ignore

    async def _receive(self):
        if self._body is None:
            await self.left.wait()
            return {"type": "http.disconnect"}
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def _send(self, message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        elif message["body"]:
            self.parts.append(message["body"])
            self.got_part.set()

    async def whole(self) -> tuple[int, bytes]:
        await asyncio.wait_for(self.task, LIMIT_S)
        return self.status, b"".join(self.parts)

    async def reports(self) -> list[dict]:
        status, body = await self.whole()
        assert status == 200 and body.endswith(b"\0")
        return [json.loads(part) for part in body.split(b"\0")[:-1]]


async def post(app, path: str, **params) -> dict:
    status, body = await Client(app, path, json.dumps(params).encode()).whole()
    assert status == 200
    return json.loads(body)


def stream(app, **params) -> Client:
    return Client(app, "/worker_generate_stream", json.dumps(params).encode())


def make_worker(llama: Llama, **limits) -> FastChatWorker:
    service = service_of(limits=Limits(**limits))
    service.start(llama)
    return FastChatWorker(service, "http://c", "http://w", 45)


def written_by_main(dialog) -> str:
    """Return the prompt in the style LLAMA3 of FastChat's main branch, which its web pages use."""
    prompt = "<|begin_of_text|>"
    for message in dialog:
        prompt += f"<|start_header_id|>{message['role']}<|end_header_id|>\n\n"
        prompt += f"{message['content'].strip()}<|eot_id|>" if message["content"] else ""
    return prompt + NO_SYSTEM


@pytest.mark.parametrize("dialog", DIALOGS)
def test_prompts_of_the_template_are_the_chat_format(demo, dialog):
    tokenizer = demo.tokenizer
    encode = ClientTokenizer(tokenizer).encode
    prompt = written(dialog, conversation_template(demo.dialog_format))
    ids = ChatFormat(tokenizer).encode_dialog_prompt(dialog)
    assert prompt_ids(prompt, demo.dialog_format) == encode(as_trained(prompt)) == ids
    assert encode(as_trained(written_by_main(dialog))) == ids


@pytest.mark.parametrize("kind", FINE_TUNES)
def test_prompts_of_a_chat_template_are_its_own(tmp_path, kind):
    dialog_format = format_of(tmp_path, kind)
    fields = conversation_template(dialog_format)
    assert set(fields["stop_token_ids"]) == dialog_format.tokenizer.stop_tokens
    for dialog in [*DIALOGS, HOSTILE]:
        assert prompt_ids(written(dialog, fields), dialog_format) == dialog_format.encode(dialog)
    text = "Once <|eot_id|><|start_header_id|>user"
    ids = ClientTokenizer(dialog_format.tokenizer).encode(text)
    assert prompt_ids(text, dialog_format) == ids, "a text stays a text"


def test_a_model_without_a_chat_template_says_so_in_the_answer(demo, monkeypatch):
    monkeypatch.setattr(demo, "dialog_format", MissingFormat(demo.tokenizer))
    app = make_worker(demo)

    async def scenario():
        conv = (await post(app, "/worker_get_conv_template"))["conv"]
        prompt = written([FRANCE], conv)
        assert (await post(app, "/count_token", prompt=prompt))["count"] > 5
        report = await post(app, "/worker_generate", prompt=prompt)
        assert report["error_code"] == 40302 and "--chat_template" in report["text"]
        plain = await post(app, "/worker_generate", prompt="a", max_new_tokens=1)
        assert plain["finish_reason"] == "length"

    asyncio.run(scenario())


def test_other_texts_stay_as_they_are():
    half_a_chat = NO_SYSTEM + "  the answer begins "
    for text in ("", " a: \n", "<|eot_id|> a ", half_a_chat, "<|start_header_id|> no end"):
        assert as_trained(text) == text


def test_stream_generate_and_what_the_controller_asks(demo):
    app = make_worker(demo)
    prompt = written([FRANCE], conversation_template(demo.dialog_format))
    params = {"prompt": prompt, "temperature": 0, "max_new_tokens": 40, "echo": False}

    async def scenario():
        reports = await stream(app, **params).reports()
        answer = demo.chat_completion([[FRANCE]], temperature=0)[0]["generation"]["content"]
        assert reports[-1]["text"] == reports[-2]["text"] == answer
        assert [r["finish_reason"] for r in reports[-2:]] == [None, "stop"], "the reason is alone"
        texts = [report["text"] for report in reports]
        assert len(set(texts)) > 3 and texts == sorted(texts, key=len), "it comes in parts"
        assert await post(app, "/worker_generate", **params) == reports[-1]
        count = await post(app, "/count_token", prompt=prompt)
        assert count == {"count": reports[-1]["usage"]["prompt_tokens"], "error_code": 0}
        assert await post(app, "/model_details") == {"context_length": demo.llm_engine.max_seq_len}
        assert (await post(app, "/worker_get_conv_template"))["conv"] == conversation_template(
            demo.dialog_format
        )
        status = {"model_names": ["demo"], "speed": 1, "queue_length": 0}
        assert await post(app, "/worker_get_status") == status == app.status()

    asyncio.run(scenario())


def test_errors_are_reports_that_fastchat_and_openai_clients_show(demo):
    app = make_worker(demo)

    async def scenario():
        cases: list[tuple[int, str, dict]] = [
            (40302, "presence_penalty=9", {"prompt": "a", "presence_penalty": 9.0}),
            (40302, "max_new_tokens", {"prompt": "a", "max_new_tokens": -1}),
            (40302, "leaves no space", {"prompt": "a " * 600}),
            (40302, "stop", {"prompt": "a", "stop": 5}),
            (40302, "prompt", {}),
        ]
        for code, named, params in cases:
            report = await post(app, "/worker_generate", **params)
            assert report["error_code"] == code and named in report["text"]
            assert report["error"]["message"] == report["text"]
            assert await stream(app, **params).reports() == [report]
        refused = await post(app, "/worker_get_embeddings", input=["a"])
        assert refused["error_code"] == 40301 and "does not compute embeddings" in refused["text"]
        assert (await post(app, "/count_token"))["error_code"] == 40001
        assert app.status()["queue_length"] == 0

    asyncio.run(scenario())


def test_fastchat_has_no_key_and_needs_none(demo):
    """FastChat has no key and needs none for its own routes.

    Only those are open. A request that is not FastChat's is refused as on any route.
    """

    async def scenario():
        worker = make_worker(demo)
        keys: dict[str, Any] = {"api_keys": ["secret"]}
        for path, method, body, status in (
            ("/worker_get_status", "POST", b"", 200),
            ("/worker_get_status", "GET", b"", 405),
            ("/worker_generate", "POST", b"{", 400),
            ("/worker_generate", "POST", b"[1]", 400),
            ("/v1/models", "GET", b"", 401),
        ):
            found, _ = await Client(worker, path, body, method, **keys).whole()
            assert found == status, path

    asyncio.run(scenario())


def test_a_client_that_leaves_aborts_its_request(demo):
    app = make_worker(demo)
    core = demo.llm_engine.core
    long = {"prompt": "Once upon a time", "temperature": 0, "max_new_tokens": 400, "stop": "\0"}

    async def scenario():
        first = stream(app, **long)
        await asyncio.wait_for(first.got_part.wait(), LIMIT_S)
        assert app.status()["queue_length"] == 1
        first.left.set()
        await asyncio.wait_for(first.task, LIMIT_S)
        assert len(first.parts) < 400 and app.status()["queue_length"] == 0
        after = await post(app, "/worker_generate", prompt="a", max_new_tokens=2)
        assert after["finish_reason"] == "length"

    asyncio.run(scenario())
    assert not core.scheduler.running and not core.scheduler.waiting


def test_a_full_queue_and_a_server_that_ends_are_reports(demo):
    app = make_worker(demo, max_queue=1)

    async def scenario():
        n = demo.model.params.max_batch_size
        many = stream(app, prompt="Once upon a time", max_new_tokens=400, n=n, temperature=1.0)
        await asyncio.wait_for(many.got_part.wait(), LIMIT_S)
        (full,) = await stream(app, prompt="a", n=2, temperature=1.0).reports()
        assert full["error_code"] == 50001 and "queue is full" in full["text"]
        app.service.drain()
        await asyncio.to_thread(app.service.close)
        last = (await many.reports())[-1]
        assert last["error_code"] == 50001 and "shutting down" in last["text"]
        late = await post(app, "/worker_generate", prompt="a")
        assert late["error_code"] == 50001

    asyncio.run(scenario())


def test_a_controller_that_is_away_or_forgets_is_told_again(demo, monkeypatch, caplog):
    posts: list[tuple[str, dict]] = []
    answers = iter([
        OSError("refused"), OSError("refused"), None,  # unavailable twice, then registered
        {"exist": True}, {"exist": False}, None,  # known, forgotten, registered again
    ])  # fmt: skip
    done = threading.Event()

    def post_to(url, body):
        posts.append((url, body))
        answer = next(answers, None)
        if answer is None and len(posts) >= 6:
            done.set()
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def scenario():
        worker = dataclasses.replace(make_worker(demo), interval_s=0.001)
        task = asyncio.create_task(worker.stay_registered())
        assert await asyncio.to_thread(done.wait, LIMIT_S)
        task.cancel()

    monkeypatch.setattr(fastchat, "_post", post_to)
    asyncio.run(scenario())
    paths = [url.removeprefix("http://c/") for url, _ in posts[:6]]
    register, beat = "register_worker", "receive_heart_beat"
    assert paths == [register, register, register, beat, beat, register]
    assert posts[2][1]["worker_status"]["model_names"] == ["demo"]
    assert posts[3][1] == {"worker_name": "http://w", "queue_length": 0}
    assert caplog.text.count("refused") == 1, "said once"


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["--fastchat_controller", "http://c", "--host", "0.0.0.0", "--api_key", "k"],
         "--worker_address"),
        (["--fastchat_controller", "localhost:21001"], "http://"),
        (["--worker_address", "localhost:8000"], "http://"),
    ],
)  # fmt: skip
def test_a_wrong_flag_ends_the_worker_early(capsys, words, named):
    assert cli.main(["serve", *words]) == 2
    assert named in capsys.readouterr().err


def test_a_wrong_heartbeat_ends_the_worker_early(monkeypatch, capsys):
    monkeypatch.setenv("FASTCHAT_WORKER_HEART_BEAT_INTERVAL", "soon")
    assert cli.main(["serve", "--fastchat_controller", "http://c"]) == 2
    assert "'soon'" in capsys.readouterr().err


class Controller(http.server.BaseHTTPRequestHandler):
    """A stand-in for FastChat's controller: it records what the worker reports."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.said.put((self.path, body))  # type: ignore[attr-defined]
        answer = json.dumps({"exist": True}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: Any) -> None: ...


@contextlib.contextmanager
def controller() -> Iterator[tuple[str, queue.Queue]]:
    """The address of a controller, and a queue of the reports that it receives."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Controller) as server:
        server.said = queue.Queue()  # type: ignore[attr-defined]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}", server.said  # type: ignore[attr-defined]
        server.shutdown()


def open_stream(url: str, **params: Any) -> Any:
    kind = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(params).encode(), kind)
    return urllib.request.urlopen(request, timeout=LIMIT_S)


def ask(url: str, **params: Any) -> bytes:
    with open_stream(url, **params) as response:
        return response.read()


@pytest.mark.dist
def test_two_ranks_are_one_worker(demo, tmp_path):
    """Two ranks are one worker: rank 0 alone registers, serves, refuses and drains."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    prompt = written([FRANCE], conversation_template(demo.dialog_format))
    greedy = {"prompt": prompt, "temperature": 0, "max_new_tokens": 40, "echo": False}
    flags = ("--served_model_name", "demo", "--dtype", "fp32", "--max_seq_len", "512")
    env = environment(FASTCHAT_WORKER_HEART_BEAT_INTERVAL="1")
    with contextlib.ExitStack() as stack:
        address, said = stack.enter_context(controller())
        server = stack.enter_context(
            run_server(
                *flags, "--fastchat_controller", address, launcher=launcher, env=env, cwd=tmp_path
            )
        )
        path, card = said.get(timeout=START_LIMIT_S)
        assert path == "/register_worker" and card["worker_status"]["model_names"] == ["demo"]
        assert card["multimodal"] is False
        url = card["worker_name"]
        assert url == server.url
        pool = stack.enter_context(ThreadPoolExecutor(4))
        asked = [pool.submit(ask, f"{url}/worker_generate", **greedy) for _ in range(3)]
        bad = json.loads(ask(f"{url}/worker_generate", prompt="a", top_p=7))
        assert bad["error_code"] == 40302 and "top_p" in bad["text"]
        answer = demo.chat_completion([[FRANCE]], temperature=0)[0]["generation"]["content"]
        assert [json.loads(a.result())["text"] for a in asked] == [answer] * 3
        while (beat := said.get(timeout=LIMIT_S))[1]["queue_length"]:
            pass  # it was sent while they ran
        assert beat == ("/receive_heart_beat", {"worker_name": url, "queue_length": 0})
        stream = open_stream(f"{url}/worker_generate_stream", **greedy)
        stream.read(1)
        server.process.send_signal(signal.SIGTERM)
        assert json.loads(stream.read().split(b"\0")[-2])["text"] == answer, "it is finished"
        log = server.ended()[1]
    assert "error:" not in log and log.count("registered with the controller") == 1, log
    assert {path for path, _ in said.queue} <= {"/receive_heart_beat"}
