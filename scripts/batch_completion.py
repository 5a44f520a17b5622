"""A file of prompts or OpenAI batch requests in, a JSONL file of results out.

    python scripts/batch_completion.py prompts.jsonl results.jsonl
    python scripts/batch_completion.py prompts.jsonl results.jsonl --resume
    torchrun --nproc_per_node 8 scripts/batch_completion.py IN OUT --ckpt_dir Meta-Llama-3-8B \\
        --model_parallel_size 1

The same as the command `llama batch`; --help lists the flags, `llama --help` the exit codes.
"""

import sys

from llama.cli import main

if __name__ == "__main__":
    sys.exit(main(["batch", *sys.argv[1:]]))
