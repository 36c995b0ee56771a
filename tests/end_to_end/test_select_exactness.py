"""`select` against brute force: the reference evaluates every sequence alone, and the rules of
docs/language.md are written out here once more.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

import palmette as pm
from palmette.protocol import Piece, Usage
from palmette.runtime.async_engine import AsyncEngine
from tests.end_to_end.tiny_bpe import async_engine, next_logprobs, tokenizer

TOKENS = tokenizer()
ON_ENGINES = settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
# Pieces that merge with what stands beside them, or share bytes of a character.
PIECES = ["a", "b", "ab", "c", " a", " th", "e", "n", " ", ":", "//", "http", "é", "🐈", "🐕", '"']
TEXT = st.lists(st.sampled_from(PIECES), min_size=1, max_size=4).map("".join)
OPTIONS = st.lists(TEXT, min_size=2, max_size=5, unique=True)


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    with async_engine() as engine:
        yield engine


@pm.function
def choose(s: pm.State, prompt: str, options: list[str], rule: str = "probability") -> None:
    s += prompt + pm.select("x", options, choices_method=rule)


# -- The rules, written out ----------------------------------------------------------------------


def encoded(prompt: str, options: Sequence[str]) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The prompt that all options share, and each option's tokens from there on."""
    alone = TOKENS.encode(prompt)
    full = [TOKENS.encode([Piece(prompt), Piece(option)]) for option in options]
    shared = 0
    while shared < len(alone) and all(ids[: shared + 1] == alone[: shared + 1] for ids in full):
        shared += 1
    if shared == 0:  # nothing would be left to go on from
        return tuple(alone), [tuple(TOKENS.encode(option)) for option in options]
    return tuple(alone[:shared]), [tuple(ids[shared:]) for ids in full]


def logprobs_of(prompt: tuple[int, ...], ids: tuple[int, ...]) -> list[float]:
    return [float(next_logprobs(prompt + ids[:i])[token]) for i, token in enumerate(ids)]


def likelihoods(prompt: tuple[int, ...], continuations: list[tuple[int, ...]]) -> list[float]:
    """P(its tokens | prompt), times P(not on into a longer option | prompt, its tokens)."""
    found = []
    for ids in continuations:
        likelihood = math.exp(sum(logprobs_of(prompt, ids)))
        ways_on = {other[len(ids)] for other in continuations if is_begun_by(other, ids)}
        after = next_logprobs(prompt + ids)
        found.append(likelihood * (1 - sum(math.exp(float(after[token])) for token in ways_on)))
    return found


def is_begun_by(longer: tuple[int, ...], ids: tuple[int, ...]) -> bool:
    return len(longer) > len(ids) and longer[: len(ids)] == ids


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def greedy(rows: list[list[float]]) -> set[int]:
    """Those left after keeping, token by token, the ones whose token is the likeliest."""
    left = set(range(len(rows)))
    for place in range(max(map(len, rows))):
        values = {i: rows[i][place] if place < len(rows[i]) else mean(rows[i]) for i in left}
        left = {i for i in left if values[i] >= max(values.values()) - 1e-5}
    return left


def unconditional(ids: tuple[int, ...]) -> list[float]:
    return [0.0, *(float(next_logprobs(ids[:i])[ids[i]]) for i in range(1, len(ids)))]


def best(scores: Sequence[float]) -> set[int]:
    """Those that are the highest but for rounding."""
    return {i for i, score in enumerate(scores) if score >= max(scores) - 1e-5}


# -- Probabilities -------------------------------------------------------------------------------


@ON_ENGINES
@given(prompt=TEXT, options=OPTIONS, data=st.data())
def test_probabilities_are_those_of_brute_force_in_any_order(
    engine: AsyncEngine, prompt: str, options: list[str], data: st.DataObject
) -> None:
    shared, continuations = encoded(prompt, options)
    assume(len(set(continuations)) == len(options))
    raw = likelihoods(shared, continuations)
    expected = dict(zip(options, (value / sum(raw) for value in raw), strict=True))
    if data.draw(st.booleans()):
        engine.flush_cache()
    seen = []
    for order in (options, options[::-1], data.draw(st.permutations(options))):
        state = choose.run(prompt, order, backend=engine)
        meta = state.meta("x")
        assert meta["probabilities"] == pytest.approx(expected, abs=1e-5)
        assert math.fsum(meta["probabilities"].values()) == pytest.approx(1, abs=1e-12)
        assert list(meta["probabilities"]) == list(order)
        chosen = options.index(state["x"])
        assert expected[state["x"]] >= max(expected.values()) - 1e-5
        assert meta["log_likelihoods"] == pytest.approx(
            {o: math.log(v) for o, v in zip(options, raw, strict=True)}, rel=1e-4, abs=1e-4
        )
        assert state.token_ids() == shared + continuations[chosen]
        assert TOKENS.decode(state.token_ids()) == state.text() == prompt + state["x"]
        seen.append(meta["probabilities"])
    assert seen[0] == pytest.approx(seen[1], abs=1e-6)
    assert seen[0] == pytest.approx(seen[2], abs=1e-6)


def test_the_drawn_options_cover_every_shape() -> None:
    """That the property above is not one of easy cases."""
    shapes: Counter[str] = Counter()

    @settings(max_examples=200, derandomize=True, database=None)
    @given(prompt=TEXT, options=OPTIONS)
    def look(prompt: str, options: list[str]) -> None:
        shared, continuations = encoded(prompt, options)
        pairs = list(itertools.permutations(continuations, 2))
        shapes["begins another"] += any(is_begun_by(b, a) for a, b in pairs)
        shapes["share a beginning"] += any(a[0] == b[0] for a, b in pairs)
        shapes["over the boundary"] += len(shared) < len(TOKENS.encode(prompt))
        shapes["bytes of a character"] += any(not o.isascii() for o in options)
        shapes["of several tokens"] += any(len(ids) > 2 for ids in continuations)

    look()
    assert len(shapes) == 5
    assert all(count >= 20 for count in shapes.values()), shapes


def test_an_option_may_begin_a_chain_of_others(engine: AsyncEngine) -> None:
    options = ["x", "xa", "xab", "xy", "xyz", "x🐈", "x🐕"]
    shared, continuations = encoded("so: ", options)
    raw = likelihoods(shared, continuations)
    meta = choose.run("so: ", options, backend=engine).meta("x")
    expected = {o: v / sum(raw) for o, v in zip(options, raw, strict=True)}
    assert meta["probabilities"] == pytest.approx(expected, abs=1e-5)


# -- Passes and tokens ---------------------------------------------------------------------------


def trie_nodes(continuations: Sequence[tuple[int, ...]]) -> int:
    """The places after which something is asked, but for the prompt's end."""
    return len({ids[:end] for ids in continuations for end in range(1, len(ids))})


@ON_ENGINES
@given(prompt=TEXT, options=OPTIONS)
def test_all_options_take_one_pass_over_shared_keys_and_values(
    engine: AsyncEngine, prompt: str, options: list[str]
) -> None:
    shared, continuations = encoded(prompt, options)
    assume(len(set(continuations)) == len(options))
    engine.flush_cache()
    # That the prompt is there, so that options do not wait for the first of them to compute it.
    choose.run(prompt + "~", ["a", "b"], backend=engine)
    before = engine.stats()
    usage = choose.run(prompt, options, backend=engine).usage()
    did = engine.stats().since(before)
    assert did.requests_started == 1
    assert usage.prompt_tokens == len(shared) + trie_nodes(continuations)
    # The last token of the prompt, for its logits; the nodes, as far as nobody computed them.
    assert usage.prefilled_tokens <= 1 + trie_nodes(continuations)
    assert did.computed_tokens - usage.recomputed_tokens == usage.prefilled_tokens


def test_the_steps_of_a_select_do_not_grow_with_its_options() -> None:
    """Beginnings that options share are computed once: first by one of them, then by the rest."""
    prompt = "A question of some length, and its answer:"
    for num_options in (2, 8, 32):
        options = [f" {i:02d} and {i:02d}" for i in range(num_options)]
        shared, continuations = encoded(prompt, options)
        with async_engine() as engine:
            before = engine.stats()
            usage = choose.run(prompt, options, backend=engine).usage()
            did = engine.stats().since(before)
            assert did.steps <= 3
            assert usage.prefilled_tokens == len(shared) + trie_nodes(continuations)
            assert usage.recomputed_tokens == 0
            assert did.computed_tokens == usage.prefilled_tokens


@ON_ENGINES
@given(prompt=TEXT, options=OPTIONS)
def test_a_select_that_was_made_before_computes_one_token_beside_those_of_its_options(
    engine: AsyncEngine, prompt: str, options: list[str]
) -> None:
    """The last token of the prompt, since the probability of an option's last token is not kept."""
    _, continuations = encoded(prompt, options)
    assume(len(set(continuations)) == len(options))
    first = choose.run(prompt, options, backend=engine).meta("x")
    again = choose.run(prompt, options, backend=engine)
    assert again.meta("x")["probabilities"] == pytest.approx(first["probabilities"], abs=1e-5)
    assert again.usage().prefilled_tokens <= 1 + trie_nodes(continuations)


def test_a_select_of_single_tokens_on_a_known_prompt_computes_one_token(
    engine: AsyncEngine,
) -> None:
    prompt, options = "Yes or no? x", ["a", "b", "c"]
    choose.run(prompt, options, backend=engine)
    assert choose.run(prompt, options, backend=engine).usage().prefilled_tokens == 1
    assert choose.run(prompt, ["d", "e"], backend=engine).usage().prefilled_tokens == 1


# -- Forks, batches, rules, draws ----------------------------------------------------------------


def test_forks_and_batches_have_the_same_probabilities(engine: AsyncEngine) -> None:
    prompt = "One of them is th"
    sets = [["e", "en", "x"], [" a", "ab", "abc"], ["🐈", "🐕", "é", "éé"], ["e", "q"]]

    @pm.function
    def forked(s: pm.State) -> None:
        s += prompt
        branches = s.fork(len(sets))
        branches += [pm.select("x", options) for options in sets]
        branches.join()

    expected = []
    for options in sets:
        shared, continuations = encoded(prompt, options)
        raw = likelihoods(shared, continuations)
        expected.append({o: v / sum(raw) for o, v in zip(options, raw, strict=True)})
    batch = choose.run_batch([{"prompt": prompt, "options": o} for o in sets], backend=engine)
    with async_engine(num_pages=40, max_batch_tokens=3, max_running=2) as small:
        tight = choose.run_batch([{"prompt": prompt, "options": o} for o in sets], backend=small)
    for metas in (
        forked.run(backend=engine).meta("x"),
        [state.meta("x") for state in batch],
        [state.meta("x") for state in tight],
    ):
        for meta, wanted in zip(metas, expected, strict=True):
            assert meta["probabilities"] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("rule", [each.value for each in pm.ChoicesMethod])
@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(prompt=TEXT, options=OPTIONS)
def test_every_rule_picks_what_its_brute_force_picks(
    engine: AsyncEngine, rule: str, prompt: str, options: list[str]
) -> None:
    shared, continuations = encoded(prompt, options)
    assume(len(set(continuations)) == len(options))
    rows = [logprobs_of(shared, ids) for ids in continuations]
    state = choose.run(prompt, options, rule, backend=engine)
    scores = state.meta("x")["scores"]
    if rule == "probability":
        expected = [math.log(value) for value in likelihoods(shared, continuations)]
        allowed = best(expected)
    elif rule == "token_length_normalized":
        expected = list(map(mean, rows))
        allowed = best(expected)
    elif rule == "greedy_token_selection":
        expected = [row[0] for row in rows]
        allowed = greedy(rows)
    else:
        alone = [unconditional(ids) for ids in continuations]
        expected = [
            mean([a - b for a, b in zip(row, base, strict=True)])
            for row, base in zip(rows, alone, strict=True)
        ]
        allowed = best(expected)
    wanted = dict(zip(options, expected, strict=True))
    assert scores == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    assert options.index(state["x"]) in allowed
    raw = likelihoods(shared, continuations)
    assert state.meta("x")["probabilities"] == pytest.approx(
        {o: v / sum(raw) for o, v in zip(options, raw, strict=True)}, abs=1e-5
    )


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_draws_come_as_often_as_their_probabilities_to_that_power(
    engine: AsyncEngine, temperature: float
) -> None:
    # Tokens that the model finds likely enough for the draws to tell.
    prompt = "x: "
    shared = tuple(TOKENS.encode(prompt))
    likely = next_logprobs(shared).topk(40).indices.tolist()
    options = [
        text
        for token_id in likely
        if (text := TOKENS.decode([token_id])).isascii() and text.isprintable() and text
    ][:3]
    shared, continuations = encoded(prompt, options)
    weights = [value ** (1 / temperature) for value in likelihoods(shared, continuations)]
    num_draws = 300

    @pm.function
    def draw(s: pm.State, seed: int) -> None:
        s += prompt + pm.select("x", options, temperature=temperature, seed=seed)

    states = draw.run_batch(list(range(num_draws)), backend=engine)
    counts = Counter(state["x"] for state in states)
    for option, weight in zip(options, weights, strict=True):
        p = weight / sum(weights)
        # Four standard deviations of a binomial; the seeds are fixed, so this holds or does not.
        assert abs(counts[option] - num_draws * p) <= 4 * math.sqrt(num_draws * p * (1 - p)) + 1


def test_usage_of_a_select_adds_up() -> None:
    rng = random.Random(0)
    with async_engine() as engine:
        for _ in range(20):
            prompt = "".join(rng.choices(PIECES, k=5))
            options = list({"".join(rng.choices(PIECES, k=3)) for _ in range(4)})
            usage: Usage = choose.run(prompt, options, backend=engine).usage()
            assert usage.prompt_tokens == usage.cached_tokens + usage.prefilled_tokens
            assert usage.completion_tokens == 0
