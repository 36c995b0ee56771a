"""Attention in a few torch calls per layer, whatever the number of sequences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F  # noqa: N812

from palmette.runtime.attention.buckets import (
    MAX_PADDED_QUERIES,
    MAX_SCORES,
    Bucket,
    bucket_sequences,
)
from palmette.runtime.attention.sharing import SharedPrefix, find_shared_prefixes
from palmette.runtime.forward_batch import ForwardBatch
from palmette.runtime.kv.pool import KVPool, PageReader

Rows = torch.Tensor | slice

# Rows of a long prefill that are multiplied at once. Of 64 to 512, 128 was fastest at 1,000 keys:
# more waste work above the diagonal and leave the cache, fewer are small products.
_MAX_BLOCK_ROWS = 128

_SUMMED_AT_ONCE = 192  # by MKL, see `_combine`


class TorchAttention:
    """Two products and a softmax for sequences of similar length together.

    A shared prefix is read once: the rows of sequences whose page tables begin alike attend to
    the shared pages in one call and to the rest of their own in another, and the two parts are
    merged by the log-sum-exp of their scores. That is the shared-prefix attention of Hydragen
    (arXiv:2402.05099), cascade inference in FlashInfer (arXiv:2501.01005); exact but for rounding.

    The products are plain `torch.bmm` over the pool's layout. On the CPUs it was measured on that
    is as fast as torch's fused kernel in float32 and 3 times as fast in bfloat16, and it yields the
    log-sum-exp without operators that are private to torch.
    """

    def __init__(self, *, share_prefixes: bool = True) -> None:
        self._share_prefixes = share_prefixes

    def plan(self, batch: ForwardBatch, kv: KVPool, num_heads: int) -> _TorchPlan:
        """Gather indices and masks of `batch`, once for all layers."""
        starts, contexts = batch.query_starts, batch.context_lengths
        counts = [starts[s + 1] - starts[s] for s in range(batch.num_sequences)]
        shared: list[SharedPrefix] = []
        if self._share_prefixes:
            cached = [n - q for n, q in zip(contexts, counts, strict=True)]
            shared = find_shared_prefixes(batch.page_tables, cached, kv.page_size)
        skipped = [0] * batch.num_sequences  # leading pages that a prefix call reads
        for prefix in shared:
            for s in prefix.members:
                skipped[s] = prefix.num_pages
        lengths = [n - pages * kv.page_size for n, pages in zip(contexts, skipped, strict=True)]
        group = num_heads // kv.num_kv_heads
        own: list[_Call] = []
        for bucket in bucket_sequences(counts, lengths, num_heads):
            if bucket.num_queries > MAX_PADDED_QUERIES:
                own.append(_long_call(batch, kv, bucket, skipped, group))
            else:
                own.append(_padded_call(batch, kv, bucket, counts, lengths, skipped, group))
        prefixes: list[_Call] = [
            _prefix_call(batch, kv, prefix, counts, group) for prefix in shared
        ]
        return _TorchPlan(kv, own, prefixes)


@dataclass(frozen=True, slots=True)
class _TorchPlan:
    kv: KVPool
    own: list[_Call]
    prefixes: list[_Call]

    def attend(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        first = self.own[0].rows
        if not self.prefixes and isinstance(first, slice) and first == slice(None):
            return self.own[0].run(self.kv, layer, queries, None)
        shape, device = queries.shape, queries.device
        if not self.prefixes:
            output = torch.empty(shape, dtype=queries.dtype, device=device)
            for call in self.own:
                _put(output, call.rows, call.run(self.kv, layer, queries, None))
            return output
        output = torch.empty(shape, dtype=torch.float32, device=device)
        lse = torch.empty(shape[:2], dtype=torch.float32, device=device)
        prefix_lse = torch.empty_like(lse)
        for call in self.own:
            _put(output, call.rows, call.run(self.kv, layer, queries, lse))
        for call in self.prefixes:
            part = call.run(self.kv, layer, queries, prefix_lse)
            weight = torch.sigmoid(_get(prefix_lse, call.rows) - _get(lse, call.rows))
            rest = _get(output, call.rows)
            _put(output, call.rows, torch.lerp(rest, part, weight[..., None]))
        return output.to(queries.dtype)


class _Call(Protocol):
    """One attention call of every layer, for some rows of the batch and some of their keys."""

    @property
    def rows(self) -> Rows: ...

    def run(
        self, kv: KVPool, layer: int, queries: torch.Tensor, lse: torch.Tensor | None
    ) -> torch.Tensor:
        """Outputs of `rows`, [len(rows), H, D].

        If `lse` [T, H] is given, fills the places of `rows` in it and returns float32.
        """
        ...


@dataclass(frozen=True, slots=True)
class _PaddedCall:
    """`num_sequences` sequences, each with `num_queries` rows over `length` keys, in one product.

    The keys are whole pages: a product over a part of them would first copy it in bfloat16, and
    with whole vectors of keys a softmax does not depend on how many masked ones follow.

    `taken` are the rows to read [num_sequences * num_queries]; a shorter sequence repeats its last
    row, and `kept` picks what is not such a repetition: `rows`. The mask is additive.
    """

    rows: Rows
    taken: Rows
    kept: torch.Tensor | None
    num_sequences: int
    num_queries: int
    length: int
    pages: PageReader
    spare: int  # heads of zeros beside each num_queries * group, see `_spare_heads`
    mask: torch.Tensor | None  # [num_sequences, num_queries * group + spare, length]

    def run(
        self, kv: KVPool, layer: int, queries: torch.Tensor, lse: torch.Tensor | None
    ) -> torch.Tensor:
        num_heads, head_dim = queries.shape[1:]
        k, s, q = kv.num_kv_heads, self.num_sequences, self.num_queries
        group = num_heads // k
        tokens = self.pages.read(layer)
        keys, values = tokens.view(2, k * s, -1, head_dim) if s > 1 else tokens
        heads = _get(queries, self.taken).view(s, q, k, group, head_dim)
        heads = heads.permute(2, 0, 1, 3, 4).reshape(k * s, q * group, head_dim)
        if self.spare:
            heads = F.pad(heads, (0, 0, 0, self.spare))
        scores = torch.bmm(heads, keys.transpose(1, 2))
        if self.mask is not None:
            scores.view(k, s, q * group + self.spare, self.length).add_(self.mask)
        out, own_lse = _weigh(scores, values, lse is not None)
        out = out[:, : q * group].reshape(k, s, q, group, head_dim).permute(1, 2, 0, 3, 4)
        out = out.reshape(s * q, num_heads, head_dim)
        if self.kept is not None:
            out = out.index_select(0, self.kept)
        if lse is not None and own_lse is not None:
            own_lse = own_lse[:, : q * group].reshape(k, s, q, group).permute(1, 2, 0, 3)
            own_lse = own_lse.reshape(s * q, num_heads)
            if self.kept is not None:
                own_lse = own_lse.index_select(0, self.kept)
            _put(lse, self.rows, own_lse)
        return out


@dataclass(frozen=True, slots=True)
class _BlockedCall:
    """Many rows over the keys of one page table, some rows at a time.

    If `diagonal` is given, row i sees the first `length - len(rows) + 1 + i` keys, else all.
    Whole pages are multiplied, as in a padded call.
    """

    rows: Rows
    block_rows: int
    length: int
    pages: PageReader
    spare: int  # heads of zeros after the last, see `_spare_heads`
    diagonal: torch.Tensor | None  # [block_rows * group, block_rows + page_size], additive

    def run(
        self, kv: KVPool, layer: int, queries: torch.Tensor, lse: torch.Tensor | None
    ) -> torch.Tensor:
        num_heads, head_dim = queries.shape[1:]
        k, group = kv.num_kv_heads, num_heads // kv.num_kv_heads
        keys, values = self.pages.read(layer)  # [k, whole pages of length, D]
        keys = keys.transpose(1, 2)
        heads = _get(queries, self.rows)
        num_rows = heads.shape[0]
        heads = heads.view(num_rows, k, group, head_dim).transpose(0, 1)
        heads = heads.reshape(k, num_rows * group, head_dim)
        if self.spare:
            heads = F.pad(heads, (0, 0, 0, self.spare))
        num_before = self.length - num_rows  # keys that every row sees, if causal
        outs: list[torch.Tensor] = []
        lses: list[torch.Tensor] = []
        for start in range(0, num_rows, self.block_rows):
            end = min(start + self.block_rows, num_rows)
            block = heads[:, start * group :]
            if end < num_rows:
                block = block[:, : (end - start) * group]
            num_seen = self.length if self.diagonal is None else num_before + end
            num_seen += -num_seen % kv.page_size
            scores = torch.bmm(block, keys[:, :, :num_seen])
            if self.diagonal is not None:
                hidden = scores[:, : (end - start) * group, num_before + start :]
                hidden.add_(self.diagonal[: hidden.shape[1], : hidden.shape[2]])
            out, own_lse = _weigh(scores, values[:, :num_seen], lse is not None)
            outs.append(out)
            if own_lse is not None:
                lses.append(own_lse)
        if lse is not None:
            all_lse = torch.cat(lses, dim=1)[:, : num_rows * group]
            all_lse = all_lse.reshape(k, num_rows, group).transpose(0, 1)
            _put(lse, self.rows, all_lse.reshape(num_rows, num_heads))
        joined = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
        joined = joined[:, : num_rows * group].reshape(k, num_rows, group, head_dim)
        return joined.transpose(0, 1).reshape(num_rows, num_heads, head_dim)


def _weigh(
    scores: torch.Tensor, values: torch.Tensor, wants_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """softmax(scores) @ values, and the log-sum-exp of each row if wanted; then both are float32.

    Consumes `scores`.
    """
    if not wants_lse:
        return _combine(torch.softmax(scores, dim=-1), values), None
    highest = scores.amax(dim=-1, keepdim=True)
    weights = scores.sub_(highest).exp_()
    total = weights.sum(dim=-1, keepdim=True, dtype=torch.float32)
    out = _combine(weights, values) / total
    return out, (highest.float() + total.log())[..., 0]


def _combine(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """`weights @ values`, summed in the same order however many masked keys come last.

    MKL's float32 product sums over blocks of 192, but halves what is left of more than one block;
    so whole blocks and the rest are two products. bfloat16, which is oneDNN's, needs no such care.
    """
    num_whole = values.shape[1] - values.shape[1] % _SUMMED_AT_ONCE
    if weights.dtype != torch.float32 or num_whole in (0, values.shape[1]):
        return torch.bmm(weights, values)
    out = torch.bmm(weights[:, :, :num_whole], values[:, :num_whole])
    return out.baddbmm_(weights[:, :, num_whole:], values[:, num_whole:])


def _padded_call(
    batch: ForwardBatch,
    kv: KVPool,
    bucket: Bucket,
    counts: list[int],
    lengths: list[int],
    skipped: list[int],
    group: int,
) -> _PaddedCall:
    members, q = bucket.members, bucket.num_queries
    starts, device, s = batch.query_starts, kv.device, len(bucket.members)
    num_pages = -(-bucket.length // kv.page_size)
    length = num_pages * kv.page_size
    page_ids: list[int] = []
    for member in members:
        first = skipped[member]
        own = batch.page_tables[member][first : first - (-lengths[member] // kv.page_size)]
        page_ids += own
        page_ids += own[-1:] * (num_pages - len(own))

    rows: Rows
    taken: Rows
    kept: torch.Tensor | None = None
    is_full = all(counts[member] == q for member in members)
    if is_full and members[-1] - members[0] == s - 1:
        first = starts[members[0]]
        is_all = s * q == batch.num_tokens
        rows = taken = slice(None) if is_all else slice(first, first + s * q)
    else:
        offsets = torch.arange(q, device=device)
        firsts = torch.tensor([starts[member] for member in members], device=device)[:, None]
        own_counts = torch.tensor([counts[member] for member in members], device=device)[:, None]
        rows = taken = (firsts + torch.minimum(offsets, own_counts - 1)).flatten()
        if not is_full:
            kept = (offsets < own_counts).flatten().nonzero()[:, 0]
            rows = taken.index_select(0, kept)

    spare = _spare_heads(kv, q * group)
    mask: torch.Tensor | None = None
    if q > 1 or any(lengths[member] != length for member in members):
        # Row i of a sequence sees its first (length - count + 1 + i) keys, padding rows all.
        before = torch.tensor([lengths[m] - counts[m] for m in members], device=device)[:, None]
        most = torch.tensor([lengths[m] for m in members], device=device)[:, None]
        num_seen = torch.minimum(before + torch.arange(1, q + 1, device=device), most)
        is_hidden = torch.arange(length, device=device) >= num_seen[..., None]
        mask = torch.zeros(is_hidden.shape, dtype=kv.dtype, device=device)
        mask.masked_fill_(is_hidden, -math.inf)
        mask = F.pad(mask.repeat_interleave(group, dim=1), (0, 0, 0, spare))
    return _PaddedCall(
        rows=rows,
        taken=taken,
        kept=kept,
        num_sequences=s,
        num_queries=q,
        length=length,
        spare=spare,
        pages=kv.reader(page_ids, may_view=s == 1 and _may_view(kv)),
        mask=mask,
    )


def _long_call(
    batch: ForwardBatch, kv: KVPool, bucket: Bucket, skipped: list[int], group: int
) -> _BlockedCall:
    (member,) = bucket.members
    first, length = skipped[member], bucket.length
    start, end = batch.query_starts[member], batch.query_starts[member + 1]
    block_rows = _block_rows(length, group * kv.num_kv_heads)
    size = min(block_rows, end - start)
    shape = (size, size + kv.page_size)
    diagonal = torch.full(shape, -math.inf, dtype=kv.dtype, device=kv.device).triu_(1)
    return _BlockedCall(
        rows=slice(None) if end - start == batch.num_tokens else slice(start, end),
        block_rows=block_rows,
        length=length,
        pages=kv.reader(
            batch.page_tables[member][first : first - (-length // kv.page_size)],
            may_view=_may_view(kv),
        ),
        spare=_spare_heads(kv, (end - start) * group),
        diagonal=diagonal.repeat_interleave(group, dim=0),
    )


def _prefix_call(
    batch: ForwardBatch, kv: KVPool, prefix: SharedPrefix, counts: list[int], group: int
) -> _BlockedCall:
    """All rows of the sequences that share `prefix` on its pages, which each of them sees whole."""
    starts, members = batch.query_starts, prefix.members
    first, end = starts[members[0]], starts[members[-1] + 1]
    rows: Rows = slice(first, end)
    if sum(counts[member] for member in members) != end - first:
        listed = [row for m in members for row in range(starts[m], starts[m + 1])]
        rows = torch.tensor(listed, device=kv.device)
    length = prefix.num_pages * kv.page_size
    return _BlockedCall(
        rows=rows,
        block_rows=_block_rows(length, group * kv.num_kv_heads),
        length=length,
        pages=kv.reader(batch.page_tables[members[0]][: prefix.num_pages], may_view=_may_view(kv)),
        spare=_spare_heads(kv, sum(counts[member] for member in members) * group),
        diagonal=None,
    )


def _may_view(kv: KVPool) -> bool:
    """Whether products read pages in place. In bfloat16 they would copy them, and badly."""
    return kv.dtype == torch.float32


def _spare_heads(kv: KVPool, num_heads: int) -> int:
    """Heads to add so that a product has a multiple of four rows.

    MKL's float32 product sums a matrix of 1 to 3 rows in another order than larger ones, and so
    a decoded token would differ in its last bits from the same token in a prefill. A product of
    four rows takes no longer than one of three (measured).
    """
    return -num_heads % 4 if kv.dtype == torch.float32 else 0


def _block_rows(length: int, num_heads: int) -> int:
    most = min(_MAX_BLOCK_ROWS, MAX_SCORES // (length * num_heads))
    return max(16, most - most % 16)


def _get(tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
    return tensor[rows] if isinstance(rows, slice) else tensor.index_select(0, rows)


def _put(tensor: torch.Tensor, rows: Rows, values: torch.Tensor) -> None:
    if isinstance(rows, slice):
        tensor[rows] = values
    else:
        tensor.index_copy_(0, rows, values)
