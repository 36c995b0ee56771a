"""The fast attention equals its definition, whatever the batch."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings

from palmette.runtime.attention import ReferenceAttention, TorchAttention, buckets, torch_backend
from tests.runtime.attention.batches import PAGE_SIZE, Case, cases, make_case


def attend(backend: ReferenceAttention | TorchAttention, case: Case) -> torch.Tensor:
    plan = backend.plan(case.batch, case.kv, case.queries.shape[1])
    with torch.inference_mode():
        return plan.attend(0, case.queries)


@settings(max_examples=150)
@given(cases())
def test_any_batch_gives_what_the_definition_gives(case: Case) -> None:
    expected = attend(ReferenceAttention(), case)
    for backend in (TorchAttention(), TorchAttention(share_prefixes=False)):
        torch.testing.assert_close(attend(backend, case), expected, atol=1e-5, rtol=0)


def test_the_definition_weighs_values_by_the_softmax_of_scores() -> None:
    case = make_case([(0, 2, [5])], num_heads=1, num_kv_heads=1)
    keys, values = (case.kv.reader([5]).read(0)[which, 0, :2].double() for which in range(2))
    query = case.queries[:, 0].double()
    weights = (query[1] @ keys.T).exp()
    expected = torch.stack([values[0], (weights / weights.sum()) @ values])
    out = attend(ReferenceAttention(), case)[:, 0].double()
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=0)


def test_sequences_that_share_a_long_prefix_read_it_in_one_call() -> None:
    prefix = list(range(50))  # of which the first 48 pages, 192 tokens, are read together
    case = make_case([(202 + i, 1, [*prefix, 70 + i, 100 + i]) for i in range(5)])
    (call,) = TorchAttention().plan(case.batch, case.kv, 4).calls
    assert isinstance(call, torch_backend._PaddedCall)
    assert call.prefix is not None
    assert call.prefix.read(0).shape[2] == 192
    assert call.length == 4 * PAGE_SIZE
    expected = attend(ReferenceAttention(), case)
    torch.testing.assert_close(attend(TorchAttention(), case), expected, atol=1e-5, rtol=0)


def test_a_shared_prefix_of_extreme_scores_does_not_overflow() -> None:
    prefix = list(range(48))
    case = make_case([(192, 1, [*prefix, 60 + i]) for i in range(4)])
    case.queries.mul_(100)
    out = attend(TorchAttention(), case)
    assert out.isfinite().all()
    torch.testing.assert_close(out, attend(ReferenceAttention(), case), atol=1e-4, rtol=1e-4)


def test_rows_out_of_the_order_of_their_buckets_come_back_in_theirs() -> None:
    case = make_case(
        [(3, 1, [1]), (0, 6, [2, 3]), (90, 1, list(range(100, 123))), (0, 40, list(range(10, 20)))]
    )
    expected = attend(ReferenceAttention(), case)
    torch.testing.assert_close(attend(TorchAttention(), case), expected, atol=1e-5, rtol=0)


def test_a_prefill_longer_than_a_block_is_causal_in_every_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch_backend, "_MAX_BLOCK_ROWS", 16)
    case = make_case([(5, 75, list(range(40, 60))), (0, 33, list(range(9)))])
    expected = attend(ReferenceAttention(), case)
    torch.testing.assert_close(attend(TorchAttention(), case), expected, atol=1e-5, rtol=0)


def test_the_scores_of_one_call_stay_bounded() -> None:
    counts, lengths = [32] * 64, [4000] * 64
    found = buckets.bucket_sequences(counts, lengths, num_heads=9)
    for bucket in found:
        scores = len(bucket.members) * bucket.num_queries * bucket.length * 9
        assert len(bucket.members) == 1 or scores <= buckets.MAX_SCORES


def test_what_stands_behind_the_context_in_its_last_page_changes_nothing() -> None:
    case = make_case([(0, 2, [5]), (1, 1, [6])])
    before = attend(TorchAttention(), case)
    stale = torch.tensor([5 * PAGE_SIZE + 2, 5 * PAGE_SIZE + 3, 6 * PAGE_SIZE + 2])
    case.kv.write(0, stale, torch.full((3, 4, 8), 1e30))
    assert torch.equal(attend(TorchAttention(), case), before)


def test_bfloat16_agrees_to_its_precision() -> None:
    prefix = list(range(48))
    sequences = [(192 + i % 4, 1, [*prefix, 60 + i]) for i in range(5)]
    sequences += [(0, 40, list(range(70, 80)))]
    case = make_case(sequences, dtype=torch.bfloat16)
    expected = attend(ReferenceAttention(), case).float()
    for backend in (TorchAttention(), TorchAttention(share_prefixes=False)):
        out = attend(backend, case)
        assert out.dtype == torch.bfloat16
        torch.testing.assert_close(out.float(), expected, atol=0.04, rtol=0)
