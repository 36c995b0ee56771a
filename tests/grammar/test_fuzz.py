"""Random schemas, random logits: whatever is drawn under a mask is valid, within every budget."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from palmette.grammar import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarTooComplex,
    InvalidGrammar,
    Limits,
    UnsatisfiableGrammar,
    UnsupportedGrammar,
    Vocabulary,
)
from palmette.grammar.testing import brute_force_mask, byte_vocabulary, mask_of, text_of
from palmette.runtime.tokenization import load_tokenizer
from tests.grammar.random_schemas import RandomSchemas, is_valid, read_json

TOKENS = (
    *(b'{"', b'":', b'","', b'"}', b'"]', b"[[", b"]]", b"}}", b'""', b"[]", b"{}", b'a"', b'"a'),
    *(b"true", b"null", b"false", b"ab", b"abc", b"00", b"10", b"-1", b".5", b"e-", b"e+", b"0e"),
    *(
        b"\\u00",
        b"\\n",
        b'\\"',
        b"\xc3",
        b"\xc3\xa9",
        b"\xa9\\",
        b'id":',
        b',"b":',
        b'"x-1":[',
        b"2030-",
    ),
)
LIMITS = Limits(compile_seconds=2.0)


@pytest.fixture(scope="module")
def real_vocabulary(smollm2: Path) -> Vocabulary:
    tokenizer = load_tokenizer(smollm2)
    token_bytes = tokenizer.all_token_bytes()
    return Vocabulary(token_bytes, tokenizer.stop_token_ids)


@pytest.mark.parametrize("num_runs", [250, pytest.param(2_000, marks=pytest.mark.slow)])
def test_every_mask_is_that_of_trying_each_token(num_runs: int) -> None:
    vocabulary = byte_vocabulary(TOKENS)
    compiler = GrammarCompiler(vocabulary, limits=LIMITS)
    outcomes = Counter[str]()
    for seed in range(num_runs):
        schema = RandomSchemas(seed).draw()
        grammar = compiled(compiler, schema, outcomes)
        if grammar is None:
            continue
        rng = random.Random(seed)
        matcher = grammar.matcher()
        for _ in range(40):
            mask = mask_of(matcher, vocabulary)
            assert mask.tolist() == brute_force_mask(matcher, vocabulary).tolist(), (seed, schema)
            assert mask.any(), (seed, schema)
            token_id = int(rng.choice(np.flatnonzero(mask)))
            assert matcher.accept(token_id)
            if matcher.is_finished:
                break
    assert outcomes["compiled"] > 0.5 * num_runs, outcomes


@pytest.mark.parametrize("num_runs", [250, pytest.param(5_000, marks=pytest.mark.slow)])
def test_what_random_logits_draw_is_valid_within_every_budget(
    num_runs: int, real_vocabulary: Vocabulary
) -> None:
    compiler = GrammarCompiler(real_vocabulary, limits=LIMITS)
    outcomes = Counter[str]()
    for seed in range(num_runs):
        schema = RandomSchemas(seed).draw()
        grammar = compiled(compiler, schema, outcomes)
        if grammar is None:
            continue
        rng = np.random.default_rng(seed)
        budget = grammar.shortest_length + int(rng.choice((0, 0, 1, 2, 5, 20)))
        text = drawn(grammar, real_vocabulary, rng, budget)
        assert is_valid(schema, read_json(text)), (seed, schema, text)
    assert outcomes["compiled"] > 0.5 * num_runs, outcomes


def compiled(
    compiler: GrammarCompiler, schema: dict[str, object], outcomes: Counter[str]
) -> CompiledGrammar | None:
    """The grammar, or None where it is refused by name or nothing satisfies it."""
    try:
        grammar = compiler.compile_json_schema(schema)
    except InvalidGrammar as error:
        if "refers to itself" not in str(error):
            raise
        outcomes["a circle of references"] += 1
        return None
    except (UnsupportedGrammar, UnsatisfiableGrammar, GrammarTooComplex) as error:
        outcomes[type(error).__name__] += 1
        return None
    outcomes["compiled"] += 1
    return grammar


def drawn(
    grammar: CompiledGrammar, vocabulary: Vocabulary, rng: np.random.Generator, budget: int
) -> str:
    """A text of at most `budget` tokens, and then a stop token."""
    matcher = grammar.matcher()
    token_ids: list[int] = []
    logits = rng.normal(size=vocabulary.num_rows).astype(np.float32)
    while not matcher.is_finished:
        left = budget - len(token_ids)
        mask = mask_of(matcher, vocabulary, budget=left)
        assert mask.any()
        rng.shuffle(logits)
        token_id = int(np.argmax(np.where(mask, logits, -np.inf)))
        assert matcher.accept(token_id)
        if token_id in vocabulary.stop_token_ids:
            break
        token_ids.append(token_id)
    assert len(token_ids) <= budget
    return text_of(vocabulary, token_ids).decode()
