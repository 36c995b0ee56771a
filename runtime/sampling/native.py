"""Draws by the extension in C++: as in `distribution`, without torch's threads and temporaries."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, chain
from typing import Any

import numpy as np
import torch

from palmette.runtime.kernels.cpu import extension, kernels_for
from palmette.runtime.sampling.randomness import uniform
from palmette.runtime.sampling.rows import SamplingRow


class NativeDraws:
    """Draws from logits in float32 on a CPU, where the extension is. One caller at a time."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._drawer: Any = None
        self._made_for: tuple[str, int] | None = None

    def can_draw(self, logits: torch.Tensor) -> bool:
        """Whether it can draw from these [R, V]."""
        return (
            logits.device.type == "cpu"
            and logits.dtype is torch.float32
            and logits.stride(1) == 1
            and kernels_for(torch.float32) is not None
        )

    def draw(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> tuple[list[int], list[float]]:
        """A token for each row of `logits` [R, V], masks and suppressed tokens heeded, and the
        row's largest logit that is allowed; none is drawn if that is not finite.
        """
        count = len(rows)
        masks = [
            None if row.mask is None else np.ascontiguousarray(row.mask[: self._vocab_size])
            for row in rows
        ]
        addresses = np.array(
            [0 if mask is None else mask.__array_interface__["data"][0] for mask in masks],
            np.uint64,
        )
        suppressed = np.fromiter(chain.from_iterable(row.suppressed for row in rows), np.int64)
        first_suppressed = np.fromiter(
            accumulate((len(row.suppressed) for row in rows), initial=0), np.int64, count + 1
        )
        top_k = np.array([row.params.top_k for row in rows], np.int64)
        numbers = np.array(
            [
                (0.0, 1.0, 0.0, 0.0)
                if row.is_greedy
                else (
                    row.params.temperature,
                    row.params.top_p,
                    row.params.min_p,
                    uniform(row.seed, row.path, row.position),
                )
                for row in rows
            ],
            np.float64,
        )
        token_ids, peaks = np.empty(count, np.int64), np.empty(count, np.float32)
        self._drawer_now().draw(
            count,
            logits.data_ptr(),
            logits.stride(0),
            addresses.ctypes.data,
            suppressed.ctypes.data,
            first_suppressed.ctypes.data,
            top_k.ctypes.data,
            numbers.ctypes.data,
            token_ids.ctypes.data,
            peaks.ctypes.data,
        )
        return token_ids.tolist(), peaks.tolist()

    def _drawer_now(self) -> Any:
        name = kernels_for(torch.float32)
        assert name is not None
        wanted = (name, torch.get_num_threads())
        if wanted != self._made_for:
            self._drawer = extension().Drawer(*wanted, self._vocab_size)
            self._made_for = wanted
        return self._drawer
