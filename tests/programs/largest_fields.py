"""Print what a small request costs alongside each request of helpers/largest_fields.py.

Arguments: parts of the names of cases, and "lookup" for a server with look-up drafts. Each line has
the status and the size of the large request's answer, and then the largest figures of all small
requests alongside it: processor time of the event loop and of the thread of the model, and time.
"""

import json
import resource
import sys
import tempfile
from pathlib import Path

from helpers.beside import cost_beside, running_server
from helpers.checkpoints import long_demo
from helpers.largest_fields import cases
from llama import Llama
from llama.server.process import Server


def main(words: list[str]) -> None:
    speculate = "lookup" if "lookup" in words else None
    parts = [word for word in words if word != "lookup"] or [""]
    with tempfile.TemporaryDirectory() as folder:
        llama = Llama.build(
            str(long_demo(Path(folder) / "demo")),
            max_seq_len=4096,
            max_batch_size=32,
            device="cpu",
            speculate=speculate,
        )
    with running_server(llama) as server:
        for name, path, body in cases():
            if any(part in name for part in parts):
                measure(server, name, path, body)


def measure(server: Server, name: str, path: str, body: object) -> None:
    cost = cost_beside(server, path, json.dumps(body).encode())
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(
        f"{name:50s} {cost.status} {cost.num_bytes / 1e6:6.2f} MB, loop {cost.loop_s * 1e3:4.0f}"
        f" ms, steps {cost.step_s * 1e3:5.0f} ms, time {cost.wall_s * 1e3:5.0f} ms,"
        f" {cost.num_small} small requests, largest RSS {rss} MB {cost.error[:90]}",
        flush=True,
    )


if __name__ == "__main__":
    main(sys.argv[1:])
