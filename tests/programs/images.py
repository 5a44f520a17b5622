"""The program that test_images.py runs on every rank: answers to prompts with images, as JSON.

    torchrun programs/images.py FOLDER RANKS_OF_A_STAGE STAGES OUT

All ranks call first, then rank 0 leads. Rank 0 writes both lists of answers to OUT.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from test_images import PROMPTS, answers

from llama import Llama

folder, size, stages, out = sys.argv[1:]
llama = Llama.build(
    folder, None, 128, 4, int(size), pipeline_parallel_size=int(stages), device="cpu",
    dtype="fp32", verbose=False, mute_ranks=False,
)  # fmt: skip
called = [tokens for tokens, _ in answers(llama, PROMPTS)]
led = llama.lead(lambda: [tokens for tokens, _ in answers(llama, PROMPTS)])
llama.close()
if led is not None:
    Path(out).write_text(json.dumps([called, led]))
