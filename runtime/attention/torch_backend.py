"""Attention in a few torch calls per layer, whatever the number of sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from palmette.runtime.attention.buckets import Bucket, bucket_sequences
from palmette.runtime.attention.sharing import SharedPrefix, find_shared_prefixes
from palmette.runtime.forward_batch import ForwardBatch
from palmette.runtime.kv.pool import KVPool


class TorchAttention:
    """Sequences of similar length share one call; a long shared prefix is read once for all.

    The rows of sequences whose page tables begin alike attend to the shared pages in one call and
    to the rest of their own in another; the two parts are merged by their log-sum-exp. That is
    the shared-prefix attention of Hydragen (arXiv:2402.05099), named cascade inference in
    FlashInfer (arXiv:2501.01005). It is exact but for rounding.
    """

    def __init__(self, *, share_prefixes: bool = True) -> None:
        self._share_prefixes = share_prefixes

    def plan(self, batch: ForwardBatch, kv: KVPool, num_heads: int) -> _TorchPlan:
        """Gather indices and masks of `batch`, once for all layers."""
        counts = [
            end - start
            for start, end in zip(batch.query_starts, batch.query_starts[1:], strict=False)
        ]
        shared: list[SharedPrefix] = []
        if self._share_prefixes:
            cached = [n - q for n, q in zip(batch.context_lengths, counts, strict=True)]
            shared = find_shared_prefixes(batch.page_tables, cached, kv.page_size)
        num_skipped = [0] * batch.num_sequences  # leading pages that another call reads
        for prefix in shared:
            for s in prefix.members:
                num_skipped[s] = prefix.num_pages
        lengths = [
            n - k * kv.page_size for n, k in zip(batch.context_lengths, num_skipped, strict=True)
        ]
        group = num_heads // kv.num_kv_heads
        own = [
            _own_call(batch, kv, bucket, counts, lengths, num_skipped, group)
            for bucket in bucket_sequences(counts, lengths, kv.page_size)
        ]
        prefixes = [_prefix_call(batch, kv, prefix, counts) for prefix in shared]
        return _TorchPlan(kv, own, prefixes)


@dataclass(frozen=True, slots=True)
class _Call:
    """One attention call: S sequences with `num_queries` rows each, over `length` keys each.

    Rows that pad a sequence to `num_queries` repeat its last row. `rows` are the batch's rows
    [S * num_queries], or a slice of them; `kept` picks the results that are not padding and
    `written` says where they go, both None if nothing is padded. `pages` is [S * P] or a range
    of consecutive pages. A mask is additive.
    """

    num_sequences: int
    num_queries: int
    length: int
    rows: torch.Tensor | slice
    kept: torch.Tensor | None
    written: torch.Tensor | slice
    pages: torch.Tensor | slice
    mask: torch.Tensor | None
    is_causal: bool

    def run(self, pages: torch.Tensor, queries: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Outputs [rows written, H, D] and the log of the softmax denominators [same, H].

        `pages` are one layer's [num_pages, page_size, 2, K, D]; `queries` are [T, H, D].
        """
        _, page_size, _, num_kv_heads, head_dim = pages.shape
        num_heads = queries.shape[1]
        group = num_heads // num_kv_heads
        s, q = self.num_sequences, self.num_queries
        rows, own = self.rows, self.pages
        taken = queries[rows] if isinstance(rows, slice) else queries.index_select(0, rows)
        read = pages[own] if isinstance(own, slice) else pages.index_select(0, own)
        tokens = read.view(s, -1, 2, num_kv_heads, head_dim)[:, : self.length]
        keys, values = tokens.unbind(2)  # [s, length, K, D]
        if s == 1:
            # Key-value heads are the call's batch, so that the query heads of a group can read
            # the same keys through a stride of 0.
            heads = taken.view(q, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
            shape = (num_kv_heads, group, self.length, head_dim)
            out, lse = attention_with_lse(
                heads,
                keys[0].transpose(0, 1)[:, None].expand(shape),
                values[0].transpose(0, 1)[:, None].expand(shape),
                self.mask,
                self.is_causal,
            )
            # [K, group, q, D] and [K, group, q]
            out = out.permute(2, 0, 1, 3).reshape(q, num_heads, head_dim)
            return out, lse.permute(2, 0, 1).reshape(q, num_heads)
        # The query heads of a group are rows of the same call on their key-value head.
        heads = taken.view(s, q, num_kv_heads, group, head_dim).transpose(1, 2)
        heads = heads.reshape(s, num_kv_heads, q * group, head_dim)
        out, lse = attention_with_lse(
            heads, keys.transpose(1, 2), values.transpose(1, 2), self.mask, False
        )
        out = out.view(s, num_kv_heads, q, group, head_dim).transpose(1, 2)
        out = out.reshape(s * q, num_heads, head_dim)
        lse = lse.view(s, num_kv_heads, q, group).transpose(1, 2).reshape(s * q, num_heads)
        if self.kept is not None:
            out, lse = out.index_select(0, self.kept), lse.index_select(0, self.kept)
        return out, lse


@dataclass(frozen=True, slots=True)
class _TorchPlan:
    kv: KVPool
    own: list[_Call]
    prefixes: list[_Call]

    def attend(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        pages = self.kv.layer(layer)
        if len(self.own) == 1 and not self.prefixes and self.own[0].written == slice(None):
            return self.own[0].run(pages, queries)[0]
        output = torch.empty_like(queries)
        lse = queries.new_empty(queries.shape[:2], dtype=torch.float32)
        for call in self.own:
            out, own_lse = call.run(pages, queries)
            _put(output, call.written, out)
            if self.prefixes:
                _put(lse, call.written, own_lse)
        for call in self.prefixes:
            out, prefix_lse = call.run(pages, queries)
            rest, rest_lse = _get(output, call.rows), _get(lse, call.rows)
            share = torch.sigmoid(prefix_lse - rest_lse)[..., None]
            _put(output, call.rows, torch.lerp(rest.float(), out.float(), share).to(output.dtype))
        return output


def attention_with_lse(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    is_causal: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention [B, H, Q, D] and the log-sum-exp of its scaled scores [B, H, Q] float32.

    `mask` is additive and broadcasts to [B, H, Q, L]. Causal means from the upper left corner.
    """
    if queries.device.type == "cpu":
        out: torch.Tensor
        lse: torch.Tensor
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries, keys, values, 0.0, is_causal, attn_mask=mask
        )
        return out, lse
    scores = (queries @ keys.transpose(-1, -2)).float() / math.sqrt(queries.shape[-1])
    if mask is not None:
        scores = scores + mask
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        scores = scores.masked_fill(~seen, -math.inf)
    lse = scores.logsumexp(dim=-1)
    weights = (scores - lse[..., None]).exp().to(values.dtype)
    return weights @ values, lse


def _own_call(
    batch: ForwardBatch,
    kv: KVPool,
    bucket: Bucket,
    counts: list[int],
    lengths: list[int],
    num_skipped: list[int],
    group: int,
) -> _Call:
    """The sequences of `bucket` on the part of their context that no prefix call reads."""
    members = bucket.members
    num_queries, length = bucket.num_queries, bucket.length
    num_pages = -(-length // kv.page_size)
    starts = batch.query_starts
    tables: list[list[int]] = []
    for s in members:
        skipped = num_skipped[s]
        table = batch.page_tables[s][skipped : skipped - (-lengths[s] // kv.page_size)]
        tables.append(table + table[-1:] * (num_pages - len(table)))
    device = kv.device
    own_lengths = torch.tensor([lengths[s] for s in members], device=device)
    own_counts = torch.tensor([counts[s] for s in members], device=device)
    is_whole = all(counts[s] == num_queries for s in members)

    rows: torch.Tensor | slice
    written: torch.Tensor | slice
    kept: torch.Tensor | None = None
    first = starts[members[0]]
    if is_whole and members == list(range(members[0], members[-1] + 1)):
        end = first + num_queries * len(members)
        rows = written = slice(None) if end - first == batch.num_tokens else slice(first, end)
    else:
        offsets = torch.arange(num_queries, device=device)[None, :]
        firsts = torch.tensor([starts[s] for s in members], device=device)[:, None]
        padded = firsts + torch.minimum(offsets, own_counts[:, None] - 1)
        rows = written = padded.flatten()
        if not is_whole:
            kept = (offsets < own_counts[:, None]).flatten().nonzero()[:, 0]
            written = rows.index_select(0, kept)

    # Query j of a sequence sees its first (length - count + 1 + j) keys.
    is_causal = len(members) == 1 and num_queries == length and num_queries > 1
    mask: torch.Tensor | None = None
    sees_all = num_queries == 1 and all(lengths[s] == length for s in members)
    if not is_causal and not sees_all:
        offsets = torch.arange(num_queries, device=device)[None, :]
        num_seen = torch.minimum(
            own_lengths[:, None] - own_counts[:, None] + 1 + offsets, own_lengths[:, None]
        )
        places = torch.arange(length, device=device)
        seen = places < num_seen[..., None]  # [S, num_queries, length]
        if len(members) > 1:
            seen = seen.repeat_interleave(group, dim=1)[:, None]  # [S, 1, num_queries * group, L]
        mask = torch.zeros(seen.shape, dtype=kv.dtype, device=device)
        mask.masked_fill_(~seen, -math.inf)
    return _Call(
        num_sequences=len(members),
        num_queries=num_queries,
        length=length,
        rows=rows,
        kept=kept,
        written=written,
        pages=_page_index([page for table in tables for page in table], device),
        mask=mask,
        is_causal=is_causal,
    )


def _prefix_call(batch: ForwardBatch, kv: KVPool, prefix: SharedPrefix, counts: list[int]) -> _Call:
    """All rows of the sequences that share `prefix` on its pages, which each of them sees whole."""
    starts, members = batch.query_starts, prefix.members
    num_rows = sum(counts[s] for s in members)
    rows: torch.Tensor | slice
    if num_rows == starts[members[-1] + 1] - starts[members[0]]:
        rows = slice(starts[members[0]], starts[members[-1] + 1])
    else:
        rows = torch.tensor(
            [row for s in members for row in range(starts[s], starts[s + 1])], device=kv.device
        )
    return _Call(
        num_sequences=1,
        num_queries=num_rows,
        length=prefix.num_pages * kv.page_size,
        rows=rows,
        kept=None,
        written=rows,
        pages=_page_index(batch.page_tables[members[0]][: prefix.num_pages], kv.device),
        mask=None,
        is_causal=False,
    )


def _page_index(pages: list[int], device: torch.device) -> torch.Tensor | slice:
    """`pages` to read: a slice, which copies nothing, where each id follows the one before."""
    if pages == list(range(pages[0], pages[0] + len(pages))):
        return slice(pages[0], pages[0] + len(pages))
    return torch.tensor(pages, device=device)


def _get(tensor: torch.Tensor, rows: torch.Tensor | slice) -> torch.Tensor:
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)


def _put(tensor: torch.Tensor, rows: torch.Tensor | slice, values: torch.Tensor) -> None:
    if isinstance(rows, slice):
        tensor[rows] = values
    else:
        tensor.index_copy_(0, rows, values)
