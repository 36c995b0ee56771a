"""Our own engine as a backend."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any, get_args

from palmette.grammar.backends.protocol import BackendGrammar, Feature, Kind, UnsupportedByBackend
from palmette.grammar.compiler import GrammarCompiler
from palmette.grammar.errors import GrammarError, InvalidGrammar
from palmette.grammar.limits import Limits
from palmette.grammar.vocabulary import Vocabulary


class PalmetteBackend:
    """The default: everything, enforced exactly or refused."""

    name = "palmette"
    kinds: frozenset[Kind] = frozenset(get_args(Kind))
    features: frozenset[Feature] = frozenset({"budget", "forced_bytes"})

    def __init__(self, vocabulary: Vocabulary, *, limits: Limits | None = None) -> None:
        self.compiler = GrammarCompiler(vocabulary, limits=limits)

    @property
    def version(self) -> str:
        """Of this package; "unknown" where it is not installed."""
        try:
            return version("palmette")
        except PackageNotFoundError:
            return "unknown"

    @property
    def vocabulary(self) -> Vocabulary:
        return self.compiler.vocabulary

    def compile(
        self, kind: Kind, source: str, options: Mapping[str, object] | None = None
    ) -> BackendGrammar:
        """The source, ready to be followed. Raises a GrammarError that says why it is refused."""
        if kind not in self.kinds:
            raise UnsupportedByBackend(self.name, kind)
        compile_it: Any = getattr(self.compiler, f"compile_{kind}")
        given = dict(options or {})
        if given:
            known = inspect.signature(compile_it).parameters
            for name in given:
                if name not in known or known[name].kind is not inspect.Parameter.KEYWORD_ONLY:
                    raise UnsupportedByBackend(self.name, f"the option {name!r} of {kind}")
        try:
            compiled: BackendGrammar = compile_it(_parsed(kind, source), **given)
        except GrammarError:
            raise
        except ValueError as error:  # an option's value
            raise InvalidGrammar(str(error)) from error
        return compiled


def _parsed(kind: Kind, source: str) -> object:
    """The source as the compiler takes it."""
    return choices_of(source) if kind == "choices" else source


def choices_of(source: str) -> list[str]:
    """The options in a JSON array. Raises InvalidGrammar if it is none of strings, or empty."""
    try:
        listed = json.loads(source)
    except (ValueError, RecursionError) as error:
        raise InvalidGrammar(f"the choices are not JSON: {error}") from error
    if not isinstance(listed, list) or not all(isinstance(each, str) for each in listed):
        raise InvalidGrammar("choices must be an array of strings")
    if not listed:
        raise InvalidGrammar("choices must not be empty")
    return listed
