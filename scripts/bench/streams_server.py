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

import torch

from bench.host import llama_without_device
from llama.server.limits import Limits
from llama.server.process import Server
from llama.server.service import Service

_ROLES = {"llama-engine": "engine", "llama-http": "loop"}  # by the beginning of a thread's name
_TOKEN = 97  # the letter a


def _seconds() -> dict[str, float]:
    """Return the processor time of the process, and those of its two busy threads."""
    found = {"all": time.process_time(), **dict.fromkeys(_ROLES.values(), 0.0)}
    for thread in threading.enumerate():
        role = next((x for start, x in _ROLES.items() if thread.name.startswith(start)), None)
        if role is not None:
            times = Path(f"/proc/self/task/{thread.native_id}/schedstat").read_text()
            found[role] += int(times.split()[0]) / 1e9
    return found


def main(batch: int, longest: int, step_s: float) -> None:
    """Serve until the end of stdin."""
    torch.set_num_threads(1)
    service = Service(Limits())
    service.add("bench")
    server = Server(service, host="127.0.0.1", port=0, api_keys=[])
    server.start()
    with tempfile.TemporaryDirectory() as scratch:
        llama = llama_without_device(Path(scratch), batch, longest, step_s, _TOKEN)
    server.open(llama)
    print(server.port, flush=True)
    for _ in sys.stdin:
        report = {"tokens": llama.engine.stats.generated_tokens, "seconds": _seconds()}
        print(json.dumps(report), flush=True)
    gc.collect()
    service.close()
    server.stop()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
