"""The effects of a failing step on clients and the server, and of one bad row on the others."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.launch import PROGRAMS, environment
from helpers.server import RunningServer, post_and_leave, run_server
from helpers.waiting import wait_until
from helpers.web import web

sys.path.insert(0, str(PROGRAMS))
from faulty_server import NAN, RAISE

PROGRAM = (str(PROGRAMS / "faulty_server.py"),)
FLAGS = ("--max_seq_len", "2048", "--dtype", "fp32", "--device", "cpu")
LONG: dict[str, Any] = {"prompt": [5, 6, 7], "max_tokens": 2000, "ignore_eos": True}
LIMIT_S = 60.0  # generous: distinguishes a hang from a slow end
SLACK_S = 30.0  # slack for a busy machine


@pytest.mark.parametrize("num_ranks", [1, pytest.param(2, marks=pytest.mark.dist)])
def test_sigterm_while_the_model_is_loaded_is_an_end_in_order(num_ranks, long_demo_dir):
    """SIGTERM while the model is loaded ends the server in order.

    There is nothing to finish: the exit code is that of a drain, and no rank complains.
    """
    flags = [long_demo_dir, *FLAGS, "--port", "0", "--ranks", str(num_ranks)]
    process = subprocess.Popen(
        [sys.executable, *PROGRAM, "serve", *flags],
        env=environment(FAULT="load"), stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        for _ in range(num_ranks):
            while (line := process.stderr.readline()) != "reading\n":
                assert line, "it ended"
        if num_ranks > 1:  # the launcher may be descheduled between signalling the ranks
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            os.kill(int(children[-1]), signal.SIGTERM)
            time.sleep(0.3)
        process.terminate()
        assert process.wait(LIMIT_S) == 0
        assert process.stderr.read() == ""
    finally:
        process.kill()


@pytest.mark.parametrize("num_processes", ["0", "2"])
def test_a_row_that_fails_touches_no_other(long_demo_dir, num_processes):
    """A row that fails affects no other.

    With NaN in one row, that request alone gets 500, its neighbours get their usual answers, and
    the server goes on. Then a step fails: all requests get 500, and the process ends.
    """
    flags = (long_demo_dir, *FLAGS, "--api_processes", num_processes)
    with run_server(*flags, program=PROGRAM, env=environment(FAULT="raise")) as server:
        url = f"{server.url}/v1/completions"
        good = {"prompt": "Once upon a time", "max_tokens": 60, "temperature": 0}
        wanted = web.post(url, json=good, timeout=60).json()["choices"]
        asking = [_Asking(url, good) for _ in range(3)]
        bad = web.post(url, json={"prompt": [5, NAN], "max_tokens": 4}, timeout=60)
        assert (bad.status_code, "no token to choose" in bad.text) == (500, True)
        mixed = web.post(url, json={"prompt": [[5], [5, NAN]], "max_tokens": 90}, timeout=60)
        assert mixed.status_code == 500
        for each in asking:
            assert each.response().json()["choices"] == wanted
        assert web.get(f"{server.url}/health").status_code == 200
        figures = web.get(f"{server.url}/metrics").text
        assert 'llama:request_success_total{finished_reason="error"} 2.0' in figures
        _check_that_a_step_fails(server)
        code, log = server.ended()
        assert code == 1 and "made to fail" in log
        assert log.count("a step failed: the server ends") == 1
        assert log.count("RuntimeError: a step of the model failed") == 1


def test_a_step_that_fails_when_all_clients_have_left_ends_the_server(tmp_path, long_demo_dir):
    """A step that fails when all clients have left ends the server.

    The only client leaves while the step runs: nobody receives the error, but /health reports it,
    and the process ends.
    """
    go_on = tmp_path / "go_on"
    env = environment(FAULT="raise", FAULT_FILE=str(go_on))
    with run_server(long_demo_dir, *FLAGS, program=PROGRAM, env=env) as server:
        body = {"prompt": [5, RAISE], "max_tokens": 4}
        post_and_leave(f"{server.url}/v1/completions", body, go_on.with_suffix(".awaited").exists)
        with httpx.Client(base_url=server.url, timeout=LIMIT_S) as client:
            wait_until(lambda: client.get("/load").json() == {"server_load": 0})
            assert client.get("/health").status_code == 200, "the step still runs"
            go_on.touch()
            wait_until(lambda: client.get("/health").status_code == 503)
        code, log = server.ended()
        assert code == 1 and "made to fail" in log, log


@pytest.mark.dist
@pytest.mark.parametrize(("fault", "rank"), [("raise", None), ("kill", "1")])
def test_a_step_that_fails_on_ranks_answers_and_ends(fault, rank, long_demo_dir):
    """A step that fails on ranks gives an answer and ends the job.

    The model fails on both ranks; or rank 1 is gone, and rank 0 waits for it in the step.
    """
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    env = environment(FAULT=fault, **({} if rank is None else {"FAULT_RANK": rank}))
    with run_server(long_demo_dir, *FLAGS, launcher=launcher, program=PROGRAM, env=env) as server:
        figures = web.get(f"{server.url}/metrics").text
        assert 'llama:rank_alive{rank="1"} 1.0' in figures
        _check_that_a_step_fails(server)
        code, log = server.ended()
        assert code != 0
        assert log.count("\nerror: ") == 1, log


@pytest.mark.dist
def test_a_stopped_rank_of_an_idle_server_ends_it(long_demo_dir):
    """A stopped rank ends an idle server.

    There is no request: /ready is 503, the metrics name the rank, and the job ends.
    """
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    with run_server(long_demo_dir, *FLAGS, launcher=launcher, env=environment()) as server:
        with httpx.Client(base_url=server.url, timeout=LIMIT_S) as client:
            assert client.get("/ready").status_code == 200
            agent = Path(f"/proc/{server.process.pid}/task")
            ranks = [pid for file in agent.glob("*/children") for pid in file.read_text().split()]
            os.kill(int(max(ranks, key=int)), signal.SIGSTOP)  # the rank that was started last
            began = time.monotonic()
            wait_until(lambda: client.get("/ready").status_code == 503)
            assert 'llama:rank_alive{rank="1"} 0.0' in client.get("/metrics").text
        code, log = server.ended()
        assert code == 1 and time.monotonic() - began < 5 + SLACK_S
        assert log.count("\nerror: ") == 1 and "was stopped (by SIGSTOP or Ctrl-Z) for 3 s" in log


def _check_that_a_step_fails(server: RunningServer) -> None:
    """Check that every request in the step soon gets 500 in OpenAI's envelope, streaming or not.

    The server then reports that it is broken, or is gone.
    """
    url = f"{server.url}/v1/completions"
    answers = [_Asking(url, LONG) for _ in range(3)]
    wait_until(lambda: web.get(f"{server.url}/load").json() == {"server_load": len(answers)})
    with web.stream("POST", url, json=LONG | {"stream": True}, timeout=LIMIT_S) as response:
        parts = response.iter_text()
        first = next(parts)
        began = time.monotonic()
        answers.append(_Asking(url, {"prompt": [5, RAISE], "max_tokens": 4}))
        events = first + "".join(parts)
    assert events.endswith("data: [DONE]\n\n")
    assert '"error":{"message":"the model failed in this step' in events.split("\n\n")[-3]
    try:
        assert web.get(f"{server.url}/health").status_code == 503
    except httpx.TransportError:
        assert server.process.wait(LIMIT_S) != 0
    for each in answers:
        found = each.response()
        assert (found.status_code, found.json()["error"]["type"]) == (500, "server_error")
    assert time.monotonic() - began < LIMIT_S


class _Asking:
    """A POST in a thread of its own."""

    def __init__(self, url: str, body: dict[str, Any]) -> None:
        self._found: list[httpx.Response | Exception] = []
        self._thread = threading.Thread(target=self._ask, args=(url, body))
        self._thread.start()

    def _ask(self, url: str, body: dict[str, Any]) -> None:
        try:
            self._found.append(web.post(url, json=body, timeout=60))
        except httpx.HTTPError as e:
            self._found.append(e)

    def response(self) -> httpx.Response:
        self._thread.join(60)
        (found,) = self._found
        assert isinstance(found, httpx.Response), found
        return found
