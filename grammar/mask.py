"""Which tokens a state allows, computed once per state by walking the vocabulary's trie.

By distributivity the mask of a state is the union of the masks of its alternatives. Where one
begins with a lexeme, most of the vocabulary is decided inside the lexeme, whatever follows it:
that part is computed once per vocabulary (`SharedMasks`), together with the trie nodes at which
the lexeme can be left, and only from those the walk goes on into what follows.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from palmette.grammar.automaton import Automaton
from palmette.grammar.lexemes import Lexemes
from palmette.grammar.limits import Limits
from palmette.grammar.term_store import TermStore
from palmette.grammar.terms import Kind, Term
from palmette.grammar.token_trie import IntArray
from palmette.grammar.vocabulary import Vocabulary

BoolArray = NDArray[np.bool_]

_SPARSE = 512  # below this many tokens a list of them is copied faster than packed bits

# What objects take besides the numbers in their arrays, and their places in a cache: most sets are
# so small that this is nearly all of it.
_BYTES_PER_TOKEN_SET = 200
_BYTES_PER_ENTRY = 400


class TokenSet:
    """A set of tokens, stored small and quick to write out."""

    __slots__ = ("_packed", "_tokens", "count")

    def __init__(self, row: BoolArray) -> None:
        tokens = np.flatnonzero(row)
        self.count = int(tokens.size)
        self._tokens = tokens.astype(np.int32) if self.count < _SPARSE else None
        self._packed = None if self.count < _SPARSE else np.packbits(row)

    @property
    def num_bytes(self) -> int:
        held = self._tokens if self._packed is None else self._packed
        assert held is not None
        return held.nbytes + _BYTES_PER_TOKEN_SET

    def write(self, row: BoolArray) -> None:
        """Make `row` exactly this set."""
        if self._packed is None:
            row[:] = False
            row[self._tokens] = True
        else:
            row[:] = np.unpackbits(self._packed, count=row.size).view(np.bool_)

    def add_to(self, row: BoolArray) -> None:
        """Allow these tokens too."""
        if self._packed is None:
            row[self._tokens] = True
        else:
            row |= np.unpackbits(self._packed, count=row.size).view(np.bool_)

    @property
    def only(self) -> int | None:
        """The one token of the set, if there is exactly one."""
        return int(self._tokens[0]) if self.count == 1 and self._tokens is not None else None


@dataclass(frozen=True, slots=True)
class Body:
    """What a lexeme decides by itself, over one vocabulary."""

    inside: TokenSet  # tokens that end inside it or at its end
    exits: IntArray  # nodes of the trie at which the lexeme may be over

    @property
    def num_bytes(self) -> int:
        return self.inside.num_bytes + self.exits.nbytes + _BYTES_PER_ENTRY


@dataclass(slots=True)
class Mask:
    """The tokens a state allows, stop tokens left out, and where they lead."""

    tokens: TokenSet
    ends: tuple[Term, ...]  # where tokens lead that leave a lexeme or meet none
    bodies: tuple[tuple[Term, Term], ...]  # (lexeme, what follows)
    worst: float | None = field(default=None)  # memo of `Planner.worst_after`

    @property
    def num_bytes(self) -> int:
        return self.tokens.num_bytes + _BYTES_PER_ENTRY


class SharedMasks:
    """Bodies by structure, shared by every grammar over one vocabulary. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._bodies: OrderedDict[bytes, Body] = OrderedDict()
        self._lock = threading.Lock()

    @property
    def num_bodies(self) -> int:
        return len(self._bodies)

    def get(self, digest: bytes) -> Body | None:
        with self._lock:
            body = self._bodies.get(digest)
            if body is not None:
                self._bodies.move_to_end(digest)
            return body

    def put(self, digest: bytes, body: Body) -> None:
        with self._lock:
            if digest in self._bodies:
                return
            self._bodies[digest] = body
            self._num_bytes += body.num_bytes
            while self._num_bytes > self._max_bytes and len(self._bodies) > 1:
                _, oldest = self._bodies.popitem(last=False)
                self._num_bytes -= oldest.num_bytes


class MaskBuilder:
    """Masks of one grammar's states, cached within `limits.mask_cache_bytes`."""

    def __init__(
        self, vocabulary: Vocabulary, automaton: Automaton, shared: SharedMasks, limits: Limits
    ) -> None:
        self._vocabulary = vocabulary
        self._automaton = automaton
        self._store: TermStore = automaton.store
        self._lexemes = Lexemes(automaton.store)
        self._shared = shared
        self._max_bytes = limits.mask_cache_bytes
        self._num_bytes = 0
        self._masks: OrderedDict[Term, Mask] = OrderedDict()
        self._root: IntArray = np.zeros(1, np.int32)

    def mask_of(self, term: Term) -> Mask:
        """The tokens after which the text can still be completed."""
        mask = self._masks.get(term)
        if mask is not None:
            self._masks.move_to_end(term)
            return mask
        mask = self._build(term)
        self._masks[term] = mask
        self._num_bytes += mask.num_bytes
        while self._num_bytes > self._max_bytes and len(self._masks) > 1:
            _, oldest = self._masks.popitem(last=False)
            self._num_bytes -= oldest.num_bytes
        return mask

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def clear(self) -> None:
        """Forget every mask."""
        self._masks.clear()
        self._num_bytes = 0

    def _build(self, term: Term) -> Mask:
        row: BoolArray = np.zeros(self._vocabulary.num_rows, bool)
        bodies: list[tuple[Term, Term]] = []
        plain: list[Term] = []
        starts: list[tuple[IntArray, Term]] = []
        pending = list(term.alternatives)
        while pending:
            each = pending.pop()
            head, tail = each.items if each.kind == Kind.SEQUENCE else (each, self._store.epsilon)
            if head.kind != Kind.LEXEME:
                plain.append(each)
                continue
            if self._store.is_empty(head):
                continue
            body = self._body_of(head)
            body.inside.add_to(row)
            bodies.append((head, tail))
            if tail.kind != Kind.EPSILON:
                starts.append((body.exits, tail))
                if head.nullable:
                    pending.extend(tail.alternatives)
        if plain:
            starts.append((self._root, self._store.alternation(plain)))
        ends = self._walk_from(starts, row)
        return Mask(TokenSet(row), ends, tuple(bodies))

    def _walk_from(self, starts: list[tuple[IntArray, Term]], row: BoolArray) -> tuple[Term, ...]:
        """Allow the tokens on the way from the starts; where these tokens lead."""
        starts = [(nodes, term) for nodes, term in starts if nodes.size]
        if not starts:
            return ()
        automaton, trie = self._automaton, self._vocabulary.trie
        nodes = np.concatenate([nodes for nodes, _ in starts])
        states = np.concatenate(
            [np.full(nodes.size, automaton.state_of(term), np.int32) for nodes, term in starts]
        )
        nodes, states = automaton.walk(trie, nodes, states)
        row[trie.tokens_at(nodes)] = True
        ending = np.unique(states[trie.has_token[nodes]])
        return tuple(automaton.term_of(int(state)) for state in ending)

    def _body_of(self, head: Term) -> Body:
        clamped = self._lexemes.clamp(head, self._vocabulary.trie.max_token_bytes)
        digest = self._lexemes.digest(clamped)
        body = self._shared.get(digest)
        if body is None:
            base = self._lexemes.without_exclusion(clamped)
            body = self._walk_body(clamped) if base is None else self._narrow_body(clamped, base)
            self._shared.put(digest, body)
        return body

    def _walk_body(self, head: Term) -> Body:
        trie, automaton = self._vocabulary.trie, self._automaton
        state = np.array([automaton.state_of(head)], np.int32)
        nodes, states = automaton.walk(trie, self._root, state)
        row: BoolArray = np.zeros(self._vocabulary.num_rows, bool)
        row[trie.tokens_at(nodes)] = True
        return Body(TokenSet(row), nodes[automaton.nullable[states]])

    def _narrow_body(self, head: Term, base: Term) -> Body:
        """The body of `base`, less the ends at which a word excluded from `head` is complete."""
        trie, automaton = self._vocabulary.trie, self._automaton
        known = self._body_of(base)
        state = automaton.state_of(head)
        is_end = np.array([automaton.accepts(state, trie.path(n)) for n in known.exits], bool)
        row: BoolArray = np.zeros(self._vocabulary.num_rows, bool)
        known.inside.write(row)
        row[trie.tokens_at(known.exits[~is_end])] = False
        return Body(TokenSet(row), known.exits[is_end])
