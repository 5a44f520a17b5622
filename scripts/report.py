"""What the scripts share: where the demo model lies, and the line of figures at their end."""

from pathlib import Path

from llama import Llama

DEMO_DIR = str(Path(__file__).resolve().parent.parent / "checkpoints" / "demo")


def figures(llama: Llama) -> str:
    """Load seconds, prompt and generated tokens per second, ranks and dtype, in one line."""
    stats, parallel = llama.engine.stats, llama.model.parallel
    dtype = str(llama.model.norm.weight.dtype).removeprefix("torch.")
    prompt = _rate(stats.prompt_tokens, stats.prompt_seconds)
    generated = _rate(stats.generated_tokens, stats.generate_seconds)
    ranks = parallel.size * parallel.data_size
    return (
        f"load {llama.load_seconds:.2f} s | prompt {prompt} | generated {generated} "
        f"| ranks {ranks} | {dtype}"
    )


def _rate(tokens: int, seconds: float) -> str:
    return f"{tokens} tokens, {tokens / seconds:.0f} tokens/s" if seconds else f"{tokens} tokens"
