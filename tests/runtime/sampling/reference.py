"""The sampling rules once more, one token at a time in plain floats: slow and easy to check."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from palmette.protocol import SamplingParams


def adjusted_logits(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    allowed: Sequence[bool] | None = None,
    suppressed: Sequence[int] = (),
) -> list[float]:
    """Bias, penalties, mask."""
    changed = list(logits)
    for token_id, bias in params.logit_bias:
        changed[token_id] += bias
    counts = Counter(output)
    for token_id in set(prompt) | set(output):
        value = changed[token_id]
        penalty = params.repetition_penalty
        changed[token_id] = value / penalty if value > 0 else value * penalty
    for token_id, count in counts.items():
        changed[token_id] -= params.frequency_penalty * count + params.presence_penalty
    for token_id in range(len(changed)):
        if token_id in suppressed or (allowed is not None and not allowed[token_id]):
            changed[token_id] = -math.inf
    return changed


def probabilities(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """The distribution that is drawn from, for adjusted logits and a temperature above 0."""
    peak = max(logits)
    full = [math.exp((value - peak) / params.temperature) for value in logits]
    total = math.fsum(full)
    full = [value / total for value in full]
    order = sorted(range(len(full)), key=lambda token_id: (-logits[token_id], token_id))
    kept = []
    mass = 0.0
    for rank, token_id in enumerate(order):
        if params.top_k > 0 and rank >= params.top_k:
            break
        if params.top_p < 1 and mass >= params.top_p:
            break
        if full[token_id] < params.min_p * full[order[0]]:
            break
        kept.append(token_id)
        mass += full[token_id]
    return [value / mass if token_id in kept else 0.0 for token_id, value in enumerate(full)]


def is_on_an_edge(logits: Sequence[float], params: SamplingParams) -> bool:
    """Rounding decides whether some token passes top-p or min-p."""
    full = probabilities(logits, SamplingParams(temperature=params.temperature))
    ranked = sorted(full, reverse=True)
    sums = [math.fsum(ranked[:count]) for count in range(1, len(ranked) + 1)]
    return any(abs(mass - params.top_p) < 1e-9 for mass in sums) or any(
        abs(value - params.min_p * ranked[0]) < 1e-9 for value in full
    )


def chi_square_excess(observed: npt.ArrayLike, probabilities: npt.ArrayLike | None = None) -> float:
    """How many standard deviations Pearson's statistic lies above its mean.

    Without `probabilities` all cells are equally likely. By the cube-root approximation of Wilson
    and Hilferty (1931), which makes it nearly normal: 4 is exceeded by chance once in 30,000.
    """
    counts = np.asarray(observed, dtype=float)
    shares = (
        np.full(len(counts), 1 / len(counts))
        if probabilities is None
        else np.asarray(probabilities)
    )
    expected = shares * counts.sum()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    spread = 2 / (9 * (len(counts) - 1))
    return float(((statistic / (len(counts) - 1)) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))
