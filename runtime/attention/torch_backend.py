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
from palmette.runtime.attention.sharing import find_shared_prefixes
from palmette.runtime.forward_batch import ForwardBatch
from palmette.runtime.kv.pool import KVPool, PageReader

Rows = torch.Tensor | slice

# Rows of a long prefill that are multiplied at once. Of 64 to 512, 128 was fastest at 1,000 keys:
# more waste work above the diagonal and leave the cache, fewer are small products.
_MAX_BLOCK_ROWS = 128

_SUMMED_AT_ONCE = 192  # by MKL, see `_combine`


class TorchAttention:
    """Two products and a softmax for sequences of similar length together.

    A shared prefix is read once: all rows of sequences whose page tables begin alike multiply its
    keys in one product and its values in another, as in Hydragen (arXiv:2402.05099) and cascade
    inference (FlashInfer, arXiv:2501.01005). Their scores are joined to those of each sequence's
    own keys before one softmax, so that in float32 the result is that of attending alone, to the
    bit, where a page is a multiple of 8 tokens. (Of others the last vector of keys is cut short and
    summed in another order; in bfloat16 the two parts of a sum are each rounded.)

    The products are plain `torch.bmm` over the pool's layout. On the CPUs it was measured on that
    is as fast as torch's fused kernel in float32 and 3 times as fast in bfloat16.
    """

    # The measures taken here hold for the BLAS that they were measured with; see `_combine`.
    is_batch_invariant = False

    def __init__(self, *, share_prefixes: bool = True) -> None:
        self._share_prefixes = share_prefixes

    def plan(self, batch: ForwardBatch, kv: KVPool, num_heads: int) -> _TorchPlan:
        """Gather indices and masks of `batch`, once for all layers."""
        starts, contexts = batch.query_starts, batch.context_lengths
        counts = [starts[s + 1] - starts[s] for s in range(batch.num_sequences)]
        group = num_heads // kv.num_kv_heads
        calls: list[_Call] = []
        alone = [s for s in range(batch.num_sequences) if counts[s] <= MAX_PADDED_QUERIES]
        if self._share_prefixes:
            tables = [batch.page_tables[s] for s in alone]
            cached = [contexts[s] - counts[s] for s in alone]
            sharing: set[int] = set()
            for prefix in find_shared_prefixes(tables, cached, kv.page_size):
                num_pages = prefix.num_pages - prefix.num_pages % _prefix_step(kv)
                if num_pages:
                    members = [alone[i] for i in prefix.members]
                    calls += _padded_calls(batch, kv, members, counts, num_pages, group)
                    sharing.update(members)
            alone = [s for s in alone if s not in sharing]
        calls += _padded_calls(batch, kv, alone, counts, 0, group)
        for s, count in enumerate(counts):
            if count > MAX_PADDED_QUERIES:
                calls.append(_long_call(batch, kv, s, group))
        return _TorchPlan(kv, calls)


@dataclass(frozen=True, slots=True)
class _TorchPlan:
    kv: KVPool
    calls: list[_Call]

    def attend(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        first = self.calls[0].rows
        if isinstance(first, slice) and first == slice(None):
            return self.calls[0].run(self.kv, layer, queries)
        output = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
        for call in self.calls:
            out = call.run(self.kv, layer, queries)
            if isinstance(call.rows, slice):
                output[call.rows] = out
            else:
                output.index_copy_(0, call.rows, out)
        return output


class _Call(Protocol):
    """One attention call of every layer, for some rows of the batch and some of their keys."""

    @property
    def rows(self) -> Rows: ...

    def run(self, kv: KVPool, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Outputs of `rows`. [len(rows), H, D]"""
        ...


@dataclass(frozen=True, slots=True)
class _PaddedCall:
    """`num_sequences` sequences, each with `num_queries` rows over `length` keys, in one product.

    The keys are whole pages: a product over a part of them would first copy it in bfloat16, and
    with whole vectors of keys a softmax does not depend on how many masked ones follow.

    `taken` are the rows to read [num_sequences * num_queries]; a shorter sequence repeats its last
    row, and `kept` picks what is not such a repetition: `rows`. The mask is additive. If there is
    a `prefix`, every row sees it whole, before its own keys.
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
    prefix: PageReader | None

    def run(self, kv: KVPool, layer: int, queries: torch.Tensor) -> torch.Tensor:
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
        if self.prefix is None:
            out = _combine(torch.softmax(scores, dim=-1), values, None)
        else:
            prefix_keys, prefix_values = self.prefix.read(layer)  # [k, prefix, D]
            every = (k, s * (q * group + self.spare))
            shared = torch.bmm(heads.view(*every, head_dim), prefix_keys.transpose(1, 2))
            num_shared = shared.shape[2]
            shared = shared.view(k * s, -1, num_shared)
            weights = torch.softmax(torch.cat((shared, scores), dim=-1), dim=-1)
            shared = weights[:, :, :num_shared].reshape(*every, num_shared)
            out = torch.bmm(shared, prefix_values).view(k * s, -1, head_dim)
            out = _combine(weights[:, :, num_shared:], values, out)
        out = out[:, : q * group].reshape(k, s, q, group, head_dim).permute(1, 2, 0, 3, 4)
        out = out.reshape(s * q, num_heads, head_dim)
        return out if self.kept is None else out.index_select(0, self.kept)


@dataclass(frozen=True, slots=True)
class _BlockedCall:
    """Many rows of one sequence over its `length` keys, some rows at a time.

    Row i sees the first `length - len(rows) + 1 + i` keys. Whole pages are multiplied, as in a
    padded call.
    """

    rows: slice
    block_rows: int
    length: int
    pages: PageReader
    spare: int  # heads of zeros after the last, see `_spare_heads`
    diagonal: torch.Tensor  # [block_rows * group, block_rows + page_size], additive

    def run(self, kv: KVPool, layer: int, queries: torch.Tensor) -> torch.Tensor:
        num_heads, head_dim = queries.shape[1:]
        k, group = kv.num_kv_heads, num_heads // kv.num_kv_heads
        keys, values = self.pages.read(layer)  # [k, whole pages of length, D]
        keys = keys.transpose(1, 2)
        heads = queries[self.rows]
        num_rows = heads.shape[0]
        heads = heads.view(num_rows, k, group, head_dim).transpose(0, 1)
        heads = heads.reshape(k, num_rows * group, head_dim)
        if self.spare:
            heads = F.pad(heads, (0, 0, 0, self.spare))
        num_before = self.length - num_rows  # keys that every row sees
        outs: list[torch.Tensor] = []
        for start in range(0, num_rows, self.block_rows):
            end = min(start + self.block_rows, num_rows)
            block = heads[:, start * group :]
            if end < num_rows:
                block = block[:, : (end - start) * group]
            num_seen = num_before + end
            num_seen += -num_seen % kv.page_size
            scores = torch.bmm(block, keys[:, :, :num_seen])
            hidden = scores[:, : (end - start) * group, num_before + start :]
            hidden.add_(self.diagonal[: hidden.shape[1], : hidden.shape[2]])
            outs.append(_combine(torch.softmax(scores, dim=-1), values[:, :num_seen], None))
        joined = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
        joined = joined[:, : num_rows * group].reshape(k, num_rows, group, head_dim)
        return joined.transpose(0, 1).reshape(num_rows, num_heads, head_dim)


def _combine(
    weights: torch.Tensor, values: torch.Tensor, sum_before: torch.Tensor | None
) -> torch.Tensor:
    """`weights @ values`, plus `sum_before`, in an order that masked keys at the end do not change.

    MKL's float32 product sums over blocks of 192, but halves what is left of more than one block;
    so whole blocks and the rest are two products. bfloat16, which is oneDNN's, needs no such care.
    """
    length = values.shape[1]
    num_whole = length - length % _SUMMED_AT_ONCE if weights.dtype == torch.float32 else length
    out = sum_before
    for part in (slice(0, num_whole), slice(num_whole, length)):
        if part.start == part.stop:
            continue
        if out is None:
            out = torch.bmm(weights[:, :, part], values[:, part])
        else:
            out = out.baddbmm_(weights[:, :, part], values[:, part])
    assert out is not None, "no keys"
    return out


def _padded_calls(
    batch: ForwardBatch,
    kv: KVPool,
    members: list[int],
    counts: list[int],
    num_shared: int,
    group: int,
) -> list[_Call]:
    """Calls for `members`, whose first `num_shared` pages are the same."""
    prefix, num_shared_keys = None, num_shared * kv.page_size
    if num_shared:
        pages = batch.page_tables[members[0]][:num_shared]
        prefix = kv.reader(pages, may_view=_may_view(kv))
    lengths = [batch.context_lengths[s] - num_shared_keys for s in members]
    calls: list[_Call] = []
    for bucket in bucket_sequences(
        [counts[s] for s in members], lengths, group * kv.num_kv_heads, num_shared_keys
    ):
        chosen = [members[i] for i in bucket.members]
        bucket = Bucket(chosen, bucket.num_queries, bucket.length)
        calls.append(_padded_call(batch, kv, bucket, counts, num_shared, group, prefix))
    return calls


def _padded_call(
    batch: ForwardBatch,
    kv: KVPool,
    bucket: Bucket,
    counts: list[int],
    num_shared: int,
    group: int,
    prefix: PageReader | None,
) -> _PaddedCall:
    members, q = bucket.members, bucket.num_queries
    starts, device, s = batch.query_starts, kv.device, len(bucket.members)
    num_pages = -(-bucket.length // kv.page_size)
    length = num_pages * kv.page_size
    lengths = {m: batch.context_lengths[m] - num_shared * kv.page_size for m in members}
    page_ids: list[int] = []
    for member in members:
        own = batch.page_tables[member][num_shared:]
        own = own[: -(-lengths[member] // kv.page_size)]
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
        prefix=prefix,
    )


def _long_call(batch: ForwardBatch, kv: KVPool, member: int, group: int) -> _BlockedCall:
    length = batch.context_lengths[member]
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
            batch.page_tables[member][: -(-length // kv.page_size)],
            may_view=_may_view(kv),
        ),
        spare=_spare_heads(kv, (end - start) * group),
        diagonal=diagonal.repeat_interleave(group, dim=0),
    )


def _prefix_step(kv: KVPool) -> int:
    """Shared prefixes end on a multiple of this many pages, where `_combine` would cut as well."""
    return _SUMMED_AT_ONCE // math.gcd(_SUMMED_AT_ONCE, kv.page_size)


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
