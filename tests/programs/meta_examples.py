"""The statements of Meta's example_text_completion.py and example_chat_completion.py, one by one.

They build as Meta's do, print on every rank without checking the rank, and never leave the groups.
fire reads the flags. Input: a folder and its tokenizer. Output: what a terminal shows.
"""

import functools

import fire

from llama import Dialog, Llama


def text(ckpt_dir: str, tokenizer_path: str, temperature: float, top_p: float) -> None:
    generator = Llama.build(
        ckpt_dir=ckpt_dir, tokenizer_path=tokenizer_path, max_seq_len=128, max_batch_size=4
    )
    prompts = ["Once upon a time", "The capital of France is", "The opposite of", "One and two"]
    results = generator.text_completion(
        prompts, max_gen_len=24, temperature=temperature, top_p=top_p
    )
    for prompt, result in zip(prompts, results, strict=True):
        print(prompt)
        print(f"> {result['generation']}")
        print("\n==================================\n")


def chat(ckpt_dir: str, tokenizer_path: str, temperature: float, top_p: float) -> None:
    generator = Llama.build(
        ckpt_dir=ckpt_dir, tokenizer_path=tokenizer_path, max_seq_len=512, max_batch_size=4
    )
    dialogs: list[Dialog] = [
        [{"role": "user", "content": "What is the capital of Italy?"}],
        [
            {"role": "user", "content": "What is the capital of Japan?"},
            {"role": "assistant", "content": "The capital of Japan is Tokyo."},
            {"role": "user", "content": "What is the opposite of hot?"},
        ],
        [
            {"role": "system", "content": "Always answer with a story."},
            {"role": "user", "content": "Tell me a story."},
        ],
    ]
    results = generator.chat_completion(
        dialogs, max_gen_len=24, temperature=temperature, top_p=top_p
    )
    for dialog, result in zip(dialogs, results, strict=True):
        for msg in dialog:
            print(f"{msg['role'].capitalize()}: {msg['content']}\n")
        answer = result["generation"]
        print(f"> {answer['role'].capitalize()}: {answer['content']}")
        print("\n==================================\n")


def main(ckpt_dir: str, tokenizer_path: str, temperature: float = 0.6, top_p: float = 0.9) -> None:
    text(ckpt_dir, tokenizer_path, temperature, top_p)
    chat(ckpt_dir, tokenizer_path, temperature, top_p)


if __name__ == "__main__":
    # Meta's scripts specify neither. In float32 any number of ranks gives the same answers.
    Llama.build = functools.partial(Llama.build, device="cpu", dtype="fp32")  # type: ignore[method-assign]
    fire.Fire(main)
