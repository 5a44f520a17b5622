"""Text completion, with the reference's flags and defaults: prompts in, continuations on stdout.

    python scripts/text_completion.py
    torchrun --nproc_per_node 8 scripts/text_completion.py --ckpt_dir Meta-Llama-3-70B

Without --ckpt_dir the demo model answers, with prompts that suit it. --help lists the flags.
"""

from llama import Llama
from llama.cli import run_script
from llama.cli.model import demo_dir, figures

DEMO_PROMPTS = ["Once upon a time", "The capital of France is", "The opposite of hot is"]
PROMPTS = [
    "I believe the meaning of life is",
    "Simply put, the theory of relativity states that ",
    "A recipe for a good breakfast: take two eggs,",
    """Translate English to French:

    cheese => fromage
    good morning => bonjour
    thank you =>""",
]


def main(
    ckpt_dir: str | None = None,
    tokenizer_path: str | None = None,
    temperature: float = 0.6,
    top_p: float = 0.9,
    max_seq_len: int = 128,
    max_gen_len: int | None = 64,
    max_batch_size: int = 4,
    model_parallel_size: int | None = None,
    seed: int = 1,
    device: str | None = None,
    dtype: str | None = None,
) -> None:
    """Complete a few prompts; temperature 0 is greedy, max_gen_len None is what fits."""
    llama = Llama.build(
        ckpt_dir or demo_dir(),
        tokenizer_path,
        max_seq_len if ckpt_dir else max(max_seq_len, 256),
        max_batch_size,
        model_parallel_size,
        seed,
        device=device,
        dtype=dtype,
    )
    prompts = PROMPTS if ckpt_dir else DEMO_PROMPTS
    length = max_gen_len if ckpt_dir else None  # a demo story ends by itself
    results = llama.text_completion(prompts, temperature, top_p, length)
    if llama.model.parallel.global_rank:
        return
    for prompt, result in zip(prompts, results, strict=True):
        print(f"{prompt}\n> {result['generation']}\n\n==================================\n")
    print(figures(llama))


if __name__ == "__main__":
    run_script(main)
