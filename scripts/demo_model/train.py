"""Make the demo model again from nothing: corpus, tokenizer, training, Meta's files.

In: a folder's name and a number of steps or minutes. Out: consolidated.00.pth, params.json and
tokenizer.model in that folder, as Meta lays them out; progress and scores go to stderr. It needs
the `train` extra (transformers, tokenizers); the runtime itself never imports either.
"""

import json
import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM

from demo_model.corpus import Turn, fact_turns, facts, round_of, story_turns
from demo_model.tokenizer import NUM_RANKS, make_tokenizer
from llama.checkpoint.write.convert import convert
from llama.tokenizer import ChatFormat, Message, Tokenizer

CONTEXT = 512
PARAMS: dict[str, Any] = {
    "dim": 256,
    "n_layers": 4,
    "n_heads": 8,
    "n_kv_heads": 4,
    "vocab_size": NUM_RANKS + Tokenizer.num_reserved_special_tokens,
    "multiple_of": 32,
    "norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "context_length": CONTEXT,  # not Meta's key: without it the context is taken to be 8,192
}
FFN_DIM = 704  # 2/3 of 4 * 256, rounded up to a multiple of 32

MAX_ANSWER = 64  # tokens of an answer to a question
PROMPT_WEIGHT = 0.15  # questions are given, not asked of the model, but they teach the words
BATCH_TOKENS = 2048
PEAK_RATE = 2.5e-3
DECAY_FROM = 0.6  # the trapezoid: the rate falls to zero over the last 40 %

Row = tuple[list[int], list[float]]  # ids, and the weight of each id's loss


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


# --- documents to rows ---


def text_row(tokenizer: Tokenizer, text: str) -> Row:
    ids = tokenizer.encode(text, bos=True, eos=True)
    return ids, [1.0] * len(ids)


def chat_row(tokenizer: Tokenizer, turns: list[Turn]) -> Row:
    """A dialog in Llama 3's chat format; answers weigh in full, headers and questions little."""
    chat = ChatFormat(tokenizer)
    ids, weights = [tokenizer.bos_id], [PROMPT_WEIGHT]
    for role, content in turns:
        message = Message(role=role, content=content)
        head, whole = chat.encode_header(message), chat.encode_message(message)
        ids += whole
        weight = 1.0 if role == "assistant" else PROMPT_WEIGHT
        weights += [PROMPT_WEIGHT] * len(head) + [weight] * (len(whole) - len(head))
    return ids, weights


@dataclass(frozen=True)
class TrainBatch:
    """Documents of about one length, one a row: nothing leaks from one to the next."""

    ids: torch.Tensor  # (B, S)
    weights: torch.Tensor  # (B, S), 0 where padded


def pad(rows: list[Row]) -> TrainBatch:
    width = max(len(ids) for ids, _ in rows)
    ids = [ids + [0] * (width - len(ids)) for ids, _ in rows]
    weights = [weights + [0.0] * (width - len(weights)) for _, weights in rows]
    return TrainBatch(torch.tensor(ids), torch.tensor(weights))


def batches(tokenizer: Tokenizer, rng: random.Random) -> Iterator[TrainBatch]:
    """Fresh rounds of the corpus without end, sorted by length so that little is padded."""
    while True:
        texts, chats = round_of(rng)
        rows = [text_row(tokenizer, text) for text in texts]
        rows += [chat_row(tokenizer, turns) for turns in chats]
        rows = [(ids[:CONTEXT], weights[:CONTEXT]) for ids, weights in rows]
        rows = sorted(rows, key=lambda row: len(row[0]))
        groups: list[list[Row]] = [[]]
        for row in rows:
            if (len(groups[-1]) + 1) * len(row[0]) > BATCH_TOKENS:
                groups.append([])
            groups[-1].append(row)
        rng.shuffle(groups)
        yield from map(pad, groups)


# --- training ---


def model_of(folder: Path) -> LlamaForCausalLM:
    """Return the model of a folder in Meta's layout, in float32."""
    with tempfile.TemporaryDirectory() as temporary:
        convert(folder, Path(temporary) / "hf")
        return LlamaForCausalLM.from_pretrained(Path(temporary) / "hf", dtype=torch.float32)


def make_model() -> LlamaForCausalLM:
    config = LlamaConfig(
        vocab_size=PARAMS["vocab_size"],
        hidden_size=PARAMS["dim"],
        intermediate_size=FFN_DIM,
        num_hidden_layers=PARAMS["n_layers"],
        num_attention_heads=PARAMS["n_heads"],
        num_key_value_heads=PARAMS["n_kv_heads"],
        max_position_embeddings=CONTEXT,
        rms_norm_eps=PARAMS["norm_eps"],
        rope_parameters={"rope_type": "default", "rope_theta": PARAMS["rope_theta"]},
        tie_word_embeddings=False,
    )
    return LlamaForCausalLM(config)


def make_optimizer(model: LlamaForCausalLM) -> torch.optim.AdamW:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    free = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": free, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)


def rate_at(progress: float, step: int, peak_rate: float) -> float:
    """Warm up over 100 steps, hold, then fall in a line to zero."""
    falling = (1.0 - progress) / (1.0 - DECAY_FROM)
    return peak_rate * max(0.0, min(1.0, (step + 1) / 100, falling))


def loss_of(model: LlamaForCausalLM, batch: TrainBatch) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):  # twice as fast where the CPU multiplies bf16
        logits = model(input_ids=batch.ids, use_cache=False).logits[:, :-1].float()
    weights = batch.weights[:, 1:].flatten()
    losses = F.cross_entropy(logits.flatten(0, 1), batch.ids[:, 1:].flatten(), reduction="none")
    return (losses * weights).sum() / weights.sum()


def fit(
    model: LlamaForCausalLM,
    source: Iterator[TrainBatch],
    steps: int,
    minutes: float,
    peak_rate: float,
) -> None:
    """Train for so many steps, or where steps is 0 for so many minutes."""
    optimizer, start, seen, mean = make_optimizer(model), time.monotonic(), 0, math.nan
    step, progress = 0, 0.0
    while progress < 1.0:
        batch = next(source)
        rate = rate_at(progress, step, peak_rate)
        for group in optimizer.param_groups:
            group["lr"] = rate
        loss = loss_of(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        value, seen, step = loss.item(), seen + int((batch.weights > 0).sum()), step + 1
        mean = value if math.isnan(mean) else 0.98 * mean + 0.02 * value
        elapsed = time.monotonic() - start
        progress = step / steps if steps else elapsed / (60 * minutes)
        if step % 50 == 0 or progress >= 1.0:
            say(
                f"step {step} ({progress:.0%}) loss {mean:.4f} rate {rate:.2e} "
                f"tokens {seen} ({seen / elapsed:.0f}/s)"
            )


# --- Meta's files ---


def interleaved(weight: torch.Tensor, n_heads: int) -> torch.Tensor:
    """Hugging Face rotates halves of a head, Meta rotates neighbours: put the rows back."""
    rows, columns = weight.shape
    halves = weight.view(n_heads, 2, rows // n_heads // 2, columns)
    return halves.transpose(1, 2).reshape(rows, columns)


def meta_state(model: LlamaForCausalLM) -> dict[str, torch.Tensor]:
    """The weights under Meta's names, in bf16, each with a storage of its own."""
    inner = model.model
    state = {"tok_embeddings.weight": inner.embed_tokens.weight}
    for number, layer in enumerate(inner.layers):
        attention, mlp = layer.self_attn, layer.mlp
        own = {
            "attention.wq": interleaved(attention.q_proj.weight, PARAMS["n_heads"]),
            "attention.wk": interleaved(attention.k_proj.weight, PARAMS["n_kv_heads"]),
            "attention.wv": attention.v_proj.weight,
            "attention.wo": attention.o_proj.weight,
            "feed_forward.w1": mlp.gate_proj.weight,
            "feed_forward.w2": mlp.down_proj.weight,
            "feed_forward.w3": mlp.up_proj.weight,
            "attention_norm": layer.input_layernorm.weight,
            "ffn_norm": layer.post_attention_layernorm.weight,
        }
        state |= {f"layers.{number}.{name}.weight": weight for name, weight in own.items()}
    state |= {"norm.weight": inner.norm.weight, "output.weight": model.lm_head.weight}
    return {name: w.detach().to(torch.bfloat16).contiguous().clone() for name, w in state.items()}


def save(model: LlamaForCausalLM, folder: Path) -> None:
    torch.save(meta_state(model), folder / "consolidated.00.pth")
    (folder / "params.json").write_text(json.dumps(PARAMS, indent=2) + "\n")


# --- evaluation ---


def greedy(model: Any, tokenizer: Tokenizer, prompts: list[list[int]], limit: int) -> list[str]:
    """Continue prompts of one length with the likeliest ids, up to a stop id (left out)."""
    ids, texts = torch.tensor(prompts), []
    stops = sorted(tokenizer.stop_tokens)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=limit,
        eos_token_id=stops,
        pad_token_id=stops[0],
    )
    for row in out[:, ids.shape[1] :].tolist():
        ends = [place for place, token in enumerate(row) if token in stops]
        texts.append(tokenizer.decode(row[: ends[0]] if ends else row))
    return texts


def mixed_dialog(
    rng: random.Random, num_exchanges: int, question: str, tokenizer: Tokenizer
) -> list[int]:
    """Return the ids of a chat that ends with this question, after stories and other questions."""
    known = facts()
    while True:
        turns: list[Turn] = []
        for _ in range(num_exchanges):
            is_story = rng.random() < 0.25
            turns += story_turns(rng) if is_story else fact_turns(rng, rng.choice(known))
        dialog = [Message(role=role, content=content) for role, content in turns]
        dialog.append(Message(role="user", content=question))
        ids = ChatFormat(tokenizer).encode_dialog_prompt(dialog)
        if len(ids) <= CONTEXT - MAX_ANSWER:
            return ids


def exact_match(
    model: LlamaForCausalLM, tokenizer: Tokenizer, num_exchanges: int, every: int
) -> float:
    """Return the share of questions whose greedy answer is right to the letter.

    Args:
        model: it answers.
        tokenizer: its tokenizer.
        num_exchanges: what each chat has before the question, stories and questions mixed.
        every: one question in so many is asked.
    """
    rng = random.Random(num_exchanges)
    by_length: dict[int, list[tuple[list[int], str, str]]] = {}
    asked = [(question, fact.answer) for fact in facts() for question in fact.questions]
    for question, answer in asked[::every]:
        ids = mixed_dialog(rng, num_exchanges, question, tokenizer)
        by_length.setdefault(len(ids), []).append((ids, question, answer))
    right = total = 0
    for group in by_length.values():
        answers = greedy(model, tokenizer, [ids for ids, _, _ in group], MAX_ANSWER)
        for (_, question, wanted), said in zip(group, answers, strict=True):
            total, right = total + 1, right + (said == wanted)
            if said != wanted:
                say(f"wrong after {num_exchanges}: {question} -> {said}")
    return right / total


def evaluate(model: LlamaForCausalLM, tokenizer: Tokenizer) -> None:
    for weight in model.parameters():  # the file holds bf16, so bf16 is what gets the score
        weight.data = weight.data.to(torch.bfloat16).float()
    model.eval()
    opening = "Once upon a time"
    with torch.inference_mode():
        prompt = tokenizer.encode(opening, bos=True, eos=False)
        say(opening + greedy(model, tokenizer, [prompt], limit=250)[0])
        for num_exchanges in range(9):
            every = 8 if num_exchanges else 1
            score = exact_match(model, tokenizer, num_exchanges, every)
            say(f"right answers after {num_exchanges} exchanges: {score:.1%}")


def train(
    out: str, *, start: str | None = None, minutes: float = 25.0, steps: int = 0, seed: int = 1
) -> None:
    """Make the demo checkpoint in `out`. With `steps` given, the clock does not matter.

    With `start`, the model and the tokenizer of that folder are trained further, at a fifth of the
    rate.
    """
    folder = Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    rng = random.Random(seed)
    torch.manual_seed(seed)
    if start is not None:
        shutil.copy(Path(start) / "tokenizer.model", folder)
        tokenizer = Tokenizer(folder / "tokenizer.model")
        model = model_of(Path(start))
    else:
        texts, chats = round_of(rng)
        corpus = texts + [content for turns in chats for turn in turns for content in turn]
        tokenizer = make_tokenizer(folder / "tokenizer.model", [*corpus, "\n\n"])
        model = make_model()
    say(f"{sum(p.numel() for p in model.parameters())} parameters")
    peak_rate = PEAK_RATE if start is None else PEAK_RATE / 5
    fit(model, batches(tokenizer, rng), steps, minutes, peak_rate)
    save(model, folder)
    evaluate(model, tokenizer)
