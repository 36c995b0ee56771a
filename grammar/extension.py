"""Grammars and matchers that the extension in C++ carries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from palmette.grammar import _native
from palmette.grammar.compiled import CompiledGrammar
from palmette.grammar.limits import Limits
from palmette.grammar.matcher import Matcher
from palmette.grammar.term_store import TermStore
from palmette.grammar.terms import Term
from palmette.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    from palmette.grammar.machine import MachineName


class NativeMachine:
    """See `palmette.grammar.machine.Machine`."""

    name: MachineName = "native"

    def __init__(self, vocabulary: Vocabulary, limits: Limits) -> None:
        self._vocabulary = vocabulary
        self._limits = limits
        self._shared = _native.SharedMasks(limits.shared_cache_bytes)

    @property
    def num_bodies(self) -> int:
        return self._shared.num_bodies

    def store(self) -> TermStore:
        return _native.TermStore(self._limits, self._vocabulary.alphabet)

    def grammar(
        self, store: TermStore, start: Term, *, notes: tuple[str, ...] = ()
    ) -> CompiledGrammar:
        return NativeGrammar(self._vocabulary, store, start, self._shared, self._limits, notes)


class NativeGrammar(CompiledGrammar):
    """A compiled grammar whose tables and masks are in C++."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        store: TermStore,
        start: Term,
        shared: _native.SharedMasks,
        limits: Limits,
        notes: tuple[str, ...] = (),
    ) -> None:
        self._begin(vocabulary, store, start, limits, notes)
        self.core = _native.Grammar(vocabulary.native, shared, store, start)

    def matcher(self) -> Matcher:
        return NativeMatcher(self)

    @property
    def shortest_length(self) -> int:
        return self.core.shortest_length

    @property
    def num_bytes(self) -> int:
        return self.core.num_bytes

    @property
    def num_states(self) -> int:
        return self.core.num_states

    @property
    def num_terms(self) -> int:
        return self.core.num_terms

    @property
    def generation(self) -> int:
        return self.core.generation


class NativeMatcher(_native.Matcher, Matcher):
    """A matcher whose methods are those of the extension."""

    def __init__(self, grammar: NativeGrammar, other: NativeMatcher | None = None) -> None:
        if other is None:
            _native.Matcher.__init__(self, grammar.core)
        else:
            _native.Matcher.__init__(self, other)
        self._grammar = grammar

    def copy(self) -> NativeMatcher:
        assert isinstance(self._grammar, NativeGrammar)
        return NativeMatcher(self._grammar, self)
