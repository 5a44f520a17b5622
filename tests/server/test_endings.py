"""The words of each API for the reason of an answer's end."""

from typing import get_args

from llama.engine.sequence import FinishReason
from llama.server.endings import ENDINGS, Ending, ending_of


def test_every_reason_of_the_engine_has_words_in_each_api():
    assert set(ENDINGS) == {*get_args(FinishReason), "tool_calls"}
    assert ending_of("length") == Ending("max_tokens", "max_output_tokens", "length")
    assert ending_of(None) == ending_of("stop") == Ending("end_turn")
