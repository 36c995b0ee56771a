"""Random schemas of all keywords, and random instances: accepted exactly if they are valid."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from palmette.grammar import (
    CompiledGrammar,
    GrammarCompiler,
    GrammarError,
    GrammarTooComplex,
    UnsatisfiableGrammar,
)
from palmette.grammar.testing import accepts, byte_vocabulary
from tests.grammar.random_schemas import NAMES, VALUES, RandomSchemas, is_valid, read_json

# Without line ends, about which Python's `$` and that of ECMA-262 differ.
SCALARS = [value for value in VALUES if not isinstance(value, (list, dict)) and value != "é\n"]
SCALARS += [5, 10, -20, 2, 1.5, 1.0, "b", "ab", "bc", "c", "12", "2024-02-29", "x-1", "éé"]

compiler = GrammarCompiler(byte_vocabulary())


def instance(rng: random.Random, depth: int = 3) -> Any:
    chance = rng.random()
    if depth == 0 or chance < 0.5:
        return rng.choice(SCALARS)
    size = rng.choice((0, 1, 1, 2, 2, 3, 4))
    if chance < 0.72:
        return [instance(rng, depth - 1) for _ in range(size)]
    names = rng.sample((*NAMES, "d", "zz"), size)
    return {name: instance(rng, depth - 1) for name in names}


@pytest.mark.parametrize("first", range(0, 400, 50))
def test_what_is_accepted_in_any_order_is_what_is_valid(first: int) -> None:
    num_accepted = num_rejected = 0
    for seed in range(first, first + 50):
        schema = RandomSchemas(seed).draw()
        grammar: CompiledGrammar | None = None
        try:
            grammar = compiler.compile_json_schema(schema, order="any")
        except UnsatisfiableGrammar:
            pass
        except GrammarError:
            continue
        rng = random.Random(seed)
        for _ in range(15):
            value = instance(rng)
            text = json.dumps(value, separators=(",", ":"), ensure_ascii=False)
            try:
                expected = is_valid(schema, read_json(text))
                accepted = grammar is not None and accepts(grammar, text)
            except (RecursionError, GrammarTooComplex):
                continue  # a circle of references that only jsonschema walks; a limit of time
            assert accepted == expected, (seed, schema, text)
            num_accepted += accepted
            num_rejected += not accepted
    assert num_accepted > 50
    assert num_rejected > 50
