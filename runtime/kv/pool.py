"""Where keys and values lie: one tensor of pages per layer, and copies between pages."""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Sequence

import torch

from palmette.errors import InvalidRequest
from palmette.runtime.models.config import ModelConfig


class KVPool:
    """Keys and values of `num_pages` pages of `page_size` tokens, for every layer.

    A layer is [2, num_kv_heads, num_pages, page_size, head_dim], keys before values: within a
    page the tokens of one head are contiguous, so that what is gathered from pages is at once the
    batch of matrices, one per head and sequence, that attention multiplies. (With the heads inside
    the token, as it is computed, a page gathers in one piece instead of 2 * num_kv_heads, but the
    products then read with a stride: 1.2 times as slow in float32 and 3 times in bfloat16, measured
    for 32 sequences of 128 tokens.)

    The pool starts as zeros and a freed page keeps its content, which is finite, so that places
    that attention masks out never turn into NaN. On a CPU the system gives memory to a page when it
    is first written.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        num_pages: int,
        page_size: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        shape = (num_layers, 2, num_kv_heads, num_pages, page_size, head_dim)
        try:
            self._pages = _zeros(shape, dtype, torch.device(device))
        except (RuntimeError, MemoryError, OSError, OverflowError) as error:
            num_bytes = math.prod(shape) * dtype.itemsize
            raise InvalidRequest(
                f"a KV pool of {num_pages} pages of {page_size} tokens takes {num_bytes} bytes, "
                "which are not to be had: give num_pages or kv_memory less",
                param="num_pages",
            ) from error
        heads = (2 * num_kv_heads, num_pages * page_size, head_dim)
        self._slots_by_layer = [layer.view(heads) for layer in self._pages]
        pieces = (2 * num_kv_heads * num_pages, page_size * head_dim)
        self._pieces_by_layer = [layer.view(pieces) for layer in self._pages]
        # Where the pieces of page 0 lie; those of page p are p further. [2 * num_kv_heads, 1]
        self._first_pieces = torch.arange(2 * num_kv_heads, device=device)[:, None] * num_pages

    @staticmethod
    def bytes_per_page(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
        """What one page takes, over all layers."""
        return config.num_layers * page_size * 2 * config.kv_size * dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self._pages.nbytes

    @property
    def memory(self) -> torch.Tensor:
        """All pages of all layers, for kernels that read and write them in place.
        [num_layers, 2, num_kv_heads, num_pages, page_size, head_dim]
        """
        return self._pages

    @property
    def device(self) -> torch.device:
        return self._pages.device

    def write(self, layer: int, slots: torch.Tensor, keys_and_values: torch.Tensor) -> None:
        """Sets the tokens at `slots` [T], all different, to [T, 2 * num_kv_heads, head_dim]."""
        self._slots_by_layer[layer].index_copy_(1, slots, keys_and_values.transpose(0, 1))

    def read_tokens(self, page_ids: Sequence[int], num_tokens: int) -> torch.Tensor:
        """A copy, on the CPU, of the first `num_tokens` tokens of these pages, one after the other.
        [num_layers, 2, num_kv_heads, num_tokens, head_dim]
        """
        slots = self._slots_of(page_ids, num_tokens)
        heads = (2, self.num_kv_heads, num_tokens, self.head_dim)
        shape = (self.num_layers, *heads)
        tokens = torch.empty(shape, dtype=self.dtype)
        for layer, held in enumerate(self._slots_by_layer):
            tokens[layer].copy_(held.index_select(1, slots).view(heads))
        return tokens

    def write_tokens(self, page_ids: Sequence[int], tokens: torch.Tensor) -> None:
        """Sets the first tokens of these pages, which are all different, to `tokens`.
        [num_layers, 2, num_kv_heads, T, head_dim]
        """
        num_tokens = tokens.shape[3]
        slots = self._slots_of(page_ids, num_tokens)
        heads = (2 * self.num_kv_heads, num_tokens, self.head_dim)
        for layer, held in enumerate(self._slots_by_layer):
            held.index_copy_(1, slots, tokens[layer].reshape(heads).to(self.device, self.dtype))

    def reader(self, page_ids: Sequence[int], *, may_view: bool = False) -> PageReader:
        """Reads these pages, one after the other, from any layer.

        If `may_view`, ids that follow each other are read in place: that copies nothing, but what
        is read is not contiguous.
        """
        first, count = page_ids[0], len(page_ids)
        if may_view and list(page_ids) == list(range(first, first + count)):
            slots = slice(first * self.page_size, (first + count) * self.page_size)
            return PageReader(self, slots, None)
        pages = torch.tensor(page_ids, device=self.device)
        pieces = (self._first_pieces + pages).flatten()
        # One buffer for all layers: it stays in the cache, and no layer waits for fresh memory.
        shape = (len(pieces), self.page_size * self.head_dim)
        return PageReader(self, pieces, torch.empty(shape, dtype=self.dtype, device=self.device))

    def _slots_of(self, page_ids: Sequence[int], num_tokens: int) -> torch.Tensor:
        """Where the first tokens of these pages lie. [num_tokens]"""
        pages = torch.tensor(page_ids, dtype=torch.int64, device=self.device)
        within = torch.arange(self.page_size, device=self.device)
        return (pages[:, None] * self.page_size + within).flatten()[:num_tokens]

    def page(self, page_id: int) -> torch.Tensor:
        """The page itself, not a copy. [num_layers, 2, num_kv_heads, page_size, head_dim]"""
        if not 0 <= page_id < self.num_pages:
            raise ValueError(f"page {page_id} is outside the pool of {self.num_pages} pages")
        return self._pages[:, :, :, page_id]

    def copy_page(self, source: int, destination: int) -> None:
        """Page `destination` holds what `source` holds, in every layer.

        One at a time: many pages would first have to be gathered, which takes thrice as long.
        """
        with torch.inference_mode():
            self.page(destination).copy_(self.page(source))


class PageReader:
    """Reads some pages, layer after layer; each reading overwrites the one before.

    Made for one forward pass: asked again for the layer it read last, it does not read again.
    """

    def __init__(
        self, kv: KVPool, index: torch.Tensor | slice, buffer: torch.Tensor | None
    ) -> None:
        self._kv = kv
        self._index = index
        self._buffer = buffer
        self._layer: int | None = None  # whose keys and values are in the buffer

    def read(self, layer: int) -> torch.Tensor:
        """Keys and values. [2, num_kv_heads, num_pages * page_size, head_dim]"""
        kv = self._kv
        if self._buffer is None or isinstance(self._index, slice):
            tokens = kv._slots_by_layer[layer][:, self._index]
        else:
            if self._layer != layer:
                torch.index_select(kv._pieces_by_layer[layer], 0, self._index, out=self._buffer)
                self._layer = layer
            tokens = self._buffer
        heads: torch.Tensor = tokens.view(2, kv.num_kv_heads, -1, kv.head_dim)
        return heads


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros; on a CPU in memory that nothing has touched yet."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or sys.platform == "win32" or not num_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
