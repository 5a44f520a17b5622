"""Fixtures of the checkpoint tests: a good folder of each layout, which tests may damage."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers import meta as oracle
from helpers.checkpoints import write_meta
from helpers.weights import PARAMS, STATE, hf_model


@pytest.fixture
def meta(tmp_path) -> Path:
    """A good checkpoint of two shards, which a test may damage."""
    return write_meta(tmp_path / "model", PARAMS, STATE, 2)


@pytest.fixture
def hugging(tmp_path) -> Path:
    hf_model().save_pretrained(tmp_path / "hugging")
    return tmp_path / "hugging"


@pytest.fixture
def metas_world() -> Iterator[None]:
    oracle.join_a_world_of_one()
    yield
    oracle.leave_the_world()
