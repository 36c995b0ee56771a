"""Guesses at the next tokens of a text, from what came at the same places of its grammar before.

A guess is for whoever can look at several tokens at the cost of one: the model is asked about all
of them in one forward pass, and what it draws decides. A right guess has saved a pass; a wrong one
has changed nothing (Leviathan et al., "Fast inference from transformers via speculative decoding",
2023, with the grammar in place of a second model).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from palmette.grammar.errors import GrammarTooComplex

_MAX_PLACES = 1 << 13  # that are remembered; then all is forgotten
_MOST_TRUST = 3
# Kinds of guesses besides the drawn ones of trust 1, 2 and 3.
_FORCED = 0
_HELD_BACK = _MOST_TRUST + 1
_KEPT = 0.98  # of what is known of a kind of guess, at the next one: the last fifty or so count


class GuessMatcher(Protocol):
    """What is needed of a `Matcher`."""

    @property
    def num_tokens(self) -> int: ...

    def accept(self, token_id: int) -> bool: ...

    def rollback(self, num_tokens: int) -> None: ...

    def state(self, back: int = 0) -> int: ...


class Guess(NamedTuple):
    """A token that may come next, and whether it will have to be drawn rather than be forced.

    `probability` is that of its coming, if all that are guessed before it have come.
    """

    token_id: int
    is_drawn: bool
    probability: float = 1.0


class _Record:
    """How often guesses of one kind were right of late."""

    def __init__(self) -> None:
        self._num_right = self._num_made = 0.0

    @property
    def probability(self) -> float:
        """That the next one is right, by Laplace's rule of succession."""
        return (self._num_right + 1) / (self._num_made + 2)

    def note(self, is_right: bool) -> None:
        self._num_right = _KEPT * self._num_right + is_right
        self._num_made = _KEPT * self._num_made + 1


class Guesses:
    """What came last at each place of one grammar. Several threads may use it.

    A place is a state of the grammar's machine, so a guess knows which property of an object comes
    next, whatever its values were. Where what comes differs each time, as inside free strings,
    nothing is guessed: a guess is trusted once the same has come twice in a row, or at the first
    time that a place is seen again. How often guesses of so much trust are right is known of all
    that came, whether anybody looked at a guess there or not.
    """

    def __init__(self, max_places: int = _MAX_PLACES) -> None:
        self._max_places = max_places
        self._known: dict[int, tuple[Guess, int]] = {}  # and how far it is trusted
        self._records = [_Record() for _ in range(_HELD_BACK + 1)]

    def __len__(self) -> int:
        return len(self._known)

    def note(
        self, matcher: GuessMatcher, token_ids: Sequence[int], *, limit: int | None = None
    ) -> None:
        """These came last in the text of the matcher: one that was drawn, and forced ones after.

        Only the first `limit` are remembered: no more are ever guessed at once, and where tokens
        are forced, no guess begins.
        """
        num_tokens = len(token_ids)
        for index, token_id in enumerate(token_ids[:limit]):
            self._note(matcher.state(num_tokens - index), Guess(token_id, index == 0))

    def note_held_back(self, is_right: bool) -> None:
        """Of tokens that are likely for another reason, the first has come, or another instead."""
        self._records[_HELD_BACK].note(is_right)

    def _note(self, state: int, came: Guess) -> None:
        guess, trust = self._known.get(state, (came, 0))
        if trust:
            self._record_of(guess, trust).note(guess.token_id == came.token_id)
        if guess == came:
            trust = min(trust + 1, _MOST_TRUST)
        elif trust > 1:
            trust -= 2
        else:
            guess, trust = came, 0
        if len(self._known) >= self._max_places and state not in self._known:
            self._known.clear()
        self._known[state] = guess, trust

    def ahead(
        self, matcher: GuessMatcher, limit: int, *, first: Sequence[int] = ()
    ) -> tuple[Guess, ...]:
        """At most `limit` tokens that may come next, each behind the others.

        `first` are drawn ones that are likely for another reason. The matcher does not move.
        """
        start = matcher.num_tokens
        probability = self._records[_HELD_BACK].probability
        ahead: list[Guess] = []
        try:
            for token_id in first[:limit]:
                if not matcher.accept(token_id):
                    break
                ahead.append(Guess(token_id, True, probability))
            seen: set[int] = set()
            while len(ahead) < limit:
                state = matcher.state()
                guess, trust = self._known.get(state, (None, 0))
                # How often it goes round is unknown.
                if state in seen or guess is None or not trust:
                    break
                if not matcher.accept(guess.token_id):
                    break
                seen.add(state)
                probability = self._record_of(guess, trust).probability
                ahead.append(guess._replace(probability=probability))
        except GrammarTooComplex:  # the text itself need not come there
            pass
        finally:
            matcher.rollback(matcher.num_tokens - start)
        return tuple(ahead)

    def _record_of(self, guess: Guess, trust: int) -> _Record:
        return self._records[trust if guess.is_drawn else _FORCED]
