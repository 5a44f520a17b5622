"""`llama batch --url`: real servers and clients in separate processes, and kills of both.

The oracle is the same job on the engine: a server answers a line as the engine does.
"""

import contextlib
import http.server
import json
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.batch import answers, written
from helpers.launch import environment
from helpers.ports import reserved_port
from helpers.server import run_server
from helpers.waiting import num_lines, wait_until
from llama.cli import main
from llama.cli.batch.loop import BatchReport
from llama.cli.batch.server_job import run_server_batch
from llama.cli.client import ServerError
from llama.cli.model import sampling_params

SERVER = ("--max_seq_len", "512", "--dtype", "fp32", "--device", "cpu", "--api_key", "k")
NUM_LINES = 60


def lines() -> list[Any]:
    """Return lines with sampled answers of different lengths, a chat, and two bad lines."""
    found: list[Any] = [
        {"custom_id": f"r{i}", "prompt": f"Once upon a time {i}", "max_tokens": 20 + 3 * (i % 9)}
        for i in range(NUM_LINES)
    ]
    found[3] = {"custom_id": "r3", "messages": [{"role": "user", "content": "Tell me a story."}]}
    found[5] = "{bad"
    found[7] = {"custom_id": "r7", "prompt": "x", "unknown": 1}
    return found


def outcome(records: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the record of each custom_id, each of which occurs once."""
    found = {}
    for record in records:
        assert record["custom_id"] not in found, "an id is there twice"
        response, error = record["response"], record["error"]
        found[record["custom_id"]] = response["body"]["choices"] if response else error["line"]
    return found


def of_file(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def start_job(folder: Path, url: str, *flags: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "llama", "batch", str(folder / "in"), str(folder / "out")]
    return subprocess.Popen(
        [*command, "--url", url, "--max_gen_len", "40", "--concurrency", "4", *flags],
        env=environment(LLAMA_API_KEY="k"), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_for_lines(path: Path, count: int, process: subprocess.Popen) -> None:
    wait_until(lambda: process.poll() is not None or num_lines(path) >= count)


def kill_clients(folder: Path, url: str) -> None:
    """Start the job four times, and kill each after some more lines."""
    rng = random.Random(5)
    for kill in range(4):
        job = start_job(folder, url, "--resume")
        wait_for_lines(folder / "out", 5 * kill + rng.randint(0, 2), job)
        job.kill()
        job.communicate()


def test_kills_of_client_and_server_lose_and_double_nothing(demo, tmp_path):
    """Kills of client and server lose and double nothing.

    The client is killed four times and resumed; then the server is killed, and another one starts
    on the same port. After SIGTERM the client finishes running requests and exits with 0.
    """
    wanted = outcome(answers(demo, tmp_path, lines(), max_gen_len=40))
    (tmp_path / "out").unlink()
    out = tmp_path / "out"
    with reserved_port() as port:
        url = f"http://127.0.0.1:{port}/v1/"
        at_port = (*SERVER, "--port", str(port))
        with run_server(*at_port) as server:
            kill_clients(tmp_path, url)
            job = start_job(tmp_path, url, "--resume")
            wait_for_lines(out, 30, job)
            job.send_signal(signal.SIGTERM)
            _, told = job.communicate(timeout=60)
            assert (job.returncode, "stopped by a signal" in told) == (0, True), told
            before = len(of_file(out))
            assert 30 <= before < NUM_LINES
            job = start_job(tmp_path, url, "--resume", "--concurrency", "1")
            wait_for_lines(out, before + 1, job)
            server.process.kill()
            server.process.wait()
            assert job.poll() is None and len(of_file(out)) < NUM_LINES
        with run_server(*at_port):
            _, told = job.communicate(timeout=60)
            assert job.returncode == 0, told
        assert "2 errors in the file" in told
        assert outcome(of_file(out)) == wanted


class Flaky(http.server.BaseHTTPRequestHandler):
    """A server that answers each request with the next item of `script`: a status, or a failure."""

    protocol_version = "HTTP/1.1"
    script: list[Any]
    seen: list[dict[str, Any]]

    def do_GET(self) -> None:
        self.reply(200, {"data": [{"id": "m"}, {"id": "other", "max_model_len": 8}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.append(body)
        action = self.script.pop(0) if self.script else 200
        if action == "lost":  # in the middle of an answer
            self.send_response(200)
            self.send_header("Content-Length", "100")
            self.end_headers()
            self.close_connection = True
        elif action == "hangs up":
            self.close_connection = True
        elif action == "text":
            self.reply(200, None)
        else:
            text = [{"text": body.get("prompt", "")}]
            error = {"error": {"message": "no, " + "x" * 5000}}
            self.reply(action, {"choices": text} if action == 200 else error)

    def reply(self, status: int, body: Any) -> None:
        data = b"<html>" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        if status == 503:
            self.send_header("Retry-After", "0")
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def flaky(*script: Any) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    seen: list[dict[str, Any]] = []
    handler = type("Scripted", (Flaky,), {"script": list(script), "seen": seen})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", seen
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def run(folder: Path, url: str, asked: list[Any], **kwargs: Any) -> list[dict[str, Any]]:
    (folder / "in").write_bytes(written(asked))
    (folder / "out").unlink(missing_ok=True)
    paths = str(folder / "in"), str(folder / "out")
    report = run_server_batch(url, *paths, sampling_params(), **kwargs)
    records = of_file(folder / "out")
    assert report == BatchReport(len(records), sum(r["error"] is not None for r in records))
    return records


def test_what_fails_for_now_is_sent_again(tmp_path, monkeypatch):
    """Temporary failures are retried with the same request: 503, a lost connection, no answer."""
    monkeypatch.setattr("llama.cli.batch.server_job._FIRST_WAIT_S", 0.01)
    with flaky(503, "lost", "hangs up", 503, 502) as (url, seen):
        (record,) = run(tmp_path, url, ["hello"], model="other")
    assert record["response"]["body"] == {"choices": [{"text": "hello"}]}
    assert len(seen) == 6 and all(body == seen[0] for body in seen)
    defaults = {"model": "other", "prompt": "hello", "temperature": 0.6, "top_p": 0.9, "seed": 1}
    assert seen[0] == defaults


def test_what_fails_for_good_is_an_error_record(tmp_path, monkeypatch):
    """Permanent failures give error records.

    A refusal gives one at once, a lasting failure after `retry_s`; the other lines are answered.
    """
    monkeypatch.setattr("llama.cli.batch.server_job._FIRST_WAIT_S", 0.01)
    asked = [{"prompt": "a", "temperature": None, "seed": 5}, {"prompt": "b"}, {"prompt": "c"}]
    with flaky(400, 200, "text", *[503] * 1000) as (url, seen):
        first, second, third = run(tmp_path, url, asked, concurrency=1, retry_s=0.3)
        assert len(run(tmp_path, url, [{"prompt": "d"}], retry_s=0.3)) == 1
    assert 5 < len(seen) < 100, "the waits grow"
    assert (first["error"]["code"], first["error"]["line"]) == ("invalid_request", 1)
    assert "no, xxx" in first["error"]["message"] and len(first["error"]["message"]) <= 1000
    assert (
        second["error"] is None and "is it a server with OpenAI's API" in third["error"]["message"]
    )
    assert (seen[0]["temperature"], seen[0]["seed"], seen[1]["model"]) == (0.6, 5, "m")


def test_a_server_that_cannot_be_used_ends_the_job(tmp_path, capsys):
    """A server that cannot be used ends the job.

    A wrong key is not the fault of the lines: no record is written, and the exit code is 2.
    """
    with flaky(401) as (url, _), pytest.raises(ServerError, match="refuses the key"):
        run(tmp_path, url, ["a"])
    assert not (tmp_path / "out").read_bytes()
    with reserved_port() as port:
        for words, message in [
            (["--url", f"http://127.0.0.1:{port}"], "cannot be reached"),
            (["--url", "localhost:8000"], "must begin with http://"),
            (["--url", "http://x", "--dtype", "fp32"], "leave out --dtype"),
            (["--url", "http://x", "--concurrency", "0"], "concurrency: 0"),
        ]:
            assert main(["batch", str(tmp_path / "in"), str(tmp_path / "new"), *words]) == 2
            assert message in capsys.readouterr().err
    with (
        flaky() as (url, _),
        pytest.raises(ValueError, match="no model z: its models are m, other"),
    ):
        run(tmp_path, url, ["a"], model="z")


def test_torch_is_not_imported(tmp_path):
    (tmp_path / "in").write_text("hello\n")
    code = (
        "import sys; from llama.cli import main; code = main(sys.argv[1:]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    with flaky() as (url, _):
        words = ["batch", str(tmp_path / "in"), str(tmp_path / "out"), "--url", url]
        done = subprocess.run(
            [sys.executable, "-c", code, *words], env=environment(), capture_output=True,
            text=True, timeout=60, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
