"""Linear maps and rotary embedding on their own."""

from __future__ import annotations

import math

import pytest
import torch

from palmette.runtime.layers import linear
from palmette.runtime.layers.linear import Linear, can_pack
from palmette.runtime.layers.rotary import RotaryTable, inverse_frequencies, rotate
from palmette.runtime.models.config import RopeConfig


@pytest.fixture(params=[True, False], ids=["packed", "plain"])
def packed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    if not request.param:
        monkeypatch.setattr(linear, "can_pack", lambda dtype: False)
    elif not can_pack(torch.float32):
        pytest.skip("this build of torch cannot lay out weights for oneDNN")
    return bool(request.param)


@pytest.mark.parametrize("rows", [0, 1, 5, 130])
@pytest.mark.parametrize("has_bias", [True, False])
def test_a_linear_map_multiplies_and_adds(packed: bool, rows: int, has_bias: bool) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(24, 16), torch.randn(24) if has_bias else None
    x, residual = torch.randn(rows, 16), torch.randn(rows, 24)
    with torch.inference_mode():
        layer = Linear(weight, bias)
        expected = torch.nn.functional.linear(x, weight, bias)
        torch.testing.assert_close(layer(x), expected, atol=1e-5, rtol=0)
        torch.testing.assert_close(layer.plus(x, residual), expected + residual, atol=1e-5, rtol=0)


def test_a_map_in_another_layout_does_not_share_the_weight(packed: bool) -> None:
    weight = torch.randn(24, 16)
    with torch.inference_mode():
        assert Linear(weight).shares_memory_with(weight) is not packed


def test_rotation_keeps_scores_by_distance_only() -> None:
    table = RotaryTable(RopeConfig(theta=100.0), 8, 64, torch.device("cpu"))
    torch.manual_seed(0)
    query, key = torch.randn(1, 1, 8), torch.randn(1, 1, 8)

    def score(at: int, other: int) -> float:
        turned = [
            rotate(x, *table.rows(torch.tensor([p]), 64)) for x, p in ((query, at), (key, other))
        ]
        return float((turned[0] * turned[1]).sum())

    assert score(9, 4) == pytest.approx(score(37, 32), abs=1e-5)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-3)


def test_plane_i_turns_entries_i_and_i_plus_half_by_its_angle() -> None:
    table = RotaryTable(RopeConfig(theta=100.0), 4, 64, torch.device("cpu"))
    turned = rotate(torch.tensor([[[1.0, 0.0, 0.0, 2.0]]]), *table.rows(torch.tensor([3]), 4))
    expected = [math.cos(3), -2 * math.sin(0.3), math.sin(3), 2 * math.cos(0.3)]
    torch.testing.assert_close(turned[0, 0], torch.tensor(expected))


def test_the_table_grows_to_the_context_that_comes() -> None:
    table = RotaryTable(RopeConfig(), 4, 100_000, torch.device("cpu"))
    cos, _ = table.rows(torch.tensor([99_999]), 100_000)
    assert float(cos[0, 0, 0]) == pytest.approx(math.cos(99_999), abs=1e-3)


def test_frequency_divisors_divide_the_frequencies() -> None:
    plain = inverse_frequencies(RopeConfig(theta=100.0), 4)
    divided = inverse_frequencies(RopeConfig(theta=100.0, frequency_divisors=(1.0, 8.0)), 4)
    torch.testing.assert_close(divided, plain / torch.tensor([1.0, 8.0]))


@pytest.mark.parametrize("num_rows", [0, 1, 2, 33])
def test_products_as_float32_keep_what_bfloat16_would_round_away(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(70, 48, generator=generator).bfloat16()
    x = torch.randn(num_rows, 48, generator=generator).bfloat16()
    exact = x.double() @ weight.double().T
    linear = Linear(weight)
    precise = linear.in_float32(x)
    assert precise.dtype is torch.float32
    assert precise.shape == (num_rows, 70)
    if linear._is_packed:
        torch.testing.assert_close(precise.double(), exact, atol=1e-3, rtol=0)
    full = Linear(weight.float())
    assert torch.equal(full.in_float32(x.float()), full(x.float()))


def test_few_row_counts_reach_the_processor_and_none_is_cut() -> None:
    counts = {n: linear._padded(torch.ones(n, 3)).shape[0] for n in range(1, 513)}
    assert all(num_rows <= padded <= 1.2 * num_rows for num_rows, padded in counts.items())
    assert len(set(counts.values())) <= 60


@pytest.mark.parametrize("num_rows", [17, 33, 65, 515])
def test_padding_changes_no_row(num_rows: int) -> None:
    generator = torch.Generator().manual_seed(5)
    weight = torch.randn(24, 40, generator=generator)
    layer = Linear(weight)
    x = torch.randn(num_rows, 40, generator=generator)
    residual = torch.randn(num_rows, 24, generator=generator)
    product = x @ weight.T
    torch.testing.assert_close(layer(x), product, atol=1e-4, rtol=0)
    torch.testing.assert_close(layer.plus(x, residual), product + residual, atol=1e-4, rtol=0)
