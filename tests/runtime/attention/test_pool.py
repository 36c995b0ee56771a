"""Pages: what is written is read, copies happen one after the other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palmette.runtime.kv.pool import KVPool
from palmette.runtime.models.config import ModelConfig, RopeConfig

is_pages_first = False


@pytest.fixture(params=["layers first", "pages first"], autouse=True, scope="module")
def layout(request: Any) -> Any:
    global is_pages_first
    is_pages_first = request.param == "pages first"
    yield request.param
    is_pages_first = False


def pool(num_pages: int = 8, num_layers: int = 2) -> KVPool:
    return KVPool(
        num_layers=num_layers,
        num_kv_heads=2,
        head_dim=4,
        num_pages=num_pages,
        page_size=3,
        dtype=torch.float32,
        pages_first=is_pages_first,
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


def test_pages_in_a_row_are_read_in_place_where_their_tokens_follow_each_other(
    layout: str,
) -> None:
    kv = pool()
    fill(kv)
    viewed = kv.reader([2, 3, 4], may_view=True).read(1)
    copied = kv.reader([2, 3, 4]).read(1)
    assert torch.equal(viewed, copied)
    kv.write(1, torch.tensor([9]), torch.ones(1, 4, 4))
    assert torch.equal(viewed, copied) == is_pages_first


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 7), st.integers(0, 7))))
def test_copies_happen_one_after_the_other(pairs: list[tuple[int, int]]) -> None:
    kv = pool()
    fill(kv)
    held = list(range(8))
    for source, destination in pairs:
        kv.copy_page(source, destination)
        held[destination] = held[source]
    for layer in range(2):
        assert content_of(kv, layer) == [100.0 * layer + page for page in held]


def test_a_page_outside_the_pool_is_refused() -> None:
    kv = pool()
    for pair in ((1, 8), (8, 1), (-1, 2)):
        with pytest.raises(ValueError, match="is outside the pool of 8 pages"):
            kv.copy_page(*pair)


def test_a_page_is_a_view_of_all_layers() -> None:
    kv = pool()
    fill(kv)
    assert kv.page(3).shape == (2, 2, 2, 3, 4)
    assert kv.page(3)[1].unique().tolist() == [103.0]
    kv.page(3).fill_(7)
    assert content_of(kv, 0) == [0, 1, 2, 7, 4, 5, 6, 7]


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
