"""Timing and token counts of an answer, and the line that shows them."""

from typing import NamedTuple

from llama.api import Usage


class TurnStats(NamedTuple):
    """The timing and the token counts of one answer."""

    first_seconds: float  # time from the question to the first token
    last_seconds: float  # time from the question to the last token
    usage: Usage  # prompt_tokens is 0 if it is unknown
    server_rate: float | None = None  # tokens per second, as measured by the server

    @property
    def rate(self) -> float:
        """Return the tokens per second after the first token.

        An answer of one token has the rate up to that token.
        """
        if self.server_rate:
            return self.server_rate
        tokens = self.usage.completion_tokens
        if tokens > 1:
            return (tokens - 1) / (self.last_seconds - self.first_seconds)
        return tokens / self.first_seconds

    def describe(self, context: int | None) -> str:
        """Return the figures as one line.

        Args:
            context: The maximum number of tokens of prompt and answer, if it is known.
        """
        usage = self.usage
        speed = f"first token {1000 * self.first_seconds:.0f} ms | {self.rate:.1f} tokens/s"
        if not usage.prompt_tokens:
            return speed  # A server does not report the tokens of an answer that was stopped.
        limit = "" if context is None else f" of {context}"
        line = f"{speed} | context {usage.total_tokens}{limit} tokens"
        line += f", {usage.cached_tokens} from cache"
        if usage.draft_tokens:
            line += f" | {usage.accepted_tokens} of {usage.draft_tokens} drafted tokens accepted"
        return line
