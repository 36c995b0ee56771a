"""Constraints of requests, compiled for one vocabulary; the grammar's errors as the caller's."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt

from palmette.errors import (
    ConstraintError,
    ConstraintTooComplex,
    InvalidConstraint,
    UnsatisfiableConstraint,
    UnsupportedConstraint,
)
from palmette.grammar import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarError,
    GrammarTooComplex,
    Limits,
    Matcher,
    UnsatisfiableGrammar,
    UnsupportedGrammar,
    Vocabulary,
)
from palmette.protocol import Constraint

# A mask is made on the engine's thread while all others wait, so one that takes longer ends its
# request. Of 1,476 real schemas the slowest took 38 ms.
_MASK_SECONDS = 0.25
# Processor time that one request may spend on its constraint, and more for every token.
_REQUEST_SECONDS = 1.0
_TOKEN_SECONDS = 0.01


class ConstraintCompiler:
    """Compiles constraints, each once. Safe to call from several threads."""

    def __init__(
        self, token_bytes: Sequence[bytes], stop_token_ids: Collection[int], num_rows: int
    ) -> None:
        self._compiler = GrammarCompiler(
            Vocabulary(token_bytes, stop_token_ids, num_rows),
            limits=Limits(mask_seconds=_MASK_SECONDS),
        )

    def compile(self, constraint: Constraint) -> CompiledConstraint:
        """Raises a ConstraintError that says what is wrong and where."""
        with _translated(constraint):
            return CompiledConstraint(constraint, self._compile(constraint))

    def _compile(self, constraint: Constraint) -> CompiledGrammar:
        if constraint.kind == "regex":
            return self._compiler.compile_regex(constraint.source)
        if constraint.kind == "choices":
            return self._compiler.compile_choices(constraint.options)
        return self._compiler.compile_json_schema(constraint.source)


class CompiledConstraint:
    """A constraint ready to be followed by any number of sequences."""

    def __init__(self, constraint: Constraint, grammar: CompiledGrammar) -> None:
        self._constraint = constraint
        self._grammar = grammar

    @property
    def shortest_length(self) -> int:
        """Tokens in the shortest text that satisfies it."""
        with _translated(self._constraint):
            return self._grammar.shortest_length

    def matcher(self) -> ConstraintMatcher:
        """At the beginning of a text."""
        with _translated(self._constraint):
            return ConstraintMatcher(self._constraint, self._grammar.matcher())


class ConstraintMatcher:
    """How far one sequence has come under its constraint.

    A grammar is worked out as it is followed, so each of these may find that a limit of time or
    size is reached, and raise ConstraintTooComplex: this sequence ends, the others go on.
    """

    def __init__(self, constraint: Constraint, matcher: Matcher) -> None:
        self._constraint = constraint
        self._matcher = matcher
        self._seconds_left = _REQUEST_SECONDS

    @property
    def is_complete(self) -> bool:
        """The text may end here."""
        with _translated(self._constraint):
            return self._matcher.is_complete

    @property
    def is_finished(self) -> bool:
        """The text can only end here."""
        with _translated(self._constraint):
            return self._matcher.is_finished

    def fill_mask(self, mask: npt.NDArray[np.bool_], *, budget: int) -> None:
        """Set which tokens may come next if at most `budget` more may, this one included."""
        with self._charged():
            self._matcher.fill_mask(mask, budget=budget)

    def accept(self, token_id: int) -> bool:
        """Go on by a token; False, and nothing has changed, if it may not come."""
        self._seconds_left += _TOKEN_SECONDS
        with self._charged():
            return self._matcher.accept(token_id)

    def forced_tokens(self, limit: int) -> list[int]:
        """The run of tokens, `limit` at most, each of which is the only one that may come."""
        with self._charged():
            return self._matcher.forced_tokens(limit=limit)

    @contextmanager
    def _charged(self) -> Iterator[None]:
        """Translated, and the time it takes is the request's."""
        with _translated(self._constraint):
            start = time.thread_time()
            yield
            self._seconds_left -= time.thread_time() - start
            if self._seconds_left < 0:
                raise GrammarTooComplex(
                    f"following it took more than {_REQUEST_SECONDS} s of processor time and "
                    f"{_TOKEN_SECONDS} s for each token"
                )


@contextmanager
def _translated(constraint: Constraint) -> Iterator[None]:
    try:
        yield
    except GrammarError as error:
        kind: type[ConstraintError] = InvalidConstraint
        if isinstance(error, UnsupportedGrammar):
            kind = UnsupportedConstraint
        elif isinstance(error, UnsatisfiableGrammar):
            kind = UnsatisfiableConstraint
        elif isinstance(error, GrammarTooComplex):
            kind = ConstraintTooComplex
        message = f"{constraint.kind}: {error}"
        raise kind(message, param=constraint.kind, pointer=error.pointer) from error
