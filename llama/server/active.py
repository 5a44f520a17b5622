"""One HTTP request that the engine works for: what the log and the figures say of it.

In: the engine's requests. Out: times, counts, and the line of the log, which never has its text.
"""

import logging
import time
from dataclasses import dataclass, field

from llama.requests.request import Request

log = logging.getLogger("llama.server")


@dataclass
class ActiveRequest:
    """came: when the last output of a prompt did."""

    request_id: str
    requests: list[Request]
    began: float = field(default_factory=time.monotonic)
    came: dict[int, float] = field(default_factory=dict)
    first_token_s: float | None = None
    status: int = 200

    @property
    def num_unfinished(self) -> int:
        """Sequences that run or wait."""
        answers = (answer for request in self.requests for answer in request.answers)
        return sum(answer.finish_reason is None for answer in answers)

    def log(self) -> None:
        """The line of a request that has ended."""
        answers = [answer for request in self.requests for answer in request.answers]
        firsts = [request.answers[0].sequence for request in self.requests]
        log.info(
            "%s: %d, %d prompt tokens (%d cached), %d generated, ended by %s, first after %s, "
            "%.3f s",
            self.request_id,
            self.status,
            sum(seq.num_prompt for seq in firsts),
            sum(seq.num_cached for seq in firsts),
            sum(answer.num_read for answer in answers),
            ",".join(dict.fromkeys(str(answer.finish_reason) for answer in answers)),
            "no token" if self.first_token_s is None else f"{self.first_token_s:.3f} s",
            time.monotonic() - self.began,
        )
