"""Reasoning with a budget, and formats that begin after it.

The oracle is a definition of the allowed tokens that looks at one output as a whole.
"""

import json
import random
from typing import Any

import numpy as np
import pytest

from helpers.launch import DEMO
from llama import Llama, SamplingParams
from llama.common.checks import FieldError
from llama.engine.request import Constraint
from llama.requests.reasoning_text import reasoning_is_open
from llama.requests.thinking import ReasoningConstraint
from llama.sampling_params import ReasoningRule

VOCAB = 40
START = 37
END = 33
STOPS = (38, 39)
EVERYTHING = frozenset(range(VOCAB))


class Counting:
    """A constraint of content: the tokens 1, 2, 3, ..., or the second stop token at any time."""

    failure: str | None = None

    def fill_allowed(
        self, tokens: list[int], first: int, drafts: list[int], bits: np.ndarray
    ) -> None:
        bits.fill(0)
        content = tokens[first:]
        for row, token in zip(bits, [*drafts, None], strict=True):
            allowed = counting(content)
            for each in allowed:
                row[each // 32] |= np.uint32(1 << each % 32).astype(np.int32)
            if token not in allowed:
                return
            content = [*content, token]

    def draft(self, output: list[int], draft: list[int]) -> tuple[list[int], bool]:
        return [len(output) + 1], True


def counting(content: list[int]) -> frozenset[int]:
    """Return the tokens that `Counting` allows after its own tokens."""
    return frozenset({len(content) + 1, STOPS[1]})


def allowed_tokens(
    output: list[int], *, is_open: bool, budget: int | None, has_content: bool
) -> frozenset[int]:
    """Return the tokens that may follow an output: the definition in the docstring."""
    content_tokens = counting if has_content else lambda content: EVERYTHING
    if not is_open:
        if not output:
            first = content_tokens([]) - {START}
            return first if budget == 0 else first | {START}
        if output[0] != START:
            return content_tokens(output)
        output = output[1:]
    if END in output:
        return content_tokens(output[output.index(END) + 1 :])
    if budget is not None and len(output) >= budget:
        return frozenset({END})
    return EVERYTHING - set(STOPS)


def tokens_of(row: np.ndarray) -> frozenset[int]:
    return frozenset(t for t in range(VOCAB) if int(row[t // 32]) >> t % 32 & 1)


@pytest.mark.parametrize("is_open", [True, False])
@pytest.mark.parametrize("has_content", [True, False])
@pytest.mark.parametrize("budget", [None, 0, 1, 4])
def test_the_allowed_tokens_are_those_of_the_definition(is_open, has_content, budget):
    choose = random.Random(f"{is_open}{has_content}{budget}")
    rule = ReasoningRule(end_id=END, start_id=START, budget=budget)
    definition: dict[str, Any] = {
        "is_open": is_open, "budget": budget, "has_content": has_content,
    }  # fmt: skip
    for _ in range(150):
        content: Constraint | None = Counting() if has_content else None
        constraint = ReasoningConstraint(rule, STOPS, content, is_open=is_open)
        prompt = [choose.randrange(VOCAB) for _ in range(3)]
        output: list[int] = []
        while len(output) < 12:
            likely = [END, START, STOPS[0], 1, 2, 3, choose.randrange(VOCAB)]
            drafts = [choose.choice(likely) for _ in range(choose.randrange(6))]
            bits = np.full((1 + len(drafts), 2), 7, np.int32)
            constraint.fill_allowed([*prompt, *output], len(prompt), drafts, bits)
            for i, row in enumerate(bits):
                before = [*output, *drafts[:i]]
                assert tokens_of(row) == allowed_tokens(before, **definition), (output, drafts, i)
                if i < len(drafts) and drafts[i] not in tokens_of(row):
                    assert not bits[i + 1 :].any()
                    break
            drafted, is_forced = constraint.draft(output, drafts)
            first_allowed = allowed_tokens(output, **definition)
            assert not is_forced or set(drafted[:1]) <= first_allowed
            output.append(choose.choice(sorted(first_allowed)))


def marks(llama: Llama) -> dict[str, Any]:
    special = llama.tokenizer.special_tokens
    return {
        "start_id": special["<|reserved_special_token_0|>"],
        "end_id": special["<|reserved_special_token_1|>"],
    }


SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
}


@pytest.mark.parametrize("is_open", [True, False])
def test_json_follows_the_reasoning_whatever_the_weights(demo, is_open):
    """A model that reasons writes any text up to its budget, and its content has the format."""
    own = marks(demo)
    prompt = demo.tokenizer.encode("Once upon a time", bos=True, eos=False)
    spaces = demo.tokenizer.encode("\n", bos=False, eos=False)
    if is_open:
        prompt += [own["start_id"], *spaces]
    for seed in range(6):
        budget = seed * 3
        params = SamplingParams(
            max_tokens=60,
            temperature=1.0,
            seed=seed,
            n=2,
            structured_output={"json": SCHEMA},
            reasoning=ReasoningRule(budget=budget, **own),
        )
        (output,) = demo.llm_engine.run([demo.llm_engine.prepare("", prompt, params)])
        for answer in output.outputs:
            ids = list(answer.token_ids)
            begins = ids[0] == own["start_id"]
            assert not (begins and budget == 0)
            if is_open or begins:
                assert ids.index(own["end_id"]) <= budget + begins
                ids = ids[ids.index(own["end_id"]) + 1 :]
            assert answer.finish_reason == "stop"
            assert json.loads(demo.tokenizer.decode(ids))["n"] < 100


def test_whether_a_prompt_opens_the_reasoning(demo):
    own = marks(demo)
    encode = demo.tokenizer.encode
    prompt = [*encode("a", bos=True, eos=False), own["start_id"]]
    spaces = encode(" \n\n", bos=False, eos=False)
    word = encode("so", bos=False, eos=False)
    for ids, answer in (
        (prompt, True), ([*prompt, *spaces], True), ([*prompt, *word], False),
        (prompt[:-1], False), ([], False), ([own["start_id"]], True),
        ([*prompt, own["end_id"]], False),
    ):  # fmt: skip
        assert reasoning_is_open(ids, ReasoningRule(**own), demo.tokenizer) is answer, ids
    only_end = ReasoningRule(end_id=own["end_id"])
    assert not reasoning_is_open(prompt, only_end, demo.tokenizer)


def test_marks_outside_of_the_vocabulary_are_refused(demo):
    params = SamplingParams(reasoning=ReasoningRule(end_id=10**6, budget=1))
    with pytest.raises(FieldError, match="reasoning has the token id 1000000"):
        demo.llm_engine.prepare("", [1], params)
    with pytest.raises(FieldError, match=r"reasoning\.budget=-1 must be"):
        ReasoningRule(end_id=1, budget=-1)


def test_without_a_budget_or_a_format_nothing_is_constrained(demo):
    rule = ReasoningRule(**marks(demo))
    request = demo.llm_engine.prepare("", [1, 2], SamplingParams(reasoning=rule))
    assert request.answers[0].sequence.constraint is None
    assert not request.answers[0].sequence.spec.is_constrained


def test_drafts_change_no_answer(demo):
    """Answers with a budget and a format are the same with drafts on both sides of the mark."""
    own = marks(demo)
    text = "Once upon a time there was a dog. " * 3
    prompt = [*demo.tokenizer.encode(text, bos=True, eos=False), own["start_id"]]
    params = SamplingParams(
        max_tokens=60,
        temperature=0.0,
        structured_output={"json": SCHEMA},
        reasoning=ReasoningRule(budget=20, **own),
        prediction=' dog. Once upon a time{"n": 17}',
    )

    def answer(llama: Llama) -> tuple[list[int], int]:
        (output,) = llama.llm_engine.run([llama.llm_engine.prepare("", prompt, params)])
        return list(output.outputs[0].token_ids), llama.engine.stats.accepted_tokens

    with Llama.build(
        str(DEMO), max_seq_len=512, max_batch_size=2, device="cpu", speculate="lookup"
    ) as drafting:
        ids, num_accepted = answer(drafting)
    assert ids == answer(demo)[0]
    assert own["end_id"] in ids
    assert num_accepted > 0
