"""What the server says of its requests: a line in the log, and figures in Prometheus's format.

Log lines never have the text of a request. /metrics has the engine's own counters, too, and names
close to vLLM's. Each server has a registry of its own.
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

from llama.generation import Llama
from llama.requests.request import Answer, Request, RequestOutput

log = logging.getLogger("llama.server")
_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)


@dataclass(eq=False)
class ActiveRequest:
    """One HTTP request that the engine works for. came: when the last output of a prompt did."""

    request_id: str
    requests: list[Request]
    began: float = field(default_factory=time.monotonic)
    came: dict[int, float] = field(default_factory=dict)
    first_token_s: float | None = None
    status: int = 200

    @property
    def answers(self) -> list[Answer]:
        return [answer for request in self.requests for answer in request.answers]

    def log(self) -> None:
        """The line of a request that has ended."""
        firsts = [request.answers[0].sequence for request in self.requests]
        drafted = sum(answer.sequence.num_drafted for answer in self.answers)
        accepted = sum(answer.sequence.num_accepted for answer in self.answers)
        log.info(
            "%s: %d, %d prompt tokens (%d cached), %d generated%s, ended by %s, first after %s, "
            "%.3f s",
            self.request_id,
            self.status,
            sum(seq.num_prompt for seq in firsts),
            sum(seq.num_cached for seq in firsts),
            sum(answer.num_read for answer in self.answers),
            f" ({drafted} drafted, {accepted} accepted)" if drafted else "",
            ",".join(dict.fromkeys(str(answer.finish_reason) for answer in self.answers)),
            "no token" if self.first_token_s is None else f"{self.first_token_s:.3f} s",
            time.monotonic() - self.began,
        )


class Metrics:
    """The figures of one server."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def histogram(name: str, what: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"llama:{name}", what, buckets=buckets, registry=self.registry)

        def counter(name: str, what: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"llama:{name}", what, labels, registry=self.registry)

        since = "From a request's arrival to its"
        self.time_to_first_token = histogram("time_to_first_token_seconds", f"{since} first token.")
        self.e2e_latency = histogram("e2e_request_latency_seconds", f"{since} last token.")
        what = "Between two outputs of a request."
        self.inter_token_latency = histogram("inter_token_latency_seconds", what, _STEP_SECONDS)
        what = "Answers that ended, by the reason."
        self.success = counter("request_success", what, ("finished_reason",))
        self.refused = counter("request_refused", "Requests refused as the queue was full.")
        self.cache_queries = counter("prefix_cache_queries", "Prompt tokens looked up.")
        self.cache_hits = counter("prefix_cache_hits", "Prompt tokens found in the cache.")

    def token_came(self, active: ActiveRequest, output: RequestOutput) -> None:
        now = time.monotonic()
        if not active.came:
            active.first_token_s = now - active.began
        if output.index in active.came:
            self.inter_token_latency.observe(now - active.came[output.index])
        else:
            self.time_to_first_token.observe(now - active.began)
            self.cache_queries.inc(output.usage.prompt_tokens)
            self.cache_hits.inc(output.usage.cached_tokens)
        active.came[output.index] = now

    def finish(self, active: ActiveRequest) -> None:
        self.e2e_latency.observe(time.monotonic() - active.began)
        for request in active.requests:
            for answer in request.returned_answers():
                self.success.labels(answer.finish_reason or "abort").inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


@dataclass(eq=False)
class EngineMetrics(Collector):
    """What the engine counts itself, read when it is asked for."""

    llama: Llama
    num_unfinished: Callable[[], int]  # sequences that run or wait

    def collect(self) -> Iterator[Metric]:
        core = self.llama.engine
        scheduler, pool, stats = core.scheduler, core.scheduler.pool, core.stats
        gauge, counter = GaugeMetricFamily, CounterMetricFamily
        running = len(scheduler.running)
        waiting = max(0, self.num_unfinished() - running)
        usage = 1 - pool.num_free / pool.num_pages
        for kind, name, what, value in (
            (gauge, "num_requests_running", "Sequences in the batch.", running),
            (gauge, "num_requests_waiting", "Sequences that wait.", waiting),
            (gauge, "kv_cache_usage_perc", "Part of the KV cache in use; 1 is all of it.", usage),
            (counter, "num_preemptions", "Sequences put back.", scheduler.num_preemptions),
            (counter, "prompt_tokens", "Prompt tokens, without cached ones.", stats.prompt_tokens),
            (counter, "generation_tokens", "Generated tokens.", stats.generated_tokens),
            (counter, "spec_decode_num_drafts", "Guesses of what comes next.", stats.drafts),
            (counter, "spec_decode_num_draft_tokens", "Their tokens.", stats.draft_tokens),
            (counter, "spec_decode_num_accepted_tokens", "Right ones.", stats.accepted_tokens),
        ):
            yield kind(f"llama:{name}", what, value=value)
        name = "llama:spec_decode_num_accepted_tokens_per_pos"
        accepted = counter(name, "Right ones, by their places in drafts.", labels=["position"])
        for place, num in sorted(stats.accepted_at.items()):
            accepted.add_metric([str(place)], num)
        yield accepted
        seconds = stats.prompt_seconds + stats.generate_seconds
        yield SummaryMetricFamily(
            "llama:step_seconds", "Time of a step.", count_value=stats.steps, sum_value=seconds
        )
        what = "1 for a rank that can go on, 0 for one that is stopped or gone."
        alive = GaugeMetricFamily("llama:rank_alive", what, labels=["rank"])
        for rank, is_alive in enumerate(self.llama.model.parallel.ranks_alive()):
            alive.add_metric([str(rank)], is_alive)
        yield alive
