"""The metrics of requests of several processes, summed.

In: the samples of each process, as often as it sends them. Out: their sums, also of processes that
have ended since.
"""

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from llama.server.metrics import Metrics

_SUFFIXES = ("", "_total", "_created", "_bucket", "_count", "_sum")
Sample = list[Any]  # the name, the labels and the value of a sample


def samples_of(metrics: Metrics) -> list[Sample]:
    """Return the samples of the metrics of this process."""
    families = metrics.registry.collect()
    return [[x.name, x.labels, x.value] for family in families for x in family.samples]


class SummedMetrics(Collector):
    """The metrics of a server whose requests are answered by several processes.

    Attributes:
        registry: the registry of the server, which may have others.
    """

    def __init__(self) -> None:
        """Begin with no samples."""
        self.registry = CollectorRegistry()
        self._families = list(Metrics().registry.collect())
        self._ended: list[list[Sample]] = []
        self._latest: dict[object, list[Sample]] = {}
        self.registry.register(self)

    def begin(self, process: object) -> None:
        """Take samples of a process from now on."""
        self._latest[process] = []

    def set(self, process: object, samples: list[Sample]) -> None:
        """Keep the latest samples of a process, unless it has ended."""
        if process in self._latest:
            self._latest[process] = samples

    def end(self, process: object) -> None:
        """Keep the last samples of a process that has ended."""
        self._ended = [_rows(_sums([*self._ended, self._latest.pop(process)]))]

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics with their sums."""
        sums = _sums([*self._ended, *self._latest.values()])
        for family in self._families:
            names = {family.name + suffix for suffix in _SUFFIXES}
            found = [(key, value) for key, value in sums.items() if key[0] in names]
            if not found:
                yield family
                continue
            metric = Metric(family.name, family.documentation, family.type)
            for (name, labels), value in found:
                metric.add_sample(name, dict(labels), value)
            yield metric

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format."""
        return generate_latest(self.registry)


_Key = tuple[str, tuple[tuple[str, str], ...]]  # a name with labels


def _sums(of_processes: list[list[Sample]]) -> dict[_Key, float]:
    """Return the sum of each sample; of the times at which a counter was made, the first."""
    sums: dict[_Key, float] = {}
    for samples in of_processes:
        for name, labels, value in samples:
            key = (name, tuple(labels.items()))
            if key not in sums:
                sums[key] = value
            elif name.endswith("_created"):
                sums[key] = min(sums[key], value)
            else:
                sums[key] += value
    return sums


def _rows(sums: dict[_Key, float]) -> list[Sample]:
    return [[name, dict(labels), value] for (name, labels), value in sums.items()]
