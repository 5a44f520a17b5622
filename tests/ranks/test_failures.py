"""One rank fails, stalls or leaves, in real processes: the job ends, and one message says why.

Each rank is a process of programs/failing.py, started as torchrun would start it; where torchrun
takes part, it is the real torchrun. Limits of time distinguish a hang from a slow end.
"""

import contextlib
import json
import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import IO, Any

import pytest

from helpers.launch import PROGRAMS, environment
from helpers.ports import reserved_port
from llama.ranks.errors import NotMetError
from llama.ranks.meeting import _open_store, meet_all
from llama.ranks.peers import PeerInfo, Peers
from llama.ranks.stalls import find_stalled_rank
from llama.ranks.world import GroupSizes

pytestmark = pytest.mark.dist

LIMIT_S = 120  # distinguishes a hang from a slow end
SLACK_S = 30  # slack for a busy machine
HOST = socket.gethostname()
PROGRAM = str(PROGRAMS / "failing.py")
KILLED = "was killed by SIGKILL (if nobody sent it, memory ran out: check `dmesg`)"
STALLED = ": the others waited 2 s in "
LIMIT = " (the limit is timeout_s)"

# name: world, fault, rank, when, limit of a step in seconds, the message after "rank R on HOST"
CASES = {
    "kill-load": (3, "SIGKILL", 2, "load", 60, KILLED),
    "kill-decode": (3, "SIGKILL", 0, "decode", 60, KILLED),
    "kill-idle": (2, "SIGKILL", 1, "idle", 60, KILLED),
    "kill-idle-0": (2, "SIGKILL", 0, "idle", 60, KILLED),
    "exception-prefill": (2, "exception", 0, "prefill", 60, "failed in a step: IndexError: made "),
    "memory": (2, "memory", 1, "decode", 60, "failed in a step: MemoryError: made to fail"),
    "no-memory": (2, "no memory", 1, "decode", 60, ""),
    "exit": (2, "exit", 1, "decode", 60, "failed in a step: sys.exit(0)"),
    "script": (2, "exception", 1, "script", 60, "failed: IndexError: made to fail"),
    "left": (2, "exit", 1, "script", 60, "ended while the others were still working"),
    "stop": (2, "SIGSTOP", 1, "decode", 2, "is stopped (by SIGSTOP or a debugger)" + STALLED),
    "stop-4": (4, "SIGSTOP", 0, "prefill", 2, "is stopped (by SIGSTOP or a debugger)" + STALLED),
    "stop-load": (3, "SIGSTOP", 1, "load", 60, "was stopped (by SIGSTOP or Ctrl-Z) for 3 s"),
    "stop-idle": (2, "SIGSTOP", 1, "idle", 60, "was stopped (by SIGSTOP or Ctrl-Z) for 3 s"),
    "sleep": (2, "sleep", 1, "decode", 2, "is in the step, but does not reach the collective that"),
    "elsewhere": (2, "sleep", 1, "script", 2, "is not in a step, but runs other code" + STALLED),
    "kill-groups": (2, "SIGKILL", 1, "groups", 60, KILLED),
    "stop-groups": (2, "SIGSTOP", 1, "groups", 2, "is stopped (by SIGSTOP or a debugger)"),
}  # fmt: skip
STAGED = {  # the same for two pipeline stages; rank 0 is the last one
    "stage-kill-load": (2, "SIGKILL", 1, "load", 60, KILLED),
    "stage-kill-decode": (2, "SIGKILL", 0, "decode", 60, KILLED),
    "stage-stop-prefill": (2, "SIGSTOP", 1, "prefill", 60, "was stopped (by SIGSTOP"),
    "stage-stop-idle": (2, "SIGSTOP", 0, "idle", 60, "was stopped (by SIGSTOP or Ctrl-Z) for 3 s"),
}  # fmt: skip
# The shares of the ranks of some cases; three ranks without shares hold unequal parts as well.
SHARES = {"kill-load": [1, 2, 1], "kill-decode": [3, 1, 1]}
MEETINGS = {  # name: as above; the message of one of the ranks that wait for another
    "never": (3, "SIGKILL", 1, "never", 2, "of 3 did not arrive at 127.0.0.1:"),
    "never-0": (2, "SIGKILL", 0, "never", 2, ""),  # it would have made the store
    "came": (4, "SIGKILL", 1, "came", 6, KILLED + ", before all ranks had met"),
}


@pytest.fixture(scope="module")
def folder(make_checkpoint) -> str:
    return str(make_checkpoint(n_kv_heads=4)[0])


@dataclass
class Ended:
    """How a job has ended."""

    statuses: list[int | None]  # the exit code of each rank, or the negative signal; None: it hangs
    seconds: float  # from the fault to the end of the last rank; infinite without a fault
    said: str  # the stderr of all ranks


def job(
    world: int, fault: str, rank: int, when: str, timeout_s: float, *_: str, **more: Any
) -> dict[str, Any]:
    """Return a case of programs/failing.py; further words of a table are not for the program."""
    own = {"world": world, "fault": fault, "rank": rank, "when": when, "timeout_s": timeout_s}
    return own | {"starts_together": True} | more


@pytest.fixture
def run(folder, tmp_path) -> Callable[[dict[str, Any]], Ended]:
    """A function that runs the ranks of a case, after which nothing may be left.

    There is no process, and hence no socket (all are without files), and no segment of shared
    memory.
    """

    def run(case: dict[str, Any]) -> Ended:
        mark, errors = tmp_path / "mark", tmp_path / "errors"
        with reserved_port() as port, errors.open("ab") as stderr:
            ranks = start_ranks(case, [folder, str(mark)], port, stderr)
            statuses, ended = wait_for_ranks(case, ranks, mark)
        assert processes_of(ranks[0].pid) == []
        assert list(Path("/dev/shm").glob("*llama*")) == []
        return Ended(
            statuses=[statuses.get(rank) for rank in range(case["world"])],
            seconds=ended - float(mark.read_text()) if mark.exists() else math.inf,
            said=errors.read_text(),
        )

    return run


def start_ranks(
    case: dict[str, Any], arguments: list[str], port: int, stderr: IO[bytes]
) -> list[subprocess.Popen]:
    """Start the ranks, as a group of processes that a signal can reach."""
    world = str(case["world"])
    variables = environment(
        WORLD_SIZE=world, LOCAL_WORLD_SIZE=world, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    ranks: list[subprocess.Popen] = []
    for rank in range(case["world"]):
        ranks.append(
            subprocess.Popen(
                [sys.executable, PROGRAM, json.dumps(case), *arguments],
                env=variables | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                process_group=ranks[0].pid if ranks else 0,
            )
        )
    return ranks


def wait_for_ranks(
    case: dict[str, Any], ranks: list[subprocess.Popen], mark: Path
) -> tuple[dict[int, int], float]:
    """Wait for the ranks, and kill those that hang; return statuses and the time of the last end.

    A rank is not reaped before all have ended, so that the others can read how it has ended.
    """
    statuses: dict[int, int] = {}
    began = ended = time.time()
    while len(statuses) < len(ranks) and time.time() - began < LIMIT_S:
        for rank, process in enumerate(ranks):
            how = os.WEXITED | os.WNOHANG | os.WNOWAIT
            if rank not in statuses and (end := os.waitid(os.P_PID, process.pid, how)):
                is_exit = end.si_code == os.CLD_EXITED
                statuses[rank] = end.si_status if is_exit else -end.si_status
                ended = time.time()
        if len(statuses) == len(ranks) - 1:
            mark.with_suffix(".alone").touch()
            if case.get("goes_on"):
                os.kill(ranks[case["rank"]].pid, signal.SIGCONT)
        time.sleep(0.02)
    for process in ranks:
        process.kill()
        process.wait()
    return statuses, ended


def processes_of(group: int) -> list[str]:
    """Return the kernel's record of each process of a group (proc_pid_stat(5))."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            found.append(path.read_text())
    return [stat for stat in found if int(stat.rpartition(")")[2].split()[2]) == group]


@pytest.mark.parametrize("name", CASES)
def test_a_rank_that_fails_ends_the_job_with_one_message(name, run):
    """A rank that fails ends the job with one message.

    No rank is left, none ends with success, and one message names the rank and the cause; there is
    one traceback for an exception, and none otherwise; no rank ends with SIGABRT.
    """
    world, fault, rank, _, _, cause = CASES[name]
    ended = run(job(*CASES[name], shares=SHARES.get(name)))
    statuses, said = ended.statuses, ended.said
    assert None not in statuses, f"still there after {LIMIT_S} s: {statuses}\n{said}"
    left_early = name == "left"
    assert all(s for r, s in enumerate(statuses) if not (left_early and r == rank)), statuses
    assert -signal.SIGABRT not in statuses
    assert said.count("error: ") == 1, said
    assert f"rank {rank} on {HOST} {cause}" in said
    if name != "no-memory":  # a lack of memory may suppress the message
        assert said.count("Traceback") == (fault in ("exception", "memory") or name == "exit"), said
    if name in ("stop-load", "stop-idle", "no-memory") or fault == "SIGKILL":
        assert ended.seconds < 5 + SLACK_S
    elif fault in ("SIGSTOP", "sleep"):
        assert said.count("--- rank ") == world - (fault == "SIGSTOP"), "a stack of each that can"
        assert LIMIT in said


@pytest.mark.parametrize("name", STAGED)
def test_a_rank_of_a_stage_that_fails_is_named_with_its_stage(name, run):
    """One message names stage, rank, host and cause, and no rank is left."""
    _, _, rank, _, _, cause = STAGED[name]
    ended = run(job(*STAGED[name], stages=2))
    statuses, said = ended.statuses, ended.said
    assert None not in statuses and all(statuses), f"{statuses}\n{said}"
    assert said.count("error: ") == 1, said
    assert f"error: rank {rank} (stage {1 - rank} of 2) on {HOST} {cause}" in said
    assert ended.seconds < 5 + SLACK_S


@pytest.mark.parametrize("name", MEETINGS)
def test_a_rank_that_does_not_come_ends_the_others_within_the_limit(name, run):
    """A rank that does not come ends the others within the limit.

    One rank says which ranks came and which did not, or where they were to meet. With "came", rank
    3 arrives when all others have ended, and must report that the store is gone.
    """
    _, _, rank, _, limit_s, cause = MEETINGS[name]
    ended = run(job(*MEETINGS[name]))
    statuses, said = ended.statuses, ended.said
    assert None not in statuses and all(statuses), f"{statuses}\n{said}"
    assert ended.seconds < limit_s + SLACK_S, "the limit is a bound, not torch's own"
    first, *others = [line for line in said.splitlines() if "NotMetError: " in line]
    if cause:
        assert f"rank {rank} on {HOST} {cause}" in first
    if name == "never":
        assert f"; rank 0, 2 on {HOST} did" in first
    others = others if cause else [first]
    assert len(others) == (name != "never"), said
    assert all("the ranks cannot meet at 127.0.0.1:" in line for line in others)


def test_the_store_of_rank_0_asks_no_name_server_for_its_clients(monkeypatch):
    """The store listens for IPv4 alone, whose addresses of this machine are in its hosts file.

    torch's own socket takes clients of IPv4 as addresses of IPv6, looks each up in DNS, and
    answers nobody meanwhile.
    """
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    with reserved_port() as port:
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        monkeypatch.setenv("MASTER_PORT", str(port))
        unused: Any = None
        store = _open_store(unused, 0, timedelta(seconds=20))
        store.set("a", "b")
        assert store.get("a") == b"b"
        with pytest.raises(OSError):
            socket.create_connection(("::1", port), 5).close()


def open_alone(monkeypatch, limit_s: float = 0.5, **variables: str) -> None:
    """Meet as one of two ranks that a launch with these variables would have."""
    told = {"RANK": "1", "MASTER_ADDR": "127.0.0.1", **variables}
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    # The groups of this process belong to other tests, and their store would be used.
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: False)
    meet_all(GroupSizes(group=2, stages=1, world=2), limit_s, 30.0)


def test_a_wrong_address_or_port_is_one_line_with_the_remedy(monkeypatch):
    """A wrong address or port gives one line with the remedy.

    torch's own errors have several lines, and its own wait cannot be interrupted.
    """
    with socket.socket() as taken, socket.socket() as free:
        for s in (taken, free):
            s.bind(("127.0.0.1", 0))
        taken.listen()
        port, closed = str(taken.getsockname()[1]), str(free.getsockname()[1])
        with pytest.raises(NotMetError, match=rf"another process listens at .*:{port}, .*ss"):
            open_alone(monkeypatch, MASTER_PORT=port, RANK="0")
        with pytest.raises(NotMetError, match=rf"at 127.0.0.1:{closed} \(Connection refused\): "):
            open_alone(monkeypatch, MASTER_PORT=closed)
        with pytest.raises(NotMetError, match=r"at no.such.host.invalid:1 \(.+\): check that addr"):
            open_alone(monkeypatch, MASTER_PORT="1", MASTER_ADDR="no.such.host.invalid")
        with pytest.raises(NotMetError, match=r"refused: torchrun there has ended"):
            monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
            open_alone(monkeypatch, 5.0, MASTER_PORT=closed)


def test_idle_is_not_a_stall(run):
    """Idle ranks are not stalled.

    Ranks that are idle for longer than a step may take continue afterwards. So they do when all of
    them are stopped, as by Ctrl-Z, for longer than a single one may be.
    """
    ended = run(job(2, "pause", 0, "pause", 4.0))
    assert (ended.statuses, ended.said) == ([0, 0], "")


def test_a_stall_on_another_machine_is_named():
    """A stall on another machine is named.

    The message is what a rank there last reported in torch's store, if that is newer than the
    stall.
    """
    own = {"activity": "a step", "in_collective": True, "steps": 4}
    for change, told in (
        ({"in_collective": False}, "rank 1 on b is in the step, but does not reach"),
        ({"steps": 3}, "rank 1 on b is behind the others, in step 3 of 4"),
        ({"activity": ""}, "rank 1 on b is not in a step"),
    ):
        peers = Peers(0)
        peers.all[1] = PeerInfo(1, "b", 1, "b", 2, heard=10.0, state={**own, **change})
        name = find_stalled_rank(peers, range(2), own, 9.0, 11.0)
        assert name is not None and name.startswith(told)
        assert find_stalled_rank(peers, range(1), own, 9.0, 11.0) is None
        assert find_stalled_rank(peers, range(2), own, 10.5, 11.0) is None


def test_a_stage_that_has_finished_its_step_is_not_the_one_that_stalls():
    """The first stage waits for the next step, and the last one for the stage between them."""
    own = {"activity": "a step", "in_collective": True, "steps": 4}
    peers = Peers(0, stages=3)
    for rank, change in ((1, {"in_collective": False}), (2, {"activity": ""})):
        state = {**own, **change}
        peers.all[rank] = PeerInfo(rank, "b", 1, "b", 1, stages=3, heard=10.0, state=state)
    found = find_stalled_rank(peers, range(3), own, 9.0, 11.0)
    assert found is not None and found.startswith("rank 1 (stage 1 of 3) on b is in the step, but")


def test_a_machine_whose_ranks_are_stopped_is_given_up_by_the_others(run):
    """The other machine says which one is silent, and ends.

    No process of this job can kill the stopped rank: it ends when it continues.
    """
    ended = run(job(2, "SIGSTOP", 1, "decode", 60, is_apart=True, silence_s=4, goes_on=True))
    assert ended.statuses == [1, 1], ended.said
    here, there = [line for line in ended.said.splitlines() if line.startswith("error: ")]
    assert "(rank 1) did not respond for 4 s: the machine, its processes or the network" in here
    assert "torch's store at" in there and f"does not answer: rank 0 on {HOST}" in there
    assert ended.seconds < 4 + 10 + SLACK_S


def test_one_of_the_other_machines_says_which_one_is_gone(run):
    """Rank 0 has the store, and stays until the ranks of other machines have read the cause.

    The rank is killed in the middle of a step, so that its connections break: the others do not
    wait for the whole limit of silence.
    """
    ended = run(job(3, "SIGKILL", 1, "prefill", 60, is_apart=True))
    assert ended.statuses == [1, -signal.SIGKILL, 1], ended.said
    assert ended.said.count("error: ") == 1
    assert "(rank 1) did not respond for 3 s: the machine, its" in ended.said
    (line,) = [x for x in ended.said.splitlines() if x.startswith("llama: ended by rank ")]
    assert f" on {HOST}, whose log has more: {HOST} (rank 1) did not respond" in line


@pytest.mark.parametrize(
    ("fault", "drain_s"), [("stop", 20.0), ("stop twice", 20.0), ("stop, and go on", 0.5)]
)
def test_a_signal_lets_a_batch_job_finish_what_runs(fault, drain_s, run, tmp_path):
    """A signal lets a batch job finish what runs.

    The four running requests are answered completely, no new one starts, and the exit code is 0. A
    second signal ends the job at once; so does the time limit, which is an error.
    """
    (tmp_path / "mark.in").write_text("a question\n" * 40)
    ended = run(job(2, fault, 0, "decode", 60, drain_s=drain_s))
    lines = (tmp_path / "mark.out").read_text().splitlines()
    if fault == "stop":
        assert ended.statuses == [0, 0], ended.said
        assert ended.said.startswith("SIGTERM: running requests have 20 s to finish, and no new")
        assert ended.said.count("\n") == 1
        assert len(lines) == 4
        assert all(json.loads(line)["error"] is None for line in lines)
    elif fault == "stop twice":
        assert ended.statuses == [128 + signal.SIGTERM] * 2
        assert ended.said.count("\n") == 1 and not lines
    else:
        assert ended.statuses == [1, 1]
        assert ended.said.count("error: the requests did not finish within 0.5 s") == 1


def test_a_signal_lets_a_chat_finish_its_answer(run):
    """A signal lets a chat finish its answer.

    The answer is complete, no next question is read, and the exit code is 0.
    """
    ended = run(job(2, "stop", 0, "decode", 60, drain_s=20.0, is_chat=True))
    assert ended.statuses == [0, 0], ended.said
    assert ended.said.startswith("SIGTERM: running requests have 20 s to finish")
    assert "cut at max_gen_len | " in ended.said and "Traceback" not in ended.said


def launched(
    folder: str, mark: Path, before: list[str], after: list[str], **cases: tuple[int, str]
) -> tuple[dict[str, subprocess.Popen], dict[str, str]]:
    """Ranks under the launchers: the arguments before and after the program, the fault, rank and
    time.

    The launches have ended; the results contain their output.
    """
    launches = {}
    leaving = ["--no-python", "sh", "-c", 'test $RANK = 1 || exec "$0" "$@"', sys.executable]
    for fault, (rank, when) in cases.items():
        case = {"fault": fault, "rank": rank, "when": when, "timeout_s": 60, "world": 2}
        command = [
            sys.executable, *before, *(leaving if fault == "leaves" else []),
            PROGRAM, *after, json.dumps(case), folder, str(mark),
        ]  # fmt: skip
        launches[fault] = subprocess.Popen(
            command, env=environment(), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )
    # The pipe ends when the last process that could write to it is gone.
    return launches, {fault: x.communicate(timeout=240)[1] for fault, x in launches.items()}


def test_torchrun_and_its_ranks_end_together(folder, tmp_path):
    """torchrun and its ranks end together.

    If torchrun is killed, its idle ranks end and say why. If a rank is killed, torchrun's own
    summary names this rank, and not one that ended because of it. For torchrun, a rank that exits
    with 0 before the meeting is no failure: the others see that its process is gone.
    """
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    cases = {"agent": (0, "idle"), "SIGKILL": (1, "decode"), "leaves": (1, "before")}
    launches, said = launched(folder, tmp_path / "mark", torchrun, [], **cases)
    assert launches["agent"].returncode == -signal.SIGKILL
    assert f"torchrun (process {launches['agent'].pid}) on {HOST}" in said["agent"]
    assert said["agent"].count("error: ") == 1 and "Traceback" not in said["agent"]
    assert launches["leaves"].returncode == 1
    missing = f"rank 1 on {HOST} ended before all ranks had met: it did not arrive"
    assert said["leaves"].count(missing) == 1, said["leaves"]
    assert launches["SIGKILL"].returncode == 1
    # If torchrun is the first to notice, it ends the other rank, and is the only one to say so.
    assert said["SIGKILL"].count("error: ") <= 1
    assert said["SIGKILL"].count("error: ") == said["SIGKILL"].count(f"rank 1 on {HOST} {KILLED}")
    root = said["SIGKILL"].partition("Root Cause")[2]
    assert "rank      : 1 (" in root and "exitcode  : -9" in root


def test_ranks_without_torchrun_end_together(folder, tmp_path):
    """Ranks without torchrun end together.

    Their launcher is killed, or rank 0, which has torch's store. There is one message, and nothing
    else.
    """
    cases = {"agent": (1, "idle"), "SIGKILL": (0, "decode")}
    launches, said = launched(folder, tmp_path / "mark", [], ["--ranks"], **cases)
    assert {fault: x.returncode for fault, x in launches.items()} == {"agent": -9, "SIGKILL": 137}
    started = f"error: llama --ranks (process {launches['agent'].pid}) on {HOST}, which started"
    assert said["agent"].startswith(started) and said["agent"].count("\n") == 1
    assert said["SIGKILL"] == f"error: rank 0 on {HOST} {KILLED}\n"


LAUNCH = """
import sys
from llama.ranks import launch
launch._FOLLOW_S = 1 if sys.argv[2] == "killed" else 60
sys.exit(launch.launch(["-c", *sys.argv[1:]], 3))
"""
CHILD = """
import json, os, signal, socket, sys, time
rank, how, terms = int(os.environ["RANK"]), sys.argv[1], []
signal.signal(signal.SIGTERM, lambda *_: terms.append(time.time()))
socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])), 60).close()
got = sys.stdin.read()  # rank 0's ends when the others have said this
line = json.dumps([rank, os.environ["TORCH_CPP_LOG_LEVEL"], got, os.getpid()])
os.write(1, line.encode() + b"\\n")  # whole
if how == "fails" and not rank:
    sys.exit(3)
while how != "ends" and not (terms and how != "killed" and time.time() > terms[0] + 0.5):
    time.sleep(0.01)
sys.exit(len(terms) - 1 if terms else 0)
"""


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("ends", 0, ""),
        ("signalled", 0, ""),
        ("fails", 3, ""),
        ("killed", 137, f"error: rank 1 on {HOST} {KILLED}; others had not ended 1 s later\n"),
    ],
)
def test_a_launch_ends_with_the_code_of_the_work(how, code, said):
    """A launch ends with the exit code of its work.

    Rank 0 alone reads standard input. SIGTERM reaches each rank once, from outside or after rank 0
    has failed. Ranks that ignore it, or the death of another, are killed.
    """
    words = [sys.executable, "-c", LAUNCH, CHILD, how]
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen(words, env=environment(), text=True, **pipes) as process:
        assert process.stdin and process.stdout and process.stderr
        others = sorted(json.loads(process.stdout.readline()) for _ in range(2))
        process.stdin.write("typed")
        process.stdin.close()
        first = json.loads(process.stdout.readline())
        told = [line[:3] for line in (first, *others)]
        assert told == [[0, "ERROR", "typed"], [1, "ERROR", ""], [2, "ERROR", ""]]
        if how == "signalled":
            process.terminate()
        if how == "killed":
            os.kill(others[0][3], signal.SIGKILL)
        assert process.wait(LIMIT_S) == code
        assert process.stderr.read() == said
