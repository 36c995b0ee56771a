"""Constraints of requests, compiled for one vocabulary; the grammar's errors as the caller's."""

from __future__ import annotations

from collections.abc import Collection, Sequence

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
    UnsatisfiableGrammar,
    UnsupportedGrammar,
    Vocabulary,
)
from palmette.protocol import Constraint


class ConstraintCompiler:
    """Compiles constraints, each once. Safe to call from several threads."""

    def __init__(
        self, token_bytes: Sequence[bytes], stop_token_ids: Collection[int], num_rows: int
    ) -> None:
        self._compiler = GrammarCompiler(Vocabulary(token_bytes, stop_token_ids, num_rows))

    def compile(self, constraint: Constraint) -> CompiledGrammar:
        """Raises a ConstraintError that says what is wrong and where."""
        try:
            if constraint.kind == "regex":
                return self._compiler.compile_regex(constraint.source)
            if constraint.kind == "choices":
                return self._compiler.compile_choices(constraint.options)
            return self._compiler.compile_json_schema(constraint.source)
        except GrammarError as error:
            raise _translated(error, constraint) from error


def _translated(error: GrammarError, constraint: Constraint) -> ConstraintError:
    kind: type[ConstraintError] = InvalidConstraint
    if isinstance(error, UnsupportedGrammar):
        kind = UnsupportedConstraint
    elif isinstance(error, UnsatisfiableGrammar):
        kind = UnsatisfiableConstraint
    elif isinstance(error, GrammarTooComplex):
        kind = ConstraintTooComplex
    return kind(f"{constraint.kind}: {error}", param=constraint.kind, pointer=error.pointer)
