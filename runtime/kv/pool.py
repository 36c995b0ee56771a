"""Where keys and values lie: one tensor of pages per layer, and copies between pages."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from palmette.runtime.models.config import ModelConfig


class KVPool:
    """Keys and values of `num_pages` pages of `page_size` tokens, for every layer.

    A page of a layer is one contiguous block [page_size, 2, num_kv_heads, head_dim], keys before
    values within a token. So a token is written with one row copy, straight from the fused
    query-key-value product, and keys and values of a sequence are gathered together with one copy
    per page; pages whose ids follow each other are read in place. The pool starts as zeros and a
    freed page keeps its content, which is finite, so that masked-out places never turn into NaN.
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
        shape = (num_layers, num_pages, page_size, 2, num_kv_heads, head_dim)
        self._pages = torch.zeros(shape, dtype=dtype, device=device)
        # [num_pages, page_size, 2, num_kv_heads, head_dim] for each layer
        self._by_layer = list(self._pages.unbind(0))
        # [num_pages * page_size, 2 * num_kv_heads, head_dim] for each layer
        self._rows_by_layer = [
            pages.view(num_pages * page_size, 2 * num_kv_heads, head_dim)
            for pages in self._by_layer
        ]

    @staticmethod
    def bytes_per_page(config: ModelConfig, page_size: int, dtype: torch.dtype) -> int:
        """What one page takes, over all layers."""
        return config.num_layers * page_size * 2 * config.kv_size * dtype.itemsize

    @property
    def num_bytes(self) -> int:
        return self._pages.nbytes

    @property
    def device(self) -> torch.device:
        return self._pages.device

    def layer(self, index: int) -> torch.Tensor:
        """The pages of one layer. [num_pages, page_size, 2, num_kv_heads, head_dim]"""
        return self._by_layer[index]

    def write(self, index: int, slots: torch.Tensor, keys_and_values: torch.Tensor) -> None:
        """Set the tokens at `slots` [T] of layer `index` to [T, 2 * num_kv_heads, head_dim]."""
        self._rows_by_layer[index].index_copy_(0, slots, keys_and_values)

    def copy_pages(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Page `destinations[i]` holds what `sources[i]` held before the call, in every layer.

        All reads happen before all writes, so a page may be both a source and a destination.
        """
        if len(sources) != len(destinations):
            raise ValueError(f"{len(sources)} source pages, {len(destinations)} destinations")
        if len(set(destinations)) != len(destinations):
            raise ValueError(f"a page is written twice: {list(destinations)}")
        for page in (*sources, *destinations):
            if not 0 <= page < self.num_pages:
                raise ValueError(f"page {page} is outside the pool of {self.num_pages} pages")
        if not sources:
            return
        read = torch.tensor(list(sources), device=self.device)
        written = torch.tensor(list(destinations), device=self.device)
        with torch.inference_mode():
            self._pages.index_copy_(1, written, self._pages.index_select(1, read))
