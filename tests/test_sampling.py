"""The distribution of sampled tokens against the logits processors of transformers."""

import pytest
import torch

from helpers.sampling import LOGITS, OUTPUT, PROMPT, assert_same, sequence


@pytest.mark.parametrize(
    ("params", "processors"),
    [
        ({"temperature": 0.4}, [("TemperatureLogitsWarper", 0.4)]),
        ({"temperature": 2.5}, [("TemperatureLogitsWarper", 2.5)]),
        ({"top_k": 1}, [("TopKLogitsWarper", 1)]),
        ({"top_k": 4}, [("TopKLogitsWarper", 4)]),
        ({"top_k": 99}, [("TopKLogitsWarper", 99)]),
        ({"top_p": 0.3}, [("TopPLogitsWarper", 0.3)]),
        ({"top_p": 0.75}, [("TopPLogitsWarper", 0.75)]),
        ({"min_p": 0.3}, [("MinPLogitsWarper", 0.3)]),
        ({"repetition_penalty": 1.7}, [("RepetitionPenaltyLogitsProcessor", 1.7)]),
        ({"repetition_penalty": 0.6}, [("RepetitionPenaltyLogitsProcessor", 0.6)]),
        (
            {"logit_bias": {3: -1.5, 5: 4.0}},
            [("SequenceBiasLogitsProcessor", [[[3], -1.5], [[5], 4.0]])],
        ),
        (
            {"bad_words": ((3,), (4, 7), (3, 4, 4, 1), (3, 4, 10), (9,) * 20)},
            [("NoBadWordsLogitsProcessor", [[3], [4, 7], [3, 4, 4, 1], [3, 4, 10], [9] * 20])],
        ),
        (
            {"min_tokens": 4, "stop_ids": (3, 7)},
            [("MinNewTokensLengthLogitsProcessor", len(PROMPT), 4, [3, 7])],
        ),
        (
            {"min_tokens": 3, "stop_ids": (3, 7)},
            [("MinNewTokensLengthLogitsProcessor", len(PROMPT), 3, [3, 7])],
        ),
        (
            {
                "logit_bias": {4: 2.0}, "repetition_penalty": 1.3, "temperature": 0.7,
                "top_k": 6, "top_p": 0.8,
            },
            [
                ("SequenceBiasLogitsProcessor", [[[4], 2.0]]),
                ("RepetitionPenaltyLogitsProcessor", 1.3),
                ("TemperatureLogitsWarper", 0.7),
                ("TopKLogitsWarper", 6),
                ("TopPLogitsWarper", 0.8),
            ],
        ),
    ],
)  # fmt: skip
def test_same_distribution_as_transformers(distribution, params, processors) -> None:
    from transformers.generation import logits_process as hf

    scores = LOGITS[None]
    for name, *args in processors:
        scores = getattr(hf, name)(*args)(torch.tensor([PROMPT + OUTPUT]), scores)
    expected = scores.softmax(-1)[0]
    assert not torch.allclose(expected, LOGITS.softmax(-1)) or params in (
        {"top_k": 99}, {"min_tokens": 3, "stop_ids": (3, 7)},
    ), "the case tests nothing"  # fmt: skip
    assert_same(distribution(LOGITS, sequence(**params)), expected)
