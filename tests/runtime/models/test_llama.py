"""The forward pass agrees with transformers on the same weights."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palmette.runtime.attention import ReferenceAttention
from palmette.runtime.layers.linear import Linear
from palmette.runtime.models.llama import LlamaModel, tensor_shapes
from tests.runtime.models.tiny import (
    PAGE_SIZE,
    config_of,
    expected_logits,
    make_batch,
    make_pool,
    oracle,
    ours,
    random_ids,
)

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}

VARIANTS: dict[str, dict[str, Any]] = {
    "grouped heads": {},
    "one head for each query head": {"num_key_value_heads": 4},
    "one key-value head": {"num_key_value_heads": 1},
    "tied head": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head size apart from the hidden size": {"head_dim": 12},
    "linear scaling": {
        "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}
    },
    "llama3 scaling": {"rope_parameters": LLAMA3},
    "mistral": {"architecture": "MistralForCausalLM", "sliding_window": None},
    "mistral with a window that never cuts": {
        "architecture": "MistralForCausalLM",
        "sliding_window": 256,
    },
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_every_position_equal_those_of_transformers(variant: str) -> None:
    reference = oracle(**VARIANTS[variant])
    model = ours(reference)
    token_ids = random_ids(90, 61)
    kv = make_pool(model.config)
    logits = model.forward(make_batch([(token_ids, 0, list(range(30)))], every_row=True), kv)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected_logits(reference, token_ids), atol=1e-4, rtol=0)


@settings(max_examples=25)
@given(data=st.data())
def test_chunks_batches_and_page_order_change_nothing(data: st.DataObject) -> None:
    reference = oracle(rope_parameters=LLAMA3)
    model = ours(reference)
    kv = make_pool(model.config)
    pages = random.Random(data.draw(st.integers(0, 100))).sample(range(64), 64)
    num_sequences = data.draw(st.integers(1, 4))
    prompts = [random_ids(data.draw(st.integers(1, 55)), 61, seed=s) for s in range(num_sequences)]
    tables = [pages[16 * s : 16 * s + 16] for s in range(num_sequences)]
    expected = [expected_logits(reference, prompt) for prompt in prompts]
    joins_at = [data.draw(st.integers(0, 3)) for _ in prompts]
    computed = [0] * num_sequences
    for step in itertools.count():
        members = [
            s
            for s, prompt in enumerate(prompts)
            if step >= joins_at[s] and computed[s] < len(prompt)
        ]
        if not members and step > 3:
            break
        chunks = []
        for s in members:
            num_cached = computed[s]
            left = len(prompts[s]) - num_cached
            # The smallest draw is all that is left, so that the test ends.
            computed[s] += left - data.draw(st.integers(0, left - 1))
            chunks.append((prompts[s][: computed[s]], num_cached, tables[s]))
        if chunks:
            logits = model.forward(make_batch(chunks), kv)
            for row, s in enumerate(members):
                torch.testing.assert_close(
                    logits[row], expected[s][computed[s] - 1], atol=1e-4, rtol=0
                )


def test_forks_of_one_prompt_decode_from_its_shared_pages() -> None:
    reference = oracle()
    model = ours(reference)
    kv = make_pool(model.config)
    prompt = random_ids(48 * PAGE_SIZE, 61)
    shared = list(range(10, 58))
    model.forward(make_batch([(prompt, 0, shared)]), kv)
    forks = [[*prompt, *random_ids(1 + s, 61, seed=s)] for s in range(5)]
    tables = [[*shared, 2 * s, 2 * s + 1] for s in range(5)]
    logits = model.forward(
        make_batch([(ids, len(prompt), t) for ids, t in zip(forks, tables, strict=True)]), kv
    )
    expected = torch.stack([expected_logits(reference, ids)[-1] for ids in forks])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_greedy_decoding_yields_the_tokens_of_transformers() -> None:
    reference = oracle(attention_bias=True)
    model = ours(reference)
    kv = make_pool(model.config)
    token_ids = random_ids(7, 61)
    expected = reference.generate(
        torch.tensor([token_ids]), max_new_tokens=40, do_sample=False, eos_token_id=None
    )[0].tolist()
    num_cached = 0
    while len(token_ids) < len(expected):
        logits = model.forward(make_batch([(token_ids, num_cached, list(range(12)))]), kv)
        num_cached = len(token_ids)
        token_ids.append(int(logits[0].argmax()))
    assert token_ids == expected


def test_a_batch_without_logit_rows_fills_the_pages_and_returns_no_rows() -> None:
    reference = oracle()
    model = ours(reference)
    kv = make_pool(model.config)
    token_ids = random_ids(9, 61)
    batch = make_batch([(token_ids[:8], 0, [3, 4, 5])])
    no_rows: list[int] = []
    silent = type(batch)(
        **{name: getattr(batch, name) for name in batch.__slots__ if name != "logit_rows"},
        logit_rows=no_rows,
    )
    assert model.forward(silent, kv).shape == (0, 61)
    logits = model.forward(make_batch([(token_ids, 8, [3, 4, 5])]), kv)
    torch.testing.assert_close(
        logits[0], expected_logits(reference, token_ids)[-1], atol=1e-4, rtol=0
    )


def test_any_attention_backend_can_be_put_in() -> None:
    reference = oracle()
    token_ids = random_ids(20, 61)
    batch = make_batch([(token_ids, 0, list(range(5)))])
    fast, plain = ours(reference), ours(reference, attention=ReferenceAttention())
    torch.testing.assert_close(
        fast.forward(batch, make_pool(fast.config)),
        plain.forward(batch, make_pool(plain.config)),
        atol=1e-5,
        rtol=0,
    )


class FixedOrderAttention(ReferenceAttention):
    is_batch_invariant = True


class FixedOrderLinear(Linear):
    is_batch_invariant = True


def test_a_model_promises_the_same_bits_only_if_all_its_products_do() -> None:
    reference = oracle()
    fixed: list[FixedOrderLinear] = []

    def make(weight: torch.Tensor, bias: torch.Tensor | None = None) -> FixedOrderLinear:
        fixed.append(FixedOrderLinear(weight, bias))
        return fixed[-1]

    attention = FixedOrderAttention()
    assert not ours(reference).is_batch_invariant
    assert not ours(reference, attention=attention).is_batch_invariant
    assert not ours(reference, linear=make).is_batch_invariant
    model = ours(reference, attention=attention, linear=make)
    assert model.is_batch_invariant
    assert len(fixed) == 2 * (4 * model.config.num_layers + 1)
    fixed[-2].is_batch_invariant = False
    assert not model.is_batch_invariant


def test_a_context_beyond_the_models_is_refused() -> None:
    model = ours(oracle())
    kv = make_pool(model.config, num_pages=70)
    with pytest.raises(ValueError, match="257 tokens, the model has 256"):
        model.forward(make_batch([([1] * 257, 256, list(range(65)))]), kv)


def test_every_tensor_of_transformers_is_asked_for_exactly_once() -> None:
    reference = oracle(attention_bias=True, mlp_bias=True)
    weights = reference.state_dict()
    asked: list[str] = []

    def read(name: str) -> torch.Tensor:
        asked.append(name)
        tensor: torch.Tensor = weights[name]
        return tensor

    model = LlamaModel(config_of(reference), read, dtype=torch.float32)
    assert sorted(asked) == sorted(weights)
    assert {name: tuple(w.shape) for name, w in weights.items()} == tensor_shapes(model.config)
    num_parameters = sum(weight.numel() for weight in weights.values())
    assert model.config.num_parameters == num_parameters
    assert model.num_weight_bytes == 4 * num_parameters


def test_bfloat16_stays_near_float32() -> None:
    reference = oracle(initializer_range=0.1)
    weights = reference.state_dict()
    model = LlamaModel(config_of(reference), weights.__getitem__, dtype=torch.bfloat16)
    kv = make_pool(model.config, dtype=torch.bfloat16)
    token_ids = random_ids(30, 61)
    logits = model.forward(make_batch([(token_ids, 0, list(range(8)))]), kv)
    assert logits.dtype == torch.float32
    expected = expected_logits(reference, token_ids)[-1]
    assert (logits[0] - expected).abs().max() < 0.05 * expected.abs().max()
