"""Figures of the server in Prometheus's format, with names close to vLLM's.

In: what the service notes of its requests, and the engine's own counters when somebody asks. Out:
the text of /metrics. Each server has a registry of its own: nothing is global.
"""

import time
from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from llama.generation import Llama
from llama.ranks.collectives import ModelParallel
from llama.requests.request import RequestOutput
from llama.server.active import ActiveRequest

_SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 500)
_STEP_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10)
_KEPT = 0.9  # of the average of request times, at each request


class Metrics:
    """The figures of one server. llama: the model, once there is one. num_unfinished: sequences
    that run or wait."""

    def __init__(
        self, llama: Callable[[], Llama | None], num_unfinished: Callable[[], int]
    ) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(_Engine(llama, num_unfinished))
        self.recent_seconds = 1.0  # that a request took, a moving average

        def histogram(name: str, what: str, buckets: tuple[float, ...] = _SECONDS) -> Histogram:
            return Histogram(f"llama:{name}", what, buckets=buckets, registry=self.registry)

        def counter(name: str, what: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"llama:{name}", what, labels, registry=self.registry)

        self.time_to_first_token = histogram(
            "time_to_first_token_seconds", "From a request's arrival to its first token."
        )
        self.inter_token_latency = histogram(
            "inter_token_latency_seconds", "Between two outputs of a request.", _STEP_SECONDS
        )
        self.e2e_latency = histogram(
            "e2e_request_latency_seconds", "From a request's arrival to its last token."
        )
        self.success = counter(
            "request_success", "Answers that ended, by the reason.", ("finished_reason",)
        )
        self.refused = counter("request_refused", "Requests refused as the queue was full.")
        self.cache_queries = counter("prefix_cache_queries", "Prompt tokens looked up.")
        self.cache_hits = counter("prefix_cache_hits", "Prompt tokens found in the cache.")

    def token_came(self, active: ActiveRequest, output: RequestOutput) -> None:
        now = time.monotonic()
        if output.index in active.came:
            self.inter_token_latency.observe(now - active.came[output.index])
        else:
            self.time_to_first_token.observe(now - active.began)
            self.cache_queries.inc(output.usage.prompt_tokens)
            self.cache_hits.inc(output.usage.cached_tokens)
        active.came[output.index] = now

    def finish(self, active: ActiveRequest) -> None:
        seconds = time.monotonic() - active.began
        self.e2e_latency.observe(seconds)
        self.recent_seconds = _KEPT * self.recent_seconds + (1 - _KEPT) * seconds
        for request in active.requests:
            for answer in request.returned_answers():
                self.success.labels(answer.finish_reason or "abort").inc()

    def text(self) -> bytes:
        return generate_latest(self.registry)


class _Engine(Collector):
    """What the engine counts itself, read when it is asked for."""

    def __init__(
        self, llama: Callable[[], Llama | None], num_unfinished: Callable[[], int]
    ) -> None:
        self._llama = llama
        self._num_unfinished = num_unfinished

    def describe(self) -> list[Metric]:
        return []  # so that `collect` is not called before there is an engine

    def collect(self) -> Iterator[Metric]:
        llama = self._llama()
        if llama is None:
            return
        core = llama.engine
        scheduler, stats = core.scheduler, core.stats

        def gauge(name: str, what: str, value: float) -> Metric:
            return GaugeMetricFamily(f"llama:{name}", what, value=value)

        running = len(scheduler.running)
        yield gauge("num_requests_running", "Sequences in the batch.", running)
        waiting = max(0, self._num_unfinished() - running)
        yield gauge("num_requests_waiting", "Sequences that wait.", waiting)
        pool = scheduler.pool
        usage = 1 - pool.num_free / pool.num_pages
        yield gauge("kv_cache_usage_perc", "Part of the KV cache in use; 1 is all of it.", usage)

        def counter(name: str, what: str, value: float) -> Metric:
            return CounterMetricFamily(f"llama:{name}", what, value=value)

        yield counter("num_preemptions", "Sequences put back.", scheduler.num_preemptions)
        yield counter("prompt_tokens", "Prompt tokens, without cached ones.", stats.prompt_tokens)
        yield counter("generation_tokens", "Generated tokens.", stats.generated_tokens)
        seconds = stats.prompt_seconds + stats.generate_seconds
        yield SummaryMetricFamily(
            "llama:step_seconds", "Time of a step.", count_value=stats.steps, sum_value=seconds
        )
        what = "1 for a rank that can go on, 0 for one that is gone."
        alive = GaugeMetricFamily("llama:rank_alive", what, labels=["rank"])
        for rank, is_alive in enumerate(_ranks_alive(llama.model.parallel)):
            alive.add_metric([str(rank)], is_alive)
        yield alive


def _ranks_alive(parallel: ModelParallel) -> list[bool]:
    """Of each rank; rank 0 asks, so it lives. The watch sees those of other machines as well."""
    watch = parallel.watch
    others = range(1, parallel.size)
    return [True, *(watch is None or not watch.has_left(rank) for rank in others)]
