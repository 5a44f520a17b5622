"""The model of the batch tests, which all tests share."""

import pytest

from llama import Llama


@pytest.fixture
def llama(shared_llama) -> Llama:
    return shared_llama
