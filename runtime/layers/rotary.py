"""Rotary position embedding: tables of cosines and sines, and their application."""

from __future__ import annotations

import math

import torch

from palmette.runtime.models.config import RopeConfig

_FIRST_ROWS = 8192  # 4 MiB for heads of 64


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """Radians per position of each of the head_dim / 2 planes. [head_dim / 2] float32

    Sources: RoFormer (arXiv:2104.09864) for the frequencies, position interpolation
    (arXiv:2306.15595) for "linear", and the Llama 3.1 model card's reference code for "llama3".
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        frequencies = frequencies / rope.factor
    elif rope.kind == "llama3":
        frequencies = _llama3(frequencies, rope)
    if rope.frequency_divisors is not None:
        frequencies = frequencies / torch.tensor(rope.frequency_divisors, dtype=torch.float32)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    turns = rope.original_max_context * frequencies / (2 * math.pi)  # within the original context
    low, high = rope.low_freq_factor, rope.high_freq_factor
    kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - kept) * frequencies / rope.factor + kept * frequencies


class RotaryTable:
    """Cosines and sines of every position, computed once and kept.

    Half-split convention: plane i of a head turns its entries i and i + head_dim / 2. The table
    begins with `_FIRST_ROWS` positions and doubles when a longer context comes, so that a model
    with a large context costs no memory before it is used.
    """

    def __init__(
        self, rope: RopeConfig, head_dim: int, max_context: int, device: torch.device
    ) -> None:
        self._planes: tuple[torch.Tensor, torch.Tensor] | None = None
        self._cos = self._sin = torch.empty(0)
        self._frequencies = inverse_frequencies(rope, head_dim)
        self._max_context = max_context
        self._device = device
        self._fill(min(max_context, _FIRST_ROWS))

    def tables(self, context_length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and sines of all positions below `context_length`, and perhaps more, for each of
        the head_dim / 2 planes. [positions, head_dim / 2] float32 each, contiguous
        """
        self._reach(context_length)
        if self._planes is None:
            half = self._cos.shape[1] // 2
            self._planes = self._cos[:, :half].contiguous(), self._sin[:, half:].contiguous()
        return self._planes

    def rows(
        self, positions: torch.Tensor, context_length: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosines and signed sines, each [T, 1, head_dim] float32, of `positions` [T], all below
        `context_length`.
        """
        self._reach(context_length)
        return (
            self._cos.index_select(0, positions)[:, None, :],
            self._sin.index_select(0, positions)[:, None, :],
        )

    def _reach(self, context_length: int) -> None:
        if context_length > self._cos.shape[0]:
            if context_length > self._max_context:
                raise ValueError(
                    f"a context of {context_length} tokens, the model has {self._max_context}"
                )
            self._fill(min(self._max_context, max(context_length, 2 * self._cos.shape[0])))

    def _fill(self, num_rows: int) -> None:
        self._planes = None
        positions = torch.arange(num_rows, dtype=torch.float32)
        angles = positions[:, None] * self._frequencies[None, :]
        cos, sin = angles.cos(), angles.sin()
        # The sine carries the sign of its half, so that turning is one product with the head
        # and one with the head whose halves are swapped.
        self._cos = torch.cat((cos, cos), dim=-1).to(self._device)  # [num_rows, head_dim]
        self._sin = torch.cat((-sin, sin), dim=-1).to(self._device)  # [num_rows, head_dim]


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """`heads` [T, num_heads, head_dim] turned to their positions, in float32."""
    swapped = heads.roll(heads.shape[-1] // 2, dims=-1)
    return torch.addcmul(heads * cos, swapped, sin)
