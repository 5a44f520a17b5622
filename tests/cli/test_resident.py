"""`--resident` and `serve --background`: real servers and clients, and the locks between them.

The oracle of the answers is the same model in this process.
"""

import argparse
import contextlib
import fcntl
import functools
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from helpers.launch import DEMO, PROGRAMS, environment
from helpers.processes import children
from helpers.prompts import FRANCE, STORY, replies
from helpers.waiting import wait_until
from llama.cli import main, resident
from llama.cli.client import Client, json_at
from llama.storage.kv_disk import default_folder

LIMIT_S = 60  # distinguishes a hang from a slow end
ONCE = "Once upon a time"
FLAGS = ["--dtype", "fp32", "--device", "cpu"]
OPTIONS = argparse.Namespace(
    ckpt_dir=None, dtype="fp32", device="cpu", quantize=None, activations=None, lora=None
)
COMPLETE = ["complete", "--resident", *FLAGS, "--temperature", "0", "--max_gen_len", "12"]
WITHOUT_TORCH = (
    "import sys; from llama.cli import main; code = main(sys.argv[1:]); "
    "assert 'torch' not in sys.modules; sys.exit(code)"
)


@pytest.fixture
def folder(monkeypatch) -> Iterator[Path]:
    """The folder of the sockets, with a short path, as a socket needs one."""
    place = tempfile.mkdtemp()
    monkeypatch.setenv("XDG_RUNTIME_DIR", place)
    yield Path(place, "llama")
    for log in Path(place).glob("llama/*.log"):
        if not is_free(log):
            os.kill(process_of(log), signal.SIGKILL)
    shutil.rmtree(place)


def begin(*words: str, **how: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WITHOUT_TORCH, *words]
    pipes: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, env=environment(), text=True, **pipes, **how)


def run(*words: str, text: str = "") -> tuple[int, str, str]:
    with begin(*words) as process:
        out, err = process.communicate(text, timeout=LIMIT_S)
    return process.returncode, out, err


def process_of(log: Path) -> int:
    """Return the pid of a server, after checking that it holds the lock of its log."""
    assert not is_free(log)
    return int(log.read_text().partition("\n")[0].removeprefix("process "))


def is_free(path: Path) -> bool:
    """Return whether no process holds a lock of the file."""
    with path.open("ab") as file:
        return resident._try_lock(file, fcntl.LOCK_EX)


@pytest.mark.slow
def test_clients_share_a_server_that_outlives_them(folder, demo, tmp_path):
    """Clients share a server that outlives them.

    A stale socket is replaced. Of two clients that start at once, one starts the server, and Ctrl-C
    of that client does not end it. The answers are those of this process; SIGTERM lets running
    requests finish.
    """
    stem = resident._stem(OPTIONS)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(f"{stem}.sock")
    log = stem.with_suffix(".log")
    with begin(*COMPLETE, "--prompt", "x", start_new_session=True) as first:
        wait_until(lambda: log.exists() and "process" in log.read_text())
        server = process_of(log)
        with begin(*COMPLETE, "--prompt", STORY) as second:
            os.killpg(first.pid, signal.SIGINT)
            assert first.wait(LIMIT_S) == 130
            out, _ = second.communicate(timeout=LIMIT_S)
    assert process_of(log) == server
    assert f"KV pages, from which prompts can be read, are kept in {default_folder()}" in (
        log.read_text()
    )
    assert stat.S_IMODE(default_folder().stat().st_mode) == 0o700
    assert out == demo.text_completion([STORY], 0, max_gen_len=12)[0]["generation"] + "\n"
    modes = {path.suffix: stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()}
    assert modes == {".log": 0o600, ".sock": 0o600, ".users": 0o600}
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700

    code, out, err = run("chat", "--resident", *FLAGS, "--temperature", "0", text=FRANCE)
    assert (code, out.splitlines()) == (0, replies(demo, FRANCE)), err
    (tmp_path / "in").write_text("The capital of Japan is\n")
    files = [str(tmp_path / "in"), str(tmp_path / "out")]
    code, _, err = run("batch", *files, "--resident", *FLAGS, "--temperature", "0")
    assert code == 0 and "1 results added, 0 errors in the file" in err
    assert process_of(log) == server and log.read_text().count("Loaded in") == 1

    body = {"prompt": STORY, "max_tokens": 400, "ignore_eos": True, "stream": True}

    async def drained(client: Client) -> list[Any]:
        reasons: list[Any] = []
        async for event in client.events("/v1/completions", body):
            if not reasons:
                os.kill(server, signal.SIGTERM)
            reasons.append(json_at(event, "choices", 0, "finish_reason"))
        return reasons

    with contextlib.closing(Client(f"unix:{stem}.sock")) as client:
        assert client.run(drained(client))[-1] == "length"
    wait_until(lambda: is_free(log))


def test_servers_are_listed_and_stopped_by_their_model(folder, monkeypatch, tmp_path):
    """`llama list` names process, model and size, and `llama stop` returns after the end."""
    snapshots = {"meta-llama/Llama-3.2-1B": "llama", "google/bert": "bert"}
    for name, model_type in snapshots.items():
        cached = tmp_path / f"models--{name.replace('/', '--')}"
        snapshot = cached / "snapshots" / ("abcd" * 10)
        snapshot.mkdir(parents=True)
        (cached / "refs").mkdir()
        (cached / "refs" / "main").write_text("abcd" * 10)
        (snapshot / "config.json").write_text(f'{{"model_type": "{model_type}"}}')
        with (snapshot / "model.safetensors").open("wb") as weights:
            weights.truncate(2_470_000_000)
    (tmp_path / "models--a--odd" / "refs").mkdir(parents=True)
    (tmp_path / "models--a--odd" / "refs" / "main").write_text("/etc")  # It is left out.
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    code, out, err = run("stop", "demo")
    assert code == 2 and "'demo'; running: none" in err
    code, url, err = run("serve", "--background", *FLAGS)
    assert code == 0, err
    log = Path(url.strip().removeprefix("unix:")).with_suffix(".log")
    server = process_of(log)
    code, out, err = run("list")
    assert code == 0 and f"{DEMO}  process {server}  {url.strip()}\n" in out
    assert "  meta-llama/Llama-3.2-1B      2.47 GB\n" in out and "bert" not in out
    code, out, err = run("stop", "another")
    assert code == 2 and f"'another'; running: {DEMO}" in err
    code, out, err = run("stop", "demo")
    assert code == 0 and f"stopped {DEMO} (process {server})" in err
    assert is_free(log)  # the kernel releases the lock when the process ends
    assert run("list")[1].startswith("no server runs in the background\n")


@pytest.mark.parametrize("started", [b"1", b"0", b"x", b""])
def test_a_process_that_took_over_a_servers_number_is_not_ended(folder, monkeypatch, started):
    """What a server has started may hold its log, while its number is another process's."""
    assert not resident.running_servers()  # It makes the folder.
    with subprocess.Popen(["sleep", "60"]) as other, (folder / "a.log").open("ab") as log:
        log.write(b"process %d\nmodel /m\nstarted %s\n" % (other.pid, started))
        log.flush()
        fcntl.flock(log, fcntl.LOCK_EX)
        code, _, err = run("stop", str(other.pid))
        assert code == 1 and "is another process now" in err and other.poll() is None
        other.kill()


@pytest.mark.slow
def test_a_server_in_the_background_ends_once_nobody_has_come_for_long(folder, demo):
    """A server in the background ends after a long time without clients.

    It has flags that --resident cannot give, but clients find it; a second server is refused. A
    request is answered to its end. An API process answers, and ends with the server.
    """
    words = ["serve", "--background", *FLAGS, "--max_seq_len", "64", "--idle_minutes", "1"]
    words += ["--api_processes", "1", "--drain_s", "0"]
    code, out, err = run(*words)
    assert code == 0 and out.startswith(f"unix:{folder}/"), err
    url = out.strip()
    log = Path(url.removeprefix("unix:")).with_suffix(".log")
    server, users = process_of(log), log.with_suffix(".users")
    code, _, err = run(*words)
    assert code == 1 and f"process {server} (its log: {log}) serves this model already" in err
    assert f"`llama stop {server}`" in err
    with begin("chat", "--resident", *FLAGS) as client:
        wait_until(lambda: not is_free(users))
        os.utime(users, (1, 1))
        wait_until(lambda: users.stat().st_mtime > 1)  # it checked, and a client was connected
        assert process_of(log) == server
        client.communicate("/bye\n", timeout=LIMIT_S)
    code, out, err = run(*COMPLETE[:-2], "--prompt", ONCE)
    room = 64 - len(demo.tokenizer.encode(ONCE, bos=True, eos=False))
    whole = demo.text_completion([ONCE], 0, max_gen_len=room)[0]["generation"]
    assert (code, out) == (0, whole + "\n"), "an answer may fill the server's context"
    code, out, err = run(*COMPLETE[:-1], "0", "--prompt", ONCE)
    assert (code, out) == (0, "\n"), err
    body = {"prompt": ONCE, "ignore_eos": True, "stream": True}

    async def last_reason(client: Client) -> Any:
        reasons: list[Any] = []
        async for event in client.events("/v1/completions", body):
            os.utime(users, (1, 1))
            reasons.append(json_at(event, "choices", 0, "finish_reason"))
        return reasons[-1]

    (api_process,) = children(server)
    with contextlib.closing(Client(url)) as other:
        assert other.run(last_reason(other)) == "length"
    wait_until(lambda: is_free(log) and not Path(f"/proc/{api_process}").exists())
    assert "Traceback" not in log.read_text()


@pytest.fixture
def fake(monkeypatch, tmp_path) -> Callable[[str], None]:
    """Replace Python by shell scripts as servers."""

    def install(script: str) -> None:
        path = tmp_path / "server"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr("sys.executable", str(path))

    return install


@pytest.mark.slow
def test_a_server_that_was_idle_comes_back_to_its_prompts(folder, fake, tmp_path, capsys):
    """A server that ends for being idle writes what waits, and the next one loads it."""
    python, program = sys.executable, PROGRAMS / "kv_server.py"
    fake(f'shift 3; SLOW_WRITES_S=0.1 exec {python} -P {program} "$@"')
    words = ["serve", "--background", *FLAGS, "--idle_minutes", "1"]
    words += ["--kv_cache_dir", str(tmp_path / "kv")]
    body = {"prompt": list(range(300, 500)), "max_tokens": 1}
    num_cached = []
    for _ in range(2):
        assert main(words) == 0
        path = capsys.readouterr().out.strip().removeprefix("unix:")
        with httpx.Client(transport=httpx.HTTPTransport(uds=path), timeout=LIMIT_S) as client:
            answer = client.post("http://localhost/v1/completions", json=body).json()
        num_cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
        log = Path(path).with_suffix(".log")
        os.utime(log.with_suffix(".users"), (1, 1))
        wait_until(functools.partial(is_free, log))
    assert num_cached == [0, 192]


def test_a_killed_server_is_replaced(folder, fake):
    fake("exec sleep 100")
    stem = resident._stem(OPTIONS)
    first = resident._start(stem, {})
    assert first is not None and resident._start(stem, {}) is None
    with first, socket.socket(socket.AF_UNIX) as client:
        first.kill()
        first.wait(LIMIT_S)
        with pytest.raises(ConnectionRefusedError):
            client.connect(f"{stem}.sock")
    with socket.socket(socket.AF_UNIX) as client:
        assert resident._start(stem, {}) is not None
        client.connect(f"{stem}.sock")


def test_a_server_that_cannot_start_is_told_with_its_last_words(folder, fake, monkeypatch, capfd):
    """A server that cannot start is reported with its last log lines.

    If it never becomes ready, the wait has a limit, and the error names its process.
    """
    monkeypatch.setenv("LLAMA_DTYPE", "fp32")
    fake('echo "error: no $LLAMA_DTYPE$*"; echo more; exit 1')
    assert main([*COMPLETE, "--prompt", "x"]) == 1
    told = capfd.readouterr().err
    assert "error: the server ended: no -P -m llama serve --background --device=cpu" in told
    fake("exec sleep 100")
    monkeypatch.setattr(resident, "_START_S", 0.3)
    monkeypatch.setattr(resident, "_NOTE_S", 0.1)
    monkeypatch.setattr("llama.cli.client._CONNECT_S", 0.2)
    assert main([*COMPLETE, "--prompt", "x"]) == 1
    told = capfd.readouterr().err
    number = told.partition("waiting for process ")[2].partition(" (its log: ")[0]
    assert f"error: process {number} (its log: " in told and "not ready within 0.3 s" in told


def test_a_server_is_idle_once_no_client_has_the_lock(folder, monkeypatch):
    path = folder.parent / "key.sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        monkeypatch.setenv("LLAMA_LISTENER_FD", str(os.dup(listener.fileno())))
    inherited = resident.InheritedSocket(1)
    with inherited.socket, open(path.with_suffix(".users"), "ab") as users:
        assert inherited.url == f"unix:{path}" and not inherited.is_idle()
        fcntl.flock(users, fcntl.LOCK_SH)
        os.utime(users.fileno(), (1, 1))
        assert not inherited.is_idle() and os.fstat(users.fileno()).st_mtime > 1
        os.utime(users.fileno(), (1, 1))
        fcntl.flock(users, fcntl.LOCK_UN)
        assert inherited.is_idle()
        assert not resident._try_lock(users, fcntl.LOCK_SH), "nobody comes any more"
        inherited._users.close()


def test_each_model_and_way_to_hold_it_has_a_server(folder, tmp_path, monkeypatch):
    def key(**change: str | None) -> str:
        return resident._stem(argparse.Namespace(**{**vars(OPTIONS), **change})).name

    keys = [key(), key(dtype=None), key(quantize="int8"), key(ckpt_dir=str(tmp_path))]
    keys += [key(lora=str(tmp_path / "a")), key(lora=f"{tmp_path / 'a'},{tmp_path / 'b'}")]
    monkeypatch.setattr("llama.__version__", "0.0.1", raising=False)
    assert len({*keys, key()}) == 7
    monkeypatch.chdir(tmp_path)
    assert key(ckpt_dir=".") == key(ckpt_dir=str(tmp_path))
    assert key(lora="a,b") == key(lora=f"{tmp_path / 'a'},{tmp_path / 'b'}")


def test_a_folder_that_others_can_enter_is_refused(folder, monkeypatch):
    """A folder that other users can enter is refused.

    Without XDG_RUNTIME_DIR, the folder is one alongside those of other users in /tmp.
    """
    folder.mkdir(0o755)
    for is_link in (False, True):
        if is_link:
            folder.rmdir()
            folder.symlink_to(folder.parent)
        with pytest.raises(PermissionError, match=rf"{folder} must be a folder that is yours"):
            resident._stem(OPTIONS)
    long = folder.parent / ("x" * 80) / ("y" * 20)
    long.mkdir(parents=True)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    with pytest.raises(OSError, match=rf"{long}/llama is too long a path for a socket"):
        resident._stem(OPTIONS)
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/nowhere")
    monkeypatch.setattr("tempfile.tempdir", str(folder.parent))
    assert resident._stem(OPTIONS).parent == folder.parent / f"llama-{os.getuid()}"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["chat", "--resident", "--max_seq_len", "64"], "leave out --max_seq_len and LLAMA_MAX_SE"),
        (["chat", "--resident", "--url", "http://localhost:1"], "--url and --resident are both"),
        (
            ["complete", "--resident", "--prompt", "x", "--ranks", "2"],
            "--resident needs only one process: leave",
        ),
        (["serve", "--background", "--port", "1"], "leave out --port and LLAMA_PORT"),
        (
            ["serve", "--background"],
            "--background needs only one process: start it without torchrun",
        ),
        (
            ["serve", "--background", "--idle_minutes", "-1"],
            "--idle_minutes: -1 is not in",
        ),
    ],
)
def test_a_flag_that_cannot_be_honoured_is_named(words, told, folder, capfd, monkeypatch):
    if "torchrun" in told:
        monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(words) == 2 and told in capfd.readouterr().err
    assert not folder.exists()
