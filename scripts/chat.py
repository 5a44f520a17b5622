r"""A chat in the terminal: questions from the keyboard or a pipe in, streamed answers on stdout.

    python scripts/chat.py
    printf 'What is the capital of France?\nAnd of Japan?\n' | python scripts/chat.py
    torchrun --nproc_per_node 8 scripts/chat.py --ckpt_dir Meta-Llama-3-70B-Instruct

Without --ckpt_dir the demo model in checkpoints/demo answers. /help lists the commands.
"""

import contextlib
import os
import sys

import fire
from fire.decorators import SetParseFns
from report import DEMO_DIR

from llama import Llama
from llama.chat.session import chat
from llama.parallel import disconnect


@SetParseFns(ckpt_dir=str, tokenizer_path=str, system=str)  # or fire would read "42" as a number
def main(
    ckpt_dir: str | None = None,
    tokenizer_path: str | None = None,
    temperature: float = 0.6,
    top_p: float = 0.9,
    max_seq_len: int | None = None,
    max_batch_size: int = 1,
    max_gen_len: int | None = None,
    model_parallel_size: int | None = None,
    seed: int = 1,
    device: str | None = None,
    dtype: str | None = None,
    system: str | None = None,
    timeout_s: float = 600.0,
) -> None:
    """Talk with a model; max_seq_len (question, answer and all before) is 4096, the demo's 512."""
    if max_seq_len is None:
        max_seq_len = 4096 if ckpt_dir else 512
    try:
        with contextlib.redirect_stdout(sys.stderr):  # stdout is the answers
            llama = Llama.build(
                ckpt_dir or DEMO_DIR,
                tokenizer_path,
                max_seq_len,
                max_batch_size,
                model_parallel_size,
                seed,
                device=device,
                dtype=dtype,
                timeout_s=timeout_s,
            )
        chat(
            llama,
            system=system,
            timeout_s=timeout_s,
            temperature=temperature,
            top_p=top_p,
            max_gen_len=max_gen_len,
            seed=seed,
        )
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it again
    except KeyboardInterrupt:
        sys.exit(130)
    except (OSError, ValueError) as error:
        sys.exit(f"error: {error}")
    disconnect()


if __name__ == "__main__":
    fire.Fire(main)
