"""Attention written as its definition, one sequence at a time: what every backend must equal."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from palmette.runtime.forward_batch import ForwardBatch
from palmette.runtime.kv.pool import KVPool


class ReferenceAttention:
    """Softmax of the scores times values, in float32, with nothing shared between sequences."""

    # The order in which its products sum is torch's choice, and depends on their shapes.
    is_batch_invariant = False

    def plan(self, batch: ForwardBatch, kv: KVPool, num_heads: int) -> _ReferencePlan:
        return _ReferencePlan(batch, kv)


@dataclass(frozen=True, slots=True)
class _ReferencePlan:
    batch: ForwardBatch
    kv: KVPool

    def attend(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        batch, kv = self.batch, self.kv
        group = queries.shape[1] // kv.num_kv_heads
        output = torch.empty_like(queries)
        for s, length in enumerate(batch.context_lengths):
            rows = slice(batch.query_starts[s], batch.query_starts[s + 1])
            num_pages = -(-length // kv.page_size)
            reader = kv.reader(batch.page_tables[s][:num_pages])
            keys, values = (
                heads[:, :length].float().repeat_interleave(group, dim=0)
                for heads in reader.read(layer)
            )  # [num_heads, length, head_dim] each
            scores = torch.einsum("qhd,hkd->hqk", queries[rows].float(), keys)
            positions = torch.tensor(batch.positions[rows], device=kv.device)
            is_seen = torch.arange(length, device=kv.device)[None, :] <= positions[:, None]
            weights = scores.masked_fill(~is_seen, -math.inf).softmax(dim=-1)
            output[rows] = torch.einsum("hqk,hkd->qhd", weights, values).to(queries.dtype)
        return output
