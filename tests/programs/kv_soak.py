"""Two tenants ask a server with KV pages on disk, which is killed again and again, for minutes.

`python tests/programs/kv_soak.py --minutes 25` compares each answer, with its log-probabilities,
with that of a server without pages on disk. The folder has room for less than the prompts need, so
that pages are removed. A last server then runs `--alive` minutes; its memory and its descriptors
are printed each minute. With `--servers 2` two have the folder at once, and each is killed at times
of its own. The exit code is 1 if an answer differs, if a request had an error other than the end of
the server, if the folder ever exceeded its limit, or if it has files that are none of the format's.
`--folder DIR` goes on with the folder and the answers of an earlier run.
"""

import argparse
import json
import os
import random
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from helpers import server as server_helpers
from helpers.launch import DEMO, PROGRAMS
from helpers.server import RunningServer, run_server
from llama.build_args import MIN_DISK_BYTES
from programs.server_load import resident_mb

NUM_PROMPTS = 160
PATIENCE_S = 900.0  # alongside processes that have precedence
KEYS = ("first", "second")
FLAGS = (str(DEMO), "--dtype", "bf16", "--device", "cpu", "--max_batch_size", "8")
PROGRAM = (str(PROGRAMS / "kv_server.py"),)
NAMES = re.compile(r"secret|written|[0-9a-f]{16}(/model\.json|/\d+-\d+-[0-9a-f]{8}\.kv)?")


def prompt_of(number: int) -> list[int]:
    """Return a prompt, which begins like three others."""
    start = random.Random(number // 4).choices(range(300, 1800), k=200)
    draw = random.Random(f"end {number}")
    return start + draw.choices(range(300, 1800), k=draw.randrange(20, 280))


def ask(url: str, key: str, number: int) -> tuple[Any, int]:
    """Return the answer to a prompt, and how many of its tokens were not computed."""
    body = {
        "prompt": prompt_of(number), "max_tokens": 6, "temperature": 0.9, "seed": number,
        "logprobs": 2,
    }  # fmt: skip
    headers = {"Authorization": f"Bearer {key}"}
    answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    found = answer.json()
    return found["choices"], found["usage"]["prompt_tokens_details"]["cached_tokens"]


class Soak:
    """The answers of one run, and what was wrong."""

    def __init__(self, root: Path, wanted: list[Any]) -> None:
        self.root = root
        self.wanted = wanted
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.largest = 0

    def live(self, server: RunningServer, seconds: float) -> None:
        """Send requests for so long, and kill the server while it answers some."""
        is_over = threading.Event()
        work = [(self.send, (server, key, i, is_over)) for key in KEYS for i in range(2)]
        threads = [threading.Thread(target=call, args=values) for call, values in work]
        threads.append(threading.Thread(target=self.watch, args=(server.process.pid, is_over)))
        for thread in threads:
            thread.start()
        time.sleep(seconds)
        is_over.set()
        server.process.kill()
        for thread in threads:
            thread.join()
        self.counts["kills"] += 1

    def send(self, server: RunningServer, key: str, first: int, is_over: threading.Event) -> None:
        draw = random.Random(time.time_ns() + first)
        while not is_over.is_set():
            number = draw.randrange(NUM_PROMPTS)
            try:
                choices, num_cached = ask(server.url, key, number)
            except (httpx.TransportError, AssertionError) as error:
                if is_over.is_set():
                    self.counts["cut"] += 1
                else:
                    self.faults.append(f"prompt {number}: {error!r}")
                continue
            self.counts["answers"] += 1
            self.counts["cached tokens"] += num_cached
            self.counts["prompt tokens"] += len(prompt_of(number))
            if choices != self.wanted[number]:
                self.faults.append(f"prompt {number} of {key}: {choices}")

    def watch(self, pid: int, is_over: threading.Event) -> None:
        began = time.monotonic()
        num_minutes = 0
        while not is_over.is_set():
            if time.monotonic() - began >= 60 * num_minutes:
                num_open = len(os.listdir(f"/proc/{pid}/fd"))
                print(
                    f"minute {num_minutes}: {resident_mb(pid):.1f} MB, {num_open} descriptors, "
                    f"{self.counts['answers']:,} answers, {self.largest:,} bytes",
                    flush=True,
                )
                num_minutes += 1
            sizes = [
                path.stat().st_size for path in list(self.root.glob("*/*.kv")) if path.exists()
            ]
            self.largest = max(self.largest, sum(sizes))
            time.sleep(0.1)

    def check_folder(self) -> None:
        names = [str(path.relative_to(self.root)) for path in self.root.rglob("*")]
        self.faults += [f"left over: {name}" for name in names if not NAMES.fullmatch(name)]
        if self.largest > MIN_DISK_BYTES:
            self.faults.append(f"the folder had {self.largest:,} bytes")


def answers_without_pages(folder: Path) -> list[Any]:
    """Return the answers to all prompts, by a server without pages on disk."""
    file = folder / "wanted.json"
    if not file.exists():
        with run_server(*FLAGS, program=PROGRAM) as server:
            found = [ask(server.url, KEYS[0], number)[0] for number in range(NUM_PROMPTS)]
        file.write_text(json.dumps(found))
    return json.loads(file.read_text())


def run(folder: Path, minutes: float, minutes_alive: float, num_servers: int) -> int:
    wanted = answers_without_pages(folder)
    keys = folder / "keys"
    keys.write_text("\n".join(KEYS))
    soak = Soak(folder / "kv", wanted)
    flags = (
        *FLAGS, "--api_key_file", str(keys), "--kv_cache_dir", str(soak.root),
        "--kv_cache_disk_bytes", str(MIN_DISK_BYTES),
    )  # fmt: skip
    end = time.monotonic() + 60 * minutes

    def run_servers() -> None:
        lives = [60 * minutes_alive] if minutes_alive else []
        while lives or end - time.monotonic() > 15:
            left = end - time.monotonic()
            seconds = min(random.uniform(30, 60), left) if left > 15 else lives.pop()
            with run_server(*flags, program=PROGRAM) as server:
                soak.live(server, seconds)
                print(dict(soak.counts), f"{soak.largest:,} bytes", soak.faults[:3], flush=True)

    with ThreadPoolExecutor() as threads:
        running = [threads.submit(run_servers) for _ in range(num_servers)]
    for each in running:
        each.result()
    soak.check_folder()
    print("faults:", *soak.faults, sep="\n  ")
    return int(bool(soak.faults))


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--minutes", type=float, default=25.0)
    parser.add_argument("--alive", type=float, default=0.0)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--folder", type=Path)
    options = parser.parse_args()
    server_helpers.START_S = PATIENCE_S
    sizes = (options.minutes, options.alive, options.servers)
    if options.folder is not None:
        options.folder.mkdir(parents=True, exist_ok=True)
        return run(options.folder, *sizes)
    with tempfile.TemporaryDirectory() as folder:
        return run(Path(folder), *sizes)


if __name__ == "__main__":
    sys.exit(main())
