"""A sequence: token ids, of which the first `num_computed_tokens` have keys and values in pages."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from palmette.protocol import TokenLogprob
from palmette.radix_cache import Explanation, Lease, Namespace
from palmette.radix_cache.node import common_prefix_length

if TYPE_CHECKING:
    from collections.abc import Sequence as SequenceOf

    import numpy as np
    import numpy.typing as npt
    import torch

    from palmette.grammar.guesses import Guess
    from palmette.protocol import FinishReason, Request
    from palmette.runtime.constraints import ConstrainedText, Step
    from palmette.runtime.sampling import SamplingRow, TokenCounts
    from palmette.runtime.scheduler.programs import Program
    from palmette.runtime.scoring import ScoreGroup
    from palmette.runtime.tokenization.output import GrowingText, OutputBuffer


class Status(Enum):
    """Where a sequence stands."""

    WAITING = "waiting"  # queued, holds no pages
    RUNNING = "running"  # holds pages, has tokens to compute
    FINISHED = "finished"  # pages given back


_NEXT = {
    Status.WAITING: {Status.RUNNING, Status.FINISHED},
    Status.RUNNING: {Status.WAITING, Status.FINISHED},
    Status.FINISHED: set[Status](),
}


@dataclass(slots=True, eq=False)
class Handle:
    """What a branch of a program has computed, held in the tree until it asks again.

    `token_ids` are those of the whole pages and the tail that the lease holds.
    """

    namespace: Namespace
    token_ids: list[int]
    lease: Lease

    def fits(self, namespace: Namespace, token_ids: SequenceOf[int], limit: int) -> bool:
        """Whether the first `limit` of these tokens begin with the handle's, and it still holds."""
        num_tokens = len(self.token_ids)
        return (
            num_tokens <= limit
            and not self.lease.is_released
            and namespace == self.namespace
            and token_ids[:num_tokens] == self.token_ids
        )


@dataclass(slots=True)
class TokenTally:
    """How many tokens were computed, reused and produced for one sequence.

    `draws` is how often a token was drawn, `confirmed` how often that was done from logits behind a
    right guess; `decoded` and `forced` are those of the output.
    `high_water` is the most that was ever computed or reused: what lies below it and is computed
    after a preemption is recomputed work, not prefill.
    """

    cached: int = 0
    prefilled: int = 0
    recomputed: int = 0
    draws: int = 0
    confirmed: int = 0
    decoded: int = 0
    forced: int = 0
    num_preemptions: int = 0
    high_water: int = 0


@dataclass(slots=True, eq=False)
class Sequence:
    """Token ids on their way through the engine.

    ::

        [0, lease.num_tokens)                  from the tree, held by our lease
        [lease.num_tokens, whole pages)        ours: published to the tree as they fill
        [whole pages, len(token_ids))          ours, the last partial page

    `num_prompt_tokens` is where the request's own tokens end. `program` is the program it is a
    request of, if any; `handle` is where it goes on from, and with `goes_on` what it computes is
    kept for those that go on from here. `guesses` are tokens that perhaps come behind `token_ids`,
    and are computed with these where that is worth it.
    """

    request_id: str
    namespace: Namespace
    token_ids: list[int]
    num_prompt_tokens: int
    submitted_at: float
    max_length: int  # of token_ids, whatever is asked: the context, or the whole pool
    status: Status = Status.WAITING
    num_computed_tokens: int = 0
    page_ids: list[int] = field(default_factory=list)
    lease: Lease | None = None
    tally: TokenTally = field(default_factory=TokenTally)
    admitted_at: float | None = None
    admission_counted: bool = False
    # Deferred: `leader` is computing tokens that this one shares, up to `leader_tokens`.
    leader: Sequence | None = None
    leader_tokens: int = 0
    leader_from: int = 0  # how many of its own first tokens were cached when it was deferred
    publish_at: int = 0  # so many computed tokens are worth sharing, see `KVManager.publish`
    guesses: tuple[Guess, ...] = ()
    path: tuple[int, ...] = ()
    program: Program | None = None
    goes_on: bool = False
    handle: Handle | None = None
    takes_over: bool = False  # the handle is of its own branch, which needs it no more then
    explains: bool = False
    explanation: Explanation | None = None  # of the prompt, from just before the first admission
    # By position: log P(token | all before it) of own tokens, found and not yet in the tree.
    found_logprobs: dict[int, float] = field(default_factory=dict)

    @property
    def num_uncomputed_tokens(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def is_guessed(self) -> bool:
        """Whether it may ever have guesses."""
        return False

    @property
    def num_guesses(self) -> int:
        """How many more could be computed on the chance that they come."""
        return len(self.guesses)

    def keep_guesses(self, limit: int) -> None:
        """Have no more guesses than that."""
        self.guesses = self.guesses[:limit]

    def ids_between(self, start: int, end: int) -> list[int]:
        """The tokens at those positions, guesses among them."""
        num_tokens = len(self.token_ids)
        token_ids = self.token_ids[start:end]
        if end > num_tokens:
            token_ids += [guess.token_id for guess in self.guesses[: end - num_tokens]]
        return token_ids

    @property
    def max_cached_tokens(self) -> int:
        """How many leading tokens may come from the cache: those before the first position whose
        logits are wanted.
        """
        return len(self.token_ids) - 1

    @property
    def num_settled_tokens(self) -> int:
        """How many leading tokens stay as they are, whatever comes behind them."""
        return len(self.token_ids)

    @property
    def finds_logprobs(self) -> bool:
        """Whether log-probabilities of its output are found on the way."""
        return False

    @property
    def num_tokens_to_come(self) -> int:
        """How many tokens may still be appended to `token_ids`, at most."""
        return 0

    def move_to(self, status: Status) -> None:
        if status not in _NEXT[self.status]:
            raise RuntimeError(f"sequence {self.request_id}: {self.status} -> {status}")
        self.status = status

    def logit_positions(self, start: int, end: int) -> list[int]:
        """Positions in [start, end) whose logits are wanted."""
        return [end - 1] if end == len(self.token_ids) else []

    def note_admitted(self, num_cached_tokens: int, now: float) -> None:
        """The sequence starts over from what the cache holds. Only the first time counts as a
        cache hit, so that work done again after a preemption raises no hit rate.
        """
        if self.admitted_at is None:
            self.admitted_at = now
            self.tally.cached = num_cached_tokens
            self.tally.high_water = num_cached_tokens
        self.num_computed_tokens = num_cached_tokens

    def note_computed(self, num_tokens: int) -> None:
        """`num_tokens` more have keys and values."""
        start, end = self.num_computed_tokens, self.num_computed_tokens + num_tokens
        tally = self.tally
        tally.recomputed += max(0, min(end, tally.high_water) - start)
        fresh_prompt = min(end, self.num_prompt_tokens) - max(start, tally.high_water)
        tally.prefilled += max(0, fresh_prompt)
        tally.high_water = max(tally.high_water, end)
        self.num_computed_tokens = end


@dataclass(slots=True, eq=False)
class GenerationSequence(Sequence):
    """A sequence that grows by sampling.

    Under a constraint its last tokens may still be replaced by others that spell the same text, see
    `palmette.grammar.jump`; the first `num_final_tokens` of the output stay. A sequence whose
    `ending` is set draws no more, but computes what log-probabilities are still wanted of.

    Logits behind its guesses are there if these are right; what is computed of wrong ones counts
    for nothing, and is written over.
    """

    request: Request = field(kw_only=True)
    seed: int = field(kw_only=True)
    output: OutputBuffer = field(kw_only=True)
    stop_token_ids: frozenset[int] = field(kw_only=True)
    suppressed_token_ids: tuple[int, ...] = ()
    text: ConstrainedText | None = None
    has_begun: bool = False  # the text, which then has a mask or is being worked on
    mask: npt.NDArray[np.bool_] | None = None  # which tokens may be drawn next
    num_final_tokens: int = 0  # of a constrained output
    num_taken_back: int = 0  # tokens that were replaced
    growing: GrowingText | None = None  # of an output whose tokens may be replaced
    num_fed_tokens: int = 0  # to `output`, of an output whose tokens may be replaced
    num_fed_bytes: int = 0
    num_released_tokens: int = 0  # told in events, or about to be; the rest is held back
    first_token_at: float | None = None
    prompt_counts: TokenCounts | None = None  # what penalties count; None where there are none
    output_counts: TokenCounts | None = None
    row: SamplingRow | None = None  # how its tokens are drawn; made at the first draw
    # By position. Of rows of logits, those are kept whose next token is not final or not there.
    forced: bytearray = field(default_factory=bytearray)  # for each token of a constrained output
    drawn: TokenLogprob | None = None  # that was handed to the constrained text, if traced
    logprobs: dict[int, TokenLogprob] = field(default_factory=dict)
    rows: dict[int, torch.Tensor] = field(default_factory=dict)
    ending: tuple[FinishReason, str | int | None] | None = None
    stop_logprob: TokenLogprob | None = None  # of the stop token that ended it

    @property
    def is_guessed(self) -> bool:
        return self.text is not None

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_tokens_left(self) -> int:
        """How many more tokens may be produced."""
        asked = self.request.sampling.max_tokens - self.num_output_tokens
        return min(asked, self.max_length - len(self.token_ids))

    @property
    def finds_logprobs(self) -> bool:
        return self.request.sampling.logprobs is not None

    @property
    def num_traced(self) -> int | None:
        """How many likeliest tokens are told of each draw for a trace, if any are."""
        return None if self.finds_logprobs else self.request.trace_top

    @property
    def keeps_rows(self) -> bool:
        """Whether log-probabilities are told of tokens that were perhaps not drawn."""
        return self.text is not None and self.finds_logprobs

    @property
    def num_tokens_to_come(self) -> int:
        return self.num_tokens_left

    @property
    def is_canonical(self) -> bool:
        """Whether its last tokens may be replaced."""
        return self.text is not None and self.text.is_canonical

    @property
    def num_settled_tokens(self) -> int:
        if not self.is_canonical:
            return len(self.token_ids)
        return self.num_prompt_tokens + self.num_final_tokens

    @property
    def max_cached_tokens(self) -> int:
        limit = min(len(self.token_ids) - 1, self.num_settled_tokens)
        if self.keeps_rows:
            limit = min([limit, *self.rows_wanted(0, len(self.token_ids))])
        return limit

    @property
    def draw_position(self) -> int:
        """What keys the random number of the next draw: no two draws have the same."""
        return len(self.token_ids) + self.num_taken_back

    def draws_after(self, position: int) -> bool:
        """Whether a token is drawn from the logits at `position`, if the guesses are right."""
        num_ahead = position - (len(self.token_ids) - 1)
        if num_ahead < 0 or self.ending is not None:
            return False
        # What was forced elsewhere is drawn where the text stands.
        return not 0 < num_ahead < len(self.guesses) or self.guesses[num_ahead].is_drawn

    def take_step(self, step: Step) -> None:
        """The output's tokens are those that the constrained text has now."""
        first = self.num_prompt_tokens + step.num_kept
        replaced = self.token_ids[first:]
        self.token_ids[first:] = step.token_ids
        self.forced[step.num_kept :] = step.forced
        self.num_taken_back += len(replaced)
        self.num_final_tokens = step.num_final
        self.mask = step.mask
        self.guesses = step.guesses
        drawn, self.drawn = self.drawn, None
        # Where tokens were replaced it may stand elsewhere than it was drawn.
        if drawn is not None and not replaced and step.token_ids[:1] == (drawn.token_id,):
            self.logprobs[first] = drawn
        if replaced:
            self.num_computed_tokens = min(self.num_computed_tokens, first)
            self.tally.high_water = min(self.tally.high_water, first)
            for found in (self.logprobs, self.found_logprobs, self.rows):
                for position in [p for p in found if p >= first]:
                    del found[position]
        if self.output_counts is not None:
            for token_id in replaced:
                self.output_counts.remove(token_id)
            for token_id in step.token_ids:
                self.output_counts.add(token_id)

    def take_output(self) -> tuple[list[int], str]:
        """Ids and text that can be told now: none of it may turn out to belong to a stop string,
        and the log-probabilities are there, if they are wanted.
        """
        token_ids, text = self.output.take(self._num_tellable if self.keeps_rows else None)
        self.num_released_tokens += len(token_ids)
        return token_ids, text

    def finish_output(self) -> tuple[list[int], str]:
        """Ids and text that were still held back."""
        token_ids, text = self.output.finish()
        self.num_released_tokens += len(token_ids)
        return token_ids, text

    def take_logprobs(self, num_tokens: int) -> tuple[TokenLogprob, ...]:
        """Those of the `num_tokens` tokens that were released last; empty if none are wanted."""
        end = self.num_prompt_tokens + self.num_released_tokens
        positions = range(end - num_tokens, end)
        if self.finds_logprobs:
            return tuple(map(self.logprobs.pop, positions))
        if self.num_traced is None:
            return ()
        return tuple(map(self._traced_logprob, positions))

    def _traced_logprob(self, position: int) -> TokenLogprob:
        """That of a token as it was drawn, or none."""
        if position in self.logprobs:
            return self.logprobs.pop(position)
        return TokenLogprob(self.token_ids[position], math.nan)

    def last_forced(self, num_tokens: int) -> tuple[bool, ...]:
        """Of the `num_tokens` tokens that were released last, whether each was forced; empty if
        none was.
        """
        end = self.num_released_tokens
        forced = self.forced[end - num_tokens : end]
        return tuple(map(bool, forced)) if any(forced) else ()

    def note_draw(self, drawn: TokenLogprob | None) -> None:
        """Keep the log-probability of a drawn token for a trace, until it is known what became of
        it.
        """
        self.drawn = drawn if self.num_traced is not None else None

    def logit_positions(self, start: int, end: int) -> list[int]:
        if self.request.sampling.max_tokens == 0:
            return []
        num_tokens = len(self.token_ids)
        wanted = self.rows_wanted(start, min(end, num_tokens - 1)) if self.keeps_rows else []
        if end >= num_tokens and self.ending is None:
            wanted.append(num_tokens - 1)
            if end > num_tokens:
                wanted += filter(self.draws_after, range(num_tokens, end))
        return wanted

    def rows_wanted(self, start: int, end: int) -> list[int]:
        """Positions in [start, end) whose next token is there and has no log-probability yet."""
        first = self.num_prompt_tokens + self.num_released_tokens - 1
        return [
            position
            for position in range(max(start, first), min(end, len(self.token_ids) - 1))
            if position not in self.rows and position + 1 not in self.logprobs
        ]

    def take_rows(self, num_tokens: int) -> dict[int, torch.Tensor]:
        """The rows that tell of tokens among the first `num_tokens` of all, by their positions."""
        positions = sorted(p for p in self.rows if p + 1 < num_tokens)
        return {position + 1: self.rows.pop(position) for position in positions}

    def note_logprob(self, position: int, found: TokenLogprob) -> None:
        """That of the token at `position`."""
        self.logprobs[position] = found
        self.found_logprobs[position] = found.logprob

    @property
    def _num_tellable(self) -> int:
        """How many of the next tokens have their log-probabilities."""
        first = position = self.num_prompt_tokens + self.num_released_tokens
        while position in self.logprobs:
            position += 1
        return position - first


@dataclass(slots=True, eq=False)
class ScoringSequence(Sequence):
    """A sequence whose tokens are given; wanted are log-probabilities of possible next tokens.

    `asked` are the ids that may come after each position of its path. What of it no other sequence
    of the group was asked before, and the tree does not know from before, becomes this one's
    `targets` when it is first admitted; so the beginning that paths share is computed once,
    whichever of them comes first, and what was scored before is not computed at all.
    """

    group: ScoreGroup = field(kw_only=True)
    asked: dict[int, list[int]] = field(kw_only=True)
    targets: dict[int, list[int]] = field(default_factory=dict)

    @property
    def max_cached_tokens(self) -> int:
        return min(self.targets or self._unclaimed())

    @property
    def first_asked(self) -> int:
        """The first position after which something is asked."""
        return min(self.asked)

    def recall(self, logprobs: SequenceOf[float | None]) -> None:
        """Those of the own tokens behind `first_asked`, as far as they are known from before."""
        for position, logprob in enumerate(logprobs, self.first_asked):
            token_id = self.token_ids[position + 1]
            if logprob is not None and token_id in self.asked[position]:
                self.group.record(self.node_at(position), {token_id: logprob})

    def collect(self) -> None:
        """All is computed: what the group has found of the own tokens goes to their pages."""
        for position in self.asked:
            found = self.group.found.get(self.node_at(position))
            if found and position + 1 < len(self.token_ids):
                logprob = found.get(self.token_ids[position + 1])
                if logprob is not None:
                    self.found_logprobs[position + 1] = logprob

    def note_admitted(self, num_cached_tokens: int, now: float) -> None:
        if not self.targets:
            self.targets = self._unclaimed()
            self.group.claimed.update(map(self.node_at, self.targets))
        if self.admitted_at is None:
            self.group.note_admitted(self.node_at(len(self.token_ids) - 1), num_cached_tokens)
        Sequence.note_admitted(self, num_cached_tokens, now)

    def logit_positions(self, start: int, end: int) -> list[int]:
        return [position for position in range(start, end) if position in self.targets]

    def node_at(self, position: int) -> tuple[int, ...]:
        """The node of the continuations' tree that the token at `position` leads to."""
        return tuple(self.token_ids[len(self.group.request.token_ids) : position + 1])

    def _unclaimed(self) -> dict[int, list[int]]:
        unclaimed = {}
        for position, ids in self.asked.items():
            node = self.node_at(position)
            if node not in self.group.claimed:
                found = self.group.found.get(node, {})
                wanted = [token_id for token_id in ids if token_id not in found]
                if wanted:
                    unclaimed[position] = wanted
        return unclaimed


def shared_length(one: Sequence, other: Sequence, limit: int | None = None, above: int = 0) -> int:
    """How many leading tokens, `limit` at most, the two could share the pages of.

    0 if it is no more than `above`; knowing that bound makes most pairs cheap.
    """
    mine, theirs = one.token_ids, other.token_ids
    limit = min(len(mine) if limit is None else limit, len(theirs))
    # The one token tells most pairs apart.
    if above >= limit or one is other or mine[above] != theirs[above]:
        return 0
    if one.namespace != other.namespace or mine[:above] != theirs[:above]:
        return 0
    return common_prefix_length(mine, theirs, above + 1, limit)
