"""Meta's own example scripts on 1, 2 and 4 ranks: what a terminal shows.

The scripts' statements are in programs/meta_examples.py. One launch of torchrun per number of ranks
runs both; one rank is this process.
"""

import contextlib
import functools
import io
import sys

import pytest

from helpers.launch import DEMO, PROGRAMS, run_program
from llama import Llama
from programs import meta_examples

FLAGS = ["--ckpt_dir", str(DEMO), "--tokenizer_path", str(DEMO / "tokenizer.model")]


@pytest.fixture(scope="module")
def shown_by_one() -> list[str]:
    """The lines of stdout of one process, with the defaults of Meta's scripts."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), pytest.MonkeyPatch.context() as patch:
        patch.setattr(Llama, "build", functools.partial(Llama.build, device="cpu", dtype="fp32"))
        meta_examples.main(FLAGS[1], FLAGS[3])
    return printed.getvalue().splitlines()


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_many_ranks_show_what_one_shows(world, shown_by_one):
    """Many ranks show what one shows.

    Sampled lines are equal; "Loaded in" has the seconds and the number of ranks of its launch.
    """
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone",
        f"--nproc_per_node={world}", str(PROGRAMS / "meta_examples.py"), *FLAGS,
    ]  # fmt: skip
    done = run_program(command)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) == len(shown_by_one)
    for ours, wanted in zip(lines, shown_by_one, strict=True):
        if wanted.startswith("Loaded in "):
            assert f"model_parallel_size={world}," in ours
        else:
            assert ours == wanted


def test_one_rank_shows_what_the_calls_return(shown_by_one):
    """One rank shows what the calls return.

    Each script's model counts its calls anew: both show the result of the first call.
    """
    llama = Llama.build(str(DEMO), None, 128, 4, device="cpu", dtype="fp32")
    prompts = ["Once upon a time", "The capital of France is", "The opposite of", "One and two"]
    for prompt, result in zip(prompts, llama.text_completion(prompts, max_gen_len=24), strict=True):
        at = shown_by_one.index(prompt)
        assert shown_by_one[at + 1] == f"> {result['generation']}"
    assert "> Assistant: The opposite of hot is cold." in shown_by_one
    assert shown_by_one.count("==================================") == 7
    assert sum(line.startswith("Loaded in ") for line in shown_by_one) == 2
