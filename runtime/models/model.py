"""What the engine asks of a model, whatever computes it."""

from __future__ import annotations

from typing import Protocol

import torch

from palmette.runtime.forward_batch import ForwardBatch
from palmette.runtime.kv.pool import KVPool
from palmette.runtime.models.config import ModelConfig


class Model(Protocol):
    """Token ids to logits, over paged keys and values."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def dtype(self) -> torch.dtype:
        """That of keys and values, and of weights that are not packed."""
        ...

    @property
    def is_batch_invariant(self) -> bool:
        """A promise: the logits of a token have the same bits whatever the rest of the batch, the
        chunks in which what is before it was computed, and the number of threads.
        """
        ...

    @property
    def num_weight_bytes(self) -> int: ...

    def forward(self, batch: ForwardBatch, kv: KVPool) -> torch.Tensor:
        """Logits of `batch.logit_rows` [R, vocab_rows] float32; keys and values go into `kv`."""
        ...
