"""Reports about requests: lines of the log, and metrics for Prometheus.

In: requests, their outputs and the counters of the engine. Out: text. A line of the log never has
the text of a request. The names of the metrics are close to vLLM's; each server has a registry of
its own.
"""

import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from llama.api import Answer, Llama, Request, RequestOutput

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
        began: time of its arrival, by `time.monotonic`.
        last_output: time of the last output, by the index of the prompt.
        first_token_s: seconds until the first token.
        status: status of the response.
    """

    request_id: str
    requests: list[Request]
    sender: bytes = b""
    gave_way: bool = False
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


@dataclass(eq=False)
class EngineMetrics(Collector):
    """The engine's own counters, which are read when Prometheus asks for them.

    Attributes:
        llama: the model and its engine.
        num_unfinished: returns the number of sequences that run or wait.
    """

    llama: Llama
    num_unfinished: Callable[[], int]

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics."""
        yield from self._gauges()
        yield from self._counters()
        stats = self.llama.engine.stats
        seconds = stats.prompt_seconds + stats.generate_seconds
        yield SummaryMetricFamily(
            "llama:step_seconds", "Time of a step.", count_value=stats.steps, sum_value=seconds
        )
        yield self._rank_alive()

    def _gauges(self) -> Iterator[Metric]:
        scheduler = self.llama.engine.scheduler
        num_running = len(scheduler.running)
        num_waiting = max(0, self.num_unfinished() - num_running)
        usage = 1 - scheduler.pool.num_free / scheduler.pool.num_pages
        for name, description, value in (
            ("num_requests_running", "Sequences in the batch.", num_running),
            ("num_requests_waiting", "Sequences that wait.", num_waiting),
            ("kv_cache_usage_perc", "Used part of the KV cache; 1 is all of it.", usage),
        ):
            yield GaugeMetricFamily(f"llama:{name}", description, value=value)

    def _counters(self) -> Iterator[Metric]:
        num_preemptions = self.llama.engine.scheduler.num_preemptions
        stats = self.llama.engine.stats
        for name, description, value in (
            ("num_preemptions", "Preempted sequences.", num_preemptions),
            ("prompt_tokens", "Prompt tokens, without cached ones.", stats.prompt_tokens),
            ("generation_tokens", "Generated tokens.", stats.generated_tokens),
            ("spec_decode_num_drafts", "Drafts.", stats.drafts),
            ("spec_decode_num_draft_tokens", "Drafted tokens.", stats.draft_tokens),
            ("spec_decode_num_accepted_tokens", "Accepted tokens.", stats.accepted_tokens),
        ):
            yield CounterMetricFamily(f"llama:{name}", description, value=value)
        accepted = CounterMetricFamily(
            "llama:spec_decode_num_accepted_tokens_per_pos",
            "Accepted tokens, by their position in the draft.",
            labels=["position"],
        )
        for position, count in sorted(stats.accepted_at.items()):
            accepted.add_metric([str(position)], count)
        yield accepted

    def _rank_alive(self) -> Metric:
        alive = GaugeMetricFamily(
            "llama:rank_alive",
            "1 for a rank that works, 0 for one that is stopped or gone.",
            labels=["rank"],
        )
        for rank, is_alive in enumerate(self.llama.model.parallel.ranks_alive()):
            alive.add_metric([str(rank)], is_alive)
        return alive
