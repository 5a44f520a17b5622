"""SamplingParams: what is refused with which message, and what is stored in which form."""

import dataclasses
import inspect
import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from llama.engine.request import SequenceSpec
from llama.sampling_params import SamplingParams, StructuredOutput

# The field, a value outside its range, and the range that the message must state.
OUTSIDE = [
    ("max_tokens", -1, "from 0 to 2147483647 or None"),
    ("max_tokens", 2**31, "from 0 to 2147483647 or None"),
    ("min_tokens", -1, "from 0 to 2147483647"),
    ("min_tokens", 17, "from 0 to 16"),
    ("temperature", -0.1, "from 0 to 100"),
    ("temperature", 100.5, "from 0 to 100"),
    ("temperature", math.nan, "from 0 to 100"),
    ("temperature", math.inf, "from 0 to 100"),
    ("top_p", -0.1, "from 0 to 1"),
    ("top_p", 1.1, "from 0 to 1"),
    ("top_p", math.nan, "from 0 to 1"),
    ("top_k", -2, "from -1 to 2147483647"),
    ("top_k", 2**31, "from -1 to 2147483647"),
    ("min_p", -0.1, "from 0 to 1"),
    ("min_p", 1.1, "from 0 to 1"),
    ("repetition_penalty", 0, "from 0.01 to 10"),
    ("repetition_penalty", 10.5, "from 0.01 to 10"),
    ("repetition_penalty", math.nan, "from 0.01 to 10"),
    ("presence_penalty", -2.5, "from -2 to 2"),
    ("presence_penalty", 2.5, "from -2 to 2"),
    ("frequency_penalty", -2.5, "from -2 to 2"),
    ("frequency_penalty", 2.5, "from -2 to 2"),
    ("seed", -1, "from 0 to 9223372036854775807 or None"),
    ("seed", 2**63, "from 0 to 9223372036854775807 or None"),
    ("n", 0, "from 1 to 64"),
    ("n", 65, "from 1 to 64"),
    ("best_of", 0, "from 1 to 64 or None"),
    ("best_of", 65, "from 1 to 64 or None"),
    ("logprobs", -1, "from 0 to 100 or None"),
    ("logprobs", 101, "from 0 to 100 or None"),
    ("prompt_logprobs", -1, "from 0 to 100 or None"),
    ("prompt_logprobs", 101, "from 0 to 100 or None"),
]
NUMBERS = sorted({field for field, _, _ in OUTSIDE})
WHOLE = sorted(
    set(NUMBERS)
    - {"temperature", "top_p", "min_p", "repetition_penalty"}
    - {"presence_penalty", "frequency_penalty"}
)

# Arguments, and the parts that the message must contain.
REFUSED_VALUES = [
    ({"stop": ""}, ["stop[0]", "''", "1 to 256 characters"]),
    ({"stop": ["a", "b" * 257]}, ["stop[1]", "1 to 256 characters", "257"]),
    ({"stop": ["a"] * 33}, ["stop", "33", "at most 32"]),
    ({"stop_token_ids": [5, -1]}, ["stop_token_ids[1]", "-1", "from 0 to 2147483647"]),
    ({"stop_token_ids": [2**31]}, ["stop_token_ids[0]", "2147483648", "from 0 to 2147483647"]),
    ({"stop_token_ids": range(257)}, ["stop_token_ids", "257", "at most 256"]),
    ({"bad_words": ["a", ""]}, ["bad_words[1]", "''", "1 to 256 characters"]),
    ({"bad_words": ["a"] * 257}, ["bad_words", "257", "at most 256"]),
    ({"logit_bias": {7: 100.5}}, ["logit_bias[7]", "100.5", "from -100 to 100"]),
    ({"logit_bias": {7: -101}}, ["logit_bias[7]", "-101", "from -100 to 100"]),
    ({"logit_bias": {7: math.nan}}, ["logit_bias[7]", "nan", "from -100 to 100"]),
    ({"logit_bias": {-7: 1.0}}, ["logit_bias", "-7", "from 0 to 2147483647"]),
    ({"logit_bias": dict.fromkeys(range(1025), 1.0)}, ["logit_bias", "1025", "at most 1024"]),
    ({"n": 3, "best_of": 2}, ["best_of", "2", "from 3 to 64 or None"]),
    ({"max_tokens": 3, "min_tokens": 4}, ["min_tokens=4", "from 0 to 3"]),
]

REFUSED_TYPES = [
    ({"stop": 5}, ["stop", "5", "list or tuple"]),
    ({"stop": [5]}, ["stop[0]", "5", "string"]),
    ({"stop": {"a"}}, ["stop", "{'a'}", "list or tuple"]),  # a set's order differs between ranks
    ({"stop_token_ids": 5}, ["stop_token_ids", "5", "list or tuple"]),
    ({"stop_token_ids": ["5"]}, ["stop_token_ids[0]", "'5'", "whole number"]),
    ({"bad_words": "abc"}, ["bad_words", "'abc'", "list or tuple"]),
    ({"logit_bias": 5}, ["logit_bias", "5", "map token ids to numbers"]),
    ({"logit_bias": [(1, 2.0)]}, ["logit_bias", "map token ids to numbers"]),
    ({"logit_bias": {"7": 1.0}}, ["logit_bias", "'7'", "whole number"]),
    ({"logit_bias": {7: True}}, ["logit_bias[7]", "True", "a number"]),
    ({"ignore_eos": 1}, ["ignore_eos", "1", "True or False"]),
    ({"include_stop_str_in_output": None}, ["include_stop_str_in_output", "None", "True or False"]),
]


@pytest.mark.parametrize(("field", "value", "allowed"), OUTSIDE)
def test_a_number_outside_its_range_is_named_with_the_range(
    field: str, value: Any, allowed: str
) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**{field: value})
    assert f"{field}={value}" in str(error.value)
    assert allowed in str(error.value)


@pytest.mark.parametrize("field", NUMBERS)
@pytest.mark.parametrize("value", [True, "1", [1]])
def test_no_number_is_a_bool_or_a_string(field: str, value: Any) -> None:
    with pytest.raises(TypeError) as error:
        SamplingParams(**{field: value})
    assert f"{field}={value!r}" in str(error.value)


@pytest.mark.parametrize("value", [np.bool_(True), Fraction(1), torch.tensor(True), 1j])
def test_a_float_field_takes_real_numbers_only(value: Any) -> None:
    """pydantic's floats take whatever has `__float__`, such as the first two of these."""
    with pytest.raises(TypeError, match=r"temperature=.* must be a number from 0 to 100$"):
        SamplingParams(temperature=value)


def test_numbers_of_numpy_and_torch_become_numbers_of_python() -> None:
    """The repr, which ranks compare, is the same as with numbers of Python."""
    params = SamplingParams(
        max_tokens=np.int64(7),  # type: ignore[arg-type]
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        stop_token_ids=torch.tensor([3, 1]),  # type: ignore[arg-type]
        logit_bias={np.int64(2): torch.tensor(0.5)},  # type: ignore[dict-item]
    )
    plain = SamplingParams(
        max_tokens=7, temperature=0.5, stop_token_ids=[3, 1], logit_bias={2: 0.5}
    )
    assert repr(params) == repr(plain)


@pytest.mark.parametrize("field", WHOLE)
def test_a_count_is_no_float(field: str) -> None:
    arguments: dict[str, Any] = {field: 1.0}
    with pytest.raises(TypeError, match=rf"{field}=1.0 must be a whole number from"):
        SamplingParams(**arguments)


@pytest.mark.parametrize(("arguments", "parts"), REFUSED_VALUES)
def test_refused_value(arguments: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(**arguments)
    assert all(part in str(error.value) for part in parts), str(error.value)


@pytest.mark.parametrize(("arguments", "parts"), REFUSED_TYPES)
def test_refused_type(arguments: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(TypeError) as error:
        SamplingParams(**arguments)
    assert all(part in str(error.value) for part in parts), str(error.value)


def test_an_unknown_field_and_a_positional_one_are_refused() -> None:
    with pytest.raises(TypeError, match=r'has no argument "topp": did you mean top_p\?'):
        SamplingParams(topp=0.9)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r'StructuredOutput\(\) has no argument "x"$'):
        StructuredOutput(regex="a", x=1)  # type: ignore[call-arg]
    with pytest.raises(TypeError):
        SamplingParams(16)  # type: ignore[call-arg]


def test_the_signature_has_plain_types() -> None:
    """`help()` shows no annotations of the checks."""
    parameters = inspect.signature(SamplingParams).parameters
    assert parameters["max_tokens"].annotation == int | None
    assert "Annotated" not in str(inspect.signature(SamplingParams))


def test_a_message_stays_short_for_a_long_value() -> None:
    with pytest.raises(ValueError) as error:
        SamplingParams(stop="x" * 10**6)
    assert len(str(error.value)) < 200


@pytest.mark.parametrize(
    "arguments",
    [
        {"max_tokens": 0},
        {"max_tokens": None, "min_tokens": 10**6},
        {"min_tokens": 16},
        {"temperature": 0},
        {"temperature": 100},
        {"top_p": 0},
        {"top_p": 1},
        {"top_k": -1},
        {"top_k": 0},
        {"min_p": 0},
        {"min_p": 1},
        {"repetition_penalty": 0.01},
        {"repetition_penalty": 10},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"seed": 0},
        {"seed": 2**63 - 1},
        {"n": 64},
        {"n": 3, "best_of": 3},
        {"n": 2, "best_of": 3, "temperature": 0},
        {"logprobs": 0, "prompt_logprobs": 100},
        {"logit_bias": {0: -100, 5: 100}},
        {"stop": ["a" * 256] * 32},
        {"bad_words": ["a"] * 256},
        {"stop_token_ids": range(256)},
    ],
)
def test_the_ends_of_each_range_are_inside(arguments: dict[str, Any]) -> None:
    SamplingParams(**arguments)


def test_defaults_are_those_of_vllm() -> None:
    params = SamplingParams()
    assert (params.max_tokens, params.min_tokens, params.n, params.best_of) == (16, 0, 1, None)
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert params.repetition_penalty == 1.0
    assert params.presence_penalty == params.frequency_penalty == 0.0
    assert params.seed is params.logprobs is params.prompt_logprobs is None
    assert params.stop == params.stop_token_ids == params.bad_words == ()
    assert not params.include_stop_str_in_output and not params.ignore_eos


def test_lists_become_tuples_and_a_bias_sorted_pairs() -> None:
    params = SamplingParams(stop="end", stop_token_ids=[3, 1], logit_bias={9: 1, 2: -3})
    assert params.stop == ("end",)
    assert params.stop_token_ids == (3, 1)
    assert params.logit_bias == ((2, -3.0), (9, 1.0))
    assert SamplingParams(logit_bias=None).logit_bias == ()
    none = SamplingParams(stop=None, stop_token_ids=None, bad_words=None)  # type: ignore[arg-type]
    assert none == SamplingParams()


def test_a_callers_list_may_change_afterwards() -> None:
    stop, bias = ["a"], {1: 2.0}
    params = SamplingParams(stop=stop, logit_bias=bias)
    stop.append("b")
    bias[1] = 3.0
    assert params.stop == ("a",)
    assert params.logit_bias == ((1, 2.0),)
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.seed = 1  # type: ignore[misc]


@given(st.dictionaries(st.integers(0, 999), st.floats(-100, 100)), st.randoms())
def test_the_same_request_has_the_same_repr_and_hash(bias, random) -> None:
    """The same request has the same repr and hash.

    Ranks compare the repr, which must not depend on a dict's order, or on an int given for a float.
    """
    shuffled = list(bias.items())
    random.shuffle(shuffled)
    one = SamplingParams(logit_bias=bias, temperature=1, stop=["a", "b"])
    other = SamplingParams(logit_bias=dict(shuffled), temperature=1.0, stop=("a", "b"))
    assert repr(one) == repr(other)
    assert hash(one) == hash(other) and one == other


def test_replace_takes_what_is_stored() -> None:
    params = SamplingParams(logit_bias={1: 2.0}, stop="a", bad_words=["b"])
    assert dataclasses.replace(params, logit_bias=params.logit_bias) == params


@pytest.mark.parametrize(
    ("temperature", "greedy"), [(0, True), (1e-6, True), (1e-5, False), (1.0, False)]
)
def test_greedy_is_a_temperature_of_next_to_nothing(temperature, greedy) -> None:
    assert SequenceSpec((1,), 2, temperature=temperature).greedy is greedy


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logit_bias", {1: 1.0, 512: 1.0}),
        ("stop_token_ids", [1, 512]),
    ],
)
def test_check_vocab_names_field_id_and_range(field: str, value: Any) -> None:
    params = SamplingParams(**{field: value})
    params.check_vocab(513)
    with pytest.raises(ValueError, match=rf"{field} has the token id 512: .* from 0 to 511"):
        params.check_vocab(512)


@pytest.mark.parametrize("texts", [["x" * 100_000, "y"], ["x" * 100] * 1001, ["é" * 50_001] * 2])
def test_the_texts_of_a_choice_are_bounded_together(texts):
    with pytest.raises(ValueError, match="choice must have at most 100000 characters in all"):
        StructuredOutput(choice=texts)
    assert StructuredOutput(choice=[texts[0]]).choice == (texts[0],)
