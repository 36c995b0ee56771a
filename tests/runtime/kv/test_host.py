"""The host tier's contents: in memory, and mapped from a file."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from palmette.errors import InvalidRequest
from palmette.runtime.kv.host import HostPool
from palmette.runtime.kv.pool import KVPool


def pool(num_pages: int = 6, dtype: torch.dtype = torch.float32) -> KVPool:
    kv = KVPool(
        num_layers=3,
        num_kv_heads=2,
        head_dim=4,
        num_pages=num_pages,
        page_size=5,
        dtype=dtype,
    )
    generator = torch.Generator().manual_seed(0)
    for page in range(num_pages):
        kv.page(page).copy_(torch.randn(kv.page(page).shape, generator=generator))
    return kv


def make(kv: KVPool, num_slots: int, directory: Path | None) -> HostPool:
    return HostPool(kv, num_slots, directory)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_mapped", [False, True])
def test_a_page_comes_back_bit_by_bit(is_mapped: bool, dtype: torch.dtype, tmp_path: Path) -> None:
    kv = pool(dtype=dtype)
    host = make(kv, 4, tmp_path if is_mapped else None)
    before = [kv.page(page).clone() for page in range(6)]
    host.store([5, 0], [1, 3])
    kv.page(5).zero_()
    kv.page(0).zero_()
    host.restore(1, 2)
    host.restore(3, 5)
    expected = [torch.zeros_like(before[0]), before[1], before[5], before[3], before[4], before[0]]
    for page in range(6):
        assert torch.equal(kv.page(page), expected[page])


ACTS = st.lists(
    st.tuples(st.sampled_from(["store", "restore"]), st.integers(0, 5), st.integers(0, 2)),
    max_size=20,
)


@settings(deadline=None)
@given(acts=ACTS)
def test_slots_and_pages_hold_what_two_lists_hold(acts: list[tuple[str, int, int]]) -> None:
    kv = pool()
    host = make(kv, 3, None)
    start = [kv.page(page).clone() for page in range(6)]
    pages: list[int] = list(range(6))
    slots: dict[int, int] = {}
    for act, page, slot in acts:
        if act == "store":
            host.store([page], [slot])
            slots[slot] = pages[page]
        elif slot in slots:
            host.restore(slot, page)
            pages[page] = slots[slot]
    for page, content in enumerate(pages):
        assert torch.equal(kv.page(page), start[content])


def test_a_mapped_file_has_no_name_and_takes_its_room_at_once(tmp_path: Path) -> None:
    kv = pool()
    host = make(kv, 40, tmp_path)
    assert list(tmp_path.iterdir()) == []
    mapped = [
        line.split()
        for line in Path("/proc/self/maps").read_text().splitlines()
        if str(tmp_path) in line
    ]
    assert len(mapped) == 1
    assert host.num_bytes == 40 * 3 * 2 * 2 * 5 * 4 * 4


def test_a_size_gives_as_many_slots_as_fit() -> None:
    kv = pool()
    bytes_per_page = kv.num_bytes // kv.num_pages
    assert HostPool.of_size(kv, 3 * bytes_per_page + 5).num_slots == 3
    with pytest.raises(InvalidRequest, match="holds no page of 5 tokens") as refused:
        HostPool.of_size(kv, bytes_per_page - 1)
    assert refused.value.param == "host_memory"


def test_memory_that_is_not_there_is_refused_by_name() -> None:
    with pytest.raises(InvalidRequest, match="bytes is not to be had") as refused:
        HostPool.of_size(pool(), 1 << 60)
    assert refused.value.param == "host_memory"


def test_a_directory_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="No such file or directory") as refused:
        HostPool.of_size(pool(), 1 << 20, tmp_path / "nowhere")
    assert refused.value.param == "host_directory"


def test_a_file_system_without_room_is_refused_and_left_clean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int, start: int, length: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(InvalidRequest, match="cannot hold 1048320 bytes: No space left") as refused:
        HostPool.of_size(pool(), 1 << 20, tmp_path)
    assert refused.value.param == "host_directory"
    assert list(tmp_path.iterdir()) == []
