"""Where one text stands in a grammar."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from palmette.grammar.automaton import DEAD
from palmette.grammar.compiled import CompiledGrammar
from palmette.grammar.errors import GrammarError
from palmette.grammar.mask import Mask
from palmette.grammar.terms import Term


class _Position(NamedTuple):
    term: Term
    plan: tuple[int, ...] | None  # tokens that complete the text, if they were worked out
    has_stopped: bool = False


class Matcher:
    """Follows one text, token by token. Not thread-safe; its grammar may be shared."""

    def __init__(self, grammar: CompiledGrammar) -> None:
        if not hasattr(grammar, "automaton"):
            raise TypeError("another machine carries this grammar: take its `matcher()`")
        self._grammar = grammar
        self._positions = [_Position(grammar.start, None)]

    @property
    def num_tokens(self) -> int:
        """Tokens accepted so far, a stop token included."""
        return len(self._positions) - 1

    def state(self, back: int = 0) -> int:
        """A number of where the text stands, or stood `back` tokens ago.

        The same number in two texts of a grammar means that the same may follow. It may get another
        one in the course of time.
        """
        if not 0 <= back <= self.num_tokens:
            raise IndexError(f"there are {self.num_tokens} tokens, cannot look {back} back")
        return self._positions[-1 - back].term.serial

    @property
    def is_complete(self) -> bool:
        """Whether a stop token may come now."""
        here = self._positions[-1]
        return here.term.nullable and not here.has_stopped

    @property
    def is_finished(self) -> bool:
        """Whether nothing but a stop token may come, or one has come."""
        here = self._positions[-1]
        if here.has_stopped:
            return True
        if not here.term.nullable:
            return False
        grammar = self._grammar
        with grammar:
            automaton = grammar.automaton
            return not automaton.has_moves(automaton.state_of(here.term))

    def fill_mask(
        self, row: NDArray[np.bool_] | NDArray[np.int32], *, budget: int | None = None
    ) -> None:
        """Set `row[t]` to whether token `t` may come next.

        `row` is bool [num_rows], or int32 [ceil(num_rows / 32)], where bit `t % 32` of
        `row[t // 32]` is that of token `t`. After any allowed token the text can be completed. With
        a `budget`, it can be completed within that many tokens, the next one included and the stop
        token not; for a budget below what any completion needs, the way to the shortest one is
        left. Raises GrammarTooComplex if a limit is reached, and GrammarError if the vocabulary
        has no token to go on with.
        """
        num_rows = self._grammar.vocabulary.num_rows
        num_words = -(-num_rows // 32)
        shapes = {"bool": (num_rows,), "int32": (num_words,)}
        is_flat = row.flags.c_contiguous and row.flags.writeable
        if not is_flat or row.shape != shapes.get(str(row.dtype)):
            raise ValueError(
                f"row must be bool [{num_rows}] or int32 [{num_words}], contiguous and writable, "
                f"got {row.dtype} {list(row.shape)}"
            )
        if row.dtype == np.bool_:
            self._fill(row.view(np.bool_), budget)
            return
        allowed: NDArray[np.bool_] = np.zeros(32 * num_words, bool)
        self._fill(allowed[:num_rows], budget)
        row[:] = np.packbits(allowed, bitorder="little").view("<i4")

    def _fill(self, row: NDArray[np.bool_], budget: int | None) -> None:
        grammar = self._grammar
        here = self._positions[-1]
        if here.has_stopped:
            row[:] = False
            return
        with grammar:
            mask = grammar.masks.mask_of(here.term)
            if budget is not None and budget - 1 < grammar.planner.worst_after(mask):
                self._fill_within(row, mask, budget)
            else:
                mask.tokens.write(row)
        if here.term.nullable:
            for token_id in grammar.vocabulary.stop_token_ids:
                row[token_id] = True
        elif not mask.tokens.count:
            raise GrammarError("no token of the vocabulary continues the text")

    def _fill_within(self, row: NDArray[np.bool_], mask: Mask, budget: int) -> None:
        planner = self._grammar.planner
        here = self._positions[-1]
        np.less_equal(planner.needs(here.term), budget - 1, out=row)
        plan = here.plan
        if plan is None or len(plan) > planner.num_tokens(here.term):
            plan = planner.plan(here.term)
            self._positions[-1] = here._replace(plan=plan)
        if plan is None:
            if not row.any():
                mask.tokens.write(row)
        elif plan and (len(plan) <= budget or not row.any()):
            row[plan[0]] = True

    def accept(self, token_id: int) -> bool:
        """Take the token if it is allowed; False, and nothing changes, if it is not.

        A stop token is allowed exactly when the text is complete, and nothing after it.
        """
        grammar = self._grammar
        here = self._positions[-1]
        if here.has_stopped or not 0 <= token_id < grammar.vocabulary.num_rows:
            return False
        if token_id in grammar.vocabulary.stop_token_ids:
            if here.term.nullable:
                self._positions.append(_Position(here.term, None, True))
            return here.term.nullable
        if token_id >= grammar.vocabulary.num_tokens:
            return False
        text = grammar.vocabulary.token_bytes[token_id]
        if not text:
            return False
        with grammar:
            after = self._after(here.term, text)
        if after is None:
            return False
        plan = here.plan[1:] if here.plan and here.plan[0] == token_id else None
        self._positions.append(_Position(after, plan))
        return True

    def rollback(self, num_tokens: int) -> None:
        """Undo the last `num_tokens` accepted tokens."""
        if not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(f"cannot roll back {num_tokens} of {self.num_tokens} tokens")
        del self._positions[len(self._positions) - num_tokens :]

    def copy(self) -> Matcher:
        """An independent matcher at the same place."""
        twin = Matcher(self._grammar)
        twin._positions = self._positions.copy()
        return twin

    def __copy__(self) -> Matcher:
        return self.copy()

    def __deepcopy__(self, memo: object) -> Matcher:
        return self.copy()  # the grammar is shared by all that follow it

    def forced_tokens(self, limit: int | None = None) -> list[int]:
        """The run of tokens each of which is the only one allowed from here, at most `limit`.

        The run ends where a stop token is allowed. The matcher does not move.
        """
        grammar = self._grammar
        here = self._positions[-1]
        forced: list[int] = []
        if here.has_stopped:
            return forced
        term: Term | None = here.term
        with grammar:
            while term is not None and not term.nullable and len(forced) < _at_most(limit):
                only = grammar.masks.mask_of(term).tokens.only
                if only is None:
                    break
                forced.append(only)
                term = self._after(term, grammar.vocabulary.token_bytes[only])
        return forced

    def forced_bytes(self, limit: int = 1 << 16) -> bytes:
        """The run of bytes each of which is the only one possible from here, at most `limit`.

        The run ends where the text may stop. The matcher does not move. Unlike a run of forced
        tokens it does not depend on the vocabulary, which may spell the same bytes in many ways.
        """
        grammar = self._grammar
        here = self._positions[-1]
        forced = bytearray()
        if here.has_stopped:
            return b""
        with grammar:
            automaton = grammar.automaton
            state = automaton.state_of(here.term)
            while len(forced) < limit and not automaton.nullable[state]:
                byte = automaton.only_byte(state)
                if byte is None:
                    break
                forced.append(byte)
                state = automaton.step(state, byte)
        return bytes(forced)

    def extensions(self, tail: bytes, limit: int) -> list[bytes]:
        """What may come next that joins the end of `tail` in one token; `limit` of them at most.

        `tail` is how the text ends so far. Each answer, with some bytes that the tail ends with in
        front of it, is a token of the vocabulary. The matcher does not move.
        """
        grammar = self._grammar
        here = self._positions[-1]
        if here.has_stopped:
            return []
        trie = grammar.vocabulary.trie
        found: set[bytes] = set()
        with grammar:
            automaton = grammar.automaton
            start = np.array([automaton.state_of(here.term)], np.int32)
            for length in range(1, min(len(tail), trie.max_token_bytes) + 1):
                node = trie.find(tail[-length:])
                if node is None:
                    continue
                nodes, _ = automaton.walk(trie, np.array([node], np.int32), start)
                nodes = nodes[trie.has_token[nodes]]
                found.update(trie.path(int(node))[length:] for node in nodes[:limit])
        return sorted(found)[:limit]

    def can_complete(self, budget: int) -> bool:
        """Whether at most `budget` more tokens complete the text; the stop token is not counted.

        An answer of no may be wrong where the vocabulary has a shorter way than is known.
        """
        grammar = self._grammar
        term = self._positions[-1].term
        with grammar:
            if grammar.planner.num_tokens(term) <= budget:
                return True
            plan = grammar.planner.plan(term)
            return plan is not None and len(plan) <= budget

    def _after(self, term: Term, text: bytes) -> Term | None:
        automaton = self._grammar.automaton
        state = automaton.follow(automaton.state_of(term), text)
        return automaton.term_of(state) if state != DEAD else None


def _at_most(limit: int | None) -> float:
    return math.inf if limit is None else limit
