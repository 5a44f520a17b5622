"""A server whose APIs are in other processes than its model: limits of the whole, and failures."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.launch import PROGRAMS, environment
from helpers.processes import children, is_running
from helpers.server import RunningServer, run_server
from helpers.waiting import wait_until
from helpers.web import web

FLAGS = ("--max_seq_len", "2048", "--dtype", "fp32", "--device", "cpu")
BODY: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 200, "ignore_eos": True, "seed": 1}
KEYS = ("first-key", "second-key")


def num_unfinished(server: RunningServer, key: str = "") -> int:
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return int(web.get(f"{server.url}/load", headers=headers).json()["server_load"])


class Stream:
    """A stream that a thread reads: its text, whether it is complete, and its error."""

    def __init__(self, server: RunningServer, **body: Any) -> None:
        self.text = ""
        self.is_complete = False
        self.error = ""
        self.ended = 0.0
        self._url = f"{server.url}/v1/completions"
        self._body = {**BODY, "stream": True, **body}
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        try:
            with web.stream("POST", self._url, json=self._body, timeout=60) as response:
                for line in response.iter_lines():
                    if '"error"' in line:
                        self.error = line
                    elif line == "data: [DONE]":
                        self.is_complete = not self.error
                    elif line:
                        event = json.loads(line.removeprefix("data: "))
                        self.text += event["choices"][0]["text"]
        except httpx.TransportError as error:
            self.error = repr(error)
        self.ended = time.monotonic()

    def join(self) -> "Stream":
        self._thread.join(60)
        assert self.ended, "it hangs"
        return self


@pytest.fixture(scope="module")
def impatient(long_demo_dir) -> Iterator[RunningServer]:
    """A server with two API processes, which are given up after a second of silence."""
    program = (str(PROGRAMS / "impatient_server.py"),)
    with run_server(long_demo_dir, *FLAGS, "--api_processes", "2", program=program) as running:
        yield running


def test_api_processes_have_no_torch_and_share_the_connections(impatient):
    pids = children(impatient.process.pid)
    assert len(pids) == 2
    for pid in pids:
        assert "torch" not in Path(f"/proc/{pid}/maps").read_text()
        assert not re.search(rb"\0(RANK|WORLD_SIZE|LLAMA_LAUNCHER)=", environ(pid))
    streams = [Stream(impatient, seed=i) for i in range(8)]
    wait_until(lambda: num_unfinished(impatient) == 8)
    counts = [len(list(Path(f"/proc/{pid}/fd").iterdir())) for pid in pids]
    assert abs(counts[0] - counts[1]) <= 2, "each has four of them"
    assert all(stream.join().is_complete for stream in streams)


def environ(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_an_api_process_that_dies_takes_its_own_requests_alone(impatient, number):
    """The requests of another one go on, its pages are returned, and another one is started."""
    url = f"{impatient.url}/metrics"
    wanted = Stream(impatient).join().text
    before = children(impatient.process.pid)
    streams = [Stream(impatient) for _ in range(12)]
    wait_until(lambda: all(stream.text for stream in streams))
    os.kill(before[0], number)
    ends = [stream.join() for stream in streams]
    complete = [stream for stream in ends if stream.is_complete]
    assert {stream.text for stream in complete} == {wanted}
    assert 4 <= len(complete) <= 8, "about a half of them"
    wait_until(lambda: num_unfinished(impatient) == 0)
    wait_until(lambda: len(set(children(impatient.process.pid)) - {before[0]}) == 2)
    assert not is_running(before[0])
    figures = web.get(url).text
    assert "llama:kv_cache_usage_perc 0.0" in figures
    assert Stream(impatient).join().text == wanted


def test_counts_of_an_ended_process_are_kept(impatient):
    """The metrics are sums over all processes, also over those that have ended."""

    def num_answers() -> float:
        figures = web.get(f"{impatient.url}/metrics").text
        found = re.search(r'request_success_total\{finished_reason="length"\} (\S+)', figures)
        buckets = re.search(r'e2e_request_latency_seconds_bucket\{le="\+Inf"\} (\S+)', figures)
        assert found and buckets and float(buckets[1]) >= float(found[1])
        return float(found[1])

    first = num_answers()
    for i in range(6):
        web.post(f"{impatient.url}/v1/completions", json={**BODY, "max_tokens": 2, "seed": i})
    assert num_answers() == first + 6
    pids = children(impatient.process.pid)
    time.sleep(1.5)  # they send their counts each second
    os.kill(pids[1], signal.SIGKILL)
    wait_until(lambda: not is_running(pids[1]))
    assert num_answers() >= first + 6


def test_a_format_is_compiled_where_the_masks_are(impatient):
    url = f"{impatient.url}/v1/completions"
    body = {**BODY, "ignore_eos": False, "max_tokens": 20}
    answer = web.post(url, json={**body, "structured_outputs": {"choice": ["red", "blue"]}})
    assert answer.json()["choices"][0]["text"] in ("red", "blue")
    wrong = {**body, "structured_outputs": {"grammar": "start: nothing"}, "stream": True}
    refused = web.post(url, json=wrong)
    assert refused.status_code == 400
    assert "structured_outputs.grammar cannot be used" in refused.text


def test_the_end_of_the_engine_reaches_every_client(long_demo_dir):
    """kill -9 of the engine's process: each client gets an error, and no process is left."""
    with run_server(long_demo_dir, *FLAGS, "--api_processes", "2") as server:
        pids = children(server.process.pid)
        streams = [Stream(server, max_tokens=2000) for _ in range(6)]
        wait_until(lambda: all(stream.text for stream in streams))
        server.process.kill()
        for stream in streams:
            assert "server_error" in stream.join().error
        wait_until(lambda: not any(map(is_running, pids)))
        assert server.process.wait(10) == -signal.SIGKILL


def test_sigterm_lets_requests_end(long_demo_dir):
    """SIGTERM to all processes, as systemd sends it: new requests get 503, running ones end."""
    flags = (*FLAGS, "--api_processes", "2", "--drain_s", "100")
    with run_server(long_demo_dir, *flags) as server:
        pids = children(server.process.pid)
        streams = [Stream(server, max_tokens=300) for _ in range(4)]
        wait_until(lambda: all(stream.text for stream in streams))
        for pid in (*pids, server.process.pid):
            os.kill(pid, signal.SIGTERM)
        wait_until(lambda: web.get(f"{server.url}/ready").status_code == 503)
        refused = web.post(f"{server.url}/v1/completions", json=BODY)
        assert refused.status_code == 503
        assert all(stream.join().is_complete for stream in streams)
        assert server.process.wait(30) == 0
        assert not any(map(is_running, pids))


def test_limits_are_those_of_the_whole_server(long_demo_dir, tmp_path):
    """The queue, the connections and the tenants are the same in all processes."""
    keys = tmp_path / "keys"
    keys.write_text("\n".join(KEYS))
    operator = tmp_path / "operator"
    operator.write_text("operator")
    limits = ("--max_batch_size", "2", "--max_queue", "2", "--max_connections", "12")
    files = ("--api_key_file", str(keys), "--metrics_key_file", str(operator))
    with run_server(long_demo_dir, *FLAGS, *limits, *files, "--api_processes", "2") as server:
        url = f"{server.url}/v1/completions"
        headers = [{"Authorization": f"Bearer {key}"} for key in KEYS]
        prompt = list(range(300, 400))
        cached: list[int] = []
        with httpx.Client() as one, httpx.Client() as other:  # of different processes
            for client, header in ((one, 0), (other, 0), (one, 1), (other, 1)):
                body = {"prompt": prompt, "max_tokens": 1}
                answer = client.post(url, json=body, headers=headers[header], timeout=60).json()
                cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert cached == [0, 96, 0, 96]

        found: list[int] = []

        def ask() -> None:
            body = {**BODY, "max_tokens": 300}
            found.append(web.post(url, json=body, headers=headers[0], timeout=60).status_code)

        threads = [threading.Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(found) == [200] * 4 + [503] * 4
        figures = web.get(f"{server.url}/metrics", headers={"Authorization": "Bearer operator"})
        assert "llama:request_refused_total 4.0" in figures.text

        host, _, port = server.url.removeprefix("http://").rpartition(":")
        sockets = [socket.create_connection((host, int(port))) for _ in range(9)]
        refused = web.get(f"{server.url}/health")
        assert refused.status_code == 503
        assert "9 connections are open from one address" in refused.text
        pids = children(server.process.pid)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))
        # Their connections count no more, and whoever comes now waits for the next process.
        assert web.get(f"{server.url}/health").status_code == 200
        assert web.post(url, json=body, headers=headers[0]).status_code == 200
        for each in sockets:
            each.close()


def test_api_processes_that_never_start_end_the_server(long_demo_dir):
    """Five deaths of processes that were not ready end the server, and the log says so."""
    command = [sys.executable, str(PROGRAMS / "impatient_server.py"), "serve", long_demo_dir]
    flags = (*FLAGS, "--port", "0", "--api_processes", "1")
    env = environment(NO_API_PROCESS="1")
    ended = subprocess.run(
        [*command, *flags], env=env, stderr=subprocess.PIPE, text=True, timeout=120
    )
    assert ended.returncode == 1
    assert "5 API processes ended before they were ready: the server ends" in ended.stderr


@pytest.mark.dist
def test_ranks_lead_the_engine(long_demo_dir):
    """With two ranks, rank 0 is the engine's process, and no API process counts as a rank."""
    asked = {**BODY, "max_tokens": 20, "temperature": 0}
    texts = []
    for flags in ((), ("--ranks", "2", "--api_processes", "1")):
        with run_server(long_demo_dir, *FLAGS, *flags) as server:
            texts.append(web.post(f"{server.url}/v1/completions", json=asked).json()["choices"])
            assert server.stop() == 0
    assert texts[0] == texts[1]
