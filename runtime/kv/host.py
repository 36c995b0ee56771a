"""The host tier's contents: keys and values of evicted pages, in memory or mapped from a file."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch

from palmette.errors import InvalidRequest
from palmette.runtime.kv.pool import KVPool


class HostPool:
    """Copies of pages of `kv`, in `num_slots` slots.

    A slot is one piece of memory, laid out as a page is over all layers: [num_layers, 2,
    num_kv_heads, page_size, head_dim]. With a `directory`, the slots are mapped from a file there
    that has no name, so that the system may write them out and nothing is left behind. Its room
    is taken at once: a file system that is full later cannot end the process.

    Where the pool is on a GPU, slots in memory are pinned.
    """

    def __init__(self, kv: KVPool, num_slots: int, directory: str | Path | None = None) -> None:
        self.num_slots = num_slots
        self._kv = kv
        shape = (num_slots, *kv.page(0).shape)
        num_bytes = math.prod(shape) * kv.dtype.itemsize
        if directory is None:
            try:
                self._slots = torch.empty(
                    shape, dtype=kv.dtype, pin_memory=kv.device.type == "cuda"
                )
            except (RuntimeError, MemoryError) as error:
                raise InvalidRequest(
                    f"a host tier of {num_bytes} bytes is not to be had: give host_memory less",
                    param="host_memory",
                ) from error
        else:
            self._slots = _mapped(Path(directory), num_bytes).view(kv.dtype).view(shape)

    @classmethod
    def of_size(cls, kv: KVPool, num_bytes: int, directory: str | Path | None = None) -> HostPool:
        """As many slots as fit `num_bytes`. Raises InvalidRequest if that is none, or more than
        there is memory or room.
        """
        bytes_per_page = kv.num_bytes // kv.num_pages
        num_slots = num_bytes // bytes_per_page
        if not num_slots:
            raise InvalidRequest(
                f"host_memory of {num_bytes} bytes holds no page of {kv.page_size} tokens "
                f"({bytes_per_page} bytes): give host_memory more",
                param="host_memory",
            )
        return cls(kv, num_slots, directory)

    @property
    def num_bytes(self) -> int:
        return self._slots.nbytes

    # Page by page: the pieces of a page are long enough that this is thrice as fast as gathering
    # many pages first, and it takes no memory besides.

    @torch.inference_mode()
    def store(self, page_ids: Sequence[int], slots: Sequence[int]) -> None:
        """Slot `slots[i]` holds what page `page_ids[i]` holds, before this returns."""
        for page_id, slot in zip(page_ids, slots, strict=True):
            self._slots[slot].copy_(self._kv.page(page_id))

    @torch.inference_mode()
    def restore(self, slot: int, page_id: int) -> None:
        """The page holds what the slot holds."""
        self._kv.page(page_id).copy_(self._slots[slot])


def _mapped(directory: Path, num_bytes: int) -> torch.Tensor:
    """Bytes in a new file that has no name any more. [num_bytes] uint8"""
    try:
        handle, name = tempfile.mkstemp(dir=directory, prefix="palmette-host-")
        try:
            try:
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(handle, 0, num_bytes)
            finally:
                os.close(handle)
            return torch.from_file(name, shared=True, size=num_bytes, dtype=torch.uint8)
        finally:
            os.unlink(name)
    except (OSError, RuntimeError) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidRequest(
            f"host_directory {str(directory)!r} cannot hold {num_bytes} bytes: {why}",
            param="host_directory",
        ) from error
