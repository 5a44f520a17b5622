"""A file of prompts or OpenAI batch requests in, a JSONL file of results out.

    python scripts/batch_completion.py prompts.jsonl results.jsonl
    python scripts/batch_completion.py prompts.jsonl results.jsonl --resume
    torchrun --nproc_per_node 8 scripts/batch_completion.py IN OUT --ckpt_dir Meta-Llama-3-8B \\
        --model_parallel_size 1

Exit code 0: every line has its answer; 1: some have an error instead; 2: the files or flags cannot
be used; 130: Ctrl-C. Without --ckpt_dir the demo model in checkpoints/demo answers.
"""

import os
import sys
from pathlib import Path

import fire
from fire.decorators import SetParseFns
from report import DEMO_DIR, figures

from llama import Llama
from llama.batch.files import check_files
from llama.batch.job import run_batch
from llama.parallel import RankError


@SetParseFns(in_file=str, out_file=str, ckpt_dir=str)
def main(
    in_file: str,
    out_file: str,
    ckpt_dir: str | None = None,
    tokenizer_path: str | None = None,
    temperature: float = 0.6,
    top_p: float = 0.9,
    max_seq_len: int | None = None,
    max_batch_size: int | None = None,
    max_gen_len: int | None = None,
    model_parallel_size: int | None = None,
    seed: int = 1,
    device: str | None = None,
    dtype: str | None = None,
    resume: bool = False,
) -> None:
    """Answer each line of IN_FILE into OUT_FILE; flags are for lines that do not say themselves.

    With --resume, only what OUT_FILE does not have yet: give the same input and flags.
    """
    try:
        check_files(in_file, out_file, resume=resume)  # before minutes of loading
        llama = Llama.build(
            ckpt_dir or DEMO_DIR,
            tokenizer_path,
            max_seq_len,
            max_batch_size,
            model_parallel_size,
            seed,
            device=device,
            dtype=dtype,
        )
        report = run_batch(
            llama,
            in_file,
            out_file,
            temperature,
            top_p,
            max_gen_len,
            resume=resume,
            model=Path(ckpt_dir or DEMO_DIR).name,
            progress=sys.stderr.isatty(),
        )
    except KeyboardInterrupt:
        if os.environ.get("RANK", "0") == "0":
            say(f"stopped: what was finished is in {out_file}; add --resume to do the rest")
        sys.exit(130)
    except RankError:
        sys.exit(2)  # the rank that failed says why
    except (OSError, TypeError, ValueError) as e:
        say(f"error: {e}")
        sys.exit(2)
    parallel = llama.model.parallel
    with parallel.agree("the report", world=True):  # no rank ends before it is told
        if parallel.global_rank == 0:
            print(figures(llama))
            say(f"{out_file}: results added {report.written}, errors in it {report.failed}")
    sys.exit(1 if report.failed else 0)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    fire.Fire(main)
