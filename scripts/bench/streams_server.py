"""A server over a device that does nothing, for `streams.py`: it reports its own processor time.

In: a line on stdin for each report. Out: on stdout the port, then for each line a report as JSON:
the tokens generated so far, and the seconds of each thread. The model's steps take a fixed time, in
which the process sleeps. The server, the engine and the text are the real ones.
"""

import gc
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

from bench.host import llama_without_device
from llama.server.limits import Limits
from llama.server.process import Server
from llama.server.service import Service

# By the beginning of a thread's name. With API processes, the loop accepts connections.
_ROLES = {"llama-engine": "engine", "llama-http": "loop", "llama-accept": "loop"}
_TOKEN = 97  # the letter a


def _seconds() -> dict[str, float]:
    """Return the processor time of the server, of its two busy threads and its API processes."""
    api = sum(map(_seconds_of, _children()))
    found = {"all": time.process_time() + api, "api": api, **dict.fromkeys(_ROLES.values(), 0.0)}
    for thread in threading.enumerate():
        role = next((x for start, x in _ROLES.items() if thread.name.startswith(start)), None)
        if role is not None:
            times = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
            found[role] += int(times.split()[0]) / 1e9
    return found


def _children() -> list[int]:
    """Return the processes that this one has started."""
    tasks = Path("/proc/self/task").glob("*/children")
    return [int(child) for file in tasks for child in file.read_text().split()]


def _seconds_of(pid: int) -> float:
    """Return the processor time of another process."""
    tasks = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(file.read_text().split()[0]) for file in tasks) / 1e9


def _server(num_processes: int) -> Any:
    """Return a server with so many API processes."""
    network: dict[str, Any] = {"host": "127.0.0.1", "port": 0}
    if num_processes:
        from llama.server.api_options import ApiOptions  # An older tree has none.
        from llama.server.split import SplitServer

        return SplitServer(ApiOptions(name="bench"), num_processes, **network)
    service = Service(Limits())
    service.add("bench")
    return Server(service, **network, api_keys=[])


def main(batch: int, longest: int, step_s: float, num_processes: int) -> None:
    """Serve until the end of stdin."""
    torch.set_num_threads(1)
    server = _server(num_processes)
    server.start()
    with tempfile.TemporaryDirectory() as scratch:  # The API processes read the tokenizer, too.
        llama = llama_without_device(Path(scratch), batch, longest, step_s, _TOKEN)
        server.open(llama)
    print(server.port, flush=True)
    for _ in sys.stdin:
        report = {"tokens": llama.engine.stats.generated_tokens, "seconds": _seconds()}
        print(json.dumps(report), flush=True)
    gc.collect()
    if not num_processes:
        server.service.close()
    server.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
