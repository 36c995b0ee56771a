"""Draws by the extension in C++: as in `distribution`, without torch's threads and temporaries."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from palmette.runtime.kernels.cpu import extension, kernels_for
from palmette.runtime.sampling.randomness import uniform
from palmette.runtime.sampling.rows import SamplingRow


class NativeDraws:
    """Draws from logits in float32 on a CPU, where the extension is. One caller at a time."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._kernels = kernels_for(torch.float32)
        self._drawer: Any = None
        self._num_threads = 0

    def can_draw(self, logits: torch.Tensor) -> bool:
        """Whether it can draw from these [R, V]."""
        return (
            self._kernels is not None
            and logits.dtype is torch.float32
            and logits.is_cpu
            and logits.stride(1) == 1
        )

    def draw(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> tuple[list[int], list[float]]:
        """A token for each row of `logits` [R, V], masks and suppressed tokens heeded, and the
        row's largest logit that is allowed; none is drawn if that is not finite.
        """
        num_threads = torch.get_num_threads()
        if num_threads != self._num_threads:
            self._drawer = extension().Drawer(self._kernels, num_threads, self._vocab_size)
            self._num_threads = num_threads
        drawn = self._drawer.draw(logits.data_ptr(), logits.stride(0), list(map(_told, rows)))
        return [token_id for token_id, _ in drawn], [peak for _, peak in drawn]


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
