"""One prompt and its continuation, which goes to standard output as it is generated.

In: a loaded model; the prompt, which rank 0 has. Out: text on rank 0's standard output. Every rank
makes the call. It knows no flags.
"""

import itertools
import sys

from llama.cli.ranks import check_one_group
from llama.generation import Llama


def stream_continuation(
    llama: Llama,
    prompt: bytes,
    temperature: float,
    top_p: float,
    max_gen_len: int | None,
    *,
    seed: int | None = None,
    heading: str = "",
) -> None:
    """Write the heading and the continuation of one prompt to stdout, as it is generated.

    Rank 0 has the prompt, and writes. Nothing is written of a prompt that cannot be used.
    """
    parallel = llama.model.parallel
    check_one_group(parallel.data_size, "there is one prompt", "or start fewer processes")
    text = parallel.broadcast_bytes(prompt).decode()
    deltas = llama.stream_text([text], temperature, top_p, max_gen_len, seed=seed)
    for piece in itertools.chain((delta.text for delta in deltas), "\n"):
        if parallel.rank == 0:
            _write(heading + piece, alone=parallel.size == 1)
        heading = ""


def _write(piece: str, *, alone: bool) -> None:
    """A piece of the answer, at once. Where nobody reads, other ranks still need this one's steps.

    BrokenPipeError where this is the only rank.
    """
    try:
        sys.stdout.write(piece)
        sys.stdout.flush()
    except BrokenPipeError:
        if alone:
            raise
