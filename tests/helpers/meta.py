"""Meta's own model, from the PyPI package llama-models, and the project's reference alongside it.

Input: a state dict under Meta's names and a params dict. Output: what the model computes in
float32, one prompt at a time, with its own key-value cache. A test that compares the engine with
one of MODELS compares it with each of them.
"""

from dataclasses import fields
from typing import Any

import fairscale.nn.model_parallel.initialize as fs_init
import torch
import torch.distributed as dist
from llama_models.llama3.args import ModelArgs
from llama_models.llama3.model import Transformer
from torch import Tensor

from llama.reference import model as reference


def join_a_world_of_one() -> None:
    """Create the fairscale groups that Meta's layers need, with an in-memory store and no port."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    if not fs_init.model_parallel_is_initialized():
        fs_init.initialize_model_parallel(1)


def leave_the_world() -> None:
    fs_init.destroy_model_parallel()
    dist.destroy_process_group()


def reference_model(
    state: dict[str, Tensor], params: dict, max_seq_len: int = 128
) -> reference.Transformer:
    known = {
        field.name: params[field.name]
        for field in fields(reference.ModelArgs)
        if field.name in params
    }
    args = reference.ModelArgs(**known, max_seq_len=max_seq_len, max_batch_size=4)
    built = reference.Transformer(args, state, torch.float32, torch.device("cpu"))
    return built.eval()


def model(state: dict[str, Tensor], params: dict, max_seq_len: int = 128) -> Transformer:
    built = Transformer(ModelArgs(**params, max_seq_len=max_seq_len, max_batch_size=4))
    built.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return built.eval()


MODELS = {"llama-models": model, "llama.reference": reference_model}


def greedy(built: Any, prompt: list[int], count: int, stop_ids: set[int]) -> list[int]:
    """Return up to `count` tokens after the prompt; a stop id ends them and is left out."""
    out: list[int] = []
    logits = built.forward(torch.tensor([prompt]), 0)
    while len(out) < count:
        token = int(logits[0, -1].argmax())
        if token in stop_ids:
            break
        out.append(token)
        logits = built.forward(torch.tensor([[token]]), len(prompt) + len(out) - 1)
    return out


def logprobs(built: Any, tokens: list[int]) -> list[float]:
    """Return the log probability of each token given the tokens before it; 0.0 for the first."""
    scores = built.forward(torch.tensor([tokens]), 0)[0].log_softmax(-1)
    return [0.0] + [float(scores[i, token]) for i, token in enumerate(tokens[1:])]
