"""Chat completion, with the reference's flags and defaults: dialogs in, answers on stdout.

    python scripts/chat_completion.py
    torchrun --nproc_per_node 8 scripts/chat_completion.py --ckpt_dir Meta-Llama-3-70B-Instruct

Without --ckpt_dir the demo model answers, with questions that suit it. --help lists the flags.
"""

from llama import Dialog, Llama
from llama.cli import run_script
from llama.cli.model import check_sampling, demo_dir, figures

DEMO_DIALOGS: list[Dialog] = [
    [{"role": "user", "content": "What is the capital of France?"}],
    [
        {"role": "user", "content": "What is the capital of Japan?"},
        {"role": "assistant", "content": "The capital of Japan is Tokyo."},
        {"role": "user", "content": "What is the opposite of hot?"},
    ],
    [{"role": "user", "content": "Tell me a story."}],
]
DIALOGS: list[Dialog] = [
    [{"role": "user", "content": "what is the recipe of mayonnaise?"}],
    [
        {"role": "user", "content": "I am going to Paris, what should I see?"},
        {"role": "assistant", "content": "The Eiffel Tower, the Louvre and Notre-Dame."},
        {"role": "user", "content": "What is so great about the first?"},
    ],
    [
        {"role": "system", "content": "Always answer with a haiku."},
        {"role": "user", "content": "I am going to Paris, what should I see?"},
    ],
    [
        {"role": "system", "content": "Always answer with emojis."},
        {"role": "user", "content": "How do I go from Beijing to New York?"},
    ],
]


def main(
    ckpt_dir: str | None = None,
    tokenizer_path: str | None = None,
    temperature: float = 0.6,
    top_p: float = 0.9,
    max_seq_len: int = 512,
    max_batch_size: int = 4,
    max_gen_len: int | None = None,
    model_parallel_size: int | None = None,
    seed: int = 1,
    device: str | None = None,
    dtype: str | None = None,
    timeout_s: float = 600.0,
) -> None:
    """Answer a few dialogs; temperature 0 is greedy, max_gen_len None fills the context."""
    llama = Llama.build(
        ckpt_dir or demo_dir(),
        tokenizer_path,
        max_seq_len,
        max_batch_size,
        model_parallel_size,
        seed,
        device=device,
        dtype=dtype,
        timeout_s=timeout_s,
    )
    dialogs = DIALOGS if ckpt_dir else DEMO_DIALOGS
    results = llama.chat_completion(dialogs, temperature, top_p, max_gen_len)
    for dialog, result in zip(dialogs, results, strict=True):
        for message in dialog:
            print(f"{message['role'].capitalize()}: {message['content']}\n")
        print(f"> Assistant: {result['generation']['content']}")
        print("\n==================================\n")
    print(figures(llama))


if __name__ == "__main__":
    run_script(main, check=check_sampling)
