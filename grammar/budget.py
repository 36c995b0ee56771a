"""How many tokens complete a text, so that it can be kept within a budget.

Every number here is an upper bound that a concrete list of tokens realises.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from palmette.grammar.automaton import Automaton
from palmette.grammar.lexemes import Lexemes
from palmette.grammar.mask import Mask, doubtful_tokens, try_tokens
from palmette.grammar.terms import UNFOLDED, Kind, Term
from palmette.grammar.token_trie import IntArray
from palmette.grammar.vocabulary import Vocabulary

_JOINED_TEXT = 256  # bytes of a completion that is split into tokens as a whole, at each step anew
_LONGEST_TEXT = 1 << 13  # bytes of one element that is
_LONGEST_PLAN = 1 << 16  # elements; a longer completion is only counted, never written out
_NEEDS_KEPT = 16


class Planner:
    """Shortest completions of one grammar's states."""

    def __init__(self, vocabulary: Vocabulary, automaton: Automaton) -> None:
        self._vocabulary = vocabulary
        self._automaton = automaton
        self._store = automaton.store
        self._lexemes = Lexemes(automaton.store)
        self._num_tokens: dict[Term, float] = {}
        self._spelled: dict[bytes, list[int] | None] = {}
        self._needs: OrderedDict[Term, NDArray[np.float32]] = OrderedDict()

    def clear(self) -> None:
        """Forget every answer."""
        self._num_tokens.clear()
        self._spelled.clear()
        self._needs.clear()

    def num_tokens(self, term: Term) -> float:
        """Tokens that complete the text from here; infinite if the vocabulary has not the bytes."""
        known = self._num_tokens
        needs: dict[Term, Sequence[Term]] = {}
        pending = [term]
        while pending:
            top = pending[-1]
            if top in known:
                pending.pop()
            elif top not in needs:
                needs[top] = self._needed(top)
                pending += (each for each in needs[top] if each not in known)
            else:
                known[top] = self._total(top, [known[each] for each in needs[top]])
        return known[term]

    def _needed(self, term: Term) -> Sequence[Term]:
        """The terms whose completions tell that of a term."""
        if term.nullable or term.is_regular:
            return ()
        if term.kind == Kind.CALL:
            assert term.rule is not None
            return (term.rule.shortest(),)
        if term.kind in UNFOLDED or term.kind == Kind.CAPTURE:
            return self._store.shortest_steps(term)
        if term.kind == Kind.ALTERNATION:
            return [item for item in term.items if not self._store.is_empty(item)]
        return term.items

    def _total(self, term: Term, needed: list[float]) -> float:
        if term.nullable:
            return 0
        if term.is_regular:
            num_bytes = self._store.min_bytes(term)
            if num_bytes > _LONGEST_TEXT:
                return num_bytes
            token_ids = self._spell(self._store.shortest(term))
            return math.inf if token_ids is None else len(token_ids)
        if term.kind == Kind.SEQUENCE:
            return sum(needed)
        if term.kind in UNFOLDED or term.kind == Kind.CAPTURE:
            return max(needed, default=math.inf)
        return term.low * needed[0] if term.kind == Kind.REPEAT else min(needed)

    def _spell(self, text: bytes) -> list[int] | None:
        if text not in self._spelled:
            self._spelled[text] = self._vocabulary.fewest_tokens(text)
        return self._spelled[text]

    def plan(self, term: Term) -> tuple[int, ...] | None:
        """At most `num_tokens(term)` tokens that complete the text.

        None if the vocabulary cannot spell them or there are too many to write down.
        """
        texts = self._texts_of(term)
        if texts is None:
            return None
        if sum(map(len, texts)) <= _JOINED_TEXT:
            whole = self._vocabulary.fewest_tokens(b"".join(texts))
            return None if whole is None else tuple(whole)
        plan: list[int] = []
        for text in texts:
            token_ids = self._spell(text)
            if token_ids is None:
                return None
            plan += token_ids
        return tuple(plan)

    def _texts_of(self, term: Term) -> list[bytes] | None:
        """The elements of a short complete text; None if one is too long to write out."""
        texts: list[bytes] = []
        pending = [term]
        while pending and len(texts) <= _LONGEST_PLAN:
            term = pending.pop()
            if term.nullable:
                continue
            if term.is_regular:
                if self._store.min_bytes(term) > _LONGEST_TEXT:
                    return None
                texts.append(self._store.shortest(term))
            elif term.kind == Kind.SEQUENCE:
                pending += (term.items[1], term.items[0])
            elif term.kind == Kind.REPEAT:
                if term.low > _LONGEST_PLAN:
                    return None
                pending += [term.items[0]] * term.low
            elif term.kind == Kind.CALL:
                assert term.rule is not None
                pending.append(term.rule.shortest())
            elif term.kind in UNFOLDED or term.kind == Kind.CAPTURE:
                steps = self._store.shortest_steps(term)
                if not steps:
                    return None
                pending.append(max(steps, key=self.num_tokens))
            else:
                items = [item for item in term.items if not self._store.is_empty(item)]
                pending.append(min(items, key=self.num_tokens))
        return None if pending else texts

    def worst_after(self, mask: Mask) -> float:
        """The most tokens that may be needed after any one token of the mask."""
        if mask.worst is None:
            mask.worst = self._worst_after(mask)
        return mask.worst

    def _worst_after(self, mask: Mask) -> float:
        if not self._vocabulary.spells_every_text:
            return math.inf  # a number of bytes is no bound on the number of tokens
        worst = max((self.num_tokens(term) for term in mask.ends), default=0)
        for lexeme, after in mask.bodies:
            worst = max(worst, self._detour(lexeme) + self.num_tokens(after))
        return worst

    def _detour(self, lexeme: Term) -> float:
        """At most how many tokens complete a lexeme after any one token."""
        if lexeme.is_searched:
            lexeme = self._lexemes.clamp(lexeme, self._vocabulary.trie.max_token_bytes)
        detour = self._lexemes.detour(lexeme)
        return math.inf if detour is None else detour

    def needs(self, term: Term) -> NDArray[np.float32]:
        """For every token how many more complete the text after it; infinite if not allowed."""
        needs = self._needs.get(term)
        if needs is None:
            needs = self._compute_needs(term)
            self._needs[term] = needs
            if len(self._needs) > _NEEDS_KEPT:
                self._needs.popitem(last=False)
        return needs

    def _compute_needs(self, term: Term) -> NDArray[np.float32]:
        trie = self._vocabulary.trie
        start = self._store.lenient(term)
        state = np.array([self._automaton.state_of(start)], np.int32)
        root: IntArray = np.zeros(1, np.int32)
        nodes, states = self._automaton.walk(trie, root, state)
        doubtful = doubtful_tokens(
            self._automaton, trie, np.concatenate((root, nodes)), np.concatenate((state, states))
        )
        ending = trie.has_token[nodes]
        nodes, states = nodes[ending], states[ending]
        needs = np.full(self._vocabulary.num_rows, np.inf, np.float32)
        distinct, index = np.unique(states, return_inverse=True)
        per_state = np.array(
            [self.num_tokens(self._automaton.term_of(int(s))) for s in distinct], np.float32
        )
        node_needs = np.full(trie.num_nodes, np.inf, np.float32)
        node_needs[nodes] = per_state[index]
        needs[trie.tokens] = node_needs[trie.token_nodes]
        needs[doubtful] = np.inf
        afters = try_tokens(self._store, self._vocabulary, term, doubtful.tolist())
        for token_id, after in afters.items():
            needs[token_id] = self.num_tokens(after)
        return needs
