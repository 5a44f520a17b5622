"""The words of the server's APIs for the reason of an answer's end.

In: the finish_reason of a chat, which is the engine's `FinishReason` or "tool_calls". Out: the
words of Anthropic's and of OpenAI's Responses API. OpenAI's chats and completions, batch files, the
log and the metrics have the finish_reason itself.
"""

from typing import NamedTuple


class Ending(NamedTuple):
    """The words of the APIs for one finish_reason.

    Attributes:
        stop_reason: Anthropic's stop_reason.
        incomplete: The reason in the incomplete_details of a response; None if the response is
            completed.
        done_reason: Ollama's done_reason.
    """

    stop_reason: str
    incomplete: str | None = None
    done_reason: str = "stop"


# Requests that were aborted or failed are answered with an error. The rows for them serve the
# response object within such an error.
ENDINGS = {
    "stop": Ending("end_turn"),
    "tool_calls": Ending("tool_use"),
    "length": Ending("max_tokens", incomplete="max_output_tokens", done_reason="length"),
    "abort": Ending("end_turn"),
    "error": Ending("end_turn"),
}


def ending_of(finish_reason: str | None) -> Ending:
    """Return the words of the APIs; an answer that has not ended has those of "stop".

    Raises:
        KeyError: The reason is unknown.
    """
    return ENDINGS[finish_reason or "stop"]
