"""Which tokens a state allows, computed once per state by walking the vocabulary's trie.

By distributivity the mask of a state is the union of the masks of its alternatives. Where one
begins with a lexeme, most of the vocabulary is decided inside the lexeme, whatever follows it:
that part is computed once per vocabulary (`SharedMasks`), together with the trie nodes at which
the lexeme can be left, and only from those the walk goes on into what follows.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from palmette.grammar.automaton import Automaton
from palmette.grammar.lexemes import Lexemes
from palmette.grammar.limits import Limits
from palmette.grammar.term_store import TermStore
from palmette.grammar.terms import Kind, Term
from palmette.grammar.token_trie import IntArray, TokenTrie
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
    doubtful: tuple[int, ...]  # tokens left out, that must be tried with what was forgotten
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
        lenient = self._store.lenient(term)
        if lenient is term:
            mask = self._build(term)
        else:
            mask = self._with_doubtful(term, self.mask_of(lenient))
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
        ends, doubtful = self._walk_from(starts, row)
        return Mask(TokenSet(row), ends, tuple(bodies), doubtful)

    def _with_doubtful(self, term: Term, mask: Mask) -> Mask:
        """The mask of a term made from that of its lenient form."""
        if not mask.doubtful:
            return mask
        row: BoolArray = np.zeros(self._vocabulary.num_rows, bool)
        mask.tokens.write(row)
        afters = try_tokens(self._store, self._vocabulary, term, mask.doubtful)
        row[list(afters)] = True
        ends = tuple(dict.fromkeys((*mask.ends, *afters.values())))
        return Mask(TokenSet(row), ends, mask.bodies, ())

    def _walk_from(
        self, starts: list[tuple[IntArray, Term]], row: BoolArray
    ) -> tuple[tuple[Term, ...], tuple[int, ...]]:
        """Allow the tokens on the way from the starts; where these lead, and what is in doubt."""
        starts = [(nodes, term) for nodes, term in starts if nodes.size]
        if not starts:
            return (), ()
        automaton, trie = self._automaton, self._vocabulary.trie
        nodes = np.concatenate([nodes for nodes, _ in starts])
        states = np.concatenate(
            [np.full(nodes.size, automaton.state_of(term), np.int32) for nodes, term in starts]
        )
        reached, reached_states = automaton.walk(trie, nodes, states)
        row[trie.tokens_at(reached)] = True
        doubtful = doubtful_tokens(
            automaton,
            trie,
            np.concatenate((nodes, reached)),
            np.concatenate((states, reached_states)),
        )
        nodes, states = reached, reached_states
        row[doubtful] = False
        ending = np.unique(states[trie.has_token[nodes]])
        ends = tuple(automaton.term_of(int(state)) for state in ending)
        return ends, tuple(doubtful.tolist())

    def _body_of(self, head: Term) -> Body:
        clamped = self._lexemes.clamp(head, self._vocabulary.trie.max_token_bytes)
        digest = self._lexemes.digest(clamped)
        body = self._shared.get(digest)
        if body is None:
            base = self._lexemes.without_exclusion(clamped)
            split = self._lexemes.without_words(clamped)
            if base is not None:
                body = self._narrow_body(clamped, base)
            elif split is not None:
                body = self._body_without(clamped, *split)
            else:
                body = self._walk_body(clamped)
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

    def _body_without(self, head: Term, base: Term, words: Term) -> Body:
        """The body of `base`, less what leads only to the words that are excluded from `head`.

        A prefix that none of the words begins with has the same continuations in both.
        """
        trie, store = self._vocabulary.trie, self._store
        known = self._body_of(base)
        row: BoolArray = np.zeros(self._vocabulary.num_rows, bool)
        known.inside.write(row)
        dropped: list[int] = []
        pending = [(0, words, head)]
        while pending:
            node, word, here = pending.pop()
            if node and store.is_empty(here):
                row[trie.tokens_at(np.array([node], np.int32))] = False
            if not here.nullable:
                dropped.append(node)
            for bits, after in store.parts(word):
                for byte in range(256):
                    child = trie.child(node, byte) if bits >> byte & 1 else None
                    if child is not None:
                        pending.append((child, after, store.step(here, byte)))
        is_kept = ~np.isin(known.exits, np.array(dropped, np.int32))
        return Body(TokenSet(row), known.exits[is_kept])


def doubtful_tokens(
    automaton: Automaton, trie: TokenTrie, nodes: IntArray, states: IntArray
) -> IntArray:
    """Of a walk, its starts included: the tokens that lead beyond a barrier (see `unfold`)."""
    distinct, index = np.unique(states, return_inverse=True)
    barriers = [automaton.term_of(int(state)).is_barrier for state in distinct]
    if not any(barriers):
        return _NONE
    nodes = np.unique(nodes[np.array(barriers, bool)[index]])
    found: list[IntArray] = []
    while nodes.size:
        nodes, _ = trie.expand(nodes)
        found.append(trie.tokens_at(nodes))
    return np.unique(np.concatenate(found))


def try_tokens(
    store: TermStore, vocabulary: Vocabulary, term: Term, token_ids: Iterable[int]
) -> dict[int, Term]:
    """Those of the tokens that are allowed, with the terms that they lead to."""
    reached: dict[bytes, Term] = {b"": term}
    allowed: dict[int, Term] = {}
    for token_id in token_ids:
        text = vocabulary.token_bytes[token_id]
        here = term
        for length in range(1, len(text) + 1):
            prefix = text[:length]
            known = reached.get(prefix)
            if known is None:
                known = reached[prefix] = store.step(here, text[length - 1])
            here = known
            if here is store.empty:
                break
        else:
            allowed[token_id] = here
    return allowed


_NONE: IntArray = np.zeros(0, np.int32)
