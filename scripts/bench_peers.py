"""The engines that the benchmark runs, ours and its peers, behind the same five methods.

In: a job with folders, sizes, dtype and device, then prompts as ids. Out: ids. Each engine imports
its own package when it is made, since a peer may live in a virtual environment that has no other.
"""

import itertools
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from bench_llama_cpp import LlamaCpp
from bench_vllm import Vllm, vllm_environment

Job = dict[str, Any]
OUTSIDE_STEPS = 8  # how many are run again, with the model's share timed apart


class Engine(Protocol):
    """Greedy decoding, no stop token. Ids on the host end a call, so the device is waited for."""

    def __init__(self, job: Job) -> None: ...

    def start(self, prompts: list[list[int]]) -> list[int]:
        """Read prompts of one length; returns the latest id of each once all have one."""

    def step(self) -> list[int]:
        """The next id of each."""

    def finish(self) -> None:
        """Forget the prompts that were started."""

    def offline(self, prompts: list[list[int]], answers: list[int]) -> None:
        """Answer prompts of any lengths, each with as many tokens as `answers` says."""


class Ours:
    """The public request API: `Llama.llm_engine`."""

    def __init__(self, job: Job) -> None:
        from llama.sampling_params import SamplingParams

        self.greedy = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)
        self.names = itertools.count()
        sizes = {"max_seq_len": job["longest"], "max_batch_size": job["batch"]}
        self.llama = our_llama(job, sizes)
        self.engine = self.llama.llm_engine

    def start(self, prompts: list[list[int]]) -> list[int]:
        self.running = [str(next(self.names)) for _ in prompts]
        for name, prompt in zip(self.running, prompts, strict=True):
            self.engine.add_request(name, prompt, self.greedy)
        latest: dict[str, int] = {}
        while len(latest) < len(prompts):
            for output in self.engine.step():
                latest[output.request_id] = output.outputs[0].token_ids[-1]
        return [latest[name] for name in self.running]

    def step(self) -> list[int]:
        return [output.outputs[0].token_ids[-1] for output in self.engine.step()]

    def finish(self) -> None:
        for name in self.running:
            self.engine.abort_request(name)

    def offline(self, prompts: list[list[int]], answers: list[int]) -> None:
        for prompt, count in zip(prompts, answers, strict=True):
            params = replace(self.greedy, max_tokens=count)
            self.engine.add_request(str(next(self.names)), prompt, params)
        while self.engine.has_unfinished_requests():
            self.engine.step()

    def outside(self) -> float:
        """Seconds of a step that are not the model's: schedule, pack, sample, decode, book."""
        from bench_machine import wait_for

        model, spent = self.llama.model, 0.0
        device = model.norm.weight.device

        def timed(forward: Callable) -> Callable:
            def run(*args: Any) -> Any:
                nonlocal spent
                began = time.perf_counter()
                result = forward(*args)
                wait_for(device)
                spent += time.perf_counter() - began
                return result

            return run

        for name in ("hidden_states", "logits"):
            setattr(model, name, timed(getattr(model, name)))
        seconds = []
        for _ in range(OUTSIDE_STEPS):
            spent, began = 0.0, time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - began - spent)
        return sorted(seconds)[len(seconds) // 2]


def our_llama(job: Job, sizes: dict[str, Any]) -> Any:
    """What `Llama.build` makes, of a folder or of weights that were never in a file."""
    from bench_model import DTYPES, random_model, write_tokenizer

    from llama import Llama, Tokenizer

    if job["folder"]:
        return Llama.build(job["folder"], None, **sizes, device=job["device"], dtype=job["dtype"])
    int8 = job["dtype"] == "int8"
    dtype = DTYPES["bf16" if int8 else job["dtype"]]
    model = random_model(job["params"] | sizes, dtype, job["device"])
    model.pack(int8=int8)  # as `Llama.build` does
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "tokenizer.model")
        write_tokenizer(path, job["params"]["vocab_size"])
        return Llama(model, Tokenizer(path))


class Transformers:
    """Hugging Face's LlamaForCausalLM with its own cache; `offline` is one padded `generate`."""

    def __init__(self, job: Job) -> None:
        import torch
        from transformers import LlamaForCausalLM

        self.torch = torch
        model = LlamaForCausalLM.from_pretrained(job["hf"], dtype=_torch_dtype(job["dtype"]))
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


class LlamaModels:
    """Meta's Transformer of the package llama-models; `offline` is the loop of Meta's generate."""

    def __init__(self, job: Job) -> None:
        import fairscale.nn.model_parallel.initialize as groups
        import torch
        import torch.distributed as dist
        from llama_models.llama3.args import ModelArgs
        from llama_models.llama3.model import Transformer

        self.torch, self.device = torch, job["device"]
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        groups.initialize_model_parallel(1)
        sizes = {"max_seq_len": job["longest"], "max_batch_size": job["batch"]}
        torch.set_default_dtype(_torch_dtype(job["dtype"]))  # its caches take the default type
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


def _torch_dtype(name: str) -> Any:
    import torch

    return {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[name]


class Peer(NamedTuple):
    """How an engine is made, and what its process needs before that."""

    kind: type[Engine]
    modules: tuple[str, ...]  # that take long to import; the last is of the package itself
    environment: Callable[[Path], dict[str, str]] = lambda venv: {}


_OUR_MODULES = ("torch", "llama")
ENGINES = {
    "ours": Peer(Ours, _OUR_MODULES),
    "ours_bf16": Peer(Ours, _OUR_MODULES),  # what it is beside, where --dtype is another
    "transformers": Peer(
        Transformers, ("torch", "transformers", "transformers.models.llama.modeling_llama")
    ),
    "llama_models": Peer(
        LlamaModels, ("torch", "fairscale", "llama_models", "llama_models.llama3.model")
    ),
    "vllm": Peer(Vllm, ("torch", "vllm", "vllm.v1.engine.llm_engine"), vllm_environment),
    "llama_cpp": Peer(LlamaCpp, ("numpy", "llama_cpp")),
}
