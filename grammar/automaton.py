"""The lazily determinised machine of one grammar, as a table that numpy can walk."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from palmette.grammar.errors import GrammarTooComplex
from palmette.grammar.limits import Limits
from palmette.grammar.term_store import TermStore
from palmette.grammar.terms import Term
from palmette.grammar.token_trie import IntArray, TokenTrie

DEAD = 0

_BYTES_PER_TERM = 1000  # with its derivatives; measured on ordinary schemas


class Automaton:
    """States are numbered terms; `rows[state, byte]` is the next state, `DEAD` for none.

    A row is computed when it is first needed. No live state is a dead end: from each of them some
    string completes the text. When there are too many states `trim` drops them all and a new
    `generation` begins; terms stay valid across generations, state numbers do not.
    """

    def __init__(self, store: TermStore, limits: Limits) -> None:
        self.store = store
        self.generation = 0
        self._limits = limits
        self._byte_indices: dict[int, NDArray[np.intp]] = {}
        self._start_generation()

    def _start_generation(self) -> None:
        self.generation += 1
        self._capacity = min(256, self._limits.max_states)
        self.rows: IntArray = np.zeros((self._capacity, 256), np.int32)
        self.has_row: NDArray[np.bool_] = np.zeros(self._capacity, bool)
        self.nullable: NDArray[np.bool_] = np.zeros(self._capacity, bool)
        self._terms: list[Term] = [self.store.empty]
        self._states: dict[Term, int] = {self.store.empty: DEAD}
        self.has_row[DEAD] = True

    @property
    def num_states(self) -> int:
        return len(self._terms)

    @property
    def num_bytes(self) -> int:
        """About how much memory the table and the terms behind it take."""
        return int(self.rows.nbytes) + len(self.store) * _BYTES_PER_TERM + self.store.held

    def trim(self) -> bool:
        """Drop everything if half of a limit is in use; the rest is room for one operation."""
        if (
            len(self._terms) * 2 <= self._limits.max_states
            and self.store.load * 2 <= self._limits.max_terms
        ):
            return False
        self.store.clear()
        self._start_generation()
        return True

    def state_of(self, term: Term) -> int:
        """The number of a term that is not empty."""
        state = self._states.get(term)
        if state is None:
            state = len(self._terms)
            if state >= self._limits.max_states:
                raise GrammarTooComplex(f"the grammar needs more than {state} states at once")
            self.store.check_size()
            if state >= self._capacity:
                self._grow()
            self._states[term] = state
            self._terms.append(term)
            self.nullable[state] = term.nullable
        return state

    def term_of(self, state: int) -> Term:
        return self._terms[state]

    def step(self, state: int, byte: int) -> int:
        """The next state, `DEAD` if the byte is not allowed."""
        term = self._terms[state]
        if term.is_capturing:  # too many states to compute a row for each
            after = self.store.step(term, byte)
            return self.state_of(after) if after is not self.store.empty else DEAD
        if not self.has_row[state]:
            self._fill_row(state)
        return int(self.rows[state, byte])

    def follow(self, state: int, text: Iterable[int]) -> int:
        """The state after the bytes, `DEAD` if they are not allowed."""
        for byte in text:
            state = self.step(state, byte)
            if state == DEAD:
                break
        return state

    def has_moves(self, state: int) -> bool:
        """Whether any byte is allowed."""
        if not self.has_row[state]:
            self._fill_row(state)
        return bool(self.rows[state].any())

    def only_byte(self, state: int) -> int | None:
        """The one byte that is allowed, if there is exactly one."""
        if not self.has_row[state]:
            self._fill_row(state)
        allowed = np.flatnonzero(self.rows[state])
        return int(allowed[0]) if allowed.size == 1 else None

    def ensure_rows(self, states: IntArray) -> None:
        """Compute the rows of `states` that are missing."""
        have = self.has_row[states]
        if not have.all():
            for state in np.unique(states[~have]):
                self._fill_row(int(state))

    def walk(self, trie: TokenTrie, nodes: IntArray, states: IntArray) -> tuple[IntArray, IntArray]:
        """Every trie node that is reached alive from one of (node, state), with its state.

        The starting pairs themselves are not among them. A node is listed once for each pair that
        reaches it.
        """
        reached_nodes: list[IntArray] = []
        reached_states: list[IntArray] = []
        while nodes.size:
            children, owner = trie.expand(nodes)
            if not children.size:
                break
            self.ensure_rows(states)
            after = self.rows[states[owner], trie.byte[children]]
            alive = np.flatnonzero(after)
            nodes = children[alive]
            states = after[alive]
            if nodes.size:
                reached_nodes.append(nodes)
                reached_states.append(states)
        if not reached_nodes:
            return _NONE, _NONE
        return np.concatenate(reached_nodes), np.concatenate(reached_states)

    def accepts(self, state: int, text: Iterable[int]) -> bool:
        """Whether the text is complete after the bytes."""
        last = self.follow(state, text)  # the arrays may be others after it
        return bool(self.nullable[last])

    def _fill_row(self, state: int) -> None:
        row = np.zeros(256, np.int32)
        for bits, after in self.store.parts(self._terms[state]):
            row[self._indices(bits)] = self.state_of(after)
        self.rows[state] = row  # whole, so that an error halfway leaves it unfilled
        self.has_row[state] = True

    def _indices(self, bits: int) -> NDArray[np.intp]:
        indices = self._byte_indices.get(bits)
        if indices is None:
            packed = np.frombuffer(bits.to_bytes(32, "little"), np.uint8)
            indices = np.flatnonzero(np.unpackbits(packed, bitorder="little"))
            if len(self._byte_indices) > 4096:
                self._byte_indices.clear()
            self._byte_indices[bits] = indices
        return indices

    def _grow(self) -> None:
        self._capacity = min(self._capacity * 2, self._limits.max_states)
        more = self._capacity - len(self.rows)
        self.rows = np.concatenate((self.rows, np.zeros((more, 256), np.int32)))
        self.has_row = np.concatenate((self.has_row, np.zeros(more, bool)))
        self.nullable = np.concatenate((self.nullable, np.zeros(more, bool)))


_NONE: IntArray = np.zeros(0, np.int32)
