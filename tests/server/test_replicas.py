"""Two servers behind nginx, with the example's own configuration; skipped without nginx."""

import json
import shutil
import subprocess
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from helpers.launch import REPO
from helpers.ports import reserved_port
from helpers.server import RunningServer, raw_events, run_server
from helpers.waiting import num_lines, wait_until
from helpers.web import web
from llama.cli.batch.loop import BatchReport
from llama.cli.batch.server_job import run_server_batch
from llama.cli.model import sampling_params

CONF = REPO / "torchrun_examples" / "nginx_two_servers.conf"


@pytest.mark.skipif(shutil.which("nginx") is None, reason="nginx is not installed")
def test_a_server_that_dies_behind_nginx_is_not_noticed(tmp_path):
    """A server that dies behind nginx is not noticed by clients.

    One of two servers gets SIGKILL under load: each line of a batch job still has its answer.
    Streams are not buffered.
    """
    with ExitStack() as stack:
        servers = [stack.enter_context(run_server("--max_seq_len", "512")) for _ in range(2)]
        port = stack.enter_context(reserved_port())
        url = stack.enter_context(_Nginx(tmp_path, port, servers))
        assert web.get(f"{url}/ready").json() == {"status": "ready"}
        events = raw_events(f"{url}/v1/completions", {"prompt": "Once", "stream": True})
        assert events[-1] == "[DONE]" and len(events) > 3
        lines = [{"prompt": f"Hi {i}", "max_tokens": 60, "ignore_eos": True} for i in range(300)]
        (tmp_path / "in").write_text("".join(json.dumps(line) + "\n" for line in lines))
        out, reports = tmp_path / "out", []

        def work() -> None:
            reports.append(run_server_batch(url, str(tmp_path / "in"), str(out), sampling_params()))

        thread = threading.Thread(target=work, daemon=True)  # it may retry for minutes
        thread.start()
        wait_until(lambda: num_lines(out) >= 40)
        servers[0].process.kill()
        thread.join(240)
        assert reports == [BatchReport(300, 0)]
        assert all(len(server.log) > 5 for server in servers), "both had a part"


class _Nginx:
    """A context that runs nginx with the example's configuration on these ports; gives its URL."""

    def __init__(self, folder: Path, port: int, servers: list[RunningServer]) -> None:
        self._folder, self._port = folder, port
        conf = CONF.read_text()
        for server, usual in zip(servers, ("8001", "8002"), strict=True):
            assert f"server 127.0.0.1:{usual} " in conf
            conf = conf.replace(f"127.0.0.1:{usual}", server.url.removeprefix("http://"))
        conf = conf.replace("127.0.0.1:8000", f"127.0.0.1:{port}")
        (folder / "nginx.conf").write_text(conf)

    def __enter__(self) -> str:
        command = ["nginx", "-p", str(self._folder), "-c", str(self._folder / "nginx.conf")]
        self._process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
        url, end = f"http://127.0.0.1:{self._port}", time.monotonic() + 60
        while True:
            try:
                web.get(f"{url}/health")
                return url
            except httpx.TransportError:
                assert self._process.poll() is None and time.monotonic() < end
                time.sleep(0.02)

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.wait(20)
