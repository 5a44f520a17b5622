"""Text completion, with the reference's flags and defaults: prompts in, continuations on stdout.

    python scripts/text_completion.py
    torchrun --nproc_per_node 8 scripts/text_completion.py --ckpt_dir Meta-Llama-3-70B

    python scripts/text_completion.py --prompt "Once upon a time"
    python scripts/text_completion.py --prompt_file -    # standard input

Without --ckpt_dir the demo model answers. Without a prompt, Meta's prompts are continued (or some
that suit the demo model); the continuation of a prompt streams. --help lists the flags.
"""

from llama import Llama
from llama.cli import run_script
from llama.cli.commands import read_prompt, stream_continuation
from llama.cli.model import check_sampling, demo_dir, figures, sampling_params

DEMO_PROMPTS = ["Once upon a time", "The capital of France is", "The opposite of hot is"]
DEMO_DEFAULTS = {"max_seq_len": 256, "max_gen_len": None}  # its stories end by themselves
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
    timeout_s: float = 600.0,
    prompt: str | None = None,
    prompt_file: str | None = None,
) -> None:
    """Continue one prompt or a few; temperature 0 is greedy, max_gen_len None fills the context."""
    has_prompt = prompt is not None or prompt_file is not None
    given = read_prompt(prompt, prompt_file) if has_prompt else b""
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
    if has_prompt:
        heading = f"{given.decode()}\n> "
        params = sampling_params(temperature=temperature, top_p=top_p, max_gen_len=max_gen_len)
        stream_continuation(llama, given, params, heading=heading)
    else:
        prompts = PROMPTS if ckpt_dir else DEMO_PROMPTS
        results = llama.text_completion(prompts, temperature, top_p, max_gen_len)
        for text, result in zip(prompts, results, strict=True):
            print(f"{text}\n> {result['generation']}\n\n==================================\n")
    print(figures(llama))


if __name__ == "__main__":
    run_script(main, check=check_sampling, demo_defaults=DEMO_DEFAULTS)
