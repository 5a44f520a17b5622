"""The commands of `python -m llama`: strings from the shell in, lines of text out.

A mistake of the user's is one line on stderr and exit code 1; a traceback is a bug of ours.
"""

import sys

import fire
from fire.decorators import SetParseFns

from llama.checkpoint import convert as writing
from llama.checkpoint import verify as checking


@SetParseFns(ckpt_dir=str)  # or fire would read a folder named 3.1 as a number
def verify(ckpt_dir: str) -> None:
    """Check the files of a checkpoint: checksums, names, shapes, that no shard is missing."""
    for line in checking.verify(ckpt_dir):
        print(line)


@SetParseFns(ckpt_dir=str, out_dir=str)
def reshard(ckpt_dir: str, out_dir: str, model_parallel_size: int) -> None:
    """Write Meta's consolidated.NN.pth in another number of shards, into a new folder."""
    writing.reshard(ckpt_dir, out_dir, model_parallel_size, progress=sys.stderr.isatty())


@SetParseFns(ckpt_dir=str, out_dir=str)
def convert(ckpt_dir: str, out_dir: str) -> None:
    """Write Meta's layout as Hugging Face's, or the other way round, into a new folder."""
    writing.convert(ckpt_dir, out_dir, progress=sys.stderr.isatty())


def main() -> None:
    try:
        fire.Fire({"verify": verify, "reshard": reshard, "convert": convert}, name="llama")
    except (ValueError, OSError) as e:
        print(f"error: {e}", file=sys.stderr)
        sys.exit(1)
