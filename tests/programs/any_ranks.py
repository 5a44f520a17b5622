"""Compare any number of ranks, equal or not, with one rank: the jobs of programs/ranks.py.

    python tests/programs/any_ranks.py            # 3, 5, 6, 7 and 8 ranks, and unequal shares
    python tests/programs/any_ranks.py 3 3,1,1    # these alone

Each argument is a number of ranks, or a list of shares. The models are in float32, with 8 heads
over 4 key-value heads, 9 over 3 as SmolLM has, 8 over 8, and with heads of another size. A line
for each argument tells how many results there are, and which differ; the exit code is 1 if one
does. The calls are greedy, sampled, streamed, beams, drafted by lookup and by a model, led by rank
0 from threads, by vLLM's API, and with keys and values in 8 bits.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from helpers.checkpoints import random_state, write_byte_tokenizer, write_meta
from helpers.launch import WORKER, run_program
from helpers.prompts import prompts_of

_ARGUMENTS = ("3", "5", "6", "7", "8", "5,2,1", "3,3,2", "1,1,1,1,4")
_PARAMS = {
    "n_layers": 2, "vocab_size": 512, "multiple_of": 32, "ffn_dim_multiplier": 1.3,
    "norm_eps": 1e-5, "rope_theta": 500000.0,
}  # fmt: skip
_MODELS = {
    "8 over 4": _PARAMS | {"dim": 128, "n_heads": 8, "n_kv_heads": 4},
    "9 over 3": _PARAMS | {"dim": 144, "n_heads": 9, "n_kv_heads": 3},
    "heads of 24": _PARAMS | {"dim": 96, "n_heads": 8, "n_kv_heads": 4, "head_size": 24},
    "8 over 8": _PARAMS | {"dim": 64, "n_heads": 8, "n_kv_heads": 8},
}
_PROMPTS = prompts_of([3, 17, 9, 30, 5, 2], seed=20)
_TEXTS = ["Once", "x", "The end"]
_TOLERANCE = 1e-4  # of log-probabilities
_TOLERANCE_8_BITS = 0.05  # A value may be rounded the other way.


def jobs_for(folder: str, size: int, shares: list[int] | None) -> list[dict[str, Any]]:
    """Return the jobs for a model."""
    repeated = [prompt * 8 for prompt in _PROMPTS[:3]]
    greedy = {"max_gen_len": 8, "temperature": 0.0, "logprobs": True, "echo": True}
    jobs: list[dict[str, Any]] = [
        {"do": "generate", "prompts": _PROMPTS, **greedy},
        {"do": "generate", "prompts": _PROMPTS, "temperature": 1.0, "top_p": 0.95, "seed": 3},
        {"do": "stream", "prompts": _TEXTS},
        {"do": "beams", "prompts": _TEXTS},
        {"do": "led", "prompts": _PROMPTS},
        {"do": "speculated", "prompts": repeated, "draft": "lookup"},
        {"do": "speculated", "prompts": repeated, "draft": folder},
        {"do": "vllm_client", "prompts": _TEXTS, "size": size},
        {"do": "in_8_bits", "prompts": _PROMPTS},
    ]
    use = {"do": "use_shares", "shares": shares}
    return [use, {"do": "forget"}, *({"folder": folder, **job} for job in jobs)]


def run_jobs(size: int, jobs: list[dict[str, Any]], folder: Path) -> list[list[Any]]:
    """Return the results of each of so many ranks."""
    (folder / "jobs.json").write_text(json.dumps(jobs))
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc_per_node={size}", WORKER, str(folder / "jobs.json"), str(folder),
    ]  # fmt: skip
    done = run_program(command, timeout=1200)
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(size)]


def differences(found: Any, wanted: Any, tolerance: float, path: str = "") -> list[str]:
    """Return where two results differ; floats may differ by a tolerance."""
    if isinstance(wanted, float) and isinstance(found, float):
        return [] if abs(found - wanted) <= tolerance else [f"{path}: {found} for {wanted}"]
    if isinstance(wanted, list) and isinstance(found, list) and len(found) == len(wanted):
        pairs = enumerate(zip(found, wanted, strict=True))
        return [x for i, pair in pairs for x in differences(*pair, tolerance, f"{path}[{i}]")]
    return [] if found == wanted else [f"{path}: {found} for {wanted}"]


def compare(ranks: list[list[Any]], wanted: list[Any], jobs: list[dict[str, Any]]) -> list[str]:
    """Return where the results of rank 0 differ from those of one rank."""
    different = []
    for job, found, alone in zip(jobs, ranks[0], wanted, strict=True):
        name = f"{job.get('folder', '')[-8:]} {job['do']}"
        if "error" in found or "error" in alone:
            different.append(f"{name}: {found}, {alone}")
            continue
        ours, right = found["result"], alone["result"]
        tolerance = _TOLERANCE
        if job["do"] == "in_8_bits":  # The error of ranks that differ is not compared.
            ours, right = ours[0][1], right[0][1]
            tolerance = _TOLERANCE_8_BITS
        if job["do"] == "speculated":  # How many drafts are verified depends on time.
            ours, right = ours[:2], right[:2]
        different += differences(ours, right, tolerance, name)
    return different


def main(asked: list[str]) -> int:
    """Run the jobs, and return the exit code."""
    code = 0
    with tempfile.TemporaryDirectory() as root:
        folders = []
        for seed, (name, params) in enumerate(_MODELS.items()):
            folder = Path(root) / name
            folder.mkdir()
            write_meta(folder, params, random_state(params, seed), 1)
            write_byte_tokenizer(folder)
            folders.append(str(folder))

        def results(size: int, shares: list[int] | None) -> tuple[list[list[Any]], list[Any]]:
            jobs = [job for folder in folders for job in jobs_for(folder, size, shares)]
            return run_jobs(size, jobs, Path(root)), jobs

        (wanted,), _ = results(1, None)
        for text in asked or _ARGUMENTS:
            shares = [int(part) for part in text.split(",")] if "," in text else None
            ranks, jobs = results(len(shares) if shares else int(text), shares)
            found = compare(ranks, wanted, jobs)
            code |= bool(found)
            print(f"{text}: {len(wanted)} results, {found[:5] or 'all equal'}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
