"""Numbers from callers: which are accepted, as what type, and the errors for the others."""

import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from llama.common.checks import FieldError, brief, number, path_like, whole_number

SEVEN = [
    7,
    np.int64(7),
    np.uint8(7),
    np.array(7),
    torch.tensor(7),
    torch.tensor(7, dtype=torch.int8),
]


@pytest.mark.parametrize("value", SEVEN, ids=lambda v: type(v).__name__)
def test_whole_numbers_of_numpy_and_torch_become_ints(value):
    result = whole_number("n", value, 0, 9)
    assert (result, type(result)) == (7, int)
    with pytest.raises(ValueError, match=r"^n=7 must be a whole number from 8 to 9$"):
        whole_number("n", value, 8, 9)
    with pytest.raises(ValueError, match=r"^n=7 must be a whole number from 0 to 6 or None$"):
        whole_number("n", value, 0, 6, optional=True)


def test_both_ends_and_none_are_allowed_where_they_are_said_to_be():
    assert [whole_number("n", n, 1, 2) for n in (1, 2)] == [1, 2]
    assert [number("x", x, 1, 2) for x in (1, 2)] == [1.0, 2.0]
    assert whole_number("n", None, 1, 2, optional=True) is None
    for check in (whole_number, number):
        with pytest.raises(TypeError, match="v=None must be a"):
            check("v", None, 1, 2)


NOT_WHOLE = [
    True, np.bool_(True), torch.tensor(True), 7.0, np.float64(7), torch.tensor(7.0), "7", b"7", [7],
    7j, torch.tensor([7, 7]), np.array([7, 7]), torch.empty((), dtype=torch.int64, device="meta"),
]  # fmt: skip


@pytest.mark.parametrize("value", NOT_WHOLE, ids=str)
def test_what_is_no_whole_number_is_a_type_error(value):
    with pytest.raises(TypeError, match=r"^n=.* must be a whole number from 0 to 9$"):
        whole_number("n", value, 0, 9)


@pytest.mark.parametrize(
    "value",
    [0.5, np.float32(0.5), np.float16(0.5), torch.tensor(0.5), torch.tensor(0.5).bfloat16()],
    ids=lambda v: type(v).__name__,
)
def test_numbers_of_numpy_and_torch_become_floats(value):
    result = number("x", value, 0, 1)
    assert (result, type(result)) == (0.5, float)
    assert number("x", value, 0, 0.5, above=True) == 0.5
    with pytest.raises(ValueError, match=r"^x=0\.5 must be a number above 0\.5 and up to 1$"):
        number("x", value, 0.5, 1, above=True)


def test_integers_are_numbers():
    assert [number("x", value, 0, 9) for value in SEVEN] == [7.0] * len(SEVEN)


@pytest.mark.parametrize("value", [Fraction(7), True, "7", 7j, np.complex64(7), [7.0]], ids=str)
def test_what_is_no_number_is_a_type_error(value):
    with pytest.raises(TypeError, match=r"^x=.* must be a number from 0 to 9$"):
        number("x", value, 0, 9)


NOT_FINITE = [float("nan"), np.float32("nan"), torch.tensor(math.nan), math.inf, -np.inf, 10**400]


@pytest.mark.parametrize("value", NOT_FINITE, ids=lambda v: type(v).__name__)
def test_what_is_not_finite_is_out_of_range(value):
    with pytest.raises(ValueError, match=r"^x=.* must be a number from -inf to inf$"):
        number("x", value, -math.inf, math.inf)


class Unshowable:
    def __repr__(self) -> str:
        raise OSError("no")


@pytest.mark.parametrize(
    "value",
    ["a" * 10**7, 10**10000, {"a": ["b" * 10**6] * 9}, Unshowable()],
    ids=lambda v: type(v).__name__,
)
def test_an_error_quotes_no_more_than_a_line(value):
    assert 0 < len(brief(value)) <= 160
    with pytest.raises((TypeError, ValueError)) as error:
        whole_number("n", value, 0, 9)
    assert len(str(error.value)) < 250


def test_a_folder_with_a_number_for_a_name():
    """A folder may have a number for a name.

    fire, which reads the flags of Meta's scripts, makes an int of 123, and a float of 3.10.
    """
    assert [path_like("p", p) for p in ("3.10", 123, Path("a"))] == ["3.10", "123", Path("a")]
    with pytest.raises(TypeError, match=r"^p=3.1 must be the text of a path, such as ./3.1$"):
        path_like("p", 3.10)
    for wrong in (None, True, b"a", ["a"]):
        with pytest.raises(TypeError, match=r"^p=.* must be the text of a path$"):
            path_like("p", wrong)


@pytest.mark.parametrize(("value", "kind"), [("x", TypeError), (-1, ValueError)])
def test_an_error_says_which_field_it_is_about(value, kind):
    """An error names its field, so that a server need not read the message to name the body's
    field.
    """
    with pytest.raises(kind) as caught:
        whole_number("top_k", value, 0, 5)
    error = caught.value
    assert isinstance(error, FieldError) and error.field == "top_k"
    assert str(error) == f"top_k={value!r} must be a whole number from 0 to 5"
    moved = error.at("limits[2]")
    assert type(moved) is type(error) and moved.field == "limits[2]"
    assert str(moved) == f"limits[2]={value!r} must be a whole number from 0 to 5"
