"""Run the benchmark's engines, each job in its own process, and report the measurements.

In: the flags that all commands take, and cases. Out: rows, and on stdout the machine, its limits, a
table and one line of JSON. What a figure means is for the command to say: see `commands.py`.
"""

import contextlib
import datetime
import functools
import itertools
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from bench.engines import ACTIVATIONS, ENGINES
from bench.machine import facts, matrix_flops, read_bandwidth
from bench.report import Column, table
from bench.shapes import (
    DTYPES,
    is_gguf,
    is_quantized_folder,
    layouts,
    once,
    params_of,
    write_checkpoint,
)
from llama import ModelArgs
from llama.checkpoint.find import find
from llama.checkpoint.write.convert import pack
from llama.common.device import pick_device
from llama.weights.choice import QUANTIZED

Row = dict[str, Any]
_SCRIPTS = Path(__file__).resolve().parent.parent


@dataclass(kw_only=True)
class Bench:
    """The checked flags that every command takes, and the run of the engines in turn.

    `flags.FLAGS` describes the flags.

    The dtypes int8, fp8 and int4 concern our weights only; `--vs ours_bf16` runs our own engine in
    bf16 alongside them, `--vs ours_rounded` in the same dtype with activations in int8, and `--vs
    ours_rounded_lm_head` with those of lm_head as well.
    """

    model: str = "demo"
    dtype: str = "bf16"
    device: str | None = None
    threads: int | None = None
    vs: str = ""
    work_dir: str | None = None
    limit_s: int = 900
    out: str | None = None
    seed: int = 0
    is_run_as_it_is: bool = field(default=False, init=False)  # in the formats of its files
    skipped: dict[str, str] = field(default_factory=dict, init=False)
    failed: dict[str, str] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.params = params_of(self.model)
        self.args = ModelArgs(**self.params)
        if self.dtype not in (*DTYPES, *QUANTIZED):
            names = ", ".join([*DTYPES, *QUANTIZED])
            raise ValueError(f"dtype={self.dtype!r}: give one of {names}")
        whole("limit_s", self.limit_s)
        self.device_used = pick_device(self.device)
        if self.threads is not None:
            torch.set_num_threads(whole("threads", self.threads))
        self.pythons = {"ours": sys.executable} | _pythons(self.vs)
        readers: set[str] = set()  # the peers that read files in their own formats
        if is_gguf(self.model):
            readers = {"llama_cpp", "ik_llama_cpp"}
        elif is_quantized_folder(self.model):
            readers = {"transformers", "vllm"}
        self.is_run_as_it_is = bool(readers)
        readers |= {"ours_bf16", *ACTIVATIONS}
        if self.is_run_as_it_is and self.pythons.keys() - {"ours", *readers}:
            names = ", ".join(sorted(readers))
            raise ValueError(f"vs={self.vs!r}: of {self.model} only {names} run")

    @property
    def stored(self) -> str:
        """Return the dtype of the files, of the peers, and of everything that is not quantized."""
        return "bf16" if self.dtype in QUANTIZED else self.dtype

    def storage(self, job: Row) -> Row:
        """Return how an engine stores its weights, as arguments of `decode_bytes`."""
        if job["dtype"] == "auto":
            model = Path(self.model)
            files = [*model.glob("*.safetensors")] if model.is_dir() else [model]
            return {"itemsize": 2, "file_bytes": sum(file.stat().st_size for file in files)}
        quantize = job["dtype"] if job["dtype"] in QUANTIZED else None
        stored = DTYPES["bf16" if quantize else job["dtype"]]
        return {"itemsize": stored.itemsize, "quantize": quantize}

    def ours(self) -> Row:
        """Return a job of our own engine in this process."""
        folder = self.model if Path(self.model).exists() else None
        return self._job("") | {"dtype": self.dtype, "folder": folder}

    def run(
        self,
        measure: str,
        cases: list[Row],
        columns: list[Column],
        row_of: "Callable[[Row, Row, Limits], Row]",
        figure: str = "seconds",
        finish: Callable[[list[Row]], None] = lambda rows: None,
    ) -> list[Row]:
        """Run every case with every engine in turn, between two measurements of the limits.

        A case has "batch" and "longest" (tokens of a sequence), and what its measure needs.
        `row_of` computes figures from a case, the worker's measurement and the limits. A row's
        "to_ours" is its `figure`, a time, divided by that of our engine in the same case; with
        several rounds it is the median of the rounds' ratios. `finish` may add to the rows before
        they are reported.
        """
        longest = max(case["longest"] for case in cases)
        if longest > self.args.longest_context:
            raise ValueError(
                f"{longest} tokens are beyond this model's {self.args.longest_context}: "
                "ask for a shorter context or fewer steps"
            )
        limits = Limits(self.device_used, self.stored)
        with self.folders(measure) as folders:
            jobs = [
                self._job(measure) | folders | case | {"case": i} for i, case in enumerate(cases)
            ]
            measured = self._in_turn(jobs)
        limits.look_again()
        shown = ("batch", "context", "dtype", "busy")
        rows = [
            {**{k: job[k] for k in shown if k in job}, **row, **row_of(job, row, limits)}
            for job, row in measured
        ]
        ours = {job["case"]: row for row, (job, _) in zip(rows, measured, strict=True)
                if row["engine"] == "ours" and figure in row}  # fmt: skip
        for row, (job, _) in zip(rows, measured, strict=True):
            if job["case"] in ours:
                beside = ours[job["case"]]
                pairs = [(row[figure], beside[figure])]
                if job.get("rounds", 1) > 1:
                    pairs = [*zip(row["rounds"], beside["rounds"], strict=True)]
                row["to_ours"] = statistics.median(own / other for own, other in pairs)
        finish(rows)
        self.report(columns, rows, limits)
        return rows

    def _in_turn(self, jobs: list[Row]) -> list[tuple[Row, Row]]:
        """Return (job, measurement) pairs; all engines finish a job before any starts the next."""
        measured: list[tuple[Row, Row]] = []
        for shared in jobs:
            if "interrupted" not in self.failed:
                measured += self._rounds(shared)
        return measured

    def _rounds(self, shared: Row) -> list[tuple[Row, Row]]:
        """Run all rounds of one job with each engine; all engines stay loaded meanwhile."""
        rounds = shared.get("rounds", 1)
        workers: dict[str, Worker] = {}
        found: dict[str, tuple[Row, list[Row]]] = {}
        with contextlib.ExitStack() as stack, self._reported_if_interrupted():
            for turn, engine in itertools.product(range(rounds), self.pythons):
                if engine in self.skipped | self.failed:
                    continue
                print(
                    f"... {engine} {shared['measure']} batch {shared['batch']}",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
                if turn == 0:
                    job = shared | self._dtypes(engine)
                    if engine == "ours_packed":
                        job["folder"] = shared["packed"]
                    workers[engine] = stack.enter_context(self._worker(engine, job))
                    found[engine] = job, []
                if (row := self._ask(engine, workers[engine])) is not None:
                    found[engine][1].append(row)
                if rounds == 1:
                    stack.close()
        return [(job, _joined(rows)) for job, rows in found.values() if len(rows) == rounds]

    @contextlib.contextmanager
    def _reported_if_interrupted(self) -> Iterator[None]:
        try:
            yield
        except KeyboardInterrupt:  # hours of rows are still reported
            self.failed["interrupted"] = "rows are missing"

    def _dtypes(self, engine: str) -> Row:
        """Return what an engine computes with, and torch's name of the dtype in the files."""
        dtype = "bf16" if engine == "ours_bf16" else self.stored
        if engine in ("ours", "ours_packed", *ACTIVATIONS):
            dtype = self.dtype
        if self.is_run_as_it_is and engine != "ours_bf16":
            dtype = "auto"  # the formats of the file
        return {
            "dtype": dtype,
            "torch_dtype": str(DTYPES[self.stored]).removeprefix("torch."),
            "activations": ACTIVATIONS.get(engine),  # None: as the files ask
        }

    def _job(self, measure: str) -> Row:
        return {
            "measure": measure,
            "params": self.params,
            "threads": torch.get_num_threads(),
            "device": self.device_used.type,
            "seed": self.seed,
        }

    @contextlib.contextmanager
    def folders(self, measure: str) -> Iterator[Row]:
        """Yield the paths of the weights: "folder" for ours, and "meta", "hf", "gguf".

        "folder" is None where the weights are made in memory.
        """
        if is_gguf(self.model):
            yield {"folder": self.model, "gguf": self.model}
            return
        if self.is_run_as_it_is:
            yield {"folder": self.model, "hf": self.model}
            return
        given = Path(self.model) if Path(self.model).is_dir() else None
        on_disk = given is not None or measure in ("load", "startup")
        peers = {name for name in self.pythons if not name.startswith("ours")}
        is_packed = "ours_packed" in self.pythons
        if not on_disk and not peers and not is_packed:
            yield {"folder": None}
            return
        with tempfile.TemporaryDirectory() as scratch:
            dtype = DTYPES[self.stored]
            work = Path(self.work_dir or scratch, f"{Path(self.model).name}-{self.stored}")
            folder = given or write_checkpoint(work / "meta", self.params, dtype)
            others = layouts(find(folder), work) if peers else {}
            if is_packed:
                quantize = self.dtype if self.dtype in QUANTIZED else None
                write = functools.partial(pack, quantize=quantize)
                out = once(work / f"packed-{self.dtype}", write, find(folder).folder)
                others["packed"] = str(out)
            if peers & {"llama_cpp", "ik_llama_cpp"}:
                from bench.gguf_file import write_gguf  # imports the package gguf

                others["gguf"] = str(once(work / "model.gguf", write_gguf, find(folder), dtype))
            yield {"folder": str(folder) if on_disk else None, **others}

    def _worker(self, engine: str, job: Row) -> "Worker":
        if job["measure"] in ("load", "startup"):
            _read_once(
                {job[key] for key in ("folder", "meta", "hf", "gguf", "packed") if key in job}
            )
        command = [self.pythons[engine], "-m", "bench.worker", engine]
        return Worker(command, job, self._environment(engine), self.limit_s)

    def _ask(self, engine: str, worker: "Worker") -> Row | None:
        """Return the measurement of an engine's next round.

        The result is None where the engine is skipped or fails; `skipped` and `failed` say why.
        """
        try:
            row = worker.measure()
        except (RuntimeError, TimeoutError) as e:
            self.failed[engine] = str(e)
            return None
        if "skipped" in row:
            self.skipped[engine] = row["skipped"]
            return None
        if "first_token_at" in row:
            row["seconds"] = row.pop("first_token_at") - worker.began
        return {"engine": engine, **row}

    def _environment(self, engine: str) -> dict[str, str]:
        """Return an environment in which a worker finds `bench`, `llama` and our thread count."""
        paths = [str(_SCRIPTS), str(_SCRIPTS.parent), os.environ.get("PYTHONPATH", "")]
        venv = Path(self.pythons[engine]).parent.parent
        return {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "OMP_NUM_THREADS": str(torch.get_num_threads()),
            **ENGINES[engine].environment(venv),
        }

    def report(self, columns: list[Column], rows: list[Row], limits: "Limits | None") -> None:
        """Print the machine, the table and the JSON; write them to a file if asked to."""
        machine = facts(self.device_used)
        document = {
            "command": shlex.join(["python", *sys.argv]),
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine,
            "limits": limits and limits.as_json(),
            "model": {"name": self.model, "dtype": self.dtype, **self.params},
            "rows": rows,
            "skipped": self.skipped,
            "failed": self.failed,
        }
        notes = [f"{name}: skipped, {why}" for name, why in self.skipped.items()]
        notes += [f"{name}: failed, {why}" for name, why in self.failed.items()]
        head = [
            f"{machine['accelerator'] or machine['cpu']}, {machine['cores']} cores, "
            f"{machine['threads']} threads, torch {machine['torch']}, {self.model} {self.dtype}",
            *([str(limits)] if limits else []),
        ]
        text = "\n".join([*head, "", table(columns, rows), *notes, "", json.dumps(document)])
        print(text)
        if self.out is not None:
            Path(self.out).write_text(text + "\n")
        if self.failed:
            sys.exit(1)


class Limits:
    """Read bandwidth, measured twice since others may use the machine, and FLOP/s by dtype."""

    def __init__(self, device: torch.device, dtype: str) -> None:
        self.device = device
        self.reads = [read_bandwidth(device)]
        self.flops_by_dtype = {
            n: matrix_flops(device, DTYPES[n]) for n in dict.fromkeys((dtype, "fp32"))
        }

    def look_again(self) -> None:
        self.reads.append(read_bandwidth(self.device))

    @property
    def read(self) -> float:
        return max(self.reads)

    @property
    def flops(self) -> float:
        """Return the best rate that the machine showed, in the dtype or in float32."""
        return max(self.flops_by_dtype.values())

    def as_json(self) -> Row:
        return {"read_bytes_per_s": self.reads, "flops": self.flops_by_dtype}

    def __str__(self) -> str:
        before, after = (f"{read / 1e9:.1f}" for read in self.reads)
        rates = ", ".join(f"{name} {rate / 1e12:.3f}" for name, rate in self.flops_by_dtype.items())
        return f"read {before} GB/s before, {after} after; matrix product TFLOP/s: {rates}"


class Worker:
    """One engine in its own process (see worker.py), which ends with the block."""

    def __init__(
        self, command: list[str], job: Row, environment: dict[str, str], limit_s: int
    ) -> None:
        self._next = json.dumps(job)
        self._limit_s = limit_s
        self._is_late = False
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.began = time.monotonic()  # a clock that processes share
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
            text=True, env=environment,
        )  # fmt: skip

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._errors.close()

    def measure(self) -> Row:
        """Run one round and return its measurement.

        Raises:
            RuntimeError: The process ended instead; the message is the last line of its stderr.
            TimeoutError: There was no answer within the limit.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        limit = threading.Timer(self._limit_s, self._end)
        limit.start()
        try:
            with contextlib.suppress(BrokenPipeError):
                print(self._next, file=self._process.stdin, flush=True)
            self._next = ""
            answer = self._process.stdout.readline()
        finally:
            limit.cancel()
        if answer:
            return dict(json.loads(answer))
        if self._is_late:
            raise TimeoutError(f"no answer in {self._limit_s} s")
        self._process.wait()
        self._errors.seek(0)
        raise RuntimeError((self._errors.read().strip().splitlines() or ["no message"])[-1])

    def _end(self) -> None:
        self._is_late = True
        self._process.kill()


def _joined(rows: list[Row]) -> Row:
    """Join the measurements of all rounds; "rounds" has the median of each."""
    joined = rows[-1] | rows[0]
    for key in {"steps", "prefills"} & joined.keys():
        joined[key] = [seconds for row in rows for seconds in row[key]]
        joined["rounds"] = [statistics.median(row[key]) for row in rows]
    return joined


def _read_once(paths: set[str]) -> None:
    """Read the files into the page cache, which may have dropped them since they were written."""
    for path in map(Path, paths):
        found = [path] if path.is_file() else path.iterdir()
        for file in filter(Path.is_file, found):
            with file.open("rb", buffering=0) as content:
                while content.read(1 << 24):
                    pass


def whole(name: str, value: Any, min_value: int = 1) -> int:
    """Return an integer flag, or raise a ValueError that names it."""
    if isinstance(value, bool) or not isinstance(value, int) or value < min_value:
        raise ValueError(f"{name}={value!r}: give an integer of at least {min_value}")
    return value


def _pythons(vs: str) -> dict[str, str]:
    """Return the interpreter of each peer in "name,name:VENV"; ValueError names a wrong one."""
    found = {}
    for peer in filter(None, vs.split(",")):
        name, _, venv = peer.partition(":")
        if name not in ENGINES or name == "ours":
            allowed = ", ".join(peer for peer in ENGINES if peer != "ours")
            raise ValueError(f"vs={peer!r}: the peers are {allowed}")
        python = Path(venv, "bin", "python") if venv else Path(sys.executable)
        if not python.exists():
            raise ValueError(f"vs={peer!r}: {python} does not exist: give a virtual environment")
        found[name] = str(python)
    return found
