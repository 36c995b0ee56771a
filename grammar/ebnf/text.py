"""What the readers of grammars have in common: a place in a text, and errors that name it."""

from __future__ import annotations

import re

from palmette.grammar.errors import (
    GrammarError,
    GrammarTooComplex,
    InvalidGrammar,
    UnsupportedGrammar,
)
from palmette.grammar.term_store import TermStore

BOUNDS = {"*": (0, None), "+": (1, None), "?": (0, 1)}  # of repetitions
_LONGEST_COUNT = 18  # digits


class Reader:
    """A position in a source that moves forward."""

    def __init__(self, source: str, store: TermStore) -> None:
        self.source = source
        self.at = 0
        self.store = store
        self._depth = 0

    @property
    def is_at_end(self) -> bool:
        return self.at >= len(self.source)

    def looks_at(self, text: str) -> bool:
        return self.source.startswith(text, self.at)

    def take(self, text: str) -> bool:
        """Go past `text` if it comes next."""
        if self.looks_at(text):
            self.at += len(text)
            return True
        return False

    def match(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Go past what matches the pattern here."""
        self.store.spend()
        found = pattern.match(self.source, self.at)
        if found is not None:
            self.at = found.end()
        return found

    def skip(self, blank: re.Pattern[str]) -> None:
        """Go past as many of these as there are. The pattern does not match nothing.

        One by one: a pattern that repeats itself takes memory for each time it does.
        """
        while self.match(blank) is not None:
            pass

    def open_group(self) -> None:
        """Count one more group around what follows."""
        self._depth += 1
        if self._depth > self.store.limits.max_nesting:
            raise GrammarTooComplex(
                f"more than {self.store.limits.max_nesting} groups inside each other",
                pointer=self.where(),
            )

    def close_group(self) -> None:
        self._depth -= 1

    def count(self, digits: str, at: int) -> int:
        """The number of repetitions that is written there."""
        if len(digits) > _LONGEST_COUNT:
            raise self.invalid("a count beyond all measure", at)
        return int(digits)

    def where(self, at: int | None = None) -> str:
        """A position for a person."""
        at = self.at if at is None else at
        line = self.source.count("\n", 0, at) + 1
        return f"line {line}, column {at - self.source.rfind(chr(10), 0, at)}"

    def invalid(self, message: str, at: int | None = None) -> InvalidGrammar:
        return InvalidGrammar(message, pointer=self.where(at))

    def unsupported(self, feature: str, at: int | None = None) -> UnsupportedGrammar:
        return UnsupportedGrammar(
            f"{feature} is not supported", feature=feature, pointer=self.where(at)
        )

    def shown(self) -> str:
        """What comes next, for a message."""
        if self.is_at_end:
            return "the end"
        return repr(self.source[self.at : self.at + 12].split("\n")[0] or "\n")


def placed(error: GrammarError, where: str) -> GrammarError:
    """The same error, said of a place in the source around it."""
    if isinstance(error, UnsupportedGrammar):
        return UnsupportedGrammar(str(error), feature=error.feature, pointer=where)
    return type(error)(str(error), pointer=where)
