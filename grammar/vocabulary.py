"""The tokens of a model as the grammar engine sees them: bytes, and which ones end a text."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from palmette.grammar.terms import bits_of
from palmette.grammar.token_trie import TokenTrie

if TYPE_CHECKING:
    from palmette.grammar import _native


class Vocabulary:
    """Token `t` stands for the bytes `token_bytes[t]`.

    Empty bytes mark a control token: it is never allowed, except that the tokens in
    `stop_token_ids` are allowed where the text is complete. A stop token never stands for text,
    whatever its bytes. `num_rows` is the width of a mask; rows beyond the tokens (padding of the
    model's output layer) are never allowed.
    """

    def __init__(
        self,
        token_bytes: Sequence[bytes],
        stop_token_ids: Collection[int],
        num_rows: int | None = None,
    ) -> None:
        num_tokens = len(token_bytes)
        self.num_rows = num_tokens if num_rows is None else num_rows
        if self.num_rows < num_tokens:
            raise ValueError(f"num_rows is {self.num_rows}, but there are {num_tokens} tokens")
        for token_id in stop_token_ids:
            if not 0 <= token_id < self.num_rows:
                raise ValueError(f"stop token {token_id} is outside the {self.num_rows} rows")
        self.stop_token_ids = frozenset(stop_token_ids)
        self.token_bytes: tuple[bytes, ...] = tuple(
            b"" if i in self.stop_token_ids else bytes(token) for i, token in enumerate(token_bytes)
        )
        singles = bits_of(token[0] for token in self.token_bytes if len(token) == 1)
        self.alphabet = bits_of(set().union(*self.token_bytes))  # bytes in any token
        # Whether each of them is a token too, so that any text over the alphabet can be spelled.
        self.spells_every_text = singles == self.alphabet

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "native"}

    @cached_property
    def trie(self) -> TokenTrie:
        """Every prefix of every token."""
        return TokenTrie(self.token_bytes)

    @cached_property
    def native(self) -> _native.Vocabulary:
        """The same vocabulary for the machine in C++."""
        from palmette.grammar import _native

        return _native.Vocabulary(self.token_bytes, sorted(self.stop_token_ids), self.num_rows)

    @classmethod
    def from_tokenizer(
        cls,
        tokenizer: Any,
        *,
        stop_token_ids: Collection[int] | None = None,
        num_rows: int | None = None,
    ) -> Vocabulary:
        """That of a tokenizer of Hugging Face; see `palmette.grammar.hf.vocabulary_of`."""
        from palmette.grammar.hf import vocabulary_of

        return vocabulary_of(tokenizer, stop_token_ids=stop_token_ids, num_rows=num_rows)

    @cached_property
    def joined_bytes(self) -> NDArray[np.bool_]:
        """[256, 256]: whether the two bytes stand side by side within any token.

        Between two that do not, every encoding of a text has a border.
        """
        pairs = np.zeros((256, 256), bool)
        text = np.frombuffer(b"".join(self.token_bytes), np.uint8)
        lengths = np.fromiter(map(len, self.token_bytes), np.int64, len(self.token_bytes))
        begins = np.zeros(len(text) + 1, bool)
        begins[np.cumsum(lengths)] = True
        inside = ~begins[1:-1] if len(text) else begins[:0]
        pairs[text[:-1][inside], text[1:][inside]] = True
        return pairs

    @property
    def num_tokens(self) -> int:
        return len(self.token_bytes)

    def fewest_tokens(self, text: bytes) -> list[int] | None:
        """A shortest list of tokens that spells `text`, or None if no list does."""
        best: list[int | None] = [None] * len(text) + [0]  # tokens needed from each position on
        choice = [(0, 0)] * len(text)  # the first of them, and its end
        trie = self.trie
        for start in range(len(text) - 1, -1, -1):
            node = 0
            at = start
            while at < len(text):
                child = trie.child(node, text[at])
                if child is None:
                    break
                node = child
                at += 1
                rest = best[at]
                here = best[start]
                if rest is not None and trie.has_token[node] and (here is None or rest + 1 <= here):
                    best[start] = rest + 1
                    choice[start] = (int(trie.tokens[trie.first_token[node]]), at)
        if best[0] is None:
            return None
        token_ids = []
        at = 0
        while at < len(text):
            token_id, at = choice[at]
            token_ids.append(token_id)
        return token_ids
