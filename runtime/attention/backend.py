"""What a model asks of attention: plan once per batch, then attend once per layer."""

from __future__ import annotations

from typing import Protocol

import torch

from palmette.runtime.forward_batch import ForwardBatch
from palmette.runtime.kv.pool import KVPool


class AttentionPlan(Protocol):
    """Everything about a batch that is the same in every layer."""

    def attend(self, layer: int, queries: torch.Tensor) -> torch.Tensor:
        """Attention of `queries` [T, num_heads, head_dim] in layer `layer`, of the same shape.

        The keys and values of the batch's own rows are in the pool already. Query head h reads
        key-value head h // (num_heads / num_kv_heads). Scores are plain dot products: the model
        has scaled the queries.
        """
        ...


class AttentionBackend(Protocol):
    """A way to compute attention."""

    @property
    def is_batch_invariant(self) -> bool:
        """A promise: a row's output has the same bits whatever stands beside it in the batch and
        however the tokens before it were divided among batches, on any number of threads.

        Only a fixed order of reduction can promise that; that it was so in all runs is no promise.
        """
        ...

    def plan(self, batch: ForwardBatch, kv: KVPool, num_heads: int) -> AttentionPlan:
        """A plan for one forward pass of `batch` over `kv`; valid for that pass only."""
        ...
