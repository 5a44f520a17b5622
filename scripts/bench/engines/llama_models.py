"""Meta's own model, from the package llama-models, behind the benchmark's `Engine`.

In: a job with "meta", a folder with one shard, then prompts as ids. Out: ids.
"""

from pathlib import Path
from typing import Any


class LlamaModels:
    """Meta's Transformer of the package llama-models; `offline` is the loop of Meta's generate."""

    def __init__(self, job: dict[str, Any]) -> None:
        import fairscale.nn.model_parallel.initialize as groups
        import torch
        import torch.distributed as dist
        from llama_models.llama3.args import ModelArgs
        from llama_models.llama3.model import Transformer

        self.torch, self.device = torch, job["device"]
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        groups.initialize_model_parallel(1)
        sizes = {"max_seq_len": job["longest"], "max_batch_size": job["batch"]}
        torch.set_default_dtype(getattr(torch, job["torch_dtype"]))  # its KV cache takes it
        model = Transformer(ModelArgs(**job["params"], **sizes))
        path = Path(job["meta"], "consolidated.00.pth")
        model.load_state_dict(torch.load(path, mmap=True, weights_only=True))
        self.model = model.to(self.device).eval()

    def start(self, prompts: list[list[int]]) -> list[int]:
        self.position = 0
        return self._forward(prompts)

    def step(self) -> list[int]:
        return self._forward([[token] for token in self.latest])

    def _forward(self, rows: list[list[int]]) -> list[int]:
        logits = self.model(self.torch.tensor(rows, device=self.device), self.position)
        self.position += len(rows[0])
        self.latest = logits[:, -1].argmax(-1).tolist()
        return self.latest

    def finish(self) -> None:
        self.position = 0

    def offline(self, prompts: list[list[int]], answers: list[int]) -> None:
        torch = self.torch
        total = max(len(p) + n for p, n in zip(prompts, answers, strict=True))
        rows = [p + [0] * (total - len(p)) for p in prompts]
        tokens = torch.tensor(rows, device=self.device)
        lengths = torch.tensor([len(p) for p in prompts], device=self.device)
        before = 0
        for now in range(min(map(len, prompts)), total):
            chosen = self.model(tokens[:, before:now], before)[:, -1].argmax(-1)
            tokens[:, now] = torch.where(lengths > now, tokens[:, now], chosen)
            before = now
        tokens.tolist()  # sync
