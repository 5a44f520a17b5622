"""The metrics of /metrics are right, and the dashboard uses no others."""

import json
import os
import re
import signal
import subprocess
import threading
from unittest.mock import Mock

import pytest
from prometheus_client.parser import text_string_to_metric_families

from helpers.launch import REPO
from helpers.server import RunningServer, run_server
from helpers.waiting import wait_until
from helpers.web import web
from llama.ranks.collectives import ModelParallel
from llama.ranks.peers import PeerInfo, Peers
from llama.ranks.placement import Placement
from llama.ranks.rendezvous import Rendezvous
from llama.ranks.watch import Watch
from llama.server.metrics import Metrics
from llama.server.summed_metrics import SummedMetrics, samples_of

NAMES = """
    num_requests_running num_requests_waiting kv_cache_usage_perc prefix_cache_queries_total
    prefix_cache_hits_total time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket
    e2e_request_latency_seconds_bucket request_success_total num_preemptions_total
    step_seconds_sum step_seconds_count rank_alive
""".split()


def figures(url: str) -> dict[tuple[str, ...], float]:
    """Return (name without llama:, its labels' values) -> value."""
    found = {}
    for family in text_string_to_metric_families(web.get(f"{url}/metrics").text):
        for sample in family.samples:
            found[(sample.name.removeprefix("llama:"), *sample.labels.values())] = sample.value
    return found


@pytest.fixture(scope="module")
def own_server():
    """A separate server, whose metrics start at 0; two sequences run at once."""
    with run_server("--max_seq_len", "512", "--dtype", "fp32", "--max_batch_size", "2") as running:
        yield running


def test_figures_count_requests_and_tokens(own_server):
    """Metrics count requests and tokens.

    Two prompts have answers of 7 and 2 tokens; the second time the first prompt is cached. Of 5
    requested sequences 2 run and 3 wait. The log has a line for each request, without the prompt.
    """
    url = f"{own_server.url}/v1/completions"
    prompt = [7] * 40
    body = {"prompt": [prompt, [5]], "max_tokens": 3, "ignore_eos": True}
    for _ in range(2):
        answer = web.post(url, json=body, headers={"X-Request-Id": "mine"}, timeout=60)
        assert answer.headers["x-request-id"] == "mine"
    now = figures(own_server.url)
    assert set(NAMES) <= {name for name, *_ in now}
    assert now["request_success_total", "length"] == 4
    assert now["generation_tokens_total",] == 12
    assert now["prefix_cache_queries_total",] == 82
    assert now["prompt_tokens_total",] == 82 - 32, "those that were computed"
    assert now["prefix_cache_hits_total",] == 32
    assert now["time_to_first_token_seconds_count",] == 4
    assert now["inter_token_latency_seconds_count",] <= 8
    assert now["e2e_request_latency_seconds_count",] == 2
    assert now["rank_alive", "0"] == 1
    assert now["step_seconds_count",] >= 6 and now["step_seconds_sum",] > 0
    answered = " mine: 200, 41 prompt tokens ("
    wait_until(lambda: len(lines_with(own_server, answered)) == 2)
    assert "6 generated, ended by length" in lines_with(own_server, answered)[1]

    long = {"prompt": "Xylophone", "max_tokens": 400, "ignore_eos": True, "n": 5, "stream": True}
    with web.stream("POST", url, json=long, timeout=60) as response:
        assert response.status_code == 200, response.read()
        parts = response.iter_bytes()
        next(parts)
        now = figures(own_server.url)
        assert (now["num_requests_running",], now["num_requests_waiting",]) == (2, 3)
        assert 0 < now["kv_cache_usage_perc",] <= 1
    assert web.post(url, json={"prompt": "Xylophone", "n": 99}).status_code == 400
    assert "Xylophone" not in "".join(own_server.log)
    wait_until(lambda: lines_with(own_server, ": 400, for 'n', POST '/v1/completions'"))


def lines_with(server: RunningServer, text: str) -> list[str]:
    """Wait for the lines of the log with a text; a thread reads the log, so they may come late."""
    return [line for line in server.log if text in line]


def test_a_name_of_a_request_may_come_twice(own_server):
    """Two concurrent requests may have the same name, because the client chooses it."""
    url, answers = f"{own_server.url}/v1/completions", []

    def ask() -> None:
        headers = {"X-Request-Id": "same"}
        body = {"prompt": "a", "max_tokens": 30}
        answers.append(web.post(url, json=body, headers=headers, timeout=60).status_code)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 3


def test_a_rank_that_left_or_was_killed_is_not_alive():
    """A rank that left or was killed is not alive in the metrics.

    As rank 0 sees it, rank 1 reported that it leaves, and rank 2 is another process, which is gone.
    """
    zero = Peers(0)
    own = zero.own
    with subprocess.Popen(["sleep", "60"]) as process:
        zero.add(PeerInfo(1, own.host, os.getpid(), own.machine, 3))
        zero.add(PeerInfo(2, own.host, process.pid, own.machine, 3))
        watch = Watch(zero, range(3), Rendezvous(zero, 3, Mock(), "", 60.0, 30.0))
        parallel = ModelParallel(Placement(size=3), watch=watch)
        assert parallel.ranks_alive() == [True, True, True]
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED)
        for _ in range(2):
            zero.note_stops(0.5)
        assert parallel.ranks_alive() == [True, True, False]
        process.send_signal(signal.SIGCONT)
        os.waitid(os.P_PID, process.pid, os.WCONTINUED)
        zero.note_stops(0.5)
        zero.all[1].has_left = True
        zero.note_ends()
        assert parallel.ranks_alive() == [True, False, True]
        process.kill()
        process.wait()
        zero.note_ends()
        assert parallel.ranks_alive() == [True, False, False]
    zero.close()
    assert ModelParallel().ranks_alive() == [True]


def test_a_process_that_ends_while_its_samples_arrive_is_counted_once():
    own = Metrics()
    own.refused.inc(3)
    summed = SummedMetrics()
    summed.begin("one")
    summed.set("one", samples_of(own))
    summed.end("one")
    summed.set("one", samples_of(own))
    assert b"llama:request_refused_total 3.0" in summed.text()


def test_the_dashboard_asks_for_figures_that_are_there(own_server):
    web.post(f"{own_server.url}/v1/completions", json={"prompt": "a", "max_tokens": 1})
    there = {name for name, *_ in figures(own_server.url)}
    dashboard = json.loads((REPO / "torchrun_examples" / "grafana_dashboard.json").read_text())
    asked = set()
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            names = re.findall(r"llama:(\w+)", target["expr"])
            assert names, target
            asked |= set(names)
    assert asked <= there, asked - there
    assert set(NAMES) <= asked
