"""From logits to the distribution that is drawn from, as whole numbers, and the draw itself.

A token's weight is its probability over that of the likeliest token, as a 64-bit integer scaled by
a power of two. Sums of integers do not depend on the order in which they are taken, so that a row
gives the same cumulative distribution alone, in any batch, with any number of threads and on any
device; and a forbidden token, having weight 0, cannot be drawn, whatever the rounding.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from palmette.protocol import SamplingParams

# Elements of [rows, vocabulary] worked on at a time: bounds memory, stays near the caches.
_CHUNK_ELEMENTS = 1 << 17


def draw(
    logits: torch.Tensor, params: Sequence[SamplingParams], uniforms: Sequence[float]
) -> list[int]:
    """One token id per row of `logits` [D, V], by inverse transform in the order of token ids.

    Every row has a finite maximum and a positive temperature; `uniforms` lie in [0, 1).
    """
    token_ids: list[int] = []
    chunk = max(1, _CHUNK_ELEMENTS // logits.shape[1])
    for start in range(0, len(params), chunk):
        part = slice(start, start + chunk)
        cumulative = weights(logits[part], params[part]).cumsum_(dim=-1)
        totals = cumulative[:, -1:]
        points = torch.tensor(uniforms[part], dtype=torch.float64, device=logits.device)
        # The product may round up to the total itself, which is one past the last token.
        targets = torch.minimum((points[:, None] * totals).long(), totals - 1)
        token_ids += torch.searchsorted(cumulative, targets, right=True)[:, 0].tolist()
    return token_ids


def weights(logits: torch.Tensor, params: Sequence[SamplingParams]) -> torch.Tensor:
    """[D, V] int64: in proportion to the probabilities that the tokens are drawn with.

    Top-p and min-p are measured on the temperature-scaled distribution of all tokens that are not
    forbidden, top-k on its order (of equals, the lower id first). All three keep a prefix of that
    order, so their intersection is the shortest of the prefixes, and never empty. Top-p: Holtzman
    et al., arXiv:1904.09751; min-p: Nguyen et al., arXiv:2407.01082.
    """
    vocab_size = logits.shape[1]
    one = 2.0 ** scale_bits(vocab_size)
    temperatures = _column([p.temperature for p in params], logits.device)
    scaled = logits.double()
    if scaled.data_ptr() == logits.data_ptr():  # double() copies nothing if they were doubles
        scaled = scaled.clone()
    scaled.sub_(scaled.amax(dim=-1, keepdim=True)).div_(temperatures)
    filtered = [
        index
        for index, p in enumerate(params)
        if p.top_p < 1 or p.min_p > 0 or 0 < p.top_k < vocab_size
    ]
    if not filtered:
        return scaled.exp_().mul_(one).round_().long()
    result = scaled.exp().mul_(one).round_().long()
    if len(filtered) == len(params):
        return _filtered(result, scaled, params, one)
    places = torch.tensor(filtered, device=logits.device)
    result[places] = _filtered(result[places], scaled[places], [params[i] for i in filtered], one)
    return result


def scale_bits(vocab_size: int) -> int:
    """The likeliest token has weight 2**scale_bits, so that all weights add up to below 2**62."""
    return min(52, 62 - vocab_size.bit_length())


def ranked(
    values: torch.Tensor, candidates: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The candidates of each row, best first; of equals, the lower id first.

    `values` [F, V], `candidates` [F, V] bool. Returns ids, values and validity, [F, M] each, where
    M is the largest number of candidates in a row; shorter rows are filled up at their end with
    entries that are not valid (id 0, value -inf).
    """
    row_ids, token_ids = candidates.nonzero(as_tuple=True)  # by row, then by id
    counts = torch.bincount(row_ids, minlength=len(values))
    starts = counts.cumsum(0) - counts
    columns = torch.arange(len(row_ids), device=values.device) - starts[row_ids]
    width = int(counts.max())
    padded = values.new_full((len(values), width), -torch.inf)
    padded[row_ids, columns] = values[row_ids, token_ids]
    ids = token_ids.new_zeros((len(values), width))
    ids[row_ids, columns] = token_ids
    padded, order = padded.sort(dim=-1, descending=True, stable=True)
    valid = torch.arange(width, device=values.device) < counts[:, None]
    return ids.gather(1, order), padded, valid


def _filtered(
    weights: torch.Tensor, scaled: torch.Tensor, params: Sequence[SamplingParams], one: float
) -> torch.Tensor:
    """`weights` [F, V] with 0 for what top-k, top-p or min-p leaves out."""
    device, vocab_size = weights.device, weights.shape[1]
    totals = weights.sum(dim=-1, keepdim=True)
    top_p = _column([p.top_p for p in params], device)
    top_k = torch.tensor([_num_kept(p, vocab_size) for p in params], device=device)[:, None]

    # Only what may pass is sorted. Tokens lighter than a V-th of what top-p leaves out weigh
    # less than that together, so the heavier ones already reach top_p.
    least = ((1.0 - top_p) * totals / vocab_size).floor()
    least = torch.maximum(least, (_column([p.min_p for p in params], device) * one).ceil())
    floor = least.long().clamp_(min=1)
    if any(0 < p.top_k < vocab_size for p in params):
        floor = torch.maximum(floor, _kth_largest(weights, top_k))

    ids, _, valid = ranked(scaled, weights >= floor)
    kept = weights.gather(1, ids) * valid
    before = kept.cumsum(dim=-1) - kept
    rank = torch.arange(ids.shape[1], device=device)
    kept = kept * ((rank < top_k) & (before < top_p * totals))
    return torch.zeros_like(weights).scatter_add_(1, ids, kept)


def _kth_largest(weights: torch.Tensor, ks: torch.Tensor) -> torch.Tensor:
    """[F, 1] the k-th largest weight of each row, for each row's own k; 0 where k is V."""
    vocab_size = weights.shape[1]
    most = int(torch.where(ks < vocab_size, ks, 1).max())
    best = weights.topk(most, dim=-1).values
    return torch.where(ks < vocab_size, best.gather(1, ks.clamp(max=most) - 1), 0)


def _num_kept(params: SamplingParams, vocab_size: int) -> int:
    return params.top_k if 0 < params.top_k < vocab_size else vocab_size


def _column(values: Sequence[float], device: torch.device) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, device=device)[:, None]
