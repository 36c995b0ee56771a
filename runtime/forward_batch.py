"""One step's work as the model sees it: a flattened batch over paged keys and values."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """T tokens of S sequences, no padding; prefill, extend and decode differ only in their counts.

    Row `i` of sequence `s` (rows `query_starts[s] <= i < query_starts[s + 1]`) attends to the
    first `positions[i] + 1` tokens of its sequence, whose keys and values lie in the pages
    `page_tables[s][: ceil(context_lengths[s] / page_size)]`. The model writes the keys and values
    of row `i` to slot `slots[i] = page * page_size + offset` before it attends, so rows of one
    batch see each other.
    """

    # Lists, since most steps have a row or a few of each sequence.
    token_ids: list[int]  # [T]
    positions: list[int]  # [T]
    slots: list[int]  # [T]
    query_starts: list[int]  # [S + 1], from 0 to T
    context_lengths: list[int]  # [S], tokens of the sequence up to and with its last row here
    page_tables: list[list[int]]  # [S], each at least as long as its context needs
    logit_rows: list[int]  # [R], the rows whose logits are wanted, ascending

    @property
    def num_tokens(self) -> int:
        return self.query_starts[-1]

    @property
    def num_sequences(self) -> int:
        return len(self.context_lengths)

    def tensors(
        self, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """`token_ids`, `positions` and `slots` [T] and `logit_rows` [R], int64, on a device."""

        def tensor(numbers: list[int]) -> torch.Tensor:
            return torch.from_numpy(np.array(numbers, dtype=np.int64)).to(device)

        return (
            tensor(self.token_ids),
            tensor(self.positions),
            tensor(self.slots),
            tensor(self.logit_rows),
        )
