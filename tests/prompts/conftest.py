"""Fixtures of the tests of prompts: llguidance as the oracle of grammars."""

from collections.abc import Callable

import pytest
from llguidance import LLMatcher, LLTokenizer, grammar_from


@pytest.fixture(scope="session")
def takes() -> Callable[[str, str], bool]:
    """A function takes(grammar, text): whether the text, byte by byte, is a whole answer."""
    tokenizer = LLTokenizer("byte")

    def check(grammar: str, text: str) -> bool:
        source = grammar_from("lark", grammar)
        is_error, messages = LLMatcher.validate_grammar_with_warnings(source, tokenizer)
        assert not is_error, (messages, grammar)
        matcher = LLMatcher(tokenizer, source)
        tokens = tokenizer.tokenize_str(text)
        return matcher.try_consume_tokens(tokens) == len(tokens) and matcher.is_accepting()

    return check
