"""A compiled grammar: the machine and the masks that all its matchers share."""

from __future__ import annotations

import math
import threading
from types import TracebackType
from typing import TYPE_CHECKING

from palmette.grammar.automaton import Automaton
from palmette.grammar.budget import Planner
from palmette.grammar.errors import GrammarTooComplex, UnsatisfiableGrammar
from palmette.grammar.limits import Limits
from palmette.grammar.mask import MaskBuilder, SharedMasks
from palmette.grammar.patience import current_patience
from palmette.grammar.term_store import TermStore
from palmette.grammar.terms import Term
from palmette.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from palmette.grammar.matcher import Matcher


class CompiledGrammar:
    """What a regex, schema or list of choices allows, over one vocabulary. Thread-safe.

    `notes` are remarks on parts of a schema that constrain nothing, such as an unknown format.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        store: TermStore,
        start: Term,
        shared: SharedMasks,
        limits: Limits,
        notes: tuple[str, ...] = (),
    ) -> None:
        self._begin(vocabulary, store, start, limits, notes)
        self._lock = threading.Lock()
        self.automaton = Automaton(store, limits)
        self.masks = MaskBuilder(vocabulary, self.automaton, shared, limits)
        self.planner = Planner(vocabulary, self.automaton)
        self._shortest_length: int | None = None

    def _begin(
        self,
        vocabulary: Vocabulary,
        store: TermStore,
        start: Term,
        limits: Limits,
        notes: tuple[str, ...],
    ) -> None:
        """What holds for the grammars of every machine."""
        if store.is_empty(start):
            raise UnsatisfiableGrammar("no text satisfies the grammar")
        self.vocabulary = vocabulary
        self.limits = limits
        self.notes = notes
        self.start = start

    def matcher(self) -> Matcher:
        """A matcher at the start of a text."""
        from palmette.grammar.matcher import Matcher

        return Matcher(self)

    @property
    def shortest_length(self) -> int:
        """Tokens of a short complete text, stop token left out: a budget of as many suffices.

        An upper bound of the least possible number. Raises GrammarTooComplex if the vocabulary
        cannot spell the shortest text.
        """
        with self:
            if self._shortest_length is None:
                plan = self.planner.plan(self.start)
                length = self.planner.num_tokens(self.start) if plan is None else len(plan)
                if math.isinf(length):
                    raise GrammarTooComplex("the vocabulary cannot spell the shortest text")
                self._shortest_length = int(length)
            return self._shortest_length

    @property
    def num_bytes(self) -> int:
        """About how much memory its tables take now."""
        return self.automaton.num_bytes + self.masks.num_bytes

    @property
    def num_states(self) -> int:
        """States that are kept now."""
        return self.automaton.num_states

    @property
    def num_terms(self) -> int:
        """Terms that are kept now, those not counted that only matchers hold."""
        return len(self.automaton.store)

    @property
    def generation(self) -> int:
        """How often the tables were begun."""
        return self.automaton.generation

    def __enter__(self) -> CompiledGrammar:
        """Begin one operation: alone, on the clock, and with room for it.

        States that were numbered before may be others now.
        """
        patience = current_patience()
        if patience is None:
            self._lock.acquire()
        else:
            patience.acquire(self._lock)
        if self.automaton.trim():
            self.masks.clear()
            self.planner.clear()
        self.automaton.store.start_clock(self.limits.mask_seconds)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._lock.release()
        if isinstance(error, RecursionError):
            raise GrammarTooComplex("the grammar is nested too deeply") from error
