"""Grammar backends: our own engine, and other libraries behind the same protocol.

`protocol` says what they have in common. The libraries of `llguidance` and `xgrammar` are optional;
each is imported when its backend is first asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from palmette.grammar.backends.protocol import (
    Backend,
    BackendGrammar,
    BackendMatcher,
    BackendNotInstalled,
    Feature,
    Kind,
    UnknownBackend,
    UnsupportedByBackend,
)
from palmette.grammar.limits import Limits
from palmette.grammar.vocabulary import Vocabulary

BACKENDS = ("palmette", "outlines-core", "llguidance", "xgrammar")
DEFAULT_BACKEND = "palmette"

__all__ = [
    "BACKENDS",
    "DEFAULT_BACKEND",
    "Backend",
    "BackendGrammar",
    "BackendMatcher",
    "BackendNotInstalled",
    "Feature",
    "Kind",
    "UnknownBackend",
    "UnsupportedByBackend",
    "load_backend",
]


def load_backend(
    name: str,
    vocabulary: Vocabulary,
    *,
    limits: Limits | None = None,
    encode: Callable[[str], Sequence[int]] | None = None,
) -> Backend:
    """The backend of this name over a vocabulary; costly for other libraries, so keep it.

    `encode` is the model's tokenizer, for the one library that asks it (see `LLGuidanceBackend`).
    Raises UnknownBackend, or BackendNotInstalled where its library is missing.
    """
    if name == "palmette":
        from palmette.grammar.backends.own import PalmetteBackend

        return PalmetteBackend(vocabulary, limits=limits)
    if name == "outlines-core":
        from palmette.grammar.backends.outlines_core import OutlinesCoreBackend

        return OutlinesCoreBackend(vocabulary, limits=limits)
    if name == "llguidance":
        from palmette.grammar.backends.llguidance import LLGuidanceBackend

        return LLGuidanceBackend(vocabulary, limits=limits, encode=encode)
    if name == "xgrammar":
        from palmette.grammar.backends.xgrammar import XGrammarBackend

        return XGrammarBackend(vocabulary, limits=limits)
    raise UnknownBackend(name, BACKENDS)
