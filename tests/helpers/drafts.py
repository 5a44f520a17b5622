"""Runs with drafts and runs without: requests of all kinds, drafters, and the visible results.

Used by tests in one process, and by programs/ranks.py on many ranks.
"""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import torch

from helpers.prompts import prompts_of
from helpers.sequences import state_of
from llama import Llama, SamplingParams
from llama.engine.core import EngineCore
from llama.engine.sequence import SequenceState
from llama.model import Transformer
from llama.ops.cache_values import read_cache
from llama.options.engine_options import EngineOptions
from llama.options.speculation.drafter import Drafter, DraftState
from llama.options.speculation.hook import Speculation, speculate
from llama.ranks.parallel import Parallel
from llama.requests.request import Request

# methods of `Drafts`, one per kind of draft
KINDS = "oracle", "wrong", "some", "stop_ids", "too_long"
SCHEMA = {"type": "object", "properties": {"identifier_of_it": {"type": "integer"}},
          "required": ["identifier_of_it"]}  # fmt: skip
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 2, "stop_token_ids": list(range(97, 117))},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 12, "min_p": 0.01},
    {"temperature": 0.4, "repetition_penalty": 1.5},
    {"temperature": 0.0, "presence_penalty": 1.5, "frequency_penalty": 0.5, "logprobs": 0},
    {"bad_words": ["a", "xy"], "logit_bias": dict.fromkeys([97, 120, 121, 122], 40.0)},
    {"temperature": 1.0, "logprobs": 3, "prompt_logprobs": 2},
    {"temperature": 1.0, "stop": ["a", "e", "i"], "min_tokens": 5},
    {"temperature": 1.0, "stop_token_ids": list(range(200)), "min_tokens": 9},
    {"temperature": 1.0, "n": 3},
    {"temperature": 1.0, "n": 2, "best_of": 4},
    {"temperature": 0.0, "structured_output": {"json": SCHEMA}},
    {"temperature": 1.0, "structured_output": {"regex": "(ab|ac)*d"}, "logprobs": 1},
    {"temperature": 1.0, "structured_output": {"grammar": 'start: g "x"\ng[max_tokens=9]: /.*/'}},
]
PROMPTS = prompts_of([5 + 3 * i for i in range(len(SETTINGS))], seed=30)


class Drafts(Drafter):
    """A drafter of one kind, which knows each sequence's tokens of a run without drafts."""

    def __init__(self, kind: str, truth: dict[tuple, list[int]]) -> None:
        super().__init__(7, Parallel(), [])
        self.kind, self.truth, self.rng = kind, truth, random.Random(5)

    def _begin(self, seq: SequenceState) -> DraftState:
        return DraftState(seq, [])

    def _draft(self, states: list[DraftState], seconds: float) -> list[list[int]]:
        return [getattr(self, self.kind)(self.rest(x.seq), x.seq) for x in states]

    def rest(self, seq: SequenceState) -> list[int]:
        return self.truth[key(seq)][len(seq.tokens) :]

    def oracle(self, rest: list[int], seq: SequenceState) -> list[int]:
        return rest[:7]

    def wrong(self, rest: list[int], seq: SequenceState) -> list[int]:
        return [(token + 1) % 256 for token in rest[:5]]

    def some(self, rest: list[int], seq: SequenceState) -> list[int]:
        count = self.rng.randint(0, 9)
        return [x if self.rng.random() < 0.8 else self.rng.randrange(256) for x in rest[:count]]

    def stop_ids(self, rest: list[int], seq: SequenceState) -> list[int]:
        return [*rest[:2], min(seq.spec.stop_ids, default=65), *rest[2:5]]

    def too_long(self, rest: list[int], seq: SequenceState) -> list[int]:
        return rest + [65] * 500


def key(seq: SequenceState) -> tuple:
    return tuple(seq.tokens[: seq.num_prompt]), seq.spec.seed


def requests_of(llama: Llama) -> Iterator[Request]:
    for i, (prompt, settings) in enumerate(zip(PROMPTS, SETTINGS, strict=True)):
        params = SamplingParams(max_tokens=40, seed=i, **settings)
        yield llama.llm_engine.prepare("", prompt, params, index=i)


def answers(llama: Llama, requests: list[Request]) -> list[tuple]:
    """Return everything that a client can see of each request."""
    joined: dict[tuple[int, int], str] = {}
    last = {}
    for output in llama.llm_engine.stream(requests):
        llama.engine.scheduler.check()
        last[output.index] = output
        for answer in output.outputs:
            answer_key = output.index, answer.index
            joined[answer_key] = joined.get(answer_key, "") + answer.new_text
    seen: list[tuple] = []
    for index, output in sorted(last.items()):
        seen.append((output.error, output.usage, output.prompt_logprobs))
        for a in output.outputs:
            assert joined[index, a.index] == a.text
            seen.append((a.text, a.token_ids, a.logprobs, a.cumulative_logprob))
            seen.append((a.finish_reason, a.stop_reason))
    return seen


def answers_of(llama: Llama) -> list[tuple]:
    return answers(llama, list(requests_of(llama)))


def without_drafts(llama: Llama) -> tuple[list[tuple], dict[tuple, list[int]]]:
    """Return the answers of a run without drafts, and each sequence's tokens with its stop id."""
    requests = list(requests_of(llama))
    found = answers(llama, requests)
    sequences = [answer.sequence for request in requests for answer in request.answers]
    ends = [[] if seq.stop_id is None else [seq.stop_id] for seq in sequences]
    assert {"stop", "length"} <= {seq.finish_reason for seq in sequences}
    return found, {key(seq): seq.tokens + end for seq, end in zip(sequences, ends, strict=True)}


def cached(llama: Llama, kind: str | None, truth: dict[tuple, list[int]]) -> tuple:
    """Return the valid keys and values of a sequence in progress, and the state that goes with
    them.

    The state is its tokens, the hashes of its pages, and the number of steps. Without drafts
    (`kind` is None) the tokens are also added to `truth`.
    """
    llama = Llama(llama.model, llama.tokenizer, options=EngineOptions(num_pages=40))
    core = llama.engine
    speculate(core, None if kind is None else Drafts(kind, truth))
    core.scheduler.token_budget = 8  # otherwise long drafts would end the sequence at once
    seq = state_of(PROMPTS[0], 100, 1, temperature=0.7)
    core.add(seq)
    while len(seq.tokens) < 80:
        core.step()
    pages = core.runner.kv_cache[:, :, list(seq.pages)]  # (L, 2, P, S, K, W)
    slots = read_cache(pages)[:, : min(seq.num_computed, 79)]
    while core.has_unfinished():
        core.step()
    truth.setdefault(key(seq), seq.tokens)
    assert core.stats.generated_tokens == 100 - seq.num_prompt
    return slots, seq.tokens, set(core.scheduler.pool._page_of), core.stats.steps


def vectors_of(llama: Llama) -> list[str]:
    """Return embeddings, and hidden states, also of chunks in steps with other requests."""
    llama.engine.scheduler.token_budget = 16
    found: list[Any] = llama.embed(PROMPTS[:3], pooling="mean")
    layers: list[int | str] = [0, 2, 3, -1, "norm"]
    for states in llama.hidden_states(PROMPTS[4:6], layers):
        found += [states[layer] for layer in layers]
    others = list(itertools.islice(requests_of(llama), 2))
    captures = [*llama.pooler.captures(PROMPTS[1:5], layers[1:3], "all")]
    captures += llama.pooler.captures(PROMPTS[6:7], layers[2:], "last")
    for output in llama.llm_engine.run([*others, *captures])[len(others) :]:
        found += [torch.cat(output.captured[number]) for number in sorted(output.captured)]
    return [repr(tensor.tolist()) for tensor in found]


class MostlyRight(Drafter):
    """A drafter of up to five mostly right tokens; it knows each sequence's result by its seed."""

    def __init__(self, model: Transformer, wanted: dict[int, list[int]]) -> None:
        super().__init__(5, model.parallel, [])
        self.wanted, self.rng = wanted, random.Random(4)

    def _begin(self, seq: SequenceState) -> DraftState:
        return DraftState(seq, [])

    def _draft(self, states: list[DraftState], seconds: float) -> list[list[int]]:
        rests = [self.wanted[x.seq.spec.seed][len(x.seq.tokens) :] for x in states]
        return [[t if self.rng.random() < 0.8 else 9 for t in rest[:5]] for rest in rests]


def drafter_of(core: EngineCore) -> Any:
    """Return the drafter with which a core speculates."""
    (hook,) = (hook for hook in core.hooks if isinstance(hook, Speculation))
    return hook.drafter
