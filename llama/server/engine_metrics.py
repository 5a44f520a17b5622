"""The metrics of an engine, for Prometheus.

In: the counters of a model and its engine. Out: their metrics. Those of requests are in
`metrics.py`; the names are close to vLLM's.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector

from llama.api import Llama


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
        yield from self._pages_on_disk()
        yield from self._images()

    def _images(self) -> Iterator[Metric]:
        store = self.llama.image_store
        if store is None:
            return
        for name, description, value in (
            ("encoded", "Images that the encoder has read.", store.num_encoded),
            ("found", "Images whose keys and values were cached.", store.num_found),
        ):
            yield CounterMetricFamily(f"llama:images_{name}", description, value=value)

    def _pages_on_disk(self) -> Iterator[Metric]:
        pages = self.llama.pages_on_disk
        if pages is None:
            return
        yield GaugeMetricFamily(
            "llama:kv_disk_bytes", "Size of all files in kv_cache_dir.", value=pages.folder.nbytes
        )
        for name, description, value in (
            ("read_bytes", "Bytes of KV pages that rank 0 read.", pages.stats.read_bytes),
            ("written_bytes", "Bytes that rank 0 wrote.", pages.writer.written_bytes),
            ("hit_tokens", "Tokens of prompts that were loaded.", pages.stats.hit_tokens),
            ("dropped_pages", "KV pages that were not written.", pages.num_dropped),
            ("damaged_pages", "KV pages that had changed.", pages.folder.num_damaged),
        ):
            yield CounterMetricFamily(f"llama:kv_disk_{name}", description, value=value)

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
