"""The engine of Outlines: an index of every state of a regex and every token."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any, Protocol

import numpy as np
import outlines_core
from numpy.typing import NDArray
from outlines_core.json_schema import build_regex_from_schema

from palmette.grammar.backends.adapted import (
    AdaptedGrammar,
    BoolArray,
    Remembered,
    TextTokens,
    check_options,
    check_source,
    encoded,
    refusals_of,
    with_ascii_classes,
)
from palmette.grammar.backends.own import choices_of
from palmette.grammar.backends.protocol import Feature, Kind
from palmette.grammar.errors import GrammarError, InvalidGrammar, UnsupportedGrammar
from palmette.grammar.limits import Limits
from palmette.grammar.vocabulary import Vocabulary

_OPTIONS: dict[Kind, dict[str, Collection[object]]] = {
    "regex": {"syntax": ("ecma",)},
    "choices": {},
    "json_schema": {"whitespace": ("compact",), "order": ("declared",), "undeclared": ("allowed",)},
}
_NUM_INDEXES = 16  # remembered; one may take tens of megabytes
_NUM_ROWS = 512  # of a grammar, remembered; up to 8 bytes for every token


class _Index(Protocol):
    def get_initial_state(self) -> int: ...
    def get_next_state(self, state: int, token_id: int) -> int | None: ...
    def get_allowed_tokens(self, state: int) -> list[int] | None: ...
    def is_final_state(self, state: int) -> bool: ...


class OutlinesCoreBackend:
    """Regexes, and schemas as far as the library turns them into one.

    All states are worked out over the whole vocabulary when a grammar is compiled, which takes
    seconds for large ones, without a bound that could be set. A pattern that matches the empty text
    is refused.
    """

    name = "outlines-core"
    kinds: frozenset[Kind] = frozenset(_OPTIONS)
    features: frozenset[Feature] = frozenset()

    def __init__(self, vocabulary: Vocabulary, *, limits: Limits | None = None) -> None:
        self._limits = limits or Limits()
        self._tokens = TextTokens(vocabulary)
        ids_of: dict[bytes, list[int]] = {}
        for token_id, text in enumerate(vocabulary.token_bytes):
            if text:
                ids_of.setdefault(text, []).append(token_id)
        # The library wants one end-of-sequence token. It gets an id of its own, since we allow our
        # stop tokens ourselves.
        self._vocabulary: Any = outlines_core.Vocabulary(vocabulary.num_rows, ids_of)
        self._bytes: Any = outlines_core.Vocabulary(256, {bytes([i]): [i] for i in range(256)})
        self._compiled: Remembered[str, AdaptedGrammar] = Remembered(_NUM_INDEXES)

    @property
    def version(self) -> str:
        from importlib.metadata import version

        return version("outlines-core")

    @property
    def vocabulary(self) -> Vocabulary:
        return self._tokens.vocabulary

    def compile(
        self, kind: Kind, source: str, options: Mapping[str, object] | None = None
    ) -> AdaptedGrammar:
        """The source, ready to be followed. Raises a GrammarError that says why it is refused."""
        check_source(self.name, self.kinds, self._limits, kind, source)
        check_options(self.name, kind, options, _OPTIONS[kind])
        encoded(source)
        with refusals_of(self.name, _refusal):
            pattern = _pattern(kind, source)
            return self._compiled.get(pattern, lambda: self._compile(pattern))

    def _compile(self, pattern: str) -> AdaptedGrammar:
        outlines_core.Index(pattern, self._bytes)  # or `a)(b` would pass in the group
        # The library follows the first alternative that matches and no other one, and an index
        # whose first state is final lacks transitions. Asking for the end makes it look at all
        # alternatives, and refuse the latter.
        index = outlines_core.Index(rf"(?:{pattern})\z", self._vocabulary)
        states = _States(index, self._tokens)
        return AdaptedGrammar(self.name, self._tokens, lambda: _Cursor(states))


def _pattern(kind: Kind, source: str) -> str:
    if kind == "json_schema":
        pattern: str = build_regex_from_schema(source, "")
        return pattern
    if kind == "choices":
        return "|".join(_literal(option) for option in choices_of(source))
    return with_ascii_classes(source)


def _literal(text: str) -> str:
    return "(?:" + re.sub(r"([\\.+*?()|\[\]{}^$#&~-])", r"\\\1", text) + ")"


def _refusal(message: str) -> GrammarError:
    if "Unsupported JSON Schema" in message:
        return UnsupportedGrammar(message.splitlines()[0], feature="a keyword of the schema")
    if "anchored universal start" in message:
        return UnsupportedGrammar(
            f"{message} (it begins with an anchor, or matches the empty text)",
            feature="an anchor at the start, or an empty text",
        )
    return InvalidGrammar(message)


class _States:
    """An index, and the masks of the states seen last."""

    def __init__(self, index: _Index, tokens: TextTokens) -> None:
        self.index = index
        self._num_rows = tokens.vocabulary.num_rows
        self._allowed: Remembered[int, NDArray[np.int32]] = Remembered(_NUM_ROWS)

    def allowed(self, state: int) -> NDArray[np.int32]:
        """Ids of the tokens that may come."""
        return self._allowed.get(state, lambda: self._ask(state))

    def _ask(self, state: int) -> NDArray[np.int32]:
        ids = np.array(self.index.get_allowed_tokens(state) or [], np.int32)
        return ids[ids < self._num_rows]


class _Cursor:
    def __init__(self, states: _States, passed: list[int] | None = None) -> None:
        self._states = states
        self._passed = passed or [states.index.get_initial_state()]

    @property
    def is_complete(self) -> bool:
        return self._states.index.is_final_state(self._passed[-1])

    def write_allowed(self, row: BoolArray) -> None:
        row[:] = False
        row[self._states.allowed(self._passed[-1])] = True

    def advance(self, token_id: int) -> bool:
        after = self._states.index.get_next_state(self._passed[-1], token_id)
        if after is None:
            return False
        self._passed.append(after)
        return True

    def retreat(self, num_tokens: int) -> None:
        del self._passed[len(self._passed) - num_tokens :]

    def copy(self) -> _Cursor:
        return _Cursor(self._states, self._passed.copy())
