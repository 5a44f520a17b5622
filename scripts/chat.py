r"""A chat in the terminal: questions from the keyboard or a pipe in, streamed answers on stdout.

    python scripts/chat.py
    printf 'What is the capital of France?\nAnd of Japan?\n' | python scripts/chat.py
    torchrun --nproc_per_node 8 scripts/chat.py --ckpt_dir Meta-Llama-3-70B-Instruct

The same as the command `llama chat`; --help lists the flags.
"""

import sys

from llama.cli import main

if __name__ == "__main__":
    sys.exit(main(["chat", *sys.argv[1:]]))
