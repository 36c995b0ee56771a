"""Changes to logits before temperature: logit bias, then penalties, then what may not be drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from palmette.runtime.sampling.rows import SamplingRow

_IntArray = npt.NDArray[np.int64]
_FLOAT32_MAX = torch.finfo(torch.float32).max


def adjusted(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """The logits [R, V] that temperature and filters apply to; `logits` itself is left alone.

    Forbidden tokens become -inf. Rows that are all plain get `logits` back, without a copy.
    """
    changed = shifted(logits, rows)
    if all(row.mask is None and not row.suppressed for row in rows):
        return changed
    if changed is logits:
        changed = logits.clone()
    _forbid(changed, rows)
    return changed


def shifted(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> torch.Tensor:
    """The logits [R, V] with bias and penalties: `logits` itself, not copied, if there are none."""
    if not any(row.is_shifted for row in rows):
        return logits
    logits = logits.clone()
    _add_bias(logits, rows)
    _penalise_repetition(logits, rows)
    _penalise_output(logits, rows)
    return logits


def _add_bias(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    entries = [
        (index, token_id, bias)
        for index, row in enumerate(rows)
        for token_id, bias in row.params.logit_bias
    ]
    if entries:
        row_ids, token_ids, biases = zip(*entries, strict=True)
        places = (_tensor(row_ids, logits.device), _tensor(token_ids, logits.device))
        values = torch.tensor(biases, dtype=logits.dtype, device=logits.device)
        logits.index_put_(places, values, accumulate=True)


def _penalise_repetition(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Divide positive logits of tokens in prompt or output by the penalty, multiply negative ones.

    Keskar et al., "CTRL" (arXiv:1909.05858), section 4.1, with the sign handled as is usual since.
    A token that is in both is penalised once: every write starts from the value read before.
    """
    seen = _seen(
        rows,
        lambda row: row.params.repetition_penalty != 1.0,
        lambda row: [
            counts.ids for counts in (row.prompt_counts, row.output_counts) if counts is not None
        ],
        logits,
    )
    if seen is None:
        return
    row_ids, token_ids, _ = seen
    penalties = _per_entry(rows, row_ids, lambda row: row.params.repetition_penalty, logits)
    before = logits[row_ids, token_ids].double()
    after = torch.where(before > 0, before / penalties, before * penalties)
    # An extreme penalty must not turn a finite logit into an infinite one, which means forbidden.
    after = torch.where(before.isfinite(), after.clamp(-_FLOAT32_MAX, _FLOAT32_MAX), before)
    logits[row_ids, token_ids] = after.to(logits.dtype)


def _penalise_output(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    """Lower output tokens by the frequency penalty per occurrence and the presence penalty once."""
    seen = _seen(
        rows,
        lambda row: row.params.frequency_penalty != 0.0 or row.params.presence_penalty != 0.0,
        lambda row: [] if row.output_counts is None else [row.output_counts.ids],
        logits,
        lambda row: [] if row.output_counts is None else [row.output_counts.counts],
    )
    if seen is None:
        return
    row_ids, token_ids, counts = seen
    frequency = _per_entry(rows, row_ids, lambda row: row.params.frequency_penalty, logits)
    presence = _per_entry(rows, row_ids, lambda row: row.params.presence_penalty, logits)
    lowered = logits[row_ids, token_ids].double() - frequency * counts - presence
    logits[row_ids, token_ids] = lowered.to(logits.dtype)


def _forbid(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> None:
    vocab_size = logits.shape[1]
    masked = [index for index, row in enumerate(rows) if row.mask is not None]
    if masked:
        allowed = np.stack([row.mask[:vocab_size] for row in rows if row.mask is not None])
        forbidden = torch.from_numpy(~allowed).to(logits.device)
        if len(masked) == len(rows):
            logits.masked_fill_(forbidden, -torch.inf)
        else:
            places = _tensor(masked, logits.device)
            logits[places] = logits[places].masked_fill_(forbidden, -torch.inf)
    suppressed = [
        (index, token_id)
        for index, row in enumerate(rows)
        for token_id in row.suppressed
        if 0 <= token_id < vocab_size
    ]
    if suppressed:
        row_ids, token_ids = zip(*suppressed, strict=True)
        logits[_tensor(row_ids, logits.device), _tensor(token_ids, logits.device)] = -torch.inf


def _seen(
    rows: Sequence[SamplingRow],
    applies: Callable[[SamplingRow], bool],
    ids_of: Callable[[SamplingRow], list[_IntArray]],
    logits: torch.Tensor,
    counts_of: Callable[[SamplingRow], list[_IntArray]] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Row index, token id and count of each seen token, [N] each; None if there is none.

    Ids of padding rows are left out: they are never drawn.
    """
    row_ids, token_ids, counts = [], [], []
    for index, row in enumerate(rows):
        if applies(row):
            for ids in ids_of(row):
                token_ids.append(ids)
                row_ids.append(np.full(len(ids), index, dtype=np.int64))
            if counts_of is not None:
                counts.extend(counts_of(row))
    if not token_ids:
        return None
    flat_ids = np.concatenate(token_ids)
    flat_rows = np.concatenate(row_ids)
    flat_counts = np.concatenate(counts) if counts else np.ones_like(flat_ids)
    real = flat_ids < logits.shape[1]
    if not real.any():
        return None
    arrays = (flat_rows[real], flat_ids[real], flat_counts[real])
    row_tensor, id_tensor, count_tensor = (torch.from_numpy(a).to(logits.device) for a in arrays)
    return row_tensor, id_tensor, count_tensor


def _per_entry(
    rows: Sequence[SamplingRow],
    row_ids: torch.Tensor,
    value_of: Callable[[SamplingRow], float],
    logits: torch.Tensor,
) -> torch.Tensor:
    values = torch.tensor(
        [value_of(row) for row in rows], dtype=torch.float64, device=logits.device
    )
    return values[row_ids]


def _tensor(ids: Iterable[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(list(ids), dtype=torch.int64, device=device)
