"""This runtime behind the benchmark's `Engine`, through its public request API.

In: a job with the model's params, or a folder with weights. Out: ids. `llama` is imported when an
engine is made, since this file is also read where the package is not installed.
"""

import contextlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

HOST_STEPS = 8  # steps that are run again with the model's forward timed separately


class Ours:
    """The public request API: `Llama.llm_engine`."""

    def __init__(self, job: dict[str, Any]) -> None:
        from llama.sampling_params import SamplingParams

        self.greedy = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=None)
        self.names = itertools.count()
        sizes = {"max_seq_len": job["longest"], "max_batch_size": job["batch"]}
        with timed_parts() as self.load_parts:
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

    def host_overhead(self) -> float:
        """Return the median seconds of a step outside the model.

        They go into scheduling, packing, sampling and decoding text.
        """
        from bench.machine import wait_for

        model = self.llama.model
        spent = 0.0
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
        for _ in range(HOST_STEPS):
            spent = 0.0
            began = time.perf_counter()
            self.step()
            seconds.append(time.perf_counter() - began - spent)
        return sorted(seconds)[len(seconds) // 2]


@contextlib.contextmanager
def timed_parts() -> Iterator[dict[str, float]]:
    """Yield the seconds that parts of a load take, by name, for all loads in the block.

    Parts that run side by side add up to more than the load.
    """
    from llama import loading
    from llama.checkpoint.reader import CheckpointReader
    from llama.loading import weights

    methods: dict[str, tuple[Any, str]] = {
        "tokenizer": (loading, "load_tokenizer"),
        "read": (CheckpointReader, "copy"),
        "pack": (weights, "pack_model"),
    }
    spent = dict.fromkeys(methods, 0.0)

    def timed(name: str, work: Callable) -> Callable:
        def run(*args: Any, **more: Any) -> Any:
            began = time.perf_counter()
            try:
                return work(*args, **more)
            finally:
                spent[name] += time.perf_counter() - began

        return run

    with contextlib.ExitStack() as stack:
        for name, (owner, method) in methods.items():
            work = getattr(owner, method)
            stack.callback(setattr, owner, method, work)
            setattr(owner, method, timed(name, work))
        yield spent


def our_llama(job: dict[str, Any], sizes: dict[str, Any]) -> Any:
    """Return a Llama for a folder of weights, or for random weights that were never in a file."""
    from bench.shapes import DTYPES, random_model, write_tokenizer
    from llama import Llama, Tokenizer
    from llama.checkpoint.packing import pack_model
    from llama.loading.weights import round_activations
    from llama.weights.choice import QUANTIZED

    activations = job.get("activations")
    if job["folder"]:
        with tempfile.TemporaryDirectory() as scratch:
            tokenizer_path = None
            if lacks_vocabulary(job["folder"]):
                tokenizer_path = f"{scratch}/tokenizer.model"
                write_tokenizer(Path(tokenizer_path), job["params"]["vocab_size"])
            return Llama.build(
                job["folder"], tokenizer_path, **sizes, device=job["device"], dtype=job["dtype"],
                activations=activations,
            )  # fmt: skip
    quantize = job["dtype"] if job["dtype"] in QUANTIZED else None
    dtype = DTYPES["bf16" if quantize else job["dtype"]]
    model = random_model(job["params"] | sizes, dtype, job["device"])
    pack_model(model, quantize=quantize)
    if activations is not None:
        round_activations(model, activations)
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch, "tokenizer.model")
        write_tokenizer(path, job["params"]["vocab_size"])
        return Llama(model, Tokenizer(path))


def lacks_vocabulary(path: str) -> bool:
    """Return whether a GGUF file has no vocabulary, which its products do not need."""
    from llama.checkpoint.find import find

    header = find(path).header
    model = header and header.metadata.get("tokenizer.ggml.model")
    return header is not None and model in (None, "none", "no_vocab")
