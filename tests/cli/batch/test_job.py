"""A batch job loses, doubles and overwrites nothing, whatever ends it, on any number of ranks.

Files, processes and kills are real; the oracle is the output of an undisturbed job.
"""

import io
import json
import multiprocessing
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tqdm import tqdm

from helpers.batch import answers, written
from helpers.launch import PROGRAMS, REPO, environment, run_program
from helpers.waiting import num_lines, wait_until
from llama import Llama
from llama.cli import main
from llama.cli.batch.files import Results, read_lines
from llama.cli.batch.job import run_batch
from llama.cli.batch.lines import MAX_LINE
from llama.cli.batch.loop import BatchReport, Loop, salt_of
from llama.cli.model import sampling_params

WORDS = "one two three four five six seven eight nine ten".split()
SIZES = ["--max_seq_len", "128", "--max_batch_size", "4", "--dtype", "fp32", "--device", "cpu"]
fork = multiprocessing.get_context("fork")


def requests(count: int, longest: int = 12) -> list[Any]:
    """Return lines with sampled answers of different lengths; the seventh is bad, and some are
    blank.
    """
    lines: list[Any] = [
        {
            "custom_id": f"r{i}",
            "model": "m",
            "prompt": " ".join(WORDS[: i % 9 + 1]),
            "max_tokens": 4 + i % longest,
        }
        for i in range(count)
    ]
    lines[6] = "{bad"
    return lines[:9] + [""] + lines[9:]


def job(llama: Llama, folder: Path, name: str = "out", *, resume: bool = False) -> BatchReport:
    params = sampling_params(temperature=1.0)
    return run_batch(llama, str(folder / "in"), str(folder / name), params, resume=resume)


def records(path: Path) -> dict[str, Any]:
    """Return the records by id, each of which occurs once, without the number of cached tokens.

    That number depends on what else ran.
    """
    found = [json.loads(line) for line in path.read_bytes().splitlines()]
    by_id = {record["id"]: record for record in found}
    assert len(by_id) == len(found), "an id is doubled"
    for record in found:
        if record["response"]:
            del record["response"]["body"]["usage"]["prompt_tokens_details"]
    return by_id


@pytest.fixture(scope="module")
def undisturbed(shared_llama, tmp_path_factory) -> Path:
    """A folder with an input of 90 requests, `in`, and its results, `whole`."""
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "in").write_bytes(written(requests(90)))
    torch.set_num_threads(1)  # matches the tests: a module's fixture runs before `single_thread`
    report = job(shared_llama, folder, "whole")
    assert report == BatchReport(written=90, failed=1)
    assert len(records(folder / "whole")) == 90
    return folder


def test_kill_minus_nine_at_twenty_random_moments(llama, undisturbed):
    """Twenty kills by SIGKILL at random moments leave the results of the undisturbed job.

    A forked child runs the job and is killed after some more records; the next child resumes. In
    the end every id occurs once.
    """
    folder, rng, kills = undisturbed, random.Random(3), 0
    out = folder / "killed-0"
    while kills < 20:
        enough = num_lines(out) + rng.randint(0, 8)
        child = fork.Process(target=job, args=(llama, folder, out.name), kwargs={"resume": True})
        child.start()
        wait_until(lambda: num_lines(out) >= enough or not child.is_alive())  # noqa: B023
        child.kill()
        child.join()
        if num_lines(out) < 90:
            kills += 1
        else:  # it ended early: start again, for 20 kills in the middle of a job
            assert records(out) == records(folder / "whole")
            out = folder / f"killed-{kills}"
    job(llama, folder, out.name, resume=True)
    assert records(out) == records(folder / "whole")


@pytest.mark.parametrize("tail", [b"{", b'{"id": "batch_r', b'{"id": "batch_req_00000', None])
def test_a_torn_last_line_is_mended(llama, undisturbed, tail):
    """A truncated last line is repaired.

    What a killed writer left of a record is cut off, and its request is done again.
    """
    folder, out = undisturbed, undisturbed / "torn"
    whole = (folder / "whole").read_bytes().splitlines(keepends=True)
    torn = whole[41][:-1] if tail is None else tail  # complete except for its line end
    out.write_bytes(b"".join(whole[:40]) + torn)
    assert job(llama, folder, "torn", resume=True).written == 50
    assert records(out) == records(folder / "whole")
    assert out.read_bytes().startswith(b"".join(whole[:40]))


def test_a_full_disk_leaves_whole_records(llama, undisturbed):
    """A full disk leaves complete records: a write that does not fit ends the job and leaves no
    part.
    """

    def run_small() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with pytest.raises(OSError, match=r"File too large|no space left"):
            job(llama, undisturbed, "full")
        assert not llama.engine.has_unfinished(), "the requests that ran alongside it run on"

    child = fork.Process(target=run_small)
    child.start()
    child.join()
    assert child.exitcode == 0
    out = undisturbed / "full"
    assert 19_000 < out.stat().st_size <= 20_000 and out.read_bytes().endswith(b"}\n")
    job(llama, undisturbed, "full", resume=True)
    assert records(out) == records(undisturbed / "whole")


def test_what_is_not_ours_is_refused_and_left_alone(llama, undisturbed, tmp_path):
    """A foreign file is refused and left alone.

    An existing output, another input, other flags, or another program's file: each gives an error
    that says so, before a byte of the output changes.
    """
    whole = (undisturbed / "whole").read_bytes()
    (tmp_path / "out").write_bytes(whole)
    lines = requests(90)

    def refused(
        kind: type[Exception], message: str, *, temperature: float = 1.0, resume: bool = True
    ) -> None:
        (tmp_path / "in").write_bytes(written(lines))
        before = (tmp_path / "out").read_bytes()
        with pytest.raises(kind, match=message):
            paths = str(tmp_path / "in"), str(tmp_path / "out")
            run_batch(llama, *paths, sampling_params(temperature=temperature), resume=resume)
        assert (tmp_path / "out").read_bytes() == before

    refused(FileExistsError, "has results already: add --resume", resume=False)
    refused(ValueError, "line 1 or the flags are not those", temperature=0.5)
    lines[20] = {**lines[20], "custom_id": "other"}
    refused(ValueError, "line 21 or the flags are not those")
    lines[20:] = requests(90)[20:80]
    refused(ValueError, "a result of line 91, but the input ends at line 80")
    for mine in (b"my notes\n", b"my notes", whole + b"my notes\n", whole + b"{}\n", whole + b"{}"):
        (tmp_path / "out").write_bytes(mine)
        refused(ValueError, "is not a result of this input|does not end in a result")
    number = whole.replace(b"batch_req_000000000001_", b"batch_req_999999999999_")
    (tmp_path / "out").write_bytes(number)
    refused(ValueError, "is not a result of this input")
    (tmp_path / "in").unlink()
    with pytest.raises(FileNotFoundError, match="in"):
        job(llama, tmp_path)
    assert os.listdir(tmp_path) == ["out"]


def test_every_sampling_parameter_is_part_of_the_salt():
    """Every sampling parameter is part of the salt, and jobs of earlier versions can be resumed."""
    assert salt_of(sampling_params(), 1) == repr((0.6, 0.9, None, 1))
    assert salt_of(sampling_params(), 2) == repr((0.6, 0.9, None, 2))
    changed: list[dict[str, Any]] = [
        {"temperature": 0.5},
        {"top_p": 0.5},
        {"max_tokens": 5},
        {"top_k": 5},
        {"min_p": 0.5},
    ]
    salts = {salt_of(replace(sampling_params(), **change), 1) for change in changed}
    assert len(salts | {salt_of(sampling_params(), 1)}) == 6


def test_the_first_result_comes_before_the_last_line(llama, tmp_path):
    """The first result comes before the last line.

    The writer of a pipe goes on only when the results of its lines are there, except for those that
    wait in the batch, which can take one more line.
    """
    os.mkfifo(tmp_path / "in")

    def write() -> None:
        with (tmp_path / "in").open("wb", buffering=0) as pipe:
            for i in range(3):
                pipe.write(written([{"prompt": "a", "max_tokens": 2 + i} for i in range(12)]))
                wait_until(lambda: num_lines(tmp_path / "out") >= 12 * i + 9)  # noqa: B023
            in_time.append(True)

    in_time: list[bool] = []
    writer = threading.Thread(target=write)
    writer.start()
    report = job(llama, tmp_path)
    writer.join()
    assert report.written == 36 and in_time


def resident_mb() -> float:
    with open("/proc/self/statm", "rb", buffering=0) as statm:
        return int(statm.read().split()[1]) * resource.getpagesize() / 1e6


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_memory_does_not_grow_with_the_file(llama, tmp_path, monkeypatch):
    """Memory does not grow with the file.

    There are 20,000 bad lines; then 100,000 finished ones with three missing, and a line of 30 MB.
    """
    most = [0.0]
    append = Results.append

    def append_and_look(self: Results, *args: Any) -> None:
        append(self, *args)
        most[0] = max(most[0], resident_mb())

    monkeypatch.setattr(Results, "append", append_and_look)
    answers(llama, tmp_path, [{"prompt": "warm up", "max_tokens": 2}] * 5)
    (tmp_path / "in").write_bytes(b'{"prompt": "x", "tools": 1}\n' * 20_000)
    before = resident_mb()
    bad = str(tmp_path / "in"), str(tmp_path / "bad")
    assert run_batch(llama, *bad, sampling_params()).failed == 20_000
    assert most[0] - before < 4, f"{most[0] - before} MB"

    line = b'{"prompt": "x", "user": "%s", "max_tokens": 2}\n' % (b"abcdefgh" * 50)
    (tmp_path / "in").write_bytes(line * 100_003 + b'{"a": "' + b"a" * 3 * MAX_LINE)
    salt = repr((0.6, 0.9, None, 1))
    with (tmp_path / "in").open("rb") as file, (tmp_path / "out").open("wb") as out:
        for number, data, line_hash in read_lines(file, salt):
            if number % 30_000 and len(data) < MAX_LINE:
                out.write(b'{"id": "batch_req_%012d_%08x", "error": null}\n' % (number, line_hash))
    before, most[0] = resident_mb(), 0.0
    report = run_batch(
        llama, str(tmp_path / "in"), str(tmp_path / "out"), sampling_params(), resume=True
    )
    assert (report.written, report.failed) == (4, 1)
    assert most[0] - before < MAX_LINE / 1e6 * 3, f"{most[0] - before} MB"


def test_an_interrupted_job_leaves_the_model_usable(llama, undisturbed, monkeypatch):
    """An interrupted job leaves the model usable.

    After Ctrl-C in a notebook the results so far are in the file, and nothing runs on.
    """
    step = llama.engine.step

    def step_and_stop(*args) -> list:
        if num_lines(undisturbed / "stopped") > 20:
            raise KeyboardInterrupt
        return step(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(llama.engine, "step", step_and_stop)
        job(llama, undisturbed, "stopped")
    assert not llama.llm_engine.has_unfinished_requests() and not llama.engine.has_unfinished()
    assert 20 < num_lines(undisturbed / "stopped") < 90
    job(llama, undisturbed, "stopped", resume=True)
    assert records(undisturbed / "stopped") == records(undisturbed / "whole")


def test_a_signal_leaves_the_rest_of_the_input_unread(llama, undisturbed, monkeypatch):
    """The rest may be long, or a pipe whose writer goes on."""

    def unread(*_: object) -> Any:
        pytest.fail("a line is read after the signal")
        yield

    monkeypatch.setattr("llama.cli.batch.loop.stop_requested", lambda: True)
    monkeypatch.setattr("llama.cli.batch.loop.read_lines", unread)
    assert job(llama, undisturbed, "signalled") == BatchReport(0, 0)


def test_an_empty_input_and_an_empty_output(llama, tmp_path):
    (tmp_path / "in").write_bytes(b"\n \n")
    (tmp_path / "out").write_bytes(b"")
    assert job(llama, tmp_path) == BatchReport(0, 0)
    assert job(llama, tmp_path, "new", resume=True) == BatchReport(0, 0)


def test_the_progress_bar_tells_requests_rate_and_time_left(llama, undisturbed, capsys):
    paths = str(undisturbed / "in"), str(undisturbed / "barred")
    run_batch(llama, *paths, sampling_params(temperature=1.0), progress=True)
    last = capsys.readouterr().err.split("\r")[-1]
    assert "100%" in last and " 90/90 " in last and "tokens/s" in last


def test_the_progress_bar_counts_at_most_its_total():
    """The bar never counts more than its total, which is estimated from what this replica read.

    The other replicas, and an earlier job, may have finished more lines than the estimate.
    """
    job = object.__new__(Loop)
    with tempfile.TemporaryFile() as file, tqdm(file=io.StringIO()) as bar:
        file.write(b"x" * 100)
        file.seek(50)
        job.file = file
        job.num_read = 100
        job.num_done = 0
        job.began = 0.0
        job.posted = 1.0
        for written in (10, 200, 202):
            job.sums = Counter({"written": written})
            job._show(bar)
            assert bar.n == written <= bar.total == max(written, 200)


def script(*args: str | Path) -> list[str]:
    return [sys.executable, str(REPO / "scripts" / "batch_completion.py"), *map(str, args)]


def test_the_script_and_its_exit_codes(llama, checkpoint_dir, tmp_path, capfd):
    """The script has the documented exit codes.

    Ctrl-C: 130, and no finished result is lost; resumed, with a bad line: 0; an existing output: 2,
    before weights are searched for; success: 0.
    """
    (tmp_path / "in").write_bytes(written(requests(90, 40)))
    flags = ["--ckpt_dir", checkpoint_dir[0], *SIZES, "--temperature", "1"]
    command = script(tmp_path / "in", tmp_path / "out", *flags)
    running = subprocess.Popen(command, env=environment(), stderr=subprocess.PIPE, text=True)
    wait_until(lambda: num_lines(tmp_path / "out") >= 10 or running.poll() is not None)
    running.send_signal(signal.SIGINT)
    _, errors = running.communicate(timeout=60)
    assert running.returncode == 130, errors
    assert "add --resume" in errors and "Traceback" not in errors
    before = len(records(tmp_path / "out"))
    assert 10 <= before < 90

    done = run_program([*command, "--resume"])
    told = done.stdout + done.stderr
    assert done.returncode == 0 and f"{90 - before} results added, 1 errors in the file" in told
    assert "| ranks 1 | float32" in told and "Traceback" not in told
    job(llama, tmp_path, "whole")
    assert records(tmp_path / "out") == records(tmp_path / "whole")
    files = str(tmp_path / "in"), str(tmp_path / "out")
    assert main(["batch", *files, "--ckpt_dir", str(tmp_path / "no weights")]) == 2
    told = capfd.readouterr().err
    assert "error: " in told and "add --resume" in told
    (tmp_path / "in").write_text("hello\nworld\n")
    fine = files[0], str(tmp_path / "fine")
    assert main(["batch", *fine, *map(str, flags), "--max_gen_len", "3"]) == 0


def torchrun(world: int, *command: str | Path) -> subprocess.CompletedProcess:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    words = [*launch, f"--nproc_per_node={world}", *map(str, command)]
    return run_program(words)


def test_the_last_sums_of_a_replica_are_read():
    """The last sums of a replica are read.

    It adds its last results and reports its end after this replica read the results, and before it
    read who has ended. A past fault: a report said 85 lines of 90.
    """
    sums = Counter({"finished": 1, "written": 85})
    posts = iter([{"finished": 2}, {"written": 90}])
    job = object.__new__(Loop)
    job.num_replicas = 2
    job.sums = sums
    job._post = lambda **counts: dict.update(sums, next(posts))  # type: ignore[method-assign]
    job._wait_for_replicas()
    assert sums["written"] == 90


@pytest.mark.slow
def test_replicas_share_the_lines(undisturbed, checkpoint_dir):
    """Replicas share the lines.

    There are two replicas of two ranks. Each takes the lines that it has capacity for, so that one
    that waits does less; no line is lost or doubled, and the answers are those of one process. A
    second job of the same processes works too.
    """
    folder = undisturbed / "replicas"
    folder.mkdir()
    (folder / "in").write_bytes((undisturbed / "in").read_bytes())
    done = torchrun(4, PROGRAMS / "batch_ranks.py", checkpoint_dir[0], "2", folder)
    assert done.returncode == 0, done.stdout + done.stderr
    for name in ("out", "again"):
        assert records(folder / name) == records(undisturbed / "whole")
    ranks = [json.loads((folder / f"rank{r}.json").read_text()) for r in range(4)]
    for first, resumed, again in ranks:
        assert first[:2] == again[:2] == [90, 1] and resumed == [0, 1, 0]
    late, other = ranks[0][0][2], ranks[-1][0][2]
    assert 0 < late < other, "the replica that waits takes part, and does less"
    generated = sum(job[2] for job in (*ranks[0], *ranks[2]))
    lines = [(folder / f"rank{r}.figures").read_text() for r in range(4)]
    assert all(f"| generated {generated} tokens, " in line for line in lines), lines
    assert all(line.endswith("| ranks 4 | float32") for line in lines)


@pytest.mark.slow
def test_the_script_on_two_ranks_of_one_model(undisturbed, checkpoint_dir):
    """The script runs on two ranks of one model: one writes, and the results are those of one
    process.
    """
    out = undisturbed / "mp2"
    program = script(undisturbed / "in", out, "--ckpt_dir", checkpoint_dir[0], *SIZES)
    words = [*map(str, program), "--temperature", "1", "--ranks", "2"]
    done = run_program(words)
    assert done.returncode == 0, done.stderr
    assert "90 results added, 1 errors in the file" in done.stderr and "| ranks 2 |" in done.stdout
    assert records(out) == records(undisturbed / "whole")


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.timeout(600)
def test_replicas_killed_at_random_moments_lose_and_double_nothing():
    """Replicas killed at random moments lose and double nothing.

    A rank or torchrun is killed, also before the ranks have met; the program checks that all
    processes are gone after each kill, and checks the records at the end. Run by hand it makes 200
    kills.
    """
    program = [sys.executable, str(PROGRAMS / "killed_batch.py"), "--kills", "3", "--lines", "50"]
    path = os.pathsep.join([str(REPO), str(REPO / "tests")])
    done = run_program(program, env=environment(PYTHONPATH=path), timeout=580)
    assert done.returncode == 0, done.stdout + done.stderr
    counts = json.loads(done.stdout)
    assert counts["kills"] == 3 and counts["jobs"] > 0
