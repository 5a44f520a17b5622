"""Check and measure this runtime on a GPU, in one command and a fixed time.

    python scripts/gpu_check.py --minutes 9.5 --out DIR
    python scripts/gpu_check.py --out DIR --only tests    # pytest -m gpu, in a run of its own
    python scripts/gpu_check.py --out DIR --only ranks --nccl libnccl.so.2.xz    # see below
    python scripts/gpu_check.py --out DIR --only probes   # see bench/gpu_probes.py
    python scripts/gpu_check.py --out DIR --only skew,lora,prompts   # see bench/gpu_mixed.py
    python scripts/gpu_check.py --out DIR --only drafts   # see bench/gpu_drafts.py
    python scripts/gpu_check.py --out DIR --only scaled   # see bench/gpu_scaled.py
    python scripts/gpu_check.py --dry --out DIR           # on the CPU, with the demo shape

In: a machine with a GPU, and minutes. Out: DIR/results.jsonl, one line a figure, written as they
come; DIR/summary.txt, a table; DIR/log.txt. Each section (bench/gpu_sections.py) is a process with
a limit of its own, and the most informative come first: one that hangs or crashes costs its own
time only. A second run with the same DIR does what is left.
Exit code: 0, or 1 where a section failed.

A bare machine, which has torch, Triton, gcc and Python.h, lacks fairscale at the least, and what is
named below of a common image. Here, for the Python that is there, then there, without a network:

    pip wheel --no-deps -c constraints.txt -w wheels fairscale
    pip download --no-deps --only-binary :all: --python-version 3.12 -c constraints.txt -d wheels \\
        pydantic pydantic-core annotated-types typing-inspection regex tiktoken safetensors tqdm
    python3 -m pip install -q --no-index --no-deps --target site wheels/*.whl
    PYTHONPATH=site:. python3 scripts/gpu_check.py --out DIR --only facts,checks,decode,profile

The section `ranks` (bench/gpu_ranks.py) starts several ranks, which share the GPUs that are there.
NCCL takes that from 2.30 on (`llama doctor` names the version). For a torch with an older one,
such as 2.11, bench/slim_nccl.py writes a library of 39 MB, which `--nccl` preloads.
"""

import argparse
import ctypes
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).resolve().parent
sys.path.insert(0, str(SCRIPTS))
sys.path.insert(0, str(SCRIPTS.parent))

_MIN_S = 5.0  # a section is not started with less time than this
_GRACE_S = 3.0  # kept at the end for the summary
_PARENT = "LLAMA_CHECK_PARENT"  # environment variable: the id of the process that started this one
_PR_SET_PDEATHSIG = 1


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=9.5, help="for all sections together")
    parser.add_argument("--out", type=Path, required=True, help="folder of the results")
    parser.add_argument("--dry", action="store_true", help="on the CPU, with the demo shape")
    parser.add_argument("--only", default="", help="names of sections, with commas between them")
    parser.add_argument("--nccl", type=Path, help="NCCL's library for the section ranks, or its xz")
    parser.add_argument("--section", default="", help=argparse.SUPPRESS)  # in a child
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    from bench import gpu_probes, gpu_ranks, gpu_sections

    if args.nccl is not None:
        os.environ[gpu_ranks.LIBRARY] = str(args.nccl.resolve(strict=True))
    if args.section:
        end_with_parent()
        return max(_run_here(name, args.out, dry=args.dry) for name in args.section.split(","))
    if not args.dry and not gpu_sections.has_gpu():
        parser.error("torch finds no CUDA GPU here: --dry runs all of this on the CPU")
    limits = gpu_sections.LIMITS | gpu_sections.LIMITS_ALONE
    asked = args.only.split(",") if args.only else list(gpu_sections.LIMITS)
    if "probes" in asked:
        asked.extend(gpu_probes.LIMITS)
    names = [name for name in limits if name in asked]
    if not names:
        parser.error(f"--only {args.only}: there are {', '.join(limits)}, probes")
    return _run_all(names, args.out, args.minutes * 60, dry=args.dry)


def _run_all(names: list[str], out: Path, seconds: float, *, dry: bool) -> int:
    from bench.gpu_run import read_results
    from bench.gpu_sections import LIMITS, LIMITS_ALONE

    limits = LIMITS | LIMITS_ALONE
    until = time.monotonic() + seconds - _GRACE_S
    ended = _ended(read_results(out))
    todo = [name for name in names if ended.get(name) != "ok"]
    for name in names:
        if name not in todo:
            print(f"{name}: done before", flush=True)
    # Dry, they share a process: nothing in them can hang a GPU, and each would load torch anew.
    for group in [todo] if dry and todo else [[name] for name in todo]:
        left = until - time.monotonic()
        what = ",".join(group)
        if left < _MIN_S:
            print(f"{what}: no time is left for it; run the command again", flush=True)
            continue
        began = time.monotonic()
        before = len(read_results(out))
        how = _run_child(what, out, min(sum(limits[name] for name in group), left), dry=dry)
        seconds = round(time.monotonic() - began, 1)
        reported = _ended(read_results(out)[before:])  # sections that reached their end
        for name in group:
            if name not in reported:
                _append(out, {"section": name, "ended": how, "seconds": seconds})
        print(f"{what}: {how} in {seconds} s", flush=True)
    rows = read_results(out)
    summary = _summary(rows)
    (out / "summary.txt").write_text(summary)
    print(summary, end="", flush=True)
    ended = _ended(rows)
    return int(any(ended.get(name) != "ok" for name in names))


def _run_here(name: str, out: Path, *, dry: bool) -> int:
    """Run a section in this process, record how it ended, and return its exit code."""
    from bench import gpu_sections

    began = time.monotonic()
    how = "ok"
    try:
        gpu_sections.run(name, out, dry=dry)
    except Exception:
        traceback.print_exc()
        how = "failed (see log.txt)"
    seconds = round(time.monotonic() - began, 1)
    _append(out, {"section": name, "ended": how, "seconds": seconds})
    return int(how != "ok")


def _run_child(name: str, out: Path, limit_s: float, *, dry: bool) -> str:
    """Run sections in a child; return "ok", "failed (...)" or "stopped at its limit of ..."."""
    command = [sys.executable, __file__, "--out", str(out), "--section", name]
    env = os.environ | {"PYTHONUNBUFFERED": "1", _PARENT: str(os.getpid())}
    if dry:  # kernels run in Triton's interpreter; what is found of them is not kept
        env |= {"TRITON_INTERPRET": "1", "XDG_CACHE_HOME": str(out / "cache")}
    with (out / "log.txt").open("a") as log:
        print(f"--- {name} ---", file=log, flush=True)
        child = subprocess.Popen(
            command + ["--dry"] * dry, stdout=log, stderr=log, env=env, start_new_session=True
        )
        try:
            code = child.wait(limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, 9)
            child.wait()
            return f"stopped at its limit of {limit_s:.0f} s"
        except BaseException:
            os.killpg(child.pid, 9)
            raise
    return "ok" if code == 0 else f"failed (exit code {code}, see log.txt)"


def end_with_parent() -> None:
    """Have Linux kill this process when the one that started it ends, in whatever way (prctl(2)).

    A kernel that hangs would otherwise keep the GPU for ever.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    parent = str(os.getppid())
    if os.environ.get(_PARENT, parent) != parent:
        sys.exit("the process that asked for this check has ended")


def _append(out: Path, row: dict[str, Any]) -> None:
    with (out / "results.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def _ended(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Return how each section ended the last time."""
    return {row["section"]: row["ended"] for row in rows if "ended" in row}


def _summary(rows: list[dict[str, Any]]) -> str:
    """Return a line for each figure: the last one of each name and mode."""
    last: dict[tuple, dict[str, Any]] = {}
    for row in rows:
        if "what" in row:
            last[row["section"], row["what"], row.get("mode")] = row
    lines = []
    for row in last.values():
        value = f"{row['value']:,.4g}" if isinstance(row["value"], float) else str(row["value"])
        known = (f"{key} {row[key]:,.4g}" for key in ("of_floor", "bar", "goal") if row.get(key))
        lines.append(
            f"{row['what']:<34} {row.get('mode') or '':<16} {value:>12} {row.get('unit', ''):<10} "
            f"{', '.join(known)}".rstrip()
        )
    lines += [f"{name}: {how}" for name, how in _ended(rows).items() if how != "ok"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
