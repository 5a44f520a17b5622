"""The program of ranks/test_failures.py: a rank of a job in which one rank fails, stalls or leaves.

    python failing.py CASE FOLDER MARK            # the rank that the environment names
    python failing.py --ranks CASE FOLDER MARK    # a launch of two ranks

CASE is JSON: which `fault` happens to which `rank`, and `when`. FOLDER has the model. The faulty
rank writes the time to MARK. The ranks wait for one another by files of its name with suffixes.
"""

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from helpers.waiting import wait_until
from llama import Llama
from llama.checkpoint import loader
from llama.cli.batch.job import run_batch
from llama.cli.chat.engine_session import chat_on_engine as chat
from llama.cli.model import sampling_params
from llama.ranks import processes
from llama.ranks.launch import launch
from llama.ranks.rendezvous import Rendezvous, Store
from llama.ranks.signals import SIGNALS

MEETING = ("never", "came", "groups")  # the moments before the groups are complete
SLEEP_S = 300.0  # longer than any test waits


def fail(fault: str, mark: Path) -> None:
    mark.write_text(str(time.time()))
    if fault == "exception":
        raise IndexError("made to fail")
    if fault == "memory":
        raise MemoryError("made to fail")
    if fault == "no memory":  # not even for a thread, or for a message
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize(),) * 2)
        torch.zeros(1 << 28)
    if fault == "exit":
        sys.exit(0)
    if fault == "sleep":
        time.sleep(SLEEP_S)
    if fault in ("SIGKILL", "SIGSTOP", "SIGTERM"):
        os.kill(os.getpid(), getattr(signal, fault))
    if fault == "agent":
        os.kill(os.getppid(), signal.SIGKILL)
    if fault == "pause":  # a user's Ctrl-Z and `fg`: all ranks are stopped, and go on
        ranks = os.getpgid(0)
        if not os.fork():
            os.setpgid(0, 0)
            time.sleep(0.5)  # the ranks are idle
            os.killpg(ranks, signal.SIGSTOP)
            time.sleep(5.0)
            os.killpg(ranks, signal.SIGCONT)
            os._exit(0)
    if fault.startswith("stop"):  # a signal to all ranks, as torchrun passes it on
        os.killpg(0, signal.SIGTERM)
    if fault == "stop twice":
        time.sleep(3.0)  # by then every rank has recorded the first signal, 0.5 s ago or earlier
        os.killpg(0, signal.SIGTERM)
    if fault == "stop, and go on":
        time.sleep(20.0)  # the ranks are ended long before


def meet_and_fail(case: dict[str, Any], rank: int, mark: Path) -> None:
    """Let the faulty rank fail before the groups are complete, and the last one come late."""
    last = case["world"] - 1
    if case["when"] == "came" and rank == last:
        wait_until(mark.with_suffix(".alone").exists)
    elif case["when"] == "came":
        fail_once_all_came(case, rank, mark)
    elif rank == case["rank"]:
        if case["when"] == "never":
            fail(case["fault"], mark)
        new_group = dist.new_group

        def new_group_and_fail(*args: Any, **kwargs: Any) -> Any:
            if case["when"] == "groups":
                fail(case["fault"], mark)
            return new_group(*args, **kwargs)

        dist.new_group = new_group_and_fail


def fail_once_all_came(case: dict[str, Any], rank: int, mark: Path) -> None:
    """Let the faulty rank fail when all ranks but the last know each other."""
    num_others = case["world"] - 2
    complete = [mark.with_suffix(f".complete-{i}") for i in range(case["world"] - 1)]
    beat = Rendezvous._beat

    def beat_and_fail(self: Rendezvous, store: Store) -> None:
        beat(self, store)
        if len(self.peers.all) == num_others:
            complete[rank].touch()
        if rank == case["rank"] and all(path.exists() for path in complete):
            fail(case["fault"], mark)

    Rendezvous._beat = beat_and_fail  # type: ignore[method-assign]


def fail_while_loading(fault: str, mark: Path) -> None:
    """Let this rank fail once two parts of its model are filled."""
    load = loader.load

    def load_and_fail(checkpoint: Any, model: Any, *, filled: Any, **options: Any) -> None:
        parts: list[Any] = []

        def filled_or_failed(part: Any, coded: Any) -> None:
            filled(part, coded)
            parts.append(part)
            if len(parts) == 2:
                fail(fault, mark)

        load(checkpoint, model, filled=filled_or_failed, **options)

    loader.load = load_and_fail  # type: ignore


def chat_in_a_pipe(llama: Llama, rank: int, out: Path) -> None:
    """Ask one question through a pipe that stays open; rank 0 writes the answers to a file."""
    reads, writes = os.pipe()
    if not rank:
        os.write(writes, b"a question\n")
        os.dup2(reads, 0)
        os.dup2(os.open(out, os.O_CREAT | os.O_WRONLY), 1)
    chat(llama, temperature=0.0, top_p=0.9, max_gen_len=20, seed=None)


def work(case: dict[str, Any], folder: str, mark: Path) -> None:
    """Build, answer, be idle, answer: and fail where the case says so."""
    torch.set_num_threads(1)
    rank, when = int(os.environ["RANK"]), case["when"]
    is_faulty = rank == case["rank"]
    if case.get("starts_together"):  # limits of time count from here, not from the first import
        mark.with_suffix(f".started-{rank}").touch()
        started = [mark.with_suffix(f".started-{i}") for i in range(case["world"])]
        wait_until(lambda: all(path.exists() for path in started))
    if "drain_s" in case:
        SIGNALS.drain_s = case["drain_s"]
    if case.get("is_apart"):  # each rank takes itself for a machine of its own
        processes.machine_id = lambda: f"machine of rank {rank}"
        os.environ |= {"LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0", "GROUP_RANK": str(rank)}
    if when in MEETING:
        meet_and_fail(case, rank, mark)
    if when == "load" and is_faulty:
        fail_while_loading(case["fault"], mark)
    stages = case.get("stages", 1)
    llama = Llama.build(
        folder, None, 128, 4, dtype="fp32", device="cpu", timeout_s=case["timeout_s"],
        pipeline_parallel_size=stages, shares=case.get("shares"),
        silence_s=case.get("silence_s", 30.0),
    )  # fmt: skip
    runner, steps = llama.engine.runner, llama.engine.stats
    name = "start_stage" if stages > 1 else "start"
    start = getattr(runner, name)
    at = {"prefill": 0, "decode": 3}.get(when)

    def start_and_fail(scheduled):
        if is_faulty and steps.steps == at:
            fail(case["fault"], mark)
        return start(scheduled)

    setattr(runner, name, start_and_fail)
    prompts = [[256, 65 + i] for i in range(2)]
    if when == "script" and is_faulty:
        fail(case["fault"], mark)
    if case.get("is_chat"):
        chat_in_a_pipe(llama, rank, mark.with_suffix(".out"))
        return
    if "drain_s" in case:
        path = mark.with_suffix(".out")
        params = sampling_params(temperature=0, max_gen_len=8)
        run_batch(llama, str(mark.with_suffix(".in")), str(path), params)
        return
    llama.generate(prompts, 16, 0)
    if when == "idle":
        if is_faulty:
            fail(case["fault"], mark)
        if rank:
            llama.model.parallel.broadcast_bytes(b"")  # waits in C++ for rank 0
        time.sleep(SLEEP_S)
    if when == "pause":  # all ranks, longer than any step may take
        if is_faulty:
            fail(case["fault"], mark)
        time.sleep(case["timeout_s"] + 6.5)
        if is_faulty:
            os.wait()  # waits for the process that stopped the ranks
        llama.generate(prompts, 16, 0)


def main(arguments: list[str]) -> int:
    if arguments[0] == "--ranks":
        return launch([__file__, *arguments[1:]], 2)
    case, folder, mark = arguments
    work(json.loads(case), folder, Path(mark))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
