from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from palmette.errors import EngineError, InvalidRequest
from palmette.protocol import SamplingParams, TokenLogprob
from palmette.runtime.kernels.cpu import extension
from palmette.runtime.sampling import (
    LOGPROB_FLOOR,
    SampledToken,
    Sampler,
    SamplingRow,
    TokenCounts,
    uniform,
)
from palmette.runtime.sampling.adjustments import adjusted
from palmette.runtime.sampling.distribution import weights
from tests.runtime.sampling.reference import (
    adjusted_logits,
    chi_square_excess,
    is_on_an_edge,
    probabilities,
)

GREEDY = SamplingParams(temperature=0)
WAYS = ["torch"] if extension() is None else ["native", "torch"]


@pytest.fixture(autouse=True, scope="module", params=WAYS)
def way(request: Any) -> Iterator[str]:
    """Everything here holds for draws by the extension and by torch."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "torch":
            patch.setenv("PALMETTE_KERNELS", "torch")
        yield str(request.param)


def a_row(params: SamplingParams = GREEDY, **options: Any) -> SamplingRow:
    counts = {"prompt_counts": TokenCounts(), "output_counts": TokenCounts()}
    return SamplingRow(params=params, **{"seed": 0, "position": 0, **counts, **options})


def sample(
    logits: Sequence[Sequence[float]] | torch.Tensor,
    rows: list[SamplingRow],
    vocab_size: int | None = None,
) -> list[SampledToken]:
    tensor = torch.as_tensor(logits)
    sampler = Sampler(vocab_size=vocab_size or tensor.shape[1], vocab_rows=tensor.shape[1])
    results = sampler.sample(tensor, rows)
    return [result for result in results if not isinstance(result, EngineError)]


def sample_ids(*args: Any, **options: Any) -> list[int]:
    return [token.token_id for token in sample(*args, **options)]


def draws(logits: Sequence[float], params: SamplingParams, num: int, **options: Any) -> list[int]:
    """`num` draws from one distribution, at positions 0, 1, ..."""
    rows = [a_row(params, position=position, **options) for position in range(num)]
    return sample_ids(torch.tensor([list(logits)] * num), rows)


def distribution(logits: Sequence[float], params: SamplingParams) -> list[float]:
    """The probabilities that the sampler draws with."""
    row = weights(torch.tensor([list(logits)], dtype=torch.float64), [params])[0].double()
    return [float(value) for value in row / row.sum()]


def support(logits: Sequence[float], params: SamplingParams) -> list[int]:
    return [i for i, value in enumerate(distribution(logits, params)) if value > 0]


def logs(values: Sequence[float]) -> list[float]:
    return [math.log(value) for value in values]


class TestGreedy:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("batch_size", [1, 7])
    @pytest.mark.parametrize("mask", [None, [True, True, True, False]])
    def test_equal_maxima_resolve_to_the_lowest_id(
        self, dtype: torch.dtype, batch_size: int, mask: list[bool] | None
    ) -> None:
        logits = torch.tensor([[3.0, 5.0, 5.0, 1.0]] * batch_size, dtype=dtype)
        row = a_row(mask=None if mask is None else np.array(mask))
        assert sample_ids(logits, [row] * batch_size) == [1] * batch_size

    def test_equal_maxima_resolve_to_the_lowest_id_in_a_large_vocabulary(self) -> None:
        logits = torch.zeros(3, 50_000)
        for token_ids in ([49_999, 24_001, 7], [49_999, 33_333], [49_998, 49_999]):
            logits[:] = 0
            logits[:, token_ids] = 4.0
            assert sample_ids(logits, [a_row()] * 3) == [min(token_ids)] * 3

    def test_a_mask_moves_the_choice_to_the_best_allowed_token(self) -> None:
        mask = np.array([False, False, True, True])
        assert sample_ids([[3.0, 5.0, 2.0, 2.0]], [a_row(mask=mask)]) == [2]

    @pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e-40, 1e-12])
    def test_a_tiny_temperature_is_greedy(self, temperature: float) -> None:
        logits = [-30.0, 1.0, 1.0, 0.9999999]
        assert set(draws(logits, SamplingParams(temperature=temperature), 20)) == {1}

    def test_a_huge_temperature_is_uniform(self) -> None:
        params = SamplingParams(temperature=1e308)
        assert distribution([-50.0, 50.0], params) == pytest.approx([0.5, 0.5])

    def test_the_logits_are_left_as_they_were(self) -> None:
        logits = torch.tensor([[1.0, 2.0, 3.0]], dtype=torch.float32)
        params = SamplingParams(
            repetition_penalty=2, frequency_penalty=1, logit_bias=((0, 5.0),), logprobs=1, top_k=2
        )
        row = a_row(
            params, output_counts=TokenCounts([2]), mask=np.array([1, 0, 1], bool), suppressed=(2,)
        )
        assert sample_ids(logits, [row]) == [0]
        assert logits.tolist() == [[1.0, 2.0, 3.0]]


class TestFilters:
    @pytest.mark.parametrize(
        ("top_k", "expected"),
        [
            (-1, range(10)),
            (0, range(10)),
            (10, range(10)),
            (500, range(10)),
            (1, [9]),
            (3, [7, 8, 9]),
        ],
    )
    def test_top_k_keeps_the_k_likeliest_and_is_off_at_0_and_minus_1(
        self, top_k: int, expected: Sequence[int]
    ) -> None:
        params = SamplingParams(temperature=5, top_k=top_k)
        logits = [float(value) for value in range(10)]
        assert support(logits, params) == list(expected)
        assert set(draws(logits, params, 1000)) == set(expected)

    def test_top_k_of_minus_2_is_refused(self) -> None:
        with pytest.raises(InvalidRequest, match="top_k"):
            SamplingParams(top_k=-2)

    def test_of_equal_tokens_top_k_keeps_the_lower_ids(self) -> None:
        assert support([1.0, 2.0, 1.0, 1.0], SamplingParams(top_k=3)) == [0, 1, 2]

    @pytest.mark.parametrize(
        ("top_p", "expected"),
        [
            (1.0, [0, 1, 2]),
            (0.79, [0, 1]),
            (0.81, [0, 1, 2]),
            (0.49, [0]),
            (0.01, [0]),
            (1e-300, [0]),
        ],
    )
    def test_top_p_keeps_the_smallest_set_that_reaches_it(
        self, top_p: float, expected: list[int]
    ) -> None:
        assert support(logs([0.5, 0.3, 0.2]), SamplingParams(top_p=top_p)) == expected

    @pytest.mark.parametrize(("top_p", "expected"), [(0.75, [0, 1]), (0.5, [0])])
    def test_top_p_is_reached_by_a_sum_equal_to_it(self, top_p: float, expected: list[int]) -> None:
        logits = [math.log(2), 0.0, 0.0]  # a half and two quarters
        assert support(logits, SamplingParams(top_p=top_p)) == expected

    @pytest.mark.parametrize("top_p", [0, 1.5])
    def test_top_p_outside_its_range_is_refused(self, top_p: float) -> None:
        with pytest.raises(InvalidRequest, match="top_p"):
            SamplingParams(top_p=top_p)

    def test_top_p_is_measured_on_the_full_distribution_before_top_k_cuts_it(self) -> None:
        logits = logs([0.35, 0.25, 0.2, 0.06, 0.05, 0.04, 0.03, 0.02])
        kept = distribution(logits, SamplingParams(top_k=4, top_p=0.82))
        assert kept[:4] == pytest.approx([0.4070, 0.2907, 0.2326, 0.0698], abs=5e-5)
        assert kept[4:] == [0, 0, 0, 0]

    def test_min_p_keeps_what_is_likely_next_to_the_likeliest(self) -> None:
        logits = logs([0.5, 0.25, 0.15, 0.1])
        assert support(logits, SamplingParams(min_p=0.29)) == [0, 1, 2]
        assert support(logits, SamplingParams(min_p=1)) == [0]

    def test_filters_are_measured_after_temperature(self) -> None:
        logits = logs([0.5, 0.3, 0.2])
        assert support(logits, SamplingParams(top_p=0.6, temperature=0.1)) == [0]
        assert support(logits, SamplingParams(top_p=0.7, temperature=10)) == [0, 1, 2]
        assert support(logits, SamplingParams(min_p=0.9, temperature=10)) == [0, 1, 2]

    def test_filters_are_measured_on_what_the_mask_allows(self) -> None:
        mask = np.array([False, True, True, True])
        params = SamplingParams(top_p=0.5)
        logits = logs([0.9, 0.06, 0.03, 0.01])
        assert set(draws(logits, params, 200, mask=mask)) == {1}

    def test_a_flat_distribution_over_a_large_vocabulary_is_cut_exactly(self) -> None:
        logits = [0.0] * 40_000
        assert support(logits, SamplingParams(top_p=0.25)) == list(range(10_000))
        assert support(logits, SamplingParams(top_p=0.25, top_k=77)) == list(range(77))


class TestPenalties:
    LOGITS = (0.5, 0.5, 0.5, 2.0, 0.5, 2.0, 0.5, -1.0, 0.5, 2.0)

    def after(self, params: SamplingParams) -> list[float]:
        row = a_row(params, prompt_counts=TokenCounts([7, 7, 3]), output_counts=TokenCounts([5, 5]))
        return adjusted(torch.tensor([self.LOGITS]), [row])[0].tolist()

    def changes(self, params: SamplingParams) -> dict[int, float]:
        pairs = zip(self.after(params), self.LOGITS, strict=True)
        return {i: after for i, (after, before) in enumerate(pairs) if after != before}

    def test_repetition_counts_prompt_and_output_and_lowers_whatever_the_sign(self) -> None:
        assert self.changes(SamplingParams(repetition_penalty=2)) == {3: 1.0, 5: 1.0, 7: -2.0}

    def test_frequency_counts_each_occurrence_in_the_output(self) -> None:
        assert self.changes(SamplingParams(frequency_penalty=0.5)) == {5: 1.0}

    def test_presence_counts_the_output_once(self) -> None:
        assert self.changes(SamplingParams(presence_penalty=0.5)) == {5: 1.5}

    def test_a_token_in_prompt_and_output_is_penalised_for_repetition_once(self) -> None:
        row = a_row(
            SamplingParams(repetition_penalty=2),
            prompt_counts=TokenCounts([1]),
            output_counts=TokenCounts([1]),
        )
        assert adjusted(torch.tensor([[3.0, 4.0]]), [row]).tolist() == [[3.0, 2.0]]

    @pytest.mark.parametrize("penalty", [5e-324, 1e-300, 1e300])
    def test_an_extreme_penalty_leaves_a_choice(self, penalty: float) -> None:
        params = SamplingParams(temperature=0, repetition_penalty=penalty)
        counts = TokenCounts([0, 1])
        row = a_row(params, prompt_counts=counts, mask=np.array([True, True, False]))
        assert sample_ids([[3.0, -4.0, 9.0]], [row]) == [0]

    def test_a_penalty_leaves_the_neighbours_alone(self) -> None:
        penalised = a_row(
            SamplingParams(temperature=0, frequency_penalty=1.05, repetition_penalty=1.3),
            prompt_counts=TokenCounts([0, 1]),
            output_counts=TokenCounts([0, 0]),
        )
        logits = torch.tensor([[2.0, 1.9, 1.8]] * 3)
        assert sample_ids(logits, [a_row(), penalised, a_row()]) == [0, 2, 0]

    def test_penalties_ignore_ids_beyond_the_vocabulary(self) -> None:
        row = a_row(
            SamplingParams(temperature=0, repetition_penalty=2),
            prompt_counts=TokenCounts([3]),
            output_counts=TokenCounts([10_000]),
        )
        assert sample_ids([[1.0, 2.0, 1.0, 9.0]], [row], vocab_size=3) == [1]

    def test_penalties_without_counts_are_a_fault_of_that_row(self) -> None:
        sampler = Sampler(vocab_size=2, vocab_rows=2)
        bad = SamplingRow(params=SamplingParams(presence_penalty=1), seed=0, position=0)
        error, token = sampler.sample(torch.tensor([[0.0, 1.0]] * 2), [bad, a_row()])
        assert isinstance(error, EngineError)
        assert "penalties are on" in str(error)
        assert token == SampledToken(1)


class TestLogitBias:
    def test_a_bias_of_100_wins_and_of_minus_100_loses(self) -> None:
        logits = [float(value) for value in range(10)]
        wanted = SamplingParams(temperature=0, logit_bias=((5, 100.0),))
        unwanted = SamplingParams(temperature=1, logit_bias=((9, -100.0),))
        assert draws(logits, wanted, 2) == [5, 5]
        assert 9 not in draws(logits, unwanted, 500)

    @pytest.mark.parametrize("token_id", [61, 62, 999_999_999])
    def test_a_bias_for_an_id_beyond_the_vocabulary_is_refused(self, token_id: int) -> None:
        sampler = Sampler(vocab_size=61, vocab_rows=64)
        params = SamplingParams(logit_bias=((60, 1.0), (token_id, 5.0)))
        with pytest.raises(InvalidRequest, match=f"logit_bias names token {token_id}") as caught:
            sampler.check(params)
        assert caught.value.param == "logit_bias"
        # Should it get through all the same, it is a fault of that row.
        error, token = sampler.sample(torch.zeros(2, 64), [a_row(params), a_row()])
        assert isinstance(error, EngineError)
        assert token == SampledToken(0)

    def test_a_bias_within_the_vocabulary_is_accepted(self) -> None:
        Sampler(vocab_size=61, vocab_rows=64).check(SamplingParams(logit_bias=((60, 1.0),)))


class TestWhatIsNeverDrawn:
    def test_padding_rows_are_never_drawn(self) -> None:
        logits = torch.zeros(1, 64)
        logits[0, 61:] = torch.tensor([50.0, 60.0, 70.0])
        full = np.ones(64, dtype=bool)
        letters = np.zeros(64, dtype=bool)
        letters[[3, 5, 61, 63]] = True
        sampler = Sampler(vocab_size=61, vocab_rows=64)
        for params in (GREEDY, SamplingParams(), SamplingParams(top_k=5, top_p=0.9, logprobs=3)):
            for mask in (None, full, letters):
                rows = [a_row(params, position=i, mask=mask) for i in range(50)]
                for token in sampler.sample(logits.expand(50, 64), rows):
                    assert isinstance(token, SampledToken)
                    assert token.token_id < 61
                    assert mask is not letters or token.token_id in (3, 5)
                    if token.logprob is not None:
                        # Padding is no part of the distribution either: 61 tokens are equal.
                        assert token.logprob.logprob == pytest.approx(-math.log(61))
                        assert [token_id for token_id, _ in token.logprob.top] == [0, 1, 2]

    def test_masked_tokens_are_never_drawn_however_likely(self) -> None:
        logits = [60.0, 0.0, 60.0, -60.0, 60.0]
        mask = np.array([False, False, False, True, False])
        assert set(draws(logits, SamplingParams(), 300, mask=mask)) == {3}

    def test_suppressed_tokens_are_never_drawn(self) -> None:
        assert draws([5.0, 4.0, 3.0], GREEDY, 1, suppressed=(0,)) == [1]
        assert draws([5.0, 4.0, 3.0], GREEDY, 1, suppressed=(0, 1, 9)) == [2]
        assert set(draws([0.0, 0.0, 0.0], SamplingParams(), 200, suppressed=(0,))) == {1, 2}

    def test_a_token_the_model_gives_no_chance_is_never_drawn(self) -> None:
        assert set(draws([-math.inf, 0.0, 0.0], SamplingParams(), 200)) == {1, 2}


class TestFaults:
    @pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_p=0.5)])
    @pytest.mark.parametrize(
        ("logits", "options", "message"),
        [
            ([1.0, 2.0], {"mask": np.zeros(2, bool)}, "mask of a constraint allows no token"),
            ([1.0, 2.0], {"mask": np.array([True, False]), "suppressed": (0,)}, "is suppressed"),
            ([1.0, 2.0], {"suppressed": (0, 1)}, "is suppressed"),
            (
                [1.0, 2.0],
                {"mask": np.ones(3, bool)},
                r"must be 2 booleans, got bool of shape \(3,\)",
            ),
            ([1.0, 2.0], {"mask": np.ones(2, int)}, "must be 2 booleans, got int64"),
            ([1.0, math.nan], {}, "not finite numbers"),
            ([1.0, math.inf], {}, "not finite numbers"),
            ([-math.inf, -math.inf], {}, "not finite numbers"),
        ],
    )
    def test_a_row_without_a_choice_says_why_and_the_others_go_on(
        self, params: SamplingParams, logits: list[float], options: dict[str, Any], message: str
    ) -> None:
        sampler = Sampler(vocab_size=2, vocab_rows=2)
        company = a_row(replace(params, temperature=0), mask=np.array([True, True]))
        tensor = torch.tensor([[2.0, 1.0], logits, [2.0, 3.0]])
        before, error, after = sampler.sample(tensor, [company, a_row(params, **options), company])
        assert (before, after) == (SampledToken(0), SampledToken(1))
        assert isinstance(error, EngineError)
        with pytest.raises(EngineError, match=message):
            raise error

    def test_a_row_whose_log_probabilities_are_no_numbers_says_so(self) -> None:
        # The mask hides the NaN from the draw, but not from the log-probability.
        row = a_row(replace(GREEDY, logprobs=1), mask=np.array([True, False]))
        (error,) = Sampler(vocab_size=2, vocab_rows=2).sample(
            torch.tensor([[1.0, math.nan]]), [row]
        )
        assert isinstance(error, EngineError)

    def test_all_rows_may_be_at_fault(self) -> None:
        rows = [a_row(mask=np.ones(3, bool))] * 2
        results = Sampler(vocab_size=2, vocab_rows=2).sample(torch.zeros(2, 2), rows)
        assert all(isinstance(result, EngineError) for result in results)

    def test_an_empty_batch_has_no_tokens(self) -> None:
        assert Sampler(vocab_size=2, vocab_rows=2).sample(torch.zeros(0, 2), []) == []

    def test_logits_of_another_shape_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"shape \(1, 4\), got \(1, 3\)"):
            Sampler(vocab_size=2, vocab_rows=4).sample(torch.zeros(1, 3), [a_row()])

    def test_a_seed_outside_its_range_is_refused(self) -> None:
        with pytest.raises(ValueError, match="got -1"):
            a_row(seed=-1)

    def test_a_vocabulary_larger_than_the_output_layer_is_refused(self) -> None:
        with pytest.raises(ValueError, match="at most vocab_rows"):
            Sampler(vocab_size=5, vocab_rows=4)


class TestLogprobs:
    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(temperature=0),
            SamplingParams(temperature=1),
            SamplingParams(temperature=0.5),
            SamplingParams(top_p=0.7),
            SamplingParams(top_k=1),
            SamplingParams(logit_bias=((2, 50.0),), presence_penalty=1.0),
        ],
    )
    def test_they_are_those_of_the_model_before_everything(self, params: SamplingParams) -> None:
        mask = np.array([False, True, True, False])
        for options in ({}, {"mask": mask}):
            row = a_row(replace(params, logprobs=4), output_counts=TokenCounts([0]), **options)
            (token,) = sample([[1.0, 0.0, -1.0, -2.0]], [row])
            assert token.logprob is not None
            expected = [-0.4402, -1.4402, -2.4402, -3.4402]
            assert token.logprob.token_id == token.token_id
            assert token.logprob.logprob == pytest.approx(expected[token.token_id], abs=5e-5)
            assert [token_id for token_id, _ in token.logprob.top] == [0, 1, 2, 3]
            assert [value for _, value in token.logprob.top] == pytest.approx(expected, abs=5e-5)

    def test_each_row_reports_as_many_as_it_asks_for(self) -> None:
        logits = torch.tensor([[0.0, 0.0, 0.0]] * 4)
        rows = [a_row(replace(GREEDY, logprobs=n)) for n in (None, 0, 2, 100)]
        none, zero, two, all_three = [token.logprob for token in sample(logits, rows)]
        assert none is None
        assert zero is not None
        assert two is not None
        assert all_three is not None
        third = zero.logprob
        assert third == pytest.approx(-math.log(3))
        assert zero == TokenLogprob(0, third)
        assert two == TokenLogprob(0, third, ((0, third), (1, third)))
        assert all_three == TokenLogprob(0, third, ((0, third), (1, third), (2, third)))

    def test_impossible_tokens_get_the_floor_and_never_infinity(self) -> None:
        row = a_row(replace(GREEDY, logprobs=3), mask=np.array([False, False, True]))
        (token,) = sample([[0.0, -math.inf, -1e30]], [row])
        assert token.logprob == TokenLogprob(
            2, LOGPROB_FLOOR, ((0, 0.0), (2, LOGPROB_FLOOR), (1, LOGPROB_FLOOR))
        )

    def test_scores_are_log_softmax_at_the_targets(self) -> None:
        logits = torch.randn(20, 33, generator=torch.Generator().manual_seed(1)) * 5
        targets = [[(row * 7 + k) % 30 for k in range(row % 4)] for row in range(20)]
        scores = Sampler(vocab_size=30, vocab_rows=33).logprobs_of(logits, targets)
        for values, ids, row in zip(scores, targets, logits.double().tolist(), strict=True):
            norm = math.log(math.fsum(math.exp(value) for value in row[:30]))
            assert values == pytest.approx([row[token_id] - norm for token_id in ids], abs=1e-12)

    def test_scores_of_large_logits_stay_exact(self) -> None:
        logits = torch.tensor([[3e38, 3e38, -3e38]])
        scores = Sampler(vocab_size=3, vocab_rows=3).logprobs_of(logits, [[0, 2]])
        assert scores == [[pytest.approx(-math.log(2)), LOGPROB_FLOOR]]

    @pytest.mark.parametrize("token_id", [-1, 3])
    def test_a_score_of_no_token_is_refused(self, token_id: int) -> None:
        with pytest.raises(ValueError, match=f"no token has id {token_id}"):
            Sampler(vocab_size=3, vocab_rows=4).logprobs_of(torch.zeros(1, 4), [[token_id]])

    def test_scores_of_broken_logits_raise(self) -> None:
        logits = torch.tensor([[0.0, 1.0], [0.0, math.nan]])
        with pytest.raises(EngineError, match="row 1"):
            Sampler(vocab_size=2, vocab_rows=2).logprobs_of(logits, [[0], [1]])


class TestDraws:
    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(temperature=1),
            SamplingParams(temperature=0.6),
            SamplingParams(temperature=2, top_k=5),
            SamplingParams(temperature=1.3, top_p=0.85),
            SamplingParams(temperature=1, min_p=0.2, repetition_penalty=1.5),
        ],
    )
    def test_draws_follow_the_distribution(self, params: SamplingParams) -> None:
        logits = [0.3, -1.2, 2.1, 1.0, 0.0, -0.4, 1.7, -3.0]
        counts = TokenCounts([2, 4])
        found = Counter(draws(logits, params, 20_000, seed=3, prompt_counts=counts))
        expected = probabilities(adjusted_logits(logits, params, prompt=[2, 4]), params)
        possible = [i for i, value in enumerate(expected) if value > 0]
        assert set(found) <= set(possible)
        excess = chi_square_excess([found[i] for i in possible], [expected[i] for i in possible])
        assert excess < 4

    @pytest.mark.parametrize("vary", ["seed", "path", "position"])
    def test_draws_of_different_keys_are_independent(self, vary: str) -> None:
        rows = [
            a_row(SamplingParams(), **{vary: (n,) if vary == "path" else n}) for n in range(8000)
        ]
        ids = sample_ids(torch.zeros(8000, 4), rows)
        pairs = Counter(zip(ids[::2], ids[1::2], strict=True))
        assert chi_square_excess([pairs[a, b] for a in range(4) for b in range(4)]) < 4

    def test_a_draw_does_not_depend_on_its_company(self) -> None:
        generator = torch.Generator().manual_seed(5)
        logits = torch.randn(40, 3000, generator=generator) * 3
        kinds = [
            SamplingParams(temperature=0.8),
            SamplingParams(temperature=0),
            SamplingParams(top_p=0.9, logprobs=2),
            SamplingParams(top_k=40, min_p=0.01),
            SamplingParams(frequency_penalty=0.7, logit_bias=((4, 3.0),)),
        ]
        mask = np.random.default_rng(0).random(3000) < 0.5
        rows = [
            a_row(
                kinds[i % 5],
                seed=i,
                position=i,
                output_counts=TokenCounts(range(i)),
                mask=mask if i % 3 == 0 else None,
            )
            for i in range(40)
        ]
        together = sample(logits, rows)
        alone = [sample(logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
        turned = sample(logits.flip(0), rows[::-1])[::-1]
        assert together == alone == turned

    def test_a_draw_ignores_and_spares_the_global_generators(self) -> None:
        row = a_row(SamplingParams(), seed=9)
        torch.manual_seed(1)
        state = torch.get_rng_state()
        first = sample_ids(torch.zeros(1, 1000), [row])
        assert torch.equal(torch.get_rng_state(), state)
        torch.manual_seed(2)
        assert sample_ids(torch.zeros(1, 1000), [row]) == first


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[float], SamplingParams, dict[str, Any]]:
    """Logits on a coarse grid, so that ties are frequent, and any parameters."""
    size = draw(st.integers(1, 9))
    logits = draw(st.lists(st.integers(-12, 12).map(lambda n: n / 4), min_size=size, max_size=size))
    ids = st.integers(0, size - 1)
    biases = draw(st.dictionaries(ids, st.integers(-4, 4).map(float), max_size=3))
    params = SamplingParams(
        temperature=draw(st.sampled_from([0.25, 0.7, 1.0, 1.5, 4.0])),
        top_p=draw(st.sampled_from([1.0, 0.99, 0.9, 0.61, 0.33, 0.01])),
        top_k=draw(st.integers(-1, 10)),
        min_p=draw(st.sampled_from([0.0, 0.013, 0.21, 0.77])),
        presence_penalty=draw(st.sampled_from([0.0, 0.5, -1.25])),
        frequency_penalty=draw(st.sampled_from([0.0, 0.25, -0.5])),
        repetition_penalty=draw(st.sampled_from([1.0, 2.0, 0.5])),
        logit_bias=tuple(biases.items()),
    )
    options = {
        "prompt": draw(st.lists(ids, max_size=6)),
        "output": draw(st.lists(ids, max_size=6)),
        "allowed": draw(st.none() | st.lists(st.booleans(), min_size=size, max_size=size)),
        "suppressed": draw(st.lists(ids, max_size=2).map(tuple)),
    }
    return logits, params, options


class TestAgainstTheReference:
    @hypothesis_settings(deadline=None, max_examples=300)
    @given(st.lists(cases(), min_size=1, max_size=4), st.integers(0, 2**64 - 1))
    def test_a_batch_draws_what_the_reference_draws(
        self, batch: list[tuple[list[float], SamplingParams, dict[str, Any]]], seed: int
    ) -> None:
        """Every row of a mixed batch, filled up to one width with padding rows that are masked."""
        width = max(len(logits) for logits, _, _ in batch)
        tensor = torch.full((len(batch), width), 50.0)
        rows = []
        for index, (logits, params, options) in enumerate(batch):
            tensor[index, : len(logits)] = torch.tensor(logits)
            mask = np.zeros(width, dtype=bool)
            mask[: len(logits)] = True if options["allowed"] is None else options["allowed"]
            rows.append(
                a_row(
                    params,
                    seed=seed,
                    position=index,
                    prompt_counts=TokenCounts(options["prompt"]),
                    output_counts=TokenCounts(options["output"]),
                    mask=mask,
                    suppressed=options["suppressed"],
                )
            )
        results = Sampler(vocab_size=width, vocab_rows=width).sample(tensor, rows)
        for result, row, (logits, params, options) in zip(results, rows, batch, strict=True):
            changed = adjusted_logits(logits, params, **options)
            if max(changed) == -math.inf:
                assert isinstance(result, EngineError)
                continue
            assert isinstance(result, SampledToken)
            if is_on_an_edge(changed, params):
                continue
            cumulative = np.cumsum(probabilities(changed, params))
            number = uniform(seed, (), row.position)
            if np.abs(cumulative - number).min() > 1e-9:
                assert result.token_id == int(np.searchsorted(cumulative, number, side="right"))

    @hypothesis_settings(deadline=None, max_examples=300)
    @given(cases())
    def test_the_distribution_is_that_of_the_reference(
        self, case: tuple[list[float], SamplingParams, dict[str, Any]]
    ) -> None:
        logits, params, options = case
        changed = adjusted_logits(logits, params, **options)
        assume(max(changed) > -math.inf and not is_on_an_edge(changed, params))
        assert distribution(changed, params) == pytest.approx(
            probabilities(changed, params), abs=1e-12
        )
