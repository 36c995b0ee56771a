"""The text of an answer joined with the tokens that it is made of, byte by byte."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from palmette.errors import RemoteError


@dataclass(frozen=True, slots=True)
class Token:
    """A token of an answer: its bytes, its log-probability, and the likeliest ones in its place."""

    spelled: bytes
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()


Spelled = tuple[str, tuple[float, ...]]
"""A text, and a log-probability for each of its bytes: that of the token that begins there, or 0.
So they add up to that of the text. Those of a token that was cut are NaN."""


class Spelling:
    """Gives out text as far as its tokens are there, whole tokens and whole characters at a time.

    Raises RemoteError where they do not spell the text.
    """

    def __init__(self, tokens: Sequence[Token]) -> None:
        """`tokens` grow as the text does."""
        self._tokens = tokens
        self._num_used = 0
        self._held = b""  # text that was not given out
        self._values: list[float] = []  # of its first bytes

    def take(self, text: str) -> Spelled:
        """What can be given out once `text` has come, too."""
        self._held += text.encode("utf-8", "replace")
        while self._num_used < len(self._tokens):
            token = self._tokens[self._num_used]
            ahead = self._held[len(self._values) :]
            if not ahead.startswith(token.spelled):
                if token.spelled.startswith(ahead):  # more of it may come
                    break
                raise RemoteError(
                    f"the API's tokens do not spell its text: {token.spelled[:40]!r} in place of "
                    f"{ahead[:40]!r}"
                )
            if token.spelled:
                self._values += [token.logprob, *[0.0] * (len(token.spelled) - 1)]
            self._num_used += 1
        count = len(self._values)
        while count < len(self._held) and count and self._held[count] & 0xC0 == 0x80:
            count -= 1
        return self._give_out(count)

    def rest(self) -> Spelled:
        """What is left at the end of the text, which may have cut its last token."""
        missing = len(self._held) - len(self._values)
        if missing and self._num_used == len(self._tokens):
            raise RemoteError("the API did not say how likely its text is")
        self._values += [math.nan] * missing
        return self._give_out(len(self._held))

    def _give_out(self, count: int) -> Spelled:
        text, values = self._held[:count].decode("utf-8", "replace"), tuple(self._values[:count])
        self._held, self._values = self._held[count:], self._values[count:]
        return text, values
