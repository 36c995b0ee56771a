"""Draws by the extension are those by torch, token for token, and log-probabilities the same."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from palmette.errors import EngineError
from palmette.protocol import SamplingParams
from palmette.runtime.kernels import cpu
from palmette.runtime.sampling import SampledToken, Sampler, SamplingRow

native = cpu.extension()
pytestmark = pytest.mark.skipif(native is None, reason="the extension was not built")
NAMES: list[str] = [] if native is None else native.available()

KINDS = ["plain", "ties", "flat", "far", "one", "forbidden", "apart"]
SIZES = [(5, 5), (61, 64), (512, 512), (1023, 1040), (1537, 1537), (9000, 9000)]

# Filters that leave much and little, alone and together, at temperatures of both extremes.
PARAMS = [
    SamplingParams(temperature=temperature, **filters)
    for temperature in (0.0, 1e-9, 0.3, 1.0, 4.0, 1e4)
    for filters in (
        {},
        {"top_p": 0.9},
        {"top_p": 1e-9},
        {"top_p": 0.999999},
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 1500},
        {"min_p": 0.02},
        {"min_p": 1.0},
        {"top_p": 0.7, "top_k": 40, "min_p": 0.001},
    )
]


def logits_of(kind: str, vocab_rows: int, generator: torch.Generator) -> torch.Tensor:
    logits = torch.randn(len(PARAMS), vocab_rows, generator=generator) * 3
    if kind == "ties":
        return logits.round()
    if kind == "flat":
        return logits * 1e-3
    if kind == "far":
        return logits * 40
    if kind == "one":
        logits[:, vocab_rows // 3] = 1e30
    elif kind == "forbidden":
        logits[torch.rand(logits.shape, generator=generator) < 0.9] = -torch.inf
        logits[:, 1] = 0.0
    elif kind == "apart":  # whole stretches weigh nothing, next to others that do
        logits[:, : vocab_rows // 3] = -torch.inf
        logits[:, 2 * vocab_rows // 3 :] -= 1000
        logits[:, 1] = 0.0
    return logits


def sampled(
    sampler: Sampler, logits: torch.Tensor, rows: list[SamplingRow]
) -> list[SampledToken | str]:
    results = sampler.sample(logits, rows)
    return [str(each) if isinstance(each, EngineError) else each for each in results]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab_size", "vocab_rows"), SIZES)
def test_they_are_those_by_torch(
    vocab_size: int, vocab_rows: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator = torch.Generator().manual_seed(vocab_size)
    rng = np.random.default_rng(vocab_size)
    samplers = []
    for name in ("torch", *NAMES):
        monkeypatch.setenv("PALMETTE_KERNELS", name)
        samplers.append(Sampler(vocab_size=vocab_size, vocab_rows=vocab_rows))
    for round_number in range(6):
        logits = logits_of(kind, vocab_rows, generator)
        before = logits.clone()
        rows = []
        for index, params in enumerate(PARAMS):
            options: dict[str, Any] = {}
            if (index + round_number) % 3 == 0:
                mask = rng.random(vocab_rows) < 0.3
                mask[1] = True
                options["mask"] = mask
            if (index + round_number) % 4 == 0:
                options["suppressed"] = (2, 3, vocab_size + 5)
            rows.append(SamplingRow(params=params, seed=index, position=round_number, **options))
        expected = sampled(samplers[0], logits, rows)
        for sampler in samplers[1:]:
            assert sampled(sampler, logits, rows) == expected
        assert torch.equal(logits, before)


def test_rows_come_to_the_same_in_any_company_and_on_any_number_of_threads() -> None:
    generator = torch.Generator().manual_seed(0)
    sampler = Sampler(vocab_size=3000, vocab_rows=3000)
    logits = logits_of("plain", 3000, generator)
    rows = [SamplingRow(params=params, seed=3, position=9) for params in PARAMS]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [sampler.sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
        for num_threads in (1, 2, 4):
            torch.set_num_threads(num_threads)
            assert sampler.sample(logits, rows) == alone
            assert sampler.sample(logits[::2], rows[::2]) == alone[::2]
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0), SamplingParams(top_p=0.5)])
def test_a_row_that_is_not_numbers_ends_alone(bad: float, params: SamplingParams) -> None:
    logits = torch.zeros(3, 50)
    logits[1, 33] = bad
    sampler = Sampler(vocab_size=50, vocab_rows=50)
    rows = [SamplingRow(params=params, seed=0, position=0) for _ in range(3)]
    first, second, third = sampler.sample(logits, rows)
    assert isinstance(first, SampledToken)
    assert isinstance(third, SampledToken)
    assert isinstance(second, EngineError)
    assert "not finite numbers" in str(second)
    # What may not be drawn need not be a number.
    mask = np.ones(50, bool)
    mask[33] = False
    masked = [SamplingRow(params=params, seed=0, position=0, mask=mask) for _ in range(3)]
    assert all(isinstance(each, SampledToken) for each in sampler.sample(logits, masked))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("vocab_size", "vocab_rows"), SIZES)
def test_log_probabilities_are_those_by_torch(
    vocab_size: int, vocab_rows: int, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logits = logits_of(kind, vocab_rows, torch.Generator().manual_seed(vocab_size))
    before = logits.clone()
    rng = np.random.default_rng(vocab_size)
    num_rows = len(logits)
    targets = [rng.integers(vocab_size, size=index % 4).tolist() for index in range(num_rows)]
    token_ids = rng.integers(vocab_size, size=num_rows).tolist()
    num_top = [(0, 1, 5, vocab_size + 3)[index % 4] for index in range(num_rows)]
    monkeypatch.setenv("PALMETTE_KERNELS", "torch")
    by_torch = Sampler(vocab_size=vocab_size, vocab_rows=vocab_rows)
    scores = by_torch.logprobs_of(logits, targets)
    described = by_torch.describe(logits, token_ids, num_top)
    for name in NAMES:
        monkeypatch.setenv("PALMETTE_KERNELS", name)
        sampler = Sampler(vocab_size=vocab_size, vocab_rows=vocab_rows)
        found = sampler.logprobs_of(logits, targets)
        assert list(map(len, found)) == list(map(len, scores))
        for values, expected in zip(found, scores, strict=True):
            assert values == pytest.approx(expected, abs=1e-9)
        for told, wanted in zip(
            sampler.describe(logits, token_ids, num_top), described, strict=True
        ):
            assert told.token_id == wanted.token_id
            assert told.logprob == pytest.approx(wanted.logprob, abs=1e-9)
            assert [token_id for token_id, _ in told.top] == [i for i, _ in wanted.top]
            expected = [logprob for _, logprob in wanted.top]
            found_top = [logprob for _, logprob in told.top]
            np.testing.assert_allclose(found_top, expected, rtol=1e-6, atol=1e-9)
    assert torch.equal(logits, before)


def test_log_probabilities_have_the_same_bits_in_any_company_and_on_any_number_of_threads() -> None:
    logits = logits_of("plain", 3000, torch.Generator().manual_seed(0))
    sampler = Sampler(vocab_size=3000, vocab_rows=3000)
    token_ids = list(range(len(logits)))
    num_top = [index % 7 for index in token_ids]
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [
            sampler.describe(logits[i : i + 1], [token_ids[i]], [num_top[i]])[0] for i in token_ids
        ]
        for num_threads in (1, 2, 4):
            torch.set_num_threads(num_threads)
            assert sampler.describe(logits, token_ids, num_top) == alone
            turned = sampler.describe(logits.flip(0), token_ids[::-1], num_top[::-1])
            assert turned[::-1] == alone
    finally:
        torch.set_num_threads(before)


def test_scored_and_drawn_tokens_have_the_same_log_probabilities() -> None:
    logits = logits_of("plain", 700, torch.Generator().manual_seed(2))
    sampler = Sampler(vocab_size=690, vocab_rows=700)
    mask = np.arange(700) % 3 == 0
    rows = [
        SamplingRow(
            params=replace(params, logprobs=index % 3),
            seed=4,
            position=index,
            mask=mask if index % 2 else None,
        )
        for index, params in enumerate(PARAMS)
    ]
    drawn = [
        token.logprob for token in sampler.sample(logits, rows) if isinstance(token, SampledToken)
    ]
    told = [each for each in drawn if each is not None]
    assert len(told) == len(PARAMS)
    ids = [[each.token_id, *(token_id for token_id, _ in each.top)] for each in told]
    values = [[each.logprob, *(logprob for _, logprob in each.top)] for each in told]
    assert sampler.logprobs_of(logits, ids) == values


@pytest.mark.parametrize("bad", [[0.0, torch.nan], [0.0, torch.inf], [-torch.inf, -torch.inf]])
def test_a_row_without_log_probabilities_ends_alone(bad: list[float]) -> None:
    params = SamplingParams(temperature=0, logprobs=2)
    rows = [SamplingRow(params=params, seed=0, position=0) for _ in range(3)]
    logits = torch.tensor([[1.0, 0.0], bad, [0.0, 1.0]])
    first, second, third = Sampler(vocab_size=2, vocab_rows=2).sample(logits, rows)
    assert isinstance(first, SampledToken)
    assert isinstance(second, EngineError)
    assert isinstance(third, SampledToken)
    assert first.logprob is not None
    assert third.logprob is not None
    assert first.logprob.top == ((0, first.logprob.logprob), (1, third.logprob.top[1][1]))


@pytest.mark.parametrize("token_id", [-1, 4])
def test_the_extension_reads_nothing_outside_the_vocabulary(token_id: int) -> None:
    logits = torch.zeros(1, 5)
    drawer = native.Drawer("base", 1, 4)
    with pytest.raises(IndexError, match="not in the vocabulary"):
        drawer.describe(logits.data_ptr(), 5, [[token_id]], [0], -9.0)
    assert drawer.describe(logits.data_ptr(), 5, [[3]], [9], -1.0) == [
        ([-1.0], [(0, -1.0), (1, -1.0), (2, -1.0), (3, -1.0)])
    ]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_told_of_a_draw_for_a_trace_is_what_exact_log_probabilities_are(
    kind: str, size: tuple[int, int]
) -> None:
    vocab_size, vocab_rows = size
    sampler = Sampler(vocab_size=vocab_size, vocab_rows=vocab_rows)
    generator = torch.Generator().manual_seed(vocab_size)
    logits = logits_of(kind, vocab_rows, generator)
    mask = torch.rand(vocab_rows, generator=generator).numpy() > 0.5
    for changes in ({}, {"mask": mask}, {"suppressed": (0, 3)}):
        rows = [
            SamplingRow(params=params, seed=1, position=index, traced=5, **changes)
            for index, params in enumerate(PARAMS)
        ]
        asked = [
            SamplingRow(params=replace(row.params, logprobs=5), seed=1, position=row.position)
            for row in rows
        ]
        for row in asked:
            row.mask, row.suppressed = changes.get("mask"), changes.get("suppressed", ())
        for told, exact in zip(
            sampler.sample(logits, rows), sampler.sample(logits, asked), strict=True
        ):
            if isinstance(exact, EngineError):
                assert isinstance(told, EngineError)
                continue
            assert isinstance(told, SampledToken)
            assert told.token_id == exact.token_id
            assert told.logprob is not None
            assert exact.logprob is not None
            assert told.logprob.logprob == pytest.approx(exact.logprob.logprob, abs=1e-5)
            assert [i for i, _ in told.logprob.top] == [i for i, _ in exact.logprob.top]
            for (_, mine), (_, theirs) in zip(told.logprob.top, exact.logprob.top, strict=True):
                assert mine == pytest.approx(theirs, abs=1e-5)


def test_of_a_row_with_a_bias_a_trace_is_told_of_the_models_own_logits() -> None:
    sampler = Sampler(vocab_size=61, vocab_rows=64)
    logits = torch.randn(1, 64, generator=torch.Generator().manual_seed(1))
    params = SamplingParams(temperature=0, logit_bias=((7, 50.0),))
    row = SamplingRow(params=params, seed=1, position=0, traced=3)
    (told,) = sampler.sample(logits, [row])
    (exact,) = sampler.describe(logits, [7], [3])
    assert isinstance(told, SampledToken)
    assert told.logprob == exact


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="threads are counted by Linux")
def test_what_a_thread_does_one_after_the_other_shares_its_helpers() -> None:
    logits = np.random.default_rng(1).normal(size=(8, 4096)).astype(np.float32)
    counts = []

    def count() -> int:
        return sum(1 for _ in Path("/proc/self/task").iterdir())

    def work() -> None:
        counts.append(count())
        for _ in range(3):
            drawer = native.Drawer(NAMES[0], 3, logits.shape[1])
            drawer.describe(logits.ctypes.data, logits.shape[1], [[1]] * 8, [0] * 8, -1e4)
            counts.append(count())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    before, *during = counts
    assert during == [before + 2] * 3
    deadline = time.monotonic() + 10
    while count() != before - 1:  # they end with it
        assert time.monotonic() < deadline
        time.sleep(0.001)
