"""Two machines on one: network namespaces joined by a link of a given delay and rate.

In: one-way seconds and bytes per second. Out: two prefixes for commands, each of which runs its
command in one namespace; and, as a program, the time of a step of ranks across links. A link is
a pair of TUN devices and a process that carries the packets (tuntap.rst of the Linux kernel),
as not every kernel has tc's netem. Needs root, /dev/net/tun and iproute2.

    PYTHONPATH=.:scripts python -m bench.network --model 1b --delay_ms 0.1 --mbits 10000
"""

import argparse
import contextlib
import ctypes
import fcntl
import heapq
import json
import os
import select
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llama import Llama
    from llama.engine.rows import Reader
    from llama.engine.step import Step, StepResults

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "llama-link"  # in each namespace
_MTU = 9000  # jumbo frames, as machines that share a model have
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
_PR_SET_PDEATHSIG, _PR_SET_TIMERSLACK = 1, 29
_STEPS, _TURNS = 40, 4


@contextlib.contextmanager
def link(delay_s: float, bytes_per_s: float) -> Iterator[list[list[str]]]:
    """Yield the two prefixes; the link ends with the block.

    Raises:
        OSError: There is no /dev/net/tun, or no right to use it.
        CalledProcessError: `ip` refused a command.
    """
    names = [f"llama-{os.getpid()}-{i}" for i in range(2)]
    with contextlib.ExitStack() as stack:
        fds = []
        for i, (name, address) in enumerate(zip(names, ADDRESSES, strict=True)):
            _ip("netns", "add", name)
            stack.callback(_ip, "netns", "del", name)
            device = f"ll{os.getpid() % 10**7}-{i}"
            fds.append(_tun(device))
            stack.callback(os.close, fds[-1])
            _ip("link", "set", device, "netns", name)
            inside = ("-n", name)
            _ip(*inside, "link", "set", device, "name", INTERFACE, "mtu", str(_MTU))
            _ip(*inside, "addr", "add", f"{address}/24", "dev", INTERFACE)
            for up in ("lo", INTERFACE):
                _ip(*inside, "link", "set", up, "up")
        carrier = subprocess.Popen(
            [sys.executable, __file__, "carry", *map(str, (*fds, delay_s, bytes_per_s))],
            pass_fds=fds,
        )
        stack.callback(carrier.wait)
        stack.callback(carrier.kill)
        yield [["ip", "netns", "exec", name] for name in names]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)


def _tun(name: str) -> int:
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(fd, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return fd


def carry(one: int, other: int, delay_s: float, bytes_per_s: float) -> None:
    """Pass packets both ways until killed.

    A packet leaves when the line is free, and arrives `delay_s` later.
    """
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_TIMERSLACK, 1)  # nanoseconds; the default is 50,000
    prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # the link ends with who made it
    to, free = {one: other, other: one}, {one: 0.0, other: 0.0}
    under_way: list[tuple[float, int, int, bytes]] = []
    number = 0
    while True:
        wait = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for fd in select.select(list(to), [], [], wait)[0]:
            with contextlib.suppress(BlockingIOError):
                packet = os.read(fd, 65536)
                free[fd] = max(time.monotonic(), free[fd]) + len(packet) / bytes_per_s
                number += 1
                heapq.heappush(under_way, (free[fd] + delay_s, number, to[fd], packet))
        while under_way and under_way[0][0] <= time.monotonic():
            _, _, fd, packet = heapq.heappop(under_way)
            with contextlib.suppress(BlockingIOError):
                os.write(fd, packet)


def on_both(
    prefixes: list[list[str]], program: list[str], timeout_s: float = 300.0, ranks: int = 1
) -> str:
    """Run a program on `ranks` ranks in each namespace and return rank 0's standard output."""
    env = {**os.environ, "GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
    agents = [
        subprocess.Popen(
            [*prefix, sys.executable, "-m", "torch.distributed.run", "--nnodes=2",
             f"--nproc_per_node={ranks}", f"--node_rank={i}", f"--master_addr={ADDRESSES[0]}",
             "--master_port=29500", *program],
            env=env, text=True, stdout=subprocess.PIPE,
        )
        for i, prefix in enumerate(prefixes)
    ]  # fmt: skip
    try:
        outputs = [agent.communicate(timeout=timeout_s)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    codes = [agent.returncode for agent in agents]
    if any(codes):
        raise RuntimeError(f"the ranks ended with {codes}")
    return outputs[0]


def step(folder: str, batch: int) -> None:
    """Print the median milliseconds of a step, and of sums by size, as one rank measures them."""
    from bench.ranks import SUMS, sum_us
    from llama import Llama

    llama = Llama.build(folder, None, 128, batch, device="cpu", dtype="bf16")
    parallel = llama.model.parallel
    prompts = [[256 + i, 65] for i in range(batch)]
    times = [seconds for _ in range(_TURNS) for seconds in _step_seconds(llama, prompts)]
    sums = {name: sum_us(parallel, *size) for name, size in SUMS.items()}
    if parallel.is_leader:
        record = {
            "step_ms": statistics.median(times) * 1e3,
            "least_ms": min(times) * 1e3,
            **sums,
        }
        print(json.dumps(record), flush=True)


@dataclass
class _FinishedStep:
    """A running step whose results are there."""

    results: "StepResults"
    needs_tokens: bool = False

    def compute_rows(self) -> "Reader[StepResults]":
        return lambda: self.results


def _step_seconds(llama: "Llama", prompts: list[list[int]]) -> list[float]:
    start, times = llama.engine.runner.start, []

    def timed(step: "Step") -> _FinishedStep:
        began = time.perf_counter()
        results = start(step).compute_rows()()
        times.append(time.perf_counter() - began)
        return _FinishedStep(results)

    llama.engine.runner.start = timed  # type: ignore[method-assign, assignment]
    llama.generate(prompts, _STEPS, 0.0)
    llama.engine.runner.start = start  # type: ignore[method-assign]
    return times[2:]


def main() -> None:
    parser = argparse.ArgumentParser(description="The time of a step of ranks across a link.")
    parser.add_argument("--model", default="demo", help="demo, or a shape of bench/shapes.py")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--ranks", type=int, default=1, help="in each of the two namespaces")
    parser.add_argument("--delay_ms", type=float, default=0.1, help="one way")
    parser.add_argument("--mbits", type=float, default=10_000, help="megabits per second")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the namespaces are removed then too
    import torch

    from bench.shapes import params_of, write_checkpoint

    with tempfile.TemporaryDirectory() as temporary:
        folder = write_checkpoint(
            Path(temporary) / "model", params_of(options.model), torch.bfloat16
        )
        with link(options.delay_ms / 1e3, options.mbits * 1e6 / 8) as prefixes:
            program = [__file__, "step", str(folder), str(options.batch)]
            out = on_both(prefixes, program, ranks=options.ranks)
    print(json.dumps(vars(options) | json.loads(out.splitlines()[-1])))


if __name__ == "__main__":
    if sys.argv[1:2] == ["carry"]:
        carry(int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), float(sys.argv[5]))
    elif sys.argv[1:2] == ["step"]:
        step(sys.argv[2], int(sys.argv[3]))
    else:
        main()
