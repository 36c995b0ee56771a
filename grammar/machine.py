"""Which machine carries the grammars: the extension in C++ where it was built, or Python.

Both give the same answers. The environment variable PALMETTE_GRAMMAR chooses: `native` or `python`;
without it the extension is taken where there is one.
"""

from __future__ import annotations

import logging
import os
from functools import cache
from typing import Literal, Protocol

from palmette.grammar.compiled import CompiledGrammar
from palmette.grammar.limits import Limits
from palmette.grammar.mask import SharedMasks
from palmette.grammar.term_store import TermStore
from palmette.grammar.terms import Term
from palmette.grammar.vocabulary import Vocabulary

MachineName = Literal["native", "python"]

_VARIABLE = "PALMETTE_GRAMMAR"
_logger = logging.getLogger("palmette.grammar")


class Machine(Protocol):
    """What a compiler needs of a machine. The masks shared by its grammars are kept here."""

    @property
    def name(self) -> MachineName: ...

    @property
    def num_bodies(self) -> int:
        """Masks of string and number bodies that are kept for all grammars."""
        ...

    def store(self) -> TermStore:
        """A new store for the terms of one grammar."""
        ...

    def grammar(
        self, store: TermStore, start: Term, *, notes: tuple[str, ...] = ()
    ) -> CompiledGrammar:
        """The grammar of a term of such a store."""
        ...


def machine_for(vocabulary: Vocabulary, limits: Limits, name: MachineName | None = None) -> Machine:
    """The machine of that name, else the one that PALMETTE_GRAMMAR names, else the faster one.

    Raises ValueError for an unknown name, and ImportError if the extension is asked for by name
    and was not built.
    """
    where = "machine"
    chosen: str | None = name
    if chosen is None:
        where = _VARIABLE
        chosen = os.environ.get(_VARIABLE) or None
    if chosen not in (None, "native", "python"):
        raise ValueError(f"{where} is 'native' or 'python', got {chosen!r}")
    if chosen == "python":
        return PythonMachine(vocabulary, limits)
    missing = _why_missing()
    if missing is None:
        from palmette.grammar.extension import NativeMachine

        return NativeMachine(vocabulary, limits)
    if chosen == "native":
        raise ImportError(
            f"{where} is 'native', but the extension palmette.grammar._native was not built: "
            f"{missing}"
        )
    return PythonMachine(vocabulary, limits)


@cache
def _why_missing() -> str | None:
    """Why there is no extension; None if there is one."""
    try:
        from palmette.grammar import _native  # noqa: F401
    except ImportError as error:
        _logger.warning("grammars run in Python, many times slower than in C++: %s", error)
        return str(error)
    return None


class PythonMachine:
    """The reference."""

    name: MachineName = "python"

    def __init__(self, vocabulary: Vocabulary, limits: Limits) -> None:
        self._vocabulary = vocabulary
        self._limits = limits
        self._shared = SharedMasks(limits.shared_cache_bytes)

    @property
    def num_bodies(self) -> int:
        return self._shared.num_bodies

    def store(self) -> TermStore:
        return TermStore(self._limits, self._vocabulary.alphabet)

    def grammar(
        self, store: TermStore, start: Term, *, notes: tuple[str, ...] = ()
    ) -> CompiledGrammar:
        return CompiledGrammar(self._vocabulary, store, start, self._shared, self._limits, notes)
