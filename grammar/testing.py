"""Small vocabularies and slow, obvious answers to hold the fast ones against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from palmette.grammar.compiled import CompiledGrammar
from palmette.grammar.mask import BoolArray
from palmette.grammar.matcher import Matcher
from palmette.grammar.vocabulary import Vocabulary


def byte_vocabulary(more: Iterable[bytes] = (), *, num_padding: int = 0) -> Vocabulary:
    """Token `b` is the byte `b`; then `more`; then the stop token; then rows without tokens."""
    tokens = [bytes([byte]) for byte in range(256)] + list(more) + [b""]
    return Vocabulary(tokens, {len(tokens) - 1}, len(tokens) + num_padding)


def accepts(grammar: CompiledGrammar, text: str | bytes) -> bool:
    """Whether the text is complete under the grammar; over a vocabulary with all single bytes."""
    vocabulary = grammar.vocabulary
    token_of = {token: i for i, token in enumerate(vocabulary.token_bytes) if len(token) == 1}
    matcher = grammar.matcher()
    raw = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    return all(matcher.accept(token_of[bytes([byte])]) for byte in raw) and matcher.is_complete


def mask_of(matcher: Matcher, vocabulary: Vocabulary, *, budget: int | None = None) -> BoolArray:
    """A fresh mask of where the matcher stands."""
    row: BoolArray = np.ones(vocabulary.num_rows, bool)
    matcher.fill_mask(row, budget=budget)
    return row


def brute_force_mask(matcher: Matcher, vocabulary: Vocabulary) -> BoolArray:
    """Each token tried by itself, byte by byte."""
    row: BoolArray = np.zeros(vocabulary.num_rows, bool)
    for token_id in range(vocabulary.num_rows):
        if matcher.accept(token_id):
            row[token_id] = True
            matcher.rollback(1)
    return row


def allowed(matcher: Matcher, vocabulary: Vocabulary, *, budget: int | None = None) -> list[int]:
    """The tokens of the mask, ascending."""
    row = mask_of(matcher, vocabulary, budget=budget)
    return [int(token_id) for token_id in np.flatnonzero(row)]


def text_of(vocabulary: Vocabulary, token_ids: Sequence[int]) -> bytes:
    """The bytes that the tokens spell."""
    return b"".join(vocabulary.token_bytes[token_id] for token_id in token_ids)
