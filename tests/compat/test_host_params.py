"""Params that hosts send: understood as the plain value, or refused by a ValueError."""

from typing import Any

import numpy as np
import pytest
import torch

from llama import Llama
from llama.compat.hosts import DB_GPT_TOKENS, HostRequest, generate_stream, read_params


def read(llama: Llama, **changes: Any) -> HostRequest:
    params = {
        "prompt": "Once upon", "max_new_tokens": 12, "temperature": 0.0, "echo": False, **changes,
    }  # fmt: skip
    return read_params(params, None, llama.tokenizer, 50_000)


NO_STOPS: list[Any] = [None, "", [], [""], [None], set()]
SAME: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *(({"max_new_tokens": eight}, {"max_new_tokens": 8})
      for eight in ("8", " 8 ", 8.0, "8.0", np.int64(8), np.float32(8), torch.tensor(8),
                    np.array(8))),
    *(({"temperature": half}, {"temperature": 0.5}) for half in ("0.5", np.float64(0.5), "5e-1")),
    *(({"temperature": tiny}, {"temperature": 0}) for tiny in ("0", 0.0)),
    ({"temperature": 1.0, "do_sample": False}, {"temperature": 0}),
    ({"temperature": 1.0, "do_sample": None}, {"temperature": 1}),
    ({"temperature": None}, {"temperature": 1}),
    *(({"top_k": k}, {"top_k": -1}) for k in ("-1", -1.0, np.int32(-1))),
    *(({"seed": seed}, {"seed": 2**53 + 1}) for seed in (str(2**53 + 1), np.int64(2**53 + 1))),
    *(({"stop": stop}, {}) for stop in NO_STOPS),
    *(({"stop": stop}, {"stop": ["x"]}) for stop in ("x", {"x"}, ("x", None, ""), iter("x"))),
    *(({"stop_token_ids": ids}, {}) for ids in (None, [None], [], ())),
    *(({"stop_token_ids": ids}, {"stop_token_ids": [7]})
      for ids in (["7"], [7.0, None], [np.int32(7)], np.array([7]), {7}, 7, "7")),
    *(({name: one}, {}) for name in ("n", "best_of") for one in (None, 1, "1", 1.0)),
    *(({"echo": echo}, {"echo": True}) for echo in (1, "true", np.bool_(True))),
    *(({"echo": echo}, {"echo": False}) for echo in (None, 0, "False")),
    ({"judge_sent_end": None, "logprobs": None, "top_p": None, "use_beam_search": False,
      "is_reasoning_model": True, "model": "m", "request_id": "r", "images": []}, {}),
]  # fmt: skip


@pytest.mark.parametrize(("sent", "meant"), SAME)
def test_a_value_as_a_host_sends_it_is_the_plain_one(sent, meant, shared_llama):
    assert read(shared_llama, **sent) == read(shared_llama, **meant)


ODD: list[Any] = [
    object(), [], {}, [None], [8], "abc", "", "8,5", b"8", True, "True", 1j, float("nan"), "inf",
    -1, float("-inf"), 10**400, "9" * 5000, 2**63, 1e300, np.array([1, 2]), np.bool_(True),
    "\ud800", torch.zeros(2), lambda: 0, {"a": {1}},
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD, ids=range(len(ODD)))
def test_any_value_is_understood_or_a_value_error(odd, shared_llama):
    """Any value is understood or gives a ValueError.

    FastChat catches no TypeError, AttributeError or OverflowError: its stream would just end.
    """
    keys = (
        "max_new_tokens", "temperature", "top_p", "top_k", "min_p", "repetition_penalty",
        "presence_penalty", "frequency_penalty", "seed", "n", "best_of", "logprobs", "stop",
        "stop_token_ids", "echo", "do_sample", "judge_sent_end", "prompt", "unknown", 5,
    )  # fmt: skip
    refused = 0
    for key in keys:
        call: Any = {"prompt": "x", "max_new_tokens": 1, key: odd}
        try:
            next(generate_stream(shared_llama, shared_llama.tokenizer, call, "cpu", 128))
        except (ValueError, RuntimeError):
            refused += 1
    assert refused >= 5
    not_params: list[Any] = [odd, None]
    for bad in not_params:
        with pytest.raises(ValueError):
            read_params(bad, 128, shared_llama.tokenizer, 128)


@pytest.mark.parametrize(("given", "count"), [({}, 256), ({"max_new_tokens": DB_GPT_TOKENS}, 2048)])
def test_defaults_are_the_hosts_own(given, count, shared_llama):
    request = read_params({"prompt": "x"}, 42_048, shared_llama.tokenizer, 50_000, **given)
    sampling = request.sampling
    assert (sampling.max_tokens, request.echo, sampling.stop) == (count, "x", ())
    own = read(shared_llama, max_new_tokens=3, stop="END", echo=False)
    assert (own.sampling.max_tokens, own.sampling.stop, own.echo) == (3, ("END",), "")
