"""The engine's figures in the text format of Prometheus."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields
from typing import Protocol, runtime_checkable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from starlette.responses import Response

from palmette.runtime.metrics import EngineCounters, EngineStats


@runtime_checkable
class HasStats(Protocol):
    """A backend that counts what it does."""

    def stats(self) -> EngineStats: ...


def render_metrics(stats: EngineStats, num_requests: int) -> Response:
    """Every figure of `stats` under its own name, counters with ``_total``."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(stats, num_requests))
    # The format that every scraper reads; its content type names a version.
    return Response(generate_latest(registry), media_type="text/plain; version=0.0.4")


class _Collector:
    """One reading."""

    def __init__(self, stats: EngineStats, num_requests: int) -> None:
        self._stats = stats
        self._num_requests = num_requests

    def collect(self) -> Iterable[Metric]:
        counters = {field.name for field in fields(EngineCounters)}
        for field in fields(EngineStats):
            name, value = field.name, getattr(self._stats, field.name)
            family = CounterMetricFamily if name in counters else GaugeMetricFamily
            yield family(f"palmette_{name}", name.replace("_", " "), value=value)
        yield GaugeMetricFamily(
            "palmette_http_generations", "generation requests in progress", self._num_requests
        )
