"""How often each token occurred in a sequence, kept so that a batch can read it without copying."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

_FIRST_CAPACITY = 16


class TokenCounts:
    """A multiset of token ids. `add` and `remove` take constant time.

    `ids` and `counts` are two arrays side by side, one entry for each distinct token, in no
    particular order. Memory grows with the distinct tokens, not with the vocabulary.
    """

    __slots__ = ("_counts", "_ids", "_slots")

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self._slots: dict[int, int] = {}  # token id -> its place in the two arrays
        self._ids = np.empty(_FIRST_CAPACITY, dtype=np.int64)
        self._counts = np.empty(_FIRST_CAPACITY, dtype=np.int64)
        for token_id in token_ids:
            self.add(token_id)

    def add(self, token_id: int) -> None:
        """Count `token_id` once more."""
        slot = self._slots.get(token_id)
        if slot is not None:
            self._counts[slot] += 1
            return
        if token_id < 0:
            raise ValueError(f"a token id must be at least 0, got {token_id}")
        slot = len(self._slots)
        if slot == len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.empty_like(self._counts)])
        self._ids[slot] = token_id
        self._counts[slot] = 1
        self._slots[token_id] = slot

    def remove(self, token_id: int) -> None:
        """Count `token_id` once less. Raises KeyError if it is not there."""
        slot = self._slots[token_id]
        if self._counts[slot] > 1:
            self._counts[slot] -= 1
            return
        last = len(self._slots) - 1  # the last entry fills the hole
        last_id = int(self._ids[last])
        self._ids[slot], self._counts[slot] = last_id, self._counts[last]
        self._slots[last_id] = slot
        del self._slots[token_id]

    @property
    def ids(self) -> npt.NDArray[np.int64]:
        """[num_distinct] the distinct token ids; a view, valid until the next change."""
        return self._ids[: len(self._slots)]

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """[num_distinct] how often each of `ids` occurred; a view, valid until the next change."""
        return self._counts[: len(self._slots)]

    def __getitem__(self, token_id: int) -> int:
        """How often `token_id` occurred; 0 if never."""
        slot = self._slots.get(token_id)
        return 0 if slot is None else int(self._counts[slot])

    def __len__(self) -> int:
        """The number of distinct tokens."""
        return len(self._slots)
