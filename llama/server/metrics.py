"""Reports about requests: lines of the log, and metrics for Prometheus.

In: requests and their outputs. Out: text. A line of the log never has
the text of a request. The names of the metrics are close to vLLM's; each server has a registry of
its own.
"""

import logging
import time
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from llama.api import Answer, Request, RequestOutput

log = logging.getLogger("llama.server")
_REQUEST_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
_TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


@dataclass(eq=False)
class ActiveRequest:
    """One HTTP request that the engine works on.

    Attributes:
        request_id: id of the HTTP request.
        requests: the engine's request for each prompt.
        sender: whoever sent it.
        gave_way: whether it was ended for another sender's request.
        is_refused: whether the engine's process has refused it, so that it never ran.
        began: time of its arrival, by `time.monotonic`.
        last_output: time of the last output, by the index of the prompt.
        first_token_s: seconds until the first token.
        status: status of the response.
    """

    request_id: str
    requests: list[Request]
    sender: bytes = b""
    gave_way: bool = False
    is_refused: bool = False
    began: float = field(default_factory=time.monotonic)
    last_output: dict[int, float] = field(default_factory=dict)
    first_token_s: float | None = None
    status: int = 200

    @property
    def answers(self) -> list[Answer]:
        """The answers to all prompts."""
        return [answer for request in self.requests for answer in request.answers]

    @property
    def num_unfinished(self) -> int:
        """The number of its sequences that run or wait."""
        return sum(answer.finish_reason is None for answer in self.answers)

    @property
    def has_waiting(self) -> bool:
        """Whether any of its sequences has no token yet."""
        return not all(answer.num_read for answer in self.answers)

    def log(self) -> None:
        """Write the line of a request that has ended."""
        firsts = [request.answers[0].sequence for request in self.requests]
        drafted = sum(answer.sequence.num_drafted for answer in self.answers)
        accepted = sum(answer.sequence.num_accepted for answer in self.answers)
        log.info(
            "%s: %d, %d prompt tokens (%d cached), %d generated%s, ended by %s, first after %s, "
            "%.3f s",
            self.request_id,
            self.status,
            sum(sequence.num_prompt for sequence in firsts),
            sum(sequence.num_cached for sequence in firsts),
            sum(answer.num_read for answer in self.answers),
            f" ({drafted} drafted, {accepted} accepted)" if drafted else "",
            ",".join(dict.fromkeys(str(answer.finish_reason) for answer in self.answers)),
            "no token" if self.first_token_s is None else f"{self.first_token_s:.3f} s",
            time.monotonic() - self.began,
        )


class Metrics:
    """The metrics of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.time_to_first_token = self._histogram(
            "time_to_first_token_seconds",
            "Time from the arrival of a request to its first token.",
            _REQUEST_BUCKETS,
        )
        self.e2e_latency = self._histogram(
            "e2e_request_latency_seconds",
            "Time from the arrival of a request to its last token.",
            _REQUEST_BUCKETS,
        )
        self.image_read = self._histogram(
            "image_read_seconds", "Time to read the images of a request.", _REQUEST_BUCKETS
        )
        self.inter_token_latency = self._histogram(
            "inter_token_latency_seconds", "Time between two outputs of a request.", _TOKEN_BUCKETS
        )
        self.success = self._counter(
            "request_success", "Finished answers, by the reason.", ("finished_reason",)
        )
        self.refused = self._counter(
            "request_refused", "Requests refused because the server is busy."
        )
        self.cache_queries = self._counter("prefix_cache_queries", "Prompt tokens looked up.")
        self.cache_hits = self._counter("prefix_cache_hits", "Prompt tokens found in the cache.")

    def _histogram(self, name: str, description: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(f"llama:{name}", description, buckets=buckets, registry=self.registry)

    def _counter(self, name: str, description: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"llama:{name}", description, labels, registry=self.registry)

    def observe_output(self, active: ActiveRequest, output: RequestOutput) -> None:
        """Count an output of a request."""
        now = time.monotonic()
        if not active.last_output:
            active.first_token_s = now - active.began
        if output.index in active.last_output:
            self.inter_token_latency.observe(now - active.last_output[output.index])
        else:
            self.time_to_first_token.observe(now - active.began)
            self.cache_queries.inc(output.usage.prompt_tokens)
            self.cache_hits.inc(output.usage.cached_tokens)
        active.last_output[output.index] = now

    def observe_end(self, active: ActiveRequest) -> None:
        """Count a request that has ended."""
        self.e2e_latency.observe(time.monotonic() - active.began)
        for request in active.requests:
            for answer in request.returned_answers():
                self.success.labels(answer.finish_reason or "abort").inc()

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)
