"""The sampler: one token for each row of a batch of logits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
import torch

from palmette.errors import EngineError, InvalidRequest
from palmette.protocol import SamplingParams, TokenLogprob
from palmette.runtime.sampling.adjustments import adjusted, shifted
from palmette.runtime.sampling.distribution import draw
from palmette.runtime.sampling.logprobs import Described, describe
from palmette.runtime.sampling.native import NativeSampling, Traced
from palmette.runtime.sampling.randomness import uniform
from palmette.runtime.sampling.rows import SampledToken, SamplingRow, needs_counts


class Sampler:
    """Draws the next token of each row. A row's token depends on that row alone.

    The output layer of a model may have more rows (`vocab_rows`) than its tokenizer has tokens
    (`vocab_size`). The rows beyond are padding: they are never drawn, and are no part of the
    distribution that log-probabilities are of.
    """

    def __init__(self, *, vocab_size: int, vocab_rows: int) -> None:
        if not 0 < vocab_size <= vocab_rows:
            raise ValueError(
                f"vocab_size must be at least 1 and at most vocab_rows ({vocab_rows}), "
                f"got {vocab_size}"
            )
        self.vocab_size = vocab_size
        self.vocab_rows = vocab_rows
        self._native = NativeSampling(vocab_size)

    def check(self, params: SamplingParams) -> None:
        """Raise InvalidRequest if `params` name a token that the vocabulary does not have."""
        for token_id, _ in params.logit_bias:
            if token_id >= self.vocab_size:
                raise InvalidRequest(
                    f"logit_bias names token {token_id}, the vocabulary ends at "
                    f"{self.vocab_size - 1}",
                    param="logit_bias",
                )

    def sample(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> list[SampledToken | EngineError]:
        """The token of each row of `logits` [R, vocab_rows], in order.

        A row that no token can be drawn from (all are forbidden, the logits are not numbers, the
        row contradicts itself) answers with an EngineError that says why, returned rather than
        raised, and the other rows go on. `logits` are not changed.
        """
        real = self._real(logits, len(rows))
        if not rows:
            return []
        faults = [self._fault(row) for row in rows]
        if not any(faults):
            return self._sample(real, rows)
        sound = [index for index, fault in enumerate(faults) if fault is None]
        sampled = iter(self._sample(real[sound], [rows[index] for index in sound]))
        return [next(sampled) if fault is None else EngineError(fault) for fault in faults]

    def logprobs_of(
        self, logits: torch.Tensor, targets: Sequence[Sequence[int]]
    ) -> list[list[float]]:
        """Log-probabilities of `targets[i]` under row i of `logits` [R, vocab_rows].

        Log-softmax of the logits as they are, in double precision; never below LOGPROB_FLOOR.
        Raises EngineError if the logits of a row that is asked for are not numbers.
        """
        real = self._real(logits, len(targets))
        for ids in targets:
            for token_id in ids:
                if not 0 <= token_id < self.vocab_size:
                    raise ValueError(
                        f"no token has id {token_id}, the last is {self.vocab_size - 1}"
                    )
        described = _answered(self._describe(real, targets, [0] * len(targets)))
        return [values for values, _ in described]

    def describe(
        self, logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
    ) -> list[TokenLogprob]:
        """Each row's log-probability of its token, and its likeliest ones; see `logprobs.describe`.

        `logits` [R, vocab_rows]. Raises EngineError if those of a row are not numbers.
        """
        real = self._real(logits, len(token_ids))
        return _answered(self._token_logprobs(real, token_ids, num_top))

    def _real(self, logits: torch.Tensor, num_rows: int) -> torch.Tensor:
        if logits.shape != (num_rows, self.vocab_rows):
            raise ValueError(
                f"logits must be of shape {(num_rows, self.vocab_rows)}, got {tuple(logits.shape)}"
            )
        if self.vocab_size < self.vocab_rows:
            logits = logits[:, : self.vocab_size]
        return logits if logits.dtype is torch.float32 else logits.float()

    def _describe(
        self, logits: torch.Tensor, targets: Sequence[Sequence[int]], num_top: Sequence[int]
    ) -> list[Described | None]:
        by_native = self._native.takes(logits)
        return (self._native.describe if by_native else describe)(logits, targets, num_top)

    def _token_logprobs(
        self, logits: torch.Tensor, token_ids: Sequence[int], num_top: Sequence[int]
    ) -> list[TokenLogprob | None]:
        described = self._describe(logits, [[token_id] for token_id in token_ids], num_top)
        return [
            None if each is None else TokenLogprob(token_id, each[0][0], tuple(each[1]))
            for token_id, each in zip(token_ids, described, strict=True)
        ]

    def _fault(self, row: SamplingRow) -> str | None:
        """What makes it impossible to honour `row`, whatever its logits are."""
        mask, params = row.mask, row.params
        if mask is not None and (mask.shape != (self.vocab_rows,) or mask.dtype != np.bool_):
            return (
                f"a mask must be {self.vocab_rows} booleans, got {mask.dtype} of shape {mask.shape}"
            )
        if not row.is_shifted:
            return None
        if needs_counts(params) and (row.output_counts is None or row.prompt_counts is None):
            return "penalties are on, but the tokens so far were not counted"
        try:
            self.check(params)
        except InvalidRequest as error:
            return str(error)
        return None

    def _sample(
        self, logits: torch.Tensor, rows: Sequence[SamplingRow]
    ) -> list[SampledToken | EngineError]:
        if not rows:
            return []
        told: Sequence[Traced | None] = [None] * len(rows)
        if self._native.takes(logits):
            drawn_from = shifted(logits, rows)
            is_shifted = drawn_from is not logits
            token_ids, peaks, told = self._native.draw(drawn_from, rows, is_shifted=is_shifted)
        else:
            token_ids, peaks = _draw(adjusted(logits, rows), rows)
        results: list[SampledToken | EngineError] = [
            SampledToken(token_id, None if known is None else _traced(token_id, known))
            if math.isfinite(peak)
            else EngineError(_why(row, peak))
            for token_id, peak, row, known in zip(token_ids, peaks, rows, told, strict=True)
        ]
        self._add_logprobs(logits, rows, results)
        return results

    def _add_logprobs(
        self,
        logits: torch.Tensor,
        rows: Sequence[SamplingRow],
        results: list[SampledToken | EngineError],
    ) -> None:
        asked = [
            (index, result.token_id, num_top)
            for index, (row, result) in enumerate(zip(rows, results, strict=True))
            for num_top in [row.traced if row.params.logprobs is None else row.params.logprobs]
            if num_top is not None and isinstance(result, SampledToken) and not result.logprob
        ]
        if not asked:
            return
        indices = [index for index, _, _ in asked]
        ids = [token_id for _, token_id, _ in asked]
        if len(asked) < len(rows):
            logits = logits[indices]
        logprobs = self._token_logprobs(logits, ids, [num_top for _, _, num_top in asked])
        for index, token_id, logprob in zip(indices, ids, logprobs, strict=True):
            results[index] = (
                EngineError(_NOT_NUMBERS) if logprob is None else SampledToken(token_id, logprob)
            )


def _traced(token_id: int, known: Traced) -> TokenLogprob:
    logprob, top = known
    return TokenLogprob(token_id, logprob, tuple(top))


def _draw(logits: torch.Tensor, rows: Sequence[SamplingRow]) -> tuple[list[int], list[float]]:
    """A token for each row, and the row's largest logit; none is drawn if that is not finite."""
    # Of equal maxima argmax gives the first, here the lowest id, and a NaN counts as largest.
    best = logits.argmax(dim=-1)
    peaks: list[float] = logits.gather(1, best[:, None])[:, 0].tolist()
    token_ids: list[int] = best.tolist()
    drawn = [
        index for index, row in enumerate(rows) if not row.is_greedy and math.isfinite(peaks[index])
    ]
    if drawn:
        uniforms = [uniform(rows[i].seed, rows[i].path, rows[i].position) for i in drawn]
        picked = logits if len(drawn) == len(rows) else logits[drawn]
        for index, token_id in zip(
            drawn, draw(picked, [rows[i].params for i in drawn], uniforms), strict=True
        ):
            token_ids[index] = token_id
    return token_ids, peaks


_NOT_NUMBERS = "the model's logits are not finite numbers"

_Answer = TypeVar("_Answer")


def _answered(results: list[_Answer | None]) -> list[_Answer]:
    """All of them. Raises EngineError if one is None, since its logits are not numbers."""
    answered = [result for result in results if result is not None]
    if len(answered) < len(results):
        raise EngineError(f"{_NOT_NUMBERS} (row {results.index(None)})")
    return answered


def _why(row: SamplingRow, peak: float) -> str:
    """Why no token can be drawn from a row whose largest adjusted logit is `peak`."""
    if peak != -math.inf:
        return _NOT_NUMBERS
    if row.mask is not None and not row.mask.any():
        return "the mask of a constraint allows no token"
    if row.mask is not None or row.suppressed:
        return "every token that the mask allows is suppressed, impossible, or padding"
    return _NOT_NUMBERS
