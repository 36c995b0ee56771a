"""Picks the next token of every row of a batch of logits."""

from palmette.runtime.sampling.counts import TokenCounts
from palmette.runtime.sampling.logprobs import LOGPROB_FLOOR
from palmette.runtime.sampling.randomness import resolve_seed, uniform
from palmette.runtime.sampling.rows import SampledToken, SamplingRow, needs_counts
from palmette.runtime.sampling.sampler import Sampler

__all__ = [
    "LOGPROB_FLOOR",
    "SampledToken",
    "Sampler",
    "SamplingRow",
    "TokenCounts",
    "needs_counts",
    "resolve_seed",
    "uniform",
]
