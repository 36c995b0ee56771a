"""Where keys and values lie: one tensor of pages per layer, and copies between pages."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from palmette.errors import InvalidRequest
from palmette.runtime.memory import mapped
from palmette.runtime.models.config import ModelConfig


class KVPool:
    """Keys and values of `num_pages` pages of `page_size` tokens, for every layer.

    A layer is [2, num_kv_heads, num_pages, page_size, head_dim], keys before values: within a
    page the tokens of one head are contiguous, so that what is gathered from pages is at once the
    batch of matrices, one per head and sequence, that attention multiplies. (With the heads inside
    the token, as it is computed, a page gathers in one piece instead of 2 * num_kv_heads, but the
    products then read with a stride: 1.2 times as slow in float32 and 3 times in bfloat16, measured
    for 32 sequences of 128 tokens.)

    `pages_first`: all that a page holds lies together instead, [num_pages, num_layers, 2,
    num_kv_heads, page_size, head_dim] in memory, for kernels that read pages in place. What is in
    use then lies in few large pages of the system's memory, which the processor finds sooner.

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
        pages_first: bool = False,
    ) -> None:
        self.num_layers = num_layers
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.num_pages = num_pages
        self.page_size = page_size
        self.dtype = dtype
        shape = (num_layers, 2, num_kv_heads, num_pages, page_size, head_dim)
        held = (num_pages, num_layers, 2, num_kv_heads, page_size, head_dim)
        try:
            if pages_first:
                memory = _zeros(held, dtype, torch.device(device), in_large_pages=True)
                self._pages = memory.permute(1, 2, 3, 0, 4, 5)
            else:
                self._pages = _zeros(shape, dtype, torch.device(device))
        except (RuntimeError, MemoryError, OSError, OverflowError) as error:
            num_bytes = math.prod(shape) * dtype.itemsize
            raise InvalidRequest(
                f"a KV pool of {num_pages} pages of {page_size} tokens takes {num_bytes} bytes, "
                "which are not to be had: give num_pages or kv_memory less",
                param="num_pages",
            ) from error
        # For kernels: where the memory is, and how far apart in it, in numbers, layers, keys and
        # values, heads and pages are.
        self.address = self._pages.data_ptr()
        self.steps = self._pages.stride()[:4]
        # [2 * num_kv_heads, num_pages, page_size, head_dim] each, and where tokens follow each
        # other from page to page the same with [.., num_pages * page_size, ..].
        self._heads_by_layer = [layer.flatten(0, 1) for layer in self._pages]
        self._slots_by_layer: list[torch.Tensor] | None = None
        if not pages_first:
            self._slots_by_layer = [heads.flatten(1, 2) for heads in self._heads_by_layer]
        # A piece is a page of a head; of each layer all from its first on, in the order of memory.
        size = page_size * head_dim
        steps = [step // size for step in self.steps]
        pieces = (self._pages.permute(3, 0, 1, 2, 4, 5) if pages_first else self._pages).view(
            -1, size
        )
        self._pieces_by_layer = [pieces[layer * steps[0] :] for layer in range(num_layers)]
        # Where the pieces of page 0 lie, [2 * num_kv_heads, 1], and how much further are those of
        # the next.
        self._first_pieces = torch.arange(2 * num_kv_heads, device=device)[:, None] * steps[2]
        self._page_step = steps[3]

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
        tokens = keys_and_values.transpose(0, 1)
        if self._slots_by_layer is not None:
            self._slots_by_layer[layer].index_copy_(1, slots, tokens)
        else:
            size = self.page_size
            self._heads_by_layer[layer][:, slots // size, slots % size] = tokens

    def read_tokens(self, page_ids: Sequence[int], num_tokens: int) -> torch.Tensor:
        """A copy, on the CPU, of the first `num_tokens` tokens of these pages, one after the other.
        [num_layers, 2, num_kv_heads, num_tokens, head_dim]
        """
        pages = torch.tensor(page_ids, dtype=torch.int64, device=self.device)
        heads = (2, self.num_kv_heads, num_tokens, self.head_dim)
        tokens = torch.empty((self.num_layers, *heads), dtype=self.dtype)
        for layer, held in enumerate(self._heads_by_layer):
            tokens[layer].copy_(held[:, pages].flatten(1, 2)[:, :num_tokens].view(heads))
        return tokens

    def write_tokens(self, page_ids: Sequence[int], tokens: torch.Tensor) -> None:
        """Sets the first tokens of these pages, which are all different, to `tokens`.
        [num_layers, 2, num_kv_heads, T, head_dim]
        """
        num_tokens = tokens.shape[3]
        numbers = torch.arange(num_tokens, device=self.device)
        within = numbers % self.page_size
        pages = torch.tensor(page_ids, dtype=torch.int64, device=self.device)
        pages = pages[numbers // self.page_size]
        for layer, held in enumerate(self._heads_by_layer):
            held[:, pages, within] = tokens[layer].flatten(0, 1).to(self.device, self.dtype)

    def reader(self, page_ids: Sequence[int], *, may_view: bool = False) -> PageReader:
        """Reads these pages, one after the other, from any layer.

        If `may_view`, ids that follow each other are read in place: that copies nothing, but what
        is read is not contiguous.
        """
        first, count = page_ids[0], len(page_ids)
        is_run = list(page_ids) == list(range(first, first + count))
        if may_view and is_run and self._slots_by_layer is not None:
            slots = slice(first * self.page_size, (first + count) * self.page_size)
            return PageReader(self, slots, None)
        pages = torch.tensor(page_ids, device=self.device)
        pieces = (self._first_pieces + pages * self._page_step).flatten()
        # One buffer for all layers: it stays in the cache, and no layer waits for fresh memory.
        shape = (len(pieces), self.page_size * self.head_dim)
        return PageReader(self, pieces, torch.empty(shape, dtype=self.dtype, device=self.device))

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
            assert kv._slots_by_layer is not None
            tokens = kv._slots_by_layer[layer][:, self._index]
        else:
            if self._layer != layer:
                torch.index_select(kv._pieces_by_layer[layer], 0, self._index, out=self._buffer)
                self._layer = layer
            tokens = self._buffer
        heads: torch.Tensor = tokens.view(2, kv.num_kv_heads, -1, kv.head_dim)
        return heads


def _zeros(
    shape: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
    *,
    in_large_pages: bool = False,
) -> torch.Tensor:
    """Zeros; on a CPU in memory that nothing has touched yet."""
    num_bytes = math.prod(shape) * dtype.itemsize
    if device.type != "cpu" or not num_bytes:
        return torch.zeros(shape, dtype=dtype, device=device)
    memory = mapped(num_bytes, in_large_pages=in_large_pages)
    return torch.frombuffer(memory, dtype=dtype).view(shape)
