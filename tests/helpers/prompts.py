"""Prompts that several tests use, and the demo model's answers to some of them."""

import random

from llama import Llama, Message

FRANCE, JAPAN, STORY = "What is the capital of France?", "And of Japan?", "Tell me a story."


def prompts_of(lengths: list[int], seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[256] + [rng.randrange(256) for _ in range(n - 1)] for n in lengths]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def replies(demo: Llama, *questions: str, **settings) -> list[str]:
    """Return chat_completion's greedy answers to successive questions of one dialog."""
    dialog: list[Message] = []
    found = []
    for question in questions:
        dialog.append(user(question))
        (answer,) = demo.chat_completion([dialog], temperature=0.0, **settings)
        dialog.append(answer["generation"])
        found.append(answer["generation"]["content"])
    return found
