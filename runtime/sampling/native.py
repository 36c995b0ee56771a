"""Draws and log-probabilities by the extension in C++: as in `distribution` and `logprobs`, without
torch's threads and temporaries.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from palmette.runtime.kernels.cpu import extension, kernels_for
from palmette.runtime.sampling.logprobs import LOGPROB_FLOOR, Described
from palmette.runtime.sampling.randomness import uniform
from palmette.runtime.sampling.rows import SamplingRow

Traced = tuple[float, list[tuple[int, float]]]
"""The log-probability of a drawn token; the likeliest tokens in its place, with theirs."""


class NativeSampling:
    """Works on logits in float32 on a CPU, where the extension is. One caller at a time."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._kernels = kernels_for(torch.float32)
        self._drawer: Any = None
        self._num_threads = 0

    def takes(self, logits: torch.Tensor) -> bool:
        """Whether it can work on these [R, V]."""
        return (
            self._kernels is not None
            and logits.dtype is torch.float32
            and logits.is_cpu
            and logits.stride(1) == 1
        )

    def draw(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow], *, is_shifted: bool = False
    ) -> tuple[list[int], list[float], list[Traced | None]]:
        """A token for each row of `logits` [R, V], masks and suppressed tokens heeded, and the
        row's largest logit that is allowed; none is drawn if that is not finite.

        Of rows that are traced also log-probabilities, in passing: within 1e-5 of the exact ones.
        None of them if `is_shifted`, since then these are not the model's own logits.
        """
        drawn: tuple[list[int], list[float], list[Traced | None]] = self._drawer_for(rows).draw(
            logits.data_ptr(),
            logits.stride(0),
            [(*_told(row), -1 if is_shifted or row.traced is None else row.traced) for row in rows],
            LOGPROB_FLOOR,
        )
        return drawn

    def describe(
        self, logits: torch.Tensor, targets: Sequence[Sequence[int]], num_top: Sequence[int]
    ) -> list[Described | None]:
        """As `logprobs.describe`, of the same row always the same bits."""
        described: list[Described | None] = self._drawer_for(targets).describe(
            logits.data_ptr(), logits.stride(0), targets, num_top, LOGPROB_FLOOR
        )
        return described

    def _drawer_for(self, rows: Sequence[Any]) -> Any:
        """With as many threads as torch has; a single row is worked on by the caller."""
        if len(rows) > 1 or self._drawer is None:
            num_threads = torch.get_num_threads()
            if num_threads != self._num_threads:
                self._drawer = extension().Drawer(self._kernels, num_threads, self._vocab_size)
                self._num_threads = num_threads
        return self._drawer


def _told(row: SamplingRow) -> tuple[Any, ...]:
    """What the extension is told of a row."""
    if row.is_greedy:
        return row.mask, row.suppressed, 0.0, 1.0, 0.0, 0, 0.0
    params = row.params
    return (
        row.mask,
        row.suppressed,
        params.temperature,
        params.top_p,
        params.min_p,
        params.top_k,
        uniform(row.seed, row.path, row.position),
    )
