"""A text that begins with given bytes and then goes on as it likes: what a healed prompt needs.

Unlike a grammar it does not say what may follow: there every token may come, control tokens and
halves of characters too.
"""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from palmette.grammar.errors import GrammarTooComplex
from palmette.grammar.vocabulary import Vocabulary


class PrefixGrammar:
    """All texts that begin with `prefix`, which is not empty. A `BackendGrammar`."""

    notes: tuple[str, ...] = ()

    def __init__(self, vocabulary: Vocabulary, prefix: bytes) -> None:
        self.vocabulary = vocabulary
        self.prefix = prefix

    @property
    def shortest_length(self) -> int:
        """The fewest tokens that spell the prefix, the last of which may reach beyond it.

        Raises GrammarTooComplex if the vocabulary cannot spell it.
        """
        if math.isinf(self.needs[0]):
            raise GrammarTooComplex("the vocabulary cannot spell the text to begin with")
        return int(self.needs[0])

    @cached_property
    def needs(self) -> list[float]:
        """By how much of the prefix is there: the fewest tokens that spell the rest, or reach
        beyond it.
        """
        length = len(self.prefix)
        needs = [math.inf] * length + [0.0]
        for start in range(length - 1, -1, -1):
            needs[start] = 1 + min((needs[end] for end, _ in self.steps(start)), default=math.inf)
        return needs

    def steps(self, start: int) -> list[tuple[int, NDArray[np.int32]]]:
        """The tokens that may come where `start` bytes of the prefix are there, by how many are
        there after them.
        """
        trie, node = self.vocabulary.trie, 0
        steps: list[tuple[int, NDArray[np.int32]]] = []
        for end in range(start + 1, len(self.prefix) + 1):
            child = trie.child(node, self.prefix[end - 1])
            if child is None:
                return steps
            node = child
            if trie.has_token[node]:
                steps.append((end, trie.tokens_at(np.array([node], np.int32))))
        nodes, _ = trie.expand(np.array([node], np.int32))
        while nodes.size:  # those that reach beyond it
            if trie.has_token[nodes].any():
                steps.append((len(self.prefix), trie.tokens_at(nodes)))
            nodes, _ = trie.expand(nodes)
        return steps

    def matcher(self) -> PrefixMatcher:
        """A matcher at the start of a text."""
        return PrefixMatcher(self)


class PrefixMatcher:
    """Follows one text. A `BackendMatcher`. Not thread-safe; its grammar may be shared."""

    def __init__(self, grammar: PrefixGrammar) -> None:
        self._grammar = grammar
        self._ends = [0]  # how much of the prefix was there, after each number of tokens

    @property
    def num_tokens(self) -> int:
        return len(self._ends) - 1

    @property
    def is_complete(self) -> bool:
        """Whether the whole prefix is there."""
        return self._ends[-1] == len(self._grammar.prefix)

    @property
    def is_finished(self) -> bool:
        return False

    def fill_mask(self, row: NDArray[np.bool_], *, budget: int | None = None) -> None:
        """Set `row[t]`, of bool [num_rows], to whether token `t` may come next.

        With a `budget`, the prefix can be spelled within so many tokens, the next one included; for
        a budget below what that takes, the way to the fewest is left.
        """
        if self.is_complete:
            row[:] = True
            return
        row[:] = False
        grammar, here = self._grammar, self._ends[-1]
        limit = math.inf if budget is None else max(budget, grammar.needs[here])
        for end, token_ids in grammar.steps(here):
            if 1 + grammar.needs[end] <= limit:
                row[token_ids] = True

    def accept(self, token_id: int) -> bool:
        """Take the token if it is allowed; False, and nothing changes, if it is not."""
        prefix, here = self._grammar.prefix, self._ends[-1]
        if here == len(prefix):
            self._ends.append(here)
            return True
        table = self._grammar.vocabulary.token_bytes
        text = table[token_id] if 0 <= token_id < len(table) else b""
        rest = prefix[here:]
        if not text or not (rest.startswith(text) or text.startswith(rest)):
            return False
        self._ends.append(min(here + len(text), len(prefix)))
        return True

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens."""
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"cannot roll back {num_tokens} of {self.num_tokens} tokens")
        del self._ends[len(self._ends) - num_tokens :]

    def forced_tokens(self, limit: int | None = None) -> list[int]:
        """None: where only one token may come it is drawn all the same."""
        return []

    def copy(self) -> PrefixMatcher:
        """An independent matcher at the same place."""
        twin = PrefixMatcher(self._grammar)
        twin._ends = self._ends.copy()
        return twin
