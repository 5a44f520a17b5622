"""A naive Llama 3 written from the paper: no cache, no paging, no batching, no fused operators.

Input: a state dict under Meta's names (whole, unsharded), a params dict and one prompt. Output:
float32 logits of every position, and greedy continuations. It shares no code with the package.
"""

import math

import torch
from torch import Tensor


def rope_frequencies(params: dict) -> Tensor:
    half = params["dim"] // params["n_heads"] // 2
    freqs = [params.get("rope_theta", 500000.0) ** (-i / half) for i in range(half)]
    if params.get("use_scaled_rope"):
        factor = params.get("rope_scale_factor", 8)
        for i, freq in enumerate(freqs):
            wavelength = 2 * math.pi / freq
            if wavelength > 8192:
                freqs[i] = freq / factor
            elif wavelength > 2048:
                smooth = (8192 / wavelength - 1) / 3
                freqs[i] = (1 - smooth) * freq / factor + smooth * freq
    return torch.tensor(freqs)


def rotate(x: Tensor, freqs: Tensor) -> Tensor:
    """Rotate the pair (2i, 2i + 1) at position p of x (S, H, D) by p * freqs[i]."""
    angles = torch.arange(x.shape[0])[:, None] * freqs  # (S, D/2)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    even, odd = x[..., 0::2], x[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return turned.flatten(-2)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def attention(x: Tensor, w: dict[str, Tensor], params: dict) -> Tensor:
    length, n_heads = x.shape[0], params["n_heads"]
    n_kv_heads = params.get("n_kv_heads") or n_heads
    freqs = rope_frequencies(params)
    q = rotate((x @ w["attention.wq"].T).view(length, n_heads, -1), freqs)
    k = rotate((x @ w["attention.wk"].T).view(length, n_kv_heads, -1), freqs)
    v = (x @ w["attention.wv"].T).view(length, n_kv_heads, -1)
    heads = []
    for head in range(n_heads):
        kv = head // (n_heads // n_kv_heads)
        scores = q[:, head] @ k[:, kv].T / math.sqrt(q.shape[-1])
        scores += torch.full((length, length), -math.inf).triu(1)
        heads.append(scores.softmax(-1) @ v[:, kv])
    return torch.cat(heads, dim=-1) @ w["attention.wo"].T


def logits(state: dict[str, Tensor], params: dict, tokens: list[int]) -> Tensor:
    """Return the logits (S, V) of the token after each position."""
    state = {name: tensor.float() for name, tensor in state.items()}
    eps = params.get("norm_eps", 1e-5)
    x = state["tok_embeddings.weight"][torch.tensor(tokens)]
    for i in range(params["n_layers"]):
        prefix = f"layers.{i}."
        w = {
            name.removeprefix(prefix).removesuffix(".weight"): tensor
            for name, tensor in state.items()
            if name.startswith(prefix)
        }
        x = x + attention(norm(x, w["attention_norm"], eps), w, params)
        h = norm(x, w["ffn_norm"], eps)
        gate, up = h @ w["feed_forward.w1"].T, h @ w["feed_forward.w3"].T
        x = x + (gate * gate.sigmoid() * up) @ w["feed_forward.w2"].T
    return norm(x, state["norm.weight"], eps) @ state["output.weight"].T


def greedy(
    state: dict[str, Tensor], params: dict, prompt: list[int], count: int, stop_ids: set[int]
) -> list[int]:
    """Return up to `count` tokens after the prompt; a stop id ends them and is left out."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        token = int(logits(state, params, tokens)[-1].argmax())
        if token in stop_ids:
            break
        tokens.append(token)
    return tokens[len(prompt) :]


def logprobs(state: dict[str, Tensor], params: dict, tokens: list[int]) -> list[float]:
    """Return the log probability of each token given the tokens before it; 0.0 for the first."""
    scores = logits(state, params, tokens).log_softmax(-1)
    return [0.0] + [float(scores[i, token]) for i, token in enumerate(tokens[1:])]
