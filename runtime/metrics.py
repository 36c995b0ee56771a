"""What an engine has done so far, as counters, and what it holds now."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(slots=True)
class EngineCounters:
    """Totals since the engine started.

    `computed_tokens` is every token whose keys and values were computed: prompts, decoded and
    forced tokens, score paths, and `recomputed_tokens`, which preemption caused. `prompt_tokens`
    is counted when a request is admitted for the first time, together with the `cached_tokens`
    among them. `saved_passes` is how many tokens needed no forward pass of their own, of requests
    that have ended. `guessed_tokens` were computed on the chance that they would be drawn or forced
    next; `accepted_tokens` of them were, and only these are among the `computed_tokens`.
    `restored_pages` were evicted and came back from the host tier.
    """

    steps: int = 0
    computed_tokens: int = 0
    recomputed_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    decoded_tokens: int = 0
    forced_tokens: int = 0
    saved_passes: int = 0
    guessed_tokens: int = 0
    accepted_tokens: int = 0
    restored_pages: int = 0
    preemptions: int = 0
    requests_started: int = 0
    requests_finished: int = 0
    requests_failed: int = 0
    requests_aborted: int = 0


@dataclass(slots=True, kw_only=True)
class EngineStats(EngineCounters):
    """The counters, and the state of queue and pool at one moment."""

    num_running: int = 0
    num_waiting: int = 0
    num_programs: int = 0  # under way: between their first request and their end
    num_held_pages: int = 0  # that running requests and programs hold
    num_pages: int = 0
    num_free_pages: int = 0
    num_available_pages: int = 0  # free, or holding cached tokens nobody uses now
    page_size: int = 0
    kv_bytes: int = 0
    host_tier_size: int = 0  # pages of the host tier; 0: there is none
    host_tier_pages: int = 0  # of these, the ones in use

    @property
    def hit_rate(self) -> float:
        """Cached prompt tokens / prompt tokens."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    def since(self, earlier: EngineStats) -> EngineStats:
        """The counters' growth since `earlier`; what is held is as now."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        for counter in fields(EngineCounters):
            values[counter.name] -= getattr(earlier, counter.name)
        return EngineStats(**values)
