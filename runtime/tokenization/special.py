"""Control tokens: where they are spelled in a text, and which ids they have."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SpecialToken:
    """A control token. `strips_left` and `strips_right` swallow the white space beside it."""

    token_id: int
    text: str
    strips_left: bool = False
    strips_right: bool = False


class SpecialTokens:
    """The control tokens of a vocabulary, found in text by their spelling, longest first."""

    def __init__(self, tokens: Iterable[SpecialToken]) -> None:
        self._by_text = {token.text: token for token in tokens if token.text}
        spellings = sorted(self._by_text, key=lambda text: (-len(text), text))
        self._pattern = re.compile("|".join(map(re.escape, spellings))) if spellings else None
        self.ids: frozenset[int] = frozenset(token.token_id for token in self._by_text.values())

    @property
    def by_text(self) -> Mapping[str, SpecialToken]:
        """The tokens by their spelling."""
        return self._by_text

    def spans(self, text: str) -> Iterator[tuple[int, int, SpecialToken]]:
        """Where control tokens are spelled, left to right: start, end, token."""
        if self._pattern is not None:
            for match in self._pattern.finditer(text):
                yield match.start(), match.end(), self._by_text[match.group()]

    def starts(self, text: str) -> Iterator[int]:
        """Where spellings of control tokens begin, also inside one another."""
        position = 0
        while self._pattern is not None and (match := self._pattern.search(text, position)):
            yield match.start()
            position = match.start() + 1

    def split(self, text: str) -> Iterator[str | int]:
        """The text as runs of ordinary text (never empty) and the ids of control tokens.

        White space beside a token that swallows it is left out, as the model saw it in training.
        """
        start = 0
        strip_next = False
        for left, right, token in self.spans(text):
            run = text[start:left]
            if strip_next:
                run = run.lstrip()
            if token.strips_left:
                run = run.rstrip()
            if run:
                yield run
            yield token.token_id
            start, strip_next = right, token.strips_right
        run = text[start:]
        if strip_next:
            run = run.lstrip()
        if run:
            yield run
