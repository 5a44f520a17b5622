"""The section `ranks` of `scripts/gpu_check.py`: several ranks, which may share one GPU.

In: a section. Out: for each layout, model and way to run steps, whether the greedy and sampled ids
are those of one rank; then whether a job ends with one message when a rank is killed in the sum of
a graph. The ids of float32 must be equal. Each layout is a job of its own, whose ranks are this
program. Dry, the ranks are on the CPU, and steps run again in place of graphs.

NCCL takes ranks that share a GPU from 2.30 on, with which `gpu_check.py --nccl` replaces that of an
older torch. Before it, gloo carries the tensors, and only stages have graphs.
"""

import json
import lzma
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from bench.gpu_run import Again, Section
from bench.shapes import write_checkpoint
from llama import Llama
from llama.common.device import nccl_version, shares_gpu
from llama.gpu import selection
from llama.options.graphs.recorder import Outputs, Recorder

PROMPTS = [[256, 65, 66, 67], [256, 72], [256, *range(97, 117)]]
_REPO = Path(__file__).resolve().parents[2]
_DEMO = _REPO / "checkpoints" / "demo"
LIBRARY = "LLAMA_CHECK_NCCL"  # environment variable: the library of NCCL that ranks preload
_MIN_NCCL = (2, 30)  # takes ranks that share a GPU
# What ranks that share a GPU need: each kernel of NCCL waits for a peer whose time slice comes.
_SHARED = {
    "LLAMA_SHARE_GPU": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1", "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "2", "NCCL_DEBUG": "WARN",
}  # fmt: skip
_RANDOM = {  # 0.5 GB in float32; its heads have the size of the 8B's
    "dim": 1024, "n_layers": 8, "n_heads": 8, "n_kv_heads": 4, "vocab_size": 16_384,
    "multiple_of": 256, "norm_eps": 1e-5, "rope_theta": 500000.0,
}  # fmt: skip
_LAUNCH = (
    "import sys; from llama.ranks.launch import launch; "
    "sys.exit(launch(sys.argv[2:], int(sys.argv[1])))"
)
_KILLED_S = 20.0  # a job must be gone so long after the death of a rank
_KILLED_REPLAY = 5  # the replay of the killed rank that never begins


class Layout(NamedTuple):
    """Stages, and ranks in each."""

    stages: int
    size: int

    def __str__(self) -> str:
        return f"{self.stages} x {self.size}"


ALONE = Layout(1, 1)
LAYOUTS = (Layout(1, 2), Layout(1, 4), Layout(2, 1), Layout(2, 2))
ASKED = "LLAMA_CHECK_LAYOUTS"  # environment variable: some of them, such as "1 x 2,2 x 2"


class Job(NamedTuple):
    """The work of each rank of a launch, as JSON on its command line.

    Attributes:
        models: The folders of models by name.
        out: The folder to which each rank writes rankN.json.
        layout: Its layout.
        dry: Whether the ranks are on the CPU.
        killed: Whether the last rank is killed in a step that is replayed.
    """

    models: dict[str, str]
    out: str
    layout: Layout
    dry: bool
    killed: bool = False


def ranks(at: Section) -> None:
    """Compare the answers of several layouts with one rank's, and kill a rank."""
    with tempfile.TemporaryDirectory() as scratch:
        params = at.params("8b") | {"n_layers": 2} if at.dry else _RANDOM
        random = write_checkpoint(Path(scratch, "random"), params, torch.float32)
        job = Job({"demo": str(_DEMO), "random": str(random)}, scratch, ALONE, at.dry)
        _, wanted = run(job)
        differing = []
        asked = os.environ.get(ASKED, "").split(",")
        for layout in [each for each in LAYOUTS if str(each) in asked or asked == [""]]:
            began = time.monotonic()
            _, found = run(job._replace(layout=layout))
            for name, result in found.items():
                right = wanted[name.removesuffix(", unequal shares")]
                count = sum(a == b for a, b in zip(result["ids"], right["ids"], strict=True))
                same = count == len(right["ids"])
                at.say(
                    f"{layout} {name}", "same ids" if same else f"{count} answers are the same",
                    replays=result["replays"], backend=result["backend"],
                )  # fmt: skip
                if "fp32" in name and not same:
                    differing.append(f"{layout} {name}")
            at.say(f"{layout} seconds", time.monotonic() - began, "s")
        _kill(at, job)
    if differing:
        raise AssertionError(f"ids differ from one rank's: {', '.join(differing)}")


def _kill(at: Section, job: Job) -> None:
    """Kill a rank whose peer waits for it in the sum of a graph."""
    done, _ = run(job._replace(layout=Layout(1, 2), killed=True))
    killed_at = Path(job.out, "killed")
    if not killed_at.exists():
        at.say("killed in a captured sum", "no graph has sums here")
        return
    seconds = time.time() - float(killed_at.read_text())
    messages = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    at.say("killed in a captured sum", seconds, "s until the job was gone", messages=messages)
    is_named = len(messages) == 1 and "rank 1 on " in messages[0] and "SIGKILL" in messages[0]
    if not (done.returncode and is_named and seconds < _KILLED_S):
        raise AssertionError(f"exit code {done.returncode} after {seconds:.0f} s: {messages}")


def run(job: Job) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    """Run a job, and return its process and what all ranks have found alike."""
    command = [str(Path(__file__).resolve()), json.dumps(job)]
    num_ranks = job.layout.stages * job.layout.size
    if num_ranks == 1:
        command = [sys.executable, *command]
    else:
        command = [sys.executable, "-c", _LAUNCH, str(num_ranks), *command]
    paths = [str(_REPO / "scripts"), str(_REPO), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    if torch.cuda.device_count() < num_ranks:
        env |= _SHARED
    if LIBRARY in env:
        env["LD_PRELOAD"] = _unpacked(Path(env[LIBRARY]), Path(job.out))
    done = subprocess.run(
        command, env=env, stdout=sys.stderr, stderr=subprocess.PIPE, text=True, check=False
    )
    print(done.stderr, file=sys.stderr, flush=True)
    if job.killed:
        return done, {}
    if done.returncode:
        raise RuntimeError(f"the ranks of {job.layout} ended with {done.returncode}")
    files = [Path(job.out, f"rank{rank}.json") for rank in range(num_ranks)]
    first, *others = [json.loads(path.read_text()) for path in files]
    for rank, other in enumerate(others, 1):
        for name, result in first.items():
            if other[name]["ids"] != result["ids"]:
                raise AssertionError(f"{job.layout} {name}: rank {rank} has other ids than rank 0")
    return done, first


def _unpacked(library: Path, folder: Path) -> str:
    """Return the path of a library, which is decompressed into the folder if it ends with .xz."""
    if library.suffix != ".xz":
        return str(library)
    path = folder / library.stem
    if not path.exists():
        path.write_bytes(lzma.decompress(library.read_bytes()))
    return str(path)


class _Counted:
    """A recorder whose replays are counted, and of which one may kill this process."""

    def __init__(self, recorder: Recorder, killed: Path | None) -> None:
        self.num_replays = 0
        self._recorder = recorder
        self._killed = killed

    def record(
        self, function: Callable[[], Outputs], inputs: Sequence[Tensor]
    ) -> tuple[Outputs, Callable[[], None]]:
        outputs, replay = self._recorder.record(function, inputs)

        def counted() -> None:
            self.num_replays += 1
            if self._killed is not None and self.num_replays == _KILLED_REPLAY:
                self._killed.write_text(str(time.time()))
                os.kill(os.getpid(), signal.SIGKILL)
            replay()

        return outputs, counted

    def free_bytes(self) -> int:
        return self._recorder.free_bytes()

    def close(self) -> None:
        self._recorder.close()


class _Rank:
    """One rank of a job."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.rank = int(os.environ.get("RANK", "0"))
        self.recorders: list[_Counted] = []

    def work(self) -> None:
        """Answer with each model in each way, and write what was found."""
        has_old_nccl = (nccl_version() or _MIN_NCCL) < _MIN_NCCL
        if shares_gpu() and not self.job.dry and self.num_ranks > 1 and has_old_nccl:
            dist.init_process_group("gloo")
        found = {}
        for name, folder in self.job.models.items():
            for dtype in ("fp32",) if self.job.dry else ("fp32", "bf16"):
                for way in ("eager", "graphs"):
                    if self.job.killed and (dtype, way) != ("fp32", "graphs"):
                        continue
                    found[f"{name} {dtype}, {way}"] = self._answer(folder, dtype, way)
            if self.job.layout == Layout(1, 2) and not self.job.killed:
                unequal = self._answer(folder, "fp32", "graphs", shares=[3, 1])
                found[f"{name} fp32, graphs, unequal shares"] = unequal
        Path(self.job.out, f"rank{self.rank}.json").write_text(json.dumps(found))

    @property
    def num_ranks(self) -> int:
        return self.job.layout.stages * self.job.layout.size

    def _answer(self, folder: str, dtype: str, way: str, **options: Any) -> dict[str, Any]:
        os.environ.pop(selection.VARIABLE, None)
        if way == "eager":
            os.environ[selection.VARIABLE] = "none"
        self.recorders.clear()
        with mock.patch("llama.generation.recorder_for", self._recorder_for(way)):
            llama = Llama.build(
                folder, None, 256, 4, device="cpu" if self.job.dry else "cuda", dtype=dtype,
                pipeline_parallel_size=self.job.layout.stages, verbose=False, mute_ranks=False,
                kv_cache_memory_bytes=16 << 20, **options,
            )  # fmt: skip
        for recorder in self.recorders:
            recorder.num_replays = 0
            if self.job.killed and self.rank == self.num_ranks - 1:
                recorder._killed = Path(self.job.out, "killed")
        # Greedy ids are gathered; log-probabilities are broadcast; others need whole logits.
        ids = llama.generate(PROMPTS, 12, 0.0)[0]
        ids += llama.generate(PROMPTS, 12, 0.0, logprobs=True)[0]
        ids += llama.generate(PROMPTS, 12, 0.8, 0.9, seed=3)[0]
        group = getattr(llama.model.parallel, "group", None)
        backend = "none" if group is None else dist.get_backend(group)
        llama.close()
        replays = sum(recorder.num_replays for recorder in self.recorders)
        return {"ids": ids, "replays": replays, "backend": backend}

    def _recorder_for(self, way: str) -> Callable[..., Recorder | None]:
        def recorder_for(model: Any) -> Recorder | None:
            if self.job.dry:
                made: Recorder | None = Again() if way == "graphs" else None
            else:
                made = selection.recorder_for(model)
            if made is None:
                return None
            self.recorders.append(_Counted(made, None))
            return self.recorders[-1]

        return recorder_for


def main() -> None:
    models, out, layout, dry, killed = json.loads(sys.argv[1])
    _Rank(Job(models, out, Layout(*layout), dry, killed)).work()


if __name__ == "__main__":
    main()
