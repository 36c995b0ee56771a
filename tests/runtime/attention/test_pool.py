"""Pages: what is written is read, copies happen as if all at once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from palmette.runtime.kv.pool import KVPool
from palmette.runtime.models.config import ModelConfig, RopeConfig


def pool(num_pages: int = 8, num_layers: int = 2) -> KVPool:
    return KVPool(
        num_layers=num_layers,
        num_kv_heads=2,
        head_dim=4,
        num_pages=num_pages,
        page_size=3,
        dtype=torch.float32,
    )


def fill(kv: KVPool) -> None:
    """Page p of layer l holds the number 100 * l + p everywhere."""
    slots = torch.arange(kv.num_pages * kv.page_size)
    for layer in range(kv.num_layers):
        content = 100.0 * layer + (slots // kv.page_size).float()
        kv.write(layer, slots, content[:, None, None].expand(-1, 4, 4))


def content_of(kv: KVPool, layer: int) -> list[float]:
    pages = [kv.reader([page]).read(layer) for page in range(kv.num_pages)]
    assert all(bool((page == page.flatten()[0]).all()) for page in pages)
    return [float(page.flatten()[0]) for page in pages]


def test_keys_and_values_come_back_head_by_head_in_the_order_of_the_pages() -> None:
    kv = pool()
    tokens = torch.randn(2, 4, 4)  # two tokens of two key heads and two value heads
    kv.write(1, torch.tensor([6 * 3 + 2, 1 * 3 + 0]), tokens)
    for may_view in (True, False):
        read = kv.reader([6, 1], may_view=may_view).read(1)
        assert read.shape == (2, 2, 6, 4)
        assert torch.equal(read[0, :, 2], tokens[0, :2])
        assert torch.equal(read[1, :, 2], tokens[0, 2:])
        assert torch.equal(read[1, :, 3], tokens[1, 2:])
    assert not kv.reader([6, 1]).read(0).any()


def test_pages_in_a_row_are_read_in_place() -> None:
    kv = pool()
    fill(kv)
    viewed = kv.reader([2, 3, 4], may_view=True).read(1)
    copied = kv.reader([2, 3, 4]).read(1)
    assert torch.equal(viewed, copied)
    kv.write(1, torch.tensor([9]), torch.ones(1, 4, 4))
    assert not torch.equal(viewed, copied)


@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7)), unique_by=lambda pair: pair[1]))
def test_copies_read_everything_before_they_write_anything(pairs: list[tuple[int, int]]) -> None:
    kv = pool()
    fill(kv)
    kv.copy_pages([source for source, _ in pairs], [destination for _, destination in pairs])
    for layer in range(2):
        expected = [100.0 * layer + page for page in range(8)]
        for source, destination in pairs:
            expected[destination] = 100.0 * layer + source
        assert content_of(kv, layer) == expected


def test_a_copy_to_one_page_twice_or_outside_the_pool_is_refused() -> None:
    kv = pool()
    with pytest.raises(ValueError, match="written twice"):
        kv.copy_pages([1, 2], [3, 3])
    with pytest.raises(ValueError, match="page 8 is outside the pool of 8 pages"):
        kv.copy_pages([1], [8])
    with pytest.raises(ValueError, match="1 source pages, 2 destinations"):
        kv.copy_pages([1], [2, 3])


def test_the_size_of_a_pool_is_that_of_its_pages() -> None:
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_rows=10,
        hidden_size=16,
        intermediate_size=16,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=4,
        rms_norm_eps=1e-5,
        rope=RopeConfig(),
        max_context=64,
        tie_word_embeddings=True,
    )
    kv = pool(num_pages=5)
    assert kv.num_bytes == 5 * KVPool.bytes_per_page(config, 3, torch.float32)
    assert 2 * KVPool.bytes_per_page(config, 3, torch.bfloat16) == KVPool.bytes_per_page(
        config, 3, torch.float32
    )
