"""The commands for files of weights: verify, reshard and convert. Folders in, an exit code out.

They need one process. Under torchrun the other ranks have nothing to do.
"""

import argparse
import shlex
import sys

from llama.cli.ranks import global_rank


def verify(options: argparse.Namespace) -> int:
    """Print a line for each file, or fail with the first fault."""
    if global_rank() == 0:
        from llama.checkpoint.verify import verify as check

        for line in check(options.ckpt_dir, progress=sys.stderr.isatty()):
            print(line)
    return 0


def reshard(options: argparse.Namespace) -> int:
    """Write another number of shards, and say which files were written."""
    if global_rank() == 0:
        from llama.checkpoint import convert as writing

        size, shows = options.model_parallel_size, sys.stderr.isatty()
        lines = writing.reshard(options.ckpt_dir, options.out_dir, size, progress=shows)
        _show(lines, options.out_dir)
    return 0


def convert(options: argparse.Namespace) -> int:
    """Write the other layout, and say which files were written."""
    if global_rank() == 0:
        from llama.checkpoint import convert as writing

        shows = sys.stderr.isatty()
        lines = writing.convert(options.ckpt_dir, options.out_dir, progress=shows)
        _show(lines, options.out_dir)
    return 0


def _show(lines: list[str], out_dir: str) -> None:
    """What was written, and the command that checks it."""
    for line in lines:
        print(line)
    print(f"next: llama verify {shlex.quote(out_dir)}")
