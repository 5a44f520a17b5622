"""Send the same requests to vLLM and to this package: `vllm_answers.py FOLDER OUT`.

FOLDER holds a model in Hugging Face's layout and its tokenizer.model; OUT receives both answers as
JSON. vLLM starts processes that import this file again, so that all work is under `main`.
"""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

PROMPTS = ["Once upon a time", "The cat", "What is"]
REQUESTS: list[dict[str, Any]] = [
    {"max_tokens": 24, "logprobs": 2},
    {"max_tokens": 6, "logprobs": 1, "prompt_logprobs": 2, "ignore_eos": True},
    {"max_tokens": 24, "repetition_penalty": 1.3, "min_tokens": 9},
]
BUILD: dict[str, Any] = {
    "dtype": "float32", "max_model_len": 128, "max_num_seqs": 4, "enforce_eager": True,
    "disable_log_stats": True,
}  # fmt: skip


def answers(api: Any, llm: Any, prompts: list[list[int]], stop_ids: list[int]) -> list[Any]:
    """Return what a client reads of each output, on either runtime."""
    found = []
    for fields in REQUESTS:
        params = api.SamplingParams(
            temperature=0.0, detokenize=False, stop_token_ids=stop_ids, **fields
        )
        for output in llm.generate([{"prompt_token_ids": ids} for ids in prompts], params):
            (answer,) = output.outputs
            found.append({
                "prompt": [output.prompt, output.prompt_token_ids, output.finished],
                "ids": list(answer.token_ids),
                "text": answer.text,
                "reasons": [answer.finish_reason, answer.stop_reason],
                "cumulative": answer.cumulative_logprob,
                "logprobs": _plain(answer.logprobs),
                "prompt_logprobs": _plain(output.prompt_logprobs),
            })  # fmt: skip
    return found


def _plain(positions: Any) -> Any:
    """Return, per position, the id, log probability and rank of each entry, by rank."""
    return positions and [
        position and sorted(
            (entry["rank"], token, entry["logprob"])
            for token, x in position.items()
            if (entry := dataclasses.asdict(x))["rank"] in (1, 2)
        )
        for position in positions
    ]  # fmt: skip


def main(folder: str, out: str) -> None:
    import vllm

    from llama.compat import vllm as our_vllm

    ours = our_vllm.LLM(folder, device="cpu", **BUILD)
    tokenizer = ours.llama.tokenizer
    prompts = [tokenizer.encode(text, bos=True, eos=False) for text in PROMPTS]
    stop_ids = sorted(tokenizer.stop_tokens)
    theirs = vllm.LLM(folder, skip_tokenizer_init=True, kv_cache_memory_bytes=1 << 28, **BUILD)
    both = {
        "vllm": answers(vllm, theirs, prompts, stop_ids),
        "ours": answers(our_vllm, ours, prompts, stop_ids),
    }
    Path(out).write_text(json.dumps(both))


if __name__ == "__main__":
    main(*sys.argv[1:])
