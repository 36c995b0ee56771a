"""Runs one step's plan: copies pages, computes logits, draws tokens, reads off scores."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from palmette.errors import PalmetteError
from palmette.protocol import TopLogprobs
from palmette.runtime.forward_batch import ForwardBatch
from palmette.runtime.kv.moves import Move, PageCopy
from palmette.runtime.sampling import SampledToken, Sampler, SamplingRow
from palmette.runtime.scheduler import PlannedWork
from palmette.runtime.sequence import GenerationSequence, ScoringSequence

if TYPE_CHECKING:
    from palmette.runtime.kv.host import HostPool
    from palmette.runtime.kv.pool import KVPool
    from palmette.runtime.models.model import Model


@dataclass(slots=True)
class Outcome:
    """What a step brought for one sequence: a token, scores by position, an error, or nothing.

    `rows` are logits [vocab_rows] by position, for sequences that tell log-probabilities of tokens
    they did not draw; `rows_ahead` are those behind guesses, from which tokens are drawn if these
    turn out to be right.
    """

    sampled: SampledToken | None = None
    rows: dict[int, torch.Tensor] = field(default_factory=dict)
    rows_ahead: dict[int, torch.Tensor] = field(default_factory=dict)
    scores: dict[int, dict[int, float]] = field(default_factory=dict)
    top: dict[int, TopLogprobs] = field(default_factory=dict)  # by position, if asked for
    error: PalmetteError | None = None

    def take(self, drawn: SampledToken | PalmetteError) -> None:
        """What was drawn, or why nothing could be."""
        if isinstance(drawn, SampledToken):
            self.sampled = drawn
        else:
            self.error = drawn


class Worker:
    """Owns the model, the page pool, and the host tier's contents if there is one."""

    def __init__(
        self,
        model: Model,
        kv: KVPool,
        sampler: Sampler,
        page_size: int,
        *,
        host: HostPool | None = None,
    ) -> None:
        self.model = model
        self.kv = kv
        self.host = host
        self.sampler = sampler
        self._page_size = page_size

    def run(self, work: SequenceOf[PlannedWork], moves: SequenceOf[Move]) -> list[Outcome]:
        """One outcome for each of `work`, in its order. Constrained sequences have their masks."""
        for move in moves:
            self._carry_out(move)
        if not work:
            return []
        outcomes = [Outcome() for _ in work]
        rows: list[int] = []  # row of the batch, for each logits row wanted
        drawing: list[tuple[int, int]] = []  # (index in work, index in rows)
        scoring: list[tuple[int, int, int]] = []  # (index in work, index in rows, position)
        keeping: list[tuple[int, int, int]] = []  # the same
        guessing: list[tuple[int, int, int]] = []  # the same
        first_row = 0
        for index, item in enumerate(work):
            sequence, start = item.sequence, item.start
            for position in sequence.logit_positions(start, start + item.num_tokens):
                if isinstance(sequence, ScoringSequence):
                    scoring.append((index, len(rows), position))
                elif isinstance(sequence, GenerationSequence):
                    if position >= len(sequence.token_ids):
                        guessing.append((index, len(rows), position))
                    elif sequence.draws_after(position):
                        drawing.append((index, len(rows)))
                    if sequence.keeps_rows:
                        keeping.append((index, len(rows), position))
                rows.append(first_row + position - start)
            first_row += item.num_tokens
        logits = self.model.forward(self._batch(work, rows), self.kv)  # [R, vocab_rows]
        self._draw(work, drawing, logits, outcomes)
        self._score(work, scoring, logits, outcomes)
        self._find_top(work, scoring, logits, outcomes)
        for index, row, position in keeping:
            outcomes[index].rows[position] = logits[row].clone()
        for index, row, position in guessing:
            outcomes[index].rows_ahead[position] = logits[row]
        return outcomes

    def draw(
        self, sequences: SequenceOf[GenerationSequence], rows: SequenceOf[torch.Tensor]
    ) -> SequenceOf[SampledToken | PalmetteError]:
        """The next token of each from a row of logits [vocab_rows]."""
        return self._drawn(sequences, _together(rows))

    def _drawn(
        self, sequences: SequenceOf[GenerationSequence], logits: torch.Tensor
    ) -> SequenceOf[SampledToken | PalmetteError]:
        return self.sampler.sample(logits, [self._sampling_row(each) for each in sequences])

    def _carry_out(self, move: Move) -> None:
        if isinstance(move, PageCopy):
            self.kv.copy_page(move.source, move.destination)
        else:
            assert self.host is not None
            self.host.restore(move.slot, move.page)

    def _find_top(
        self,
        work: SequenceOf[PlannedWork],
        scoring: list[tuple[int, int, int]],
        logits: torch.Tensor,
        outcomes: list[Outcome],
    ) -> None:
        """The likeliest tokens at each scored position where they are asked for."""
        asked = []  # (index in work, position, a target there)
        rows = []
        num_top = []
        for index, row, position in scoring:
            sequence = work[index].sequence
            assert isinstance(sequence, ScoringSequence)
            if sequence.group.request.num_top:
                asked.append((index, position, sequence.targets[position][0]))
                rows.append(row)
                num_top.append(sequence.group.request.num_top)
        if not asked:
            return
        described = self.sampler.describe(
            logits if len(rows) == logits.shape[0] else logits[rows],
            [token_id for _, _, token_id in asked],
            num_top,
        )
        for (index, position, _), each in zip(asked, described, strict=True):
            outcomes[index].top[position] = each.top
            # To the last digit the same in both, whatever rows were summed up together.
            told = {each.token_id: each.logprob, **dict(each.top)}
            scores = outcomes[index].scores[position]
            scores.update((token_id, told[token_id]) for token_id in scores.keys() & told.keys())

    def _batch(self, work: SequenceOf[PlannedWork], rows: list[int]) -> ForwardBatch:
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        query_starts = [0]
        context_lengths = []
        size = self._page_size
        for item in work:
            start, end, page_ids = item.start, item.end, item.sequence.page_ids
            token_ids += item.sequence.ids_between(start, end)
            positions += range(start, end)
            context_lengths.append(end)
            while start < end:
                page, within = divmod(start, size)
                count = min(size - within, end - start)
                slot = page_ids[page] * size + within
                slots += range(slot, slot + count)
                start += count
            query_starts.append(len(positions))
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            query_starts=query_starts,
            context_lengths=context_lengths,
            page_tables=[item.sequence.page_ids for item in work],
            logit_rows=rows,
        )

    def _draw(
        self,
        work: SequenceOf[PlannedWork],
        drawing: list[tuple[int, int]],
        logits: torch.Tensor,
        outcomes: list[Outcome],
    ) -> None:
        """A token for each sequence whose last token was computed."""
        if not drawing:
            return
        sequences = []
        for index, _ in drawing:
            sequence = work[index].sequence
            assert isinstance(sequence, GenerationSequence)
            sequences.append(sequence)
        if len(drawing) != logits.shape[0]:
            logits = _together([logits[row] for _, row in drawing])
        for (index, _), token in zip(drawing, self._drawn(sequences, logits), strict=True):
            outcomes[index].take(token)

    @staticmethod
    def _sampling_row(sequence: GenerationSequence) -> SamplingRow:
        row = sequence.row
        if row is None:
            row = sequence.row = _new_row(sequence)
        row.position = sequence.draw_position
        row.mask, sequence.mask = sequence.mask, None
        row.suppressed = sequence.suppressed_token_ids
        if sequence.num_output_tokens < row.params.min_tokens:
            row.suppressed = tuple(sequence.stop_token_ids.union(row.suppressed))
        return row

    def _score(
        self,
        work: SequenceOf[PlannedWork],
        scoring: list[tuple[int, int, int]],
        logits: torch.Tensor,
        outcomes: list[Outcome],
    ) -> None:
        """Log-probabilities of the asked tokens at each asked position."""
        if not scoring:
            return
        targets = []
        for index, _, position in scoring:
            sequence = work[index].sequence
            assert isinstance(sequence, ScoringSequence)
            targets.append(sequence.targets[position])
        if len(scoring) != logits.shape[0]:
            logits = _together([logits[row] for _, row, _ in scoring])
        found = self.sampler.logprobs_of(logits, targets)
        for (index, _, position), ids, values in zip(scoring, targets, found, strict=True):
            outcomes[index].scores[position] = dict(zip(ids, values, strict=True))


def _together(rows: SequenceOf[torch.Tensor]) -> torch.Tensor:
    """A copy of the rows [V] as one tensor [R, V].

    On a CPU made by this thread alone: on a shared processor, torch's others are waited for longer
    than all of it takes.
    """
    if rows[0].is_cpu:
        return torch.from_numpy(np.stack([row.numpy() for row in rows]))
    return torch.stack(list(rows))


def _new_row(sequence: GenerationSequence) -> SamplingRow:
    params = sequence.request.sampling
    if sequence.keeps_rows:  # from which log-probabilities are found, once tokens are final
        params = replace(params, logprobs=None)
    return SamplingRow(
        params=params,
        seed=sequence.seed,
        path=sequence.request.path,
        position=sequence.draw_position,
        prompt_counts=sequence.prompt_counts,
        output_counts=sequence.output_counts,
        traced=sequence.num_traced,
    )
