"""Log-probabilities under the model itself: before bias, penalties, masks and temperature."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from palmette.protocol import TokenLogprob
from palmette.runtime.sampling.distribution import ranked

LOGPROB_FLOOR = -9999.0  # stands for anything less likely, minus infinity included

_CHUNK_ROWS = 8  # rows turned into doubles at a time


def token_logprobs(
    logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
) -> list[TokenLogprob | None]:
    """For each row of `logits` [R, V], its token's log-probability and its likeliest tokens.

    Row i reports the `num_top[i]` likeliest, best first, of equals the lower id first. A row whose
    logits are no distribution (a NaN, or plus infinity) gets None.
    """
    tops = _likeliest(logits, [min(n, logits.shape[1]) for n in num_top])
    targets = [[token_id, *top] for token_id, top in zip(token_ids, tops, strict=True)]
    return [
        None
        if logprobs is None
        else TokenLogprob(ids[0], logprobs[0], tuple(zip(ids[1:], logprobs[1:], strict=True)))
        for ids, logprobs in zip(targets, gathered_logprobs(logits, targets), strict=True)
    ]


def gathered_logprobs(
    logits: torch.Tensor, targets: Sequence[Sequence[int]]
) -> list[list[float] | None]:
    """Log-softmax of each row of `logits` [R, V] at its own targets, in double precision.

    At least LOGPROB_FLOOR, at most 0. A row whose logits are no distribution gets None.
    """
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
    most = max(counts)
    if most == 0:
        return [[] for _ in counts]
    least = logits.topk(most, dim=-1).values[:, -1:]
    ids, _, _ = ranked(logits, logits >= least)
    return [row[:count] for row, count in zip(ids.tolist(), counts, strict=True)]
