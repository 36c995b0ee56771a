"""The engine's figures in the text format of Prometheus."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import fields
from typing import Protocol, runtime_checkable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from starlette.responses import Response

from palmette.runtime.metrics import EngineCounters, EngineStats
from palmette.runtime.server.errors import ApiError


@runtime_checkable
class HasStats(Protocol):
    """A backend that counts what it does."""

    def stats(self) -> EngineStats: ...


class StatsReader:
    """Reads a backend's figures without blocking the event loop.

    An engine answers between two steps. Those who ask meanwhile share one reading, so that an
    engine that hangs holds one thread and not one for each health check.
    """

    def __init__(self, backend: HasStats, seconds: float = 5.0) -> None:
        self._backend = backend
        self._seconds = seconds
        self._reading: asyncio.Task[EngineStats] | None = None

    async def read(self) -> EngineStats:
        """The figures. Raises ApiError 503 if the engine does not answer in time."""
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(asyncio.to_thread(self._backend.stats))
        try:
            return await asyncio.wait_for(asyncio.shield(self._reading), self._seconds)
        except asyncio.TimeoutError:
            raise ApiError(
                503, f"the engine has not answered for {self._seconds} s", code="engine_busy"
            ) from None


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
