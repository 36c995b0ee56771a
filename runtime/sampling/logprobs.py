"""Log-probabilities under the model itself: before bias, penalties, masks and temperature."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from palmette.runtime.sampling.distribution import ranked

LOGPROB_FLOOR = -9999.0  # stands for anything less likely, minus infinity included

_CHUNK_ROWS = 8  # rows turned into doubles at a time

Described = tuple[list[float], list[tuple[int, float]]]
"""Of a row: the log-probabilities of its targets; its likeliest tokens, with theirs."""


def describe(
    logits: torch.Tensor, targets: Sequence[Sequence[int]], num_top: Sequence[int]
) -> list[Described | None]:
    """For each row of `logits` [R, V], its own targets and its `num_top[i]` likeliest tokens.

    Log-softmax in double precision, at least LOGPROB_FLOOR and at most 0. The likeliest come best
    first, of equals the lower id first; there are at most V. A row whose logits are no distribution
    (a NaN, plus infinity, or nothing but minus infinity) gets None.
    """
    tops = _likeliest(logits, [min(count, logits.shape[1]) for count in num_top])
    asked = [[*ids, *top] for ids, top in zip(targets, tops, strict=True)]
    return [
        None
        if values is None
        else (values[: len(ids)], list(zip(top, values[len(ids) :], strict=True)))
        for ids, top, values in zip(targets, tops, _gathered(logits, asked), strict=True)
    ]


def _gathered(logits: torch.Tensor, targets: Sequence[Sequence[int]]) -> list[list[float] | None]:
    results: list[list[float] | None] = []
    for start in range(0, len(targets), _CHUNK_ROWS):
        part = targets[start : start + _CHUNK_ROWS]
        doubles = logits[start : start + _CHUNK_ROWS].double()
        doubles = doubles - doubles.amax(dim=-1, keepdim=True)  # huge logits keep their digits
        row_ids = [index for index, ids in enumerate(part) for _ in ids]
        token_ids = [token_id for ids in part for token_id in ids]
        norms = torch.logsumexp(doubles, dim=-1)
        rows = torch.tensor(row_ids, dtype=torch.int64, device=logits.device)
        columns = torch.tensor(token_ids, dtype=torch.int64, device=logits.device)
        values = (doubles[rows, columns] - norms[rows]).clamp_(LOGPROB_FLOOR, 0.0).tolist()
        offset = 0
        for ids, norm in zip(part, norms.tolist(), strict=True):
            results.append(values[offset : offset + len(ids)] if math.isfinite(norm) else None)
            offset += len(ids)
    return results


def _likeliest(logits: torch.Tensor, counts: Sequence[int]) -> list[list[int]]:
    most = max(counts, default=0)
    if most == 0:
        return [[] for _ in counts]
    least = logits.topk(most, dim=-1).values[:, -1:]
    ids, _, _ = ranked(logits, logits >= least)
    return [row[:count] for row, count in zip(ids.tolist(), counts, strict=True)]
