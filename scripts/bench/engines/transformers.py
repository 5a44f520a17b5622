"""Hugging Face's transformers behind the benchmark's `Engine`.

In: a job with "hf", a folder with safetensors and config.json, then prompts as ids. Out: ids.
"""

from typing import Any


class Transformers:
    """Hugging Face's LlamaForCausalLM with its own cache; `offline` is one padded `generate`."""

    def __init__(self, job: dict[str, Any]) -> None:
        import torch
        from transformers import LlamaForCausalLM

        self.torch = torch
        model = LlamaForCausalLM.from_pretrained(job["hf"], dtype=job["torch_dtype"])
        self.model = model.to(job["device"]).eval()

    def start(self, prompts: list[list[int]]) -> list[int]:
        self.cache = None
        return self._forward(prompts)

    def step(self) -> list[int]:
        return self._forward([[token] for token in self.latest])

    def _forward(self, rows: list[list[int]]) -> list[int]:
        with self.torch.inference_mode():
            ids = self.torch.tensor(rows, device=self.model.device)
            out = self.model(ids, past_key_values=self.cache, use_cache=True, logits_to_keep=1)
        self.cache = out.past_key_values
        self.latest = out.logits[:, -1].argmax(-1).tolist()
        return self.latest

    def finish(self) -> None:
        self.cache = None

    def offline(self, prompts: list[list[int]], answers: list[int]) -> None:
        width = max(map(len, prompts))
        rows = [[0] * (width - len(p)) + p for p in prompts]  # on the left, as generate wants it
        seen = [[0] * (width - len(p)) + [1] * len(p) for p in prompts]
        ids, mask = (self.torch.tensor(x, device=self.model.device) for x in (rows, seen))
        self.model.generation_config.eos_token_id = None
        length = {"min_new_tokens": max(answers), "max_new_tokens": max(answers)}
        self.model.generate(ids, attention_mask=mask, do_sample=False, pad_token_id=0, **length)
