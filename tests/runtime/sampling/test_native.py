"""Draws by the extension are those by torch, token for token."""

from __future__ import annotations

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
    return logits


def sampled(
    sampler: Sampler, logits: torch.Tensor, rows: list[SamplingRow]
) -> list[SampledToken | str]:
    results = sampler.sample(logits, rows)
    return [str(each) if isinstance(each, EngineError) else each for each in results]


@pytest.mark.parametrize("kind", ["plain", "ties", "flat", "far", "one", "forbidden"])
@pytest.mark.parametrize(
    ("vocab_size", "vocab_rows"), [(5, 5), (61, 64), (1023, 1040), (9000, 9000)]
)
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
