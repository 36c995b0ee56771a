"""Where a prompt is taken back so that a token may reach from it into what is generated.

A prompt that ends in the middle of what the model would write as one token ends in a place where
its training had no border: behind ``http:`` it has seldom seen ``//``, since ``://`` is one token.
Token healing takes the last text back and has the model draw it again, with whatever follows.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from weakref import WeakKeyDictionary

from palmette.protocol import Tokenizer

_CHARACTER = 4  # bytes, at most


class TokenIndex:
    """The tokens of a vocabulary by what they begin with."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        every = {tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size)}
        self._sorted = sorted(every - {b""})
        self._longest = max(map(len, self._sorted), default=0)

    def num_to_take_back(self, tokens: Sequence[bytes], max_bytes: int) -> int:
        """How many of a text's last `tokens`, of `max_bytes` bytes together at most.

        The longest end of the text with which a longer token begins is looked for: a token may
        reach from there beyond the text. The tokens that hold it are taken back, and as many more
        as it takes to come to the border of a character.
        """
        ends = []  # bytes in the last 1, 2, ... tokens
        taken = b""
        for token in reversed(tokens):
            if not token or len(taken) + len(token) > max_bytes:
                break
            taken = token + taken
            ends.append(len(taken))
            if len(taken) > self._longest + _CHARACTER:
                break
        # A token that reaches beyond the text has at most so many bytes in it.
        for length in range(min(len(taken), self._longest - 1), 0, -1):
            if self._is_begun_by(taken[len(taken) - length :]):
                num_tokens = next(
                    (
                        number
                        for number, end in enumerate(ends, start=1)
                        if end >= length and not _is_inside(taken[len(taken) - end])
                    ),
                    0,
                )
                if num_tokens:
                    return num_tokens
        return 0

    def _is_begun_by(self, text: bytes) -> bool:
        """Whether a longer token begins with the text."""
        place = bisect_right(self._sorted, text)
        return place < len(self._sorted) and self._sorted[place].startswith(text)


def _is_inside(byte: int) -> bool:
    """Whether it is a later byte of a character in UTF-8."""
    return byte & 0xC0 == 0x80


_known: WeakKeyDictionary[Tokenizer, TokenIndex] = WeakKeyDictionary()
_lock = threading.Lock()


def index_of(tokenizer: Tokenizer) -> TokenIndex:
    """That of the tokenizer, made when it is first asked for; some 50 ms for a large vocabulary."""
    with _lock:
        index = _known.get(tokenizer)
        if index is None:
            index = _known[tokenizer] = TokenIndex(tokenizer)
        return index
