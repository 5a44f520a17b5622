"""`llama chat --url`: a real server, and the command in its own process, in a pipe and a terminal.

The oracle is the same chat on the engine.
"""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from helpers.bodies import parse_body
from helpers.launch import environment
from helpers.prompts import FRANCE, JAPAN, STORY, replies
from helpers.server import RunningServer, run_server
from helpers.terminal import CTRL_C, Session
from helpers.waiting import wait_until
from helpers.web import web
from llama.cli.batch.server_job import with_defaults
from llama.cli.chat.server_session import chat_body, part_of
from llama.cli.chat.session import Part
from llama.cli.chat.stats import TurnStats
from llama.prompts.messages import read_messages
from llama.requests.request import Usage
from llama.sampling_params import SamplingParams
from llama.server.openai.models import TEXT_URL


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    flags = ("--max_seq_len", "512", "--dtype", "fp32", "--device", "cpu", "--api_key", "k")
    with run_server(*flags) as running:
        yield running


def chat(url: str, text: str, *flags: str, **variables: str) -> subprocess.CompletedProcess:
    """Run a chat without importing torch; the text is standard input."""
    code = (
        "import sys; from llama.cli import main; code = main(['chat', *sys.argv[1:]]); "
        "assert 'torch' not in sys.modules; sys.exit(code)"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "--url", url, "--temperature", "0", *flags], input=text,
        env=environment(**variables), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_answers_are_those_of_the_engine(server, demo):
    """Answers are the engine's over two turns, with settings and counts; a refusal changes no
    dialog.
    """
    asked = f"{FRANCE}\n/set max_gen_len 5000\nx\n/set max_gen_len none\n"
    done = chat(server.url, f"{asked}{JAPAN}\n/stats\n", LLAMA_API_KEY="k")
    assert done.stdout.splitlines() == replies(demo, FRANCE, JAPAN), done.stderr
    assert done.returncode == 0
    assert "max_tokens=5000 are more" in done.stderr and "was not kept" in done.stderr
    assert done.stderr.count(" of 512 tokens, ") == 3 and "turns 2" in done.stderr
    refused = chat(server.url, "x\n", "--api_key", "wrong")
    assert refused.returncode == 1 and "refuses the key" in refused.stderr


def test_a_full_context_leaves_out_the_oldest_turns(server):
    done = chat(server.url, f"{FRANCE}\n" * 25, "--api_key", "k")
    assert done.stderr.count("tokens/s") == 25, done.stderr
    assert "error" not in done.stderr and "oldest turns left out: " in done.stderr
    counts = [int(n) for n in re.findall(r"context (\d+) of 512 tokens", done.stderr)]
    assert 350 < max(counts) < 420, "turns are left out at three quarters of the context"


def test_ctrl_c_stops_the_answer_and_frees_the_server(server, demo):
    session = Session.__new__(Session)
    session.start(
        sys.executable, "-m", "llama", "chat", "--url", server.url, "--temperature=0",
        LLAMA_API_KEY="k",
    )  # fmt: skip
    try:
        session.command("/set min_tokens 490", "min_tokens 490")
        session.at_prompt(f"{STORY}\r")
        session.expect("Once upon a time")
        server.process.send_signal(signal.SIGSTOP)  # so that the answer does not end meanwhile
        session.keys(CTRL_C)
        session.expect("stopped | ")
        server.process.send_signal(signal.SIGCONT)
        headers = {"Authorization": "Bearer k"}
        load = f"{server.url}/load"
        wait_until(lambda: web.get(load, headers=headers).json() == {"server_load": 0})
        session.command("/clear", "are removed")
        session.command("/set min_tokens 0", "min_tokens 0")
        assert session.ask(FRANCE) == replies(demo, FRANCE)[0]
    finally:
        session.close()


def test_bodies_of_the_client_are_those_that_the_server_reads():
    dialog = [{"role": "user", "content": "x"}]
    params = SamplingParams(temperature=0.3, top_k=5, stop=["a", "b"], seed=2**63 - 1, max_tokens=9)
    sent = json.loads(json.dumps(chat_body(dialog, params, model="m")))
    read = parse_body(sent, SamplingParams(), chat=True)
    assert (read.params, read.messages, read.model) == (params, read_messages(dialog), "m")
    assert read.stream and read.has_usage
    plain = chat_body(dialog, SamplingParams(max_tokens=16), model="m")
    assert (plain["max_tokens"], plain["temperature"], plain["top_p"]) == (16, 1, 1)
    assert "max_tokens" not in chat_body(dialog, SamplingParams(max_tokens=None), model="m")
    given = {"prompt": "x", "top_p": None, "max_completion_tokens": 4}
    defaults = SamplingParams(top_p=0.5, max_tokens=7)
    body = with_defaults(TEXT_URL, given, defaults, model="m", seed=3)
    params = parse_body(body, SamplingParams(), chat=False).params
    assert (params.top_p, params.max_tokens, params.seed) == (0.5, 4, 3)


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_read_under_both_names(name):
    chunk = {"choices": [{"delta": {name: "so", "content": None}}]}
    assert part_of(chunk) == Part(new_reasoning="so")
    both = {"choices": [{"delta": {"reasoning_content": "so", "reasoning": "so", "content": "x"}}]}
    assert part_of(both) == Part("x", new_reasoning="so"), "not twice"
    assert part_of({"choices": [{"delta": {name: 7}}]}) == Part()


@pytest.mark.parametrize(
    "chunk", [None, [], {}, {"choices": None}, {"choices": [7]}, {"choices": [{"delta": 7}]}]
)
def test_chunks_of_other_servers_are_no_crash(chunk):
    assert part_of(chunk) == Part()


def test_the_speed_is_that_which_the_server_measured():
    """The speed is what the server measured.

    Chunks may arrive together: measured by arrival it would be thousands of tokens per second.
    """
    part = part_of({"choices": [], "timings": {"predicted_per_second": 250.5}})
    stats = TurnStats(1.0, 1.0001, Usage(30, 21, 16), part.rate)
    assert "| 250.5 tokens/s |" in stats.describe(None)
    assert part_of({"timings": {"predicted_per_second": None}}).rate is None
