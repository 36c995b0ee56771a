"""A vocabulary of the size models have: a real one where a model is at hand, else a made-up one."""

from __future__ import annotations

import json
import os
import random
from typing import Any

import numpy as np
import pytest

from palmette.grammar import CompiledGrammar, GrammarCompiler, Vocabulary
from palmette.grammar.testing import accepts, mask_of, text_of

SCHEMAS: dict[str, Any] = {
    "ticket": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "tags": {"type": "array", "items": {"type": "string", "maxLength": 30}, "maxItems": 5},
            "team": {"enum": ["billing", "network", "accounts"]},
        },
        "required": ["name", "team"],
        "additionalProperties": False,
    },
    "open": {
        "type": "object",
        "properties": {"id": {"type": "string", "pattern": "^[A-Z]+-[0-9]+$"}},
    },
    "anything": {},
    "formats": {
        "type": "array",
        "items": {
            "anyOf": [{"type": "string", "format": f} for f in ("date-time", "email", "uri")]
        },
        "minItems": 1,
    },
}


def byte_characters() -> dict[str, int]:
    """How byte-level BPE vocabularies write bytes: printable ones as themselves, others shifted."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(256 + i): byte for i, byte in enumerate(others)}


def read_gguf(path: str) -> Vocabulary:
    """The vocabulary of a model with a byte-level tokenizer."""
    from gguf import GGUFReader, TokenType

    reader = GGUFReader(path)
    written = reader.fields["tokenizer.ggml.tokens"].contents()
    types = reader.fields["tokenizer.ggml.token_type"].contents()
    known = byte_characters()
    special = [i for i, kind in enumerate(types) if kind != TokenType.NORMAL]
    tokens = [
        b"" if kind != TokenType.NORMAL else bytes(known[character] for character in token)
        for token, kind in zip(written, types, strict=True)
    ]
    return Vocabulary(tokens, {special[0]})


def make_up(num_tokens: int) -> Vocabulary:
    """Pieces of words, digits, punctuation, spaces and of characters of several bytes."""
    generator = random.Random(7)
    letters = "etaoinshrdlucmfwypvbgkjqxz"
    tokens = {bytes([byte]) for byte in range(256)}
    tokens |= {b" " * n for n in range(2, 40)} | {b"\n" * n for n in range(2, 9)}
    tokens |= {mark + b'"' for mark in (b"{", b"[", b",", b":", b" ", b'"')}
    tokens |= {b'"' + mark for mark in (b"}", b"]", b",", b":", b"},", b',"', b':"')}
    tokens |= {str(number).encode() for number in range(1000)}
    tokens |= {"éàüñç東京都日本語пр"[i : i + n].encode() for i in range(12) for n in (1, 2, 3)}
    while len(tokens) < num_tokens - 1:
        word = "".join(generator.choices(letters, range(26, 0, -1), k=generator.randint(2, 9)))
        word = generator.choice(
            [word, word.title(), " " + word, word + '"', "_" + word, word + ","]
        )
        tokens.add(word.encode())
    return Vocabulary([*sorted(tokens), b""], {num_tokens - 1})


@pytest.fixture(scope="module")
def vocabulary() -> Vocabulary:
    """That of the model file PALMETTE_TEST_GGUF if it is set, else the made-up one."""
    path = os.environ.get("PALMETTE_TEST_GGUF")
    return read_gguf(path) if path else make_up(49_152)


@pytest.fixture(scope="module")
def compiler(vocabulary: Vocabulary) -> GrammarCompiler:
    return GrammarCompiler(vocabulary)


def sampled_walk(
    grammar: CompiledGrammar, vocabulary: Vocabulary, seed: int, budget: int
) -> list[int]:
    """Generate at random; at every step check the mask on a sample of tokens of both sorts."""
    generator = random.Random(seed)
    row = np.zeros(vocabulary.num_rows, bool)
    matcher = grammar.matcher()
    path: list[int] = []
    for left in range(budget, 0, -1):
        full = mask_of(matcher, vocabulary)
        matcher.fill_mask(row, budget=left)
        assert not (row & ~full).any()
        for mask, expected in ((full, True), (~full, False)):
            for token_id in generator.sample(np.flatnonzero(mask).tolist(), min(60, mask.sum())):
                assert matcher.accept(token_id) == expected
                if expected:
                    matcher.rollback(1)
        if matcher.is_complete and generator.random() < 0.3:
            break
        open_tokens = [t for t in np.flatnonzero(row) if t not in vocabulary.stop_token_ids]
        if not open_tokens:
            break
        token_id = int(generator.choice(open_tokens))
        assert matcher.accept(token_id)
        path.append(token_id)
    assert matcher.is_complete
    return path


@pytest.mark.parametrize("name", sorted(SCHEMAS))
def test_masks_are_right_and_texts_complete_within_their_budget(
    name: str, vocabulary: Vocabulary, compiler: GrammarCompiler
) -> None:
    grammar = compiler.compile_json_schema(SCHEMAS[name])
    for seed in range(3):
        budget = grammar.shortest_length + 20 * seed
        text = text_of(vocabulary, sampled_walk(grammar, vocabulary, seed, budget))
        json.loads(text)
        assert accepts(grammar, text)


def test_the_whole_mask_of_a_string_is_right(
    vocabulary: Vocabulary, compiler: GrammarCompiler
) -> None:
    matcher = compiler.compile_json_schema({"type": "string"}).matcher()
    opening = next(i for i, token in enumerate(vocabulary.token_bytes) if token == b'"')
    assert matcher.accept(opening)
    row = mask_of(matcher, vocabulary)
    for token_id, token in enumerate(vocabulary.token_bytes):
        assert row[token_id] == could_continue_a_string(token), token


# One for each state a token can end in: inside, outside, within an escape or a character.
ENDINGS = [b'"', b"", b'""', b'u0000"', b'0000"', b'000"', b'00"', b'0"']
ENDINGS += [b'\x80"', b'\x80\x80"', b'\xa0\x80"', b'\x80\x80\x80"', b'\x90\x80\x80"']


def could_continue_a_string(token: bytes) -> bool:
    """By Python's own decoder: whether some ending makes it the rest of a JSON string."""
    if not token:
        return False
    for ending in ENDINGS:
        text = b'"' + token + ending
        try:
            json.loads(text)
        except ValueError:
            continue
        if text.endswith(b'"'):
            return True
    return False
