"""The kernels in C++ for CPUs: whether they are here, and weights in their layout.

The extension is built where there is a compiler, and chooses among what it was compiled for by what
the processor has. The environment variable PALMETTE_KERNELS chooses instead: `base`, `avx2`,
`avx512`, `avx512_vnni`, `avx512_bf16`, or `torch` for none of them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np
import torch

from palmette.errors import InvalidRequest
from palmette.runtime.memory import mapped

_VARIABLE = "PALMETTE_KERNELS"
TILE = 16  # outputs that are multiplied together
BLOCK = 32  # inputs that share a scale, of a weight in blocks
# Numbers of a tile that stand beside it, a share of those of one output: they take 8 bytes each,
# and as much time as the products of a whole vector.
_MOST_OUTSIDE = 1 / 16


class Format(IntEnum):
    """How a weight is kept. Of 4, 5 and 8 bits, 32 inputs of an output share scale and offset; of 6
    bits, 16.
    """

    FLOAT32 = 0
    BFLOAT16 = 1
    Q4 = 2
    Q8 = 3
    Q5 = 4
    Q6 = 5
    B12 = 6  # bfloat16 in 12 bits, without a loss


class _Source(IntEnum):
    FLOAT32 = 0
    BFLOAT16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q8_0 = 4
    Q5_0 = 5
    Q5_1 = 6
    Q4_K = 7
    Q5_K = 8
    Q6_K = 9


# GGUF's types of blocks that stay packed, and what they are kept as. Those with a K have scales and
# offsets of 6 or 8 bits that are multiplied by halves; the products are kept, rounded to half.
BLOCK_FORMATS = {
    "Q4_0": Format.Q4,
    "Q4_1": Format.Q4,
    "Q4_K": Format.Q4,
    "Q5_0": Format.Q5,
    "Q5_1": Format.Q5,
    "Q5_K": Format.Q5,
    "Q6_K": Format.Q6,
    "Q8_0": Format.Q8,
}


@cache
def extension() -> Any:
    """The extension, or None where it was not built."""
    try:
        from palmette.runtime import _native
    except ImportError:
        return None
    return _native


def kernels_for(dtype: torch.dtype) -> str | None:
    """The name of the kernels that serve models of that type best here; None if there are none.

    Those for bfloat16 round what goes into a product to it, so float32 is served by others. Raises
    InvalidRequest if PALMETTE_KERNELS names what this processor cannot run.
    """
    return _kernels_for(dtype, os.environ.get(_VARIABLE, ""))


@cache
def _kernels_for(dtype: torch.dtype, chosen: str) -> str | None:
    if extension() is None or chosen == "torch":
        return None
    names: list[str] = extension().available()
    if chosen:
        if chosen not in names:
            raise InvalidRequest(
                f"{_VARIABLE} is {chosen!r}; this processor can run {', '.join(names)}, torch"
            )
        names = names[: names.index(chosen) + 1]
    if dtype == torch.float32:
        names = [
            name for name in names if extension().takes(name, True, Format.BFLOAT16) == "float32"
        ]
    return names[-1]


def multiplies_bfloat16() -> bool:
    """Whether there are kernels that multiply bfloat16 as such."""
    name = kernels_for(torch.bfloat16)
    return name is not None and extension().takes(name, False, Format.BFLOAT16) == "bfloat16"


def multiplies_bytes(kind: str) -> bool:
    """Whether there are kernels that multiply weights in such blocks by bytes, in bfloat16."""
    name = kernels_for(torch.bfloat16)
    if name is None or kind not in BLOCK_FORMATS:
        return False
    return bool(extension().takes(name, False, BLOCK_FORMATS[kind]) == "int8")


@dataclass(frozen=True, slots=True)
class Blocks:
    """A weight of GGUF as it lies in the file: `kind` names the type, `rows` is [n, bytes]."""

    kind: str
    rows: torch.Tensor  # uint8

    def __len__(self) -> int:
        return len(self.rows)


class WeightMemory:
    """Memory for the weights of a model, one behind the other in large pages.

    A step reads them all: in pages of 4 KiB it looks up thousands of addresses.
    """

    def __init__(self, piece: int = 32 << 20) -> None:
        """`piece`: the bytes that are asked of the system at once; untouched, they take none."""
        self._piece = piece
        self._free = torch.empty(0, dtype=torch.uint8)

    def take(self, num_bytes: int) -> torch.Tensor:
        """uint8 [num_bytes], from a multiple of 64 on."""
        taken = -(-num_bytes // 64) * 64
        if taken > len(self._free):
            memory = mapped(max(taken, self._piece), in_large_pages=True)
            self._free = torch.frombuffer(memory, dtype=torch.uint8)
        found, self._free = self._free[:num_bytes], self._free[taken:]
        return found


class PackedLinear:
    """A weight in tiles of 16 outputs."""

    def __init__(
        self,
        parts: Sequence[torch.Tensor | Blocks],
        num_inputs: int,
        *,
        dtype: torch.dtype,
        biases: Sequence[torch.Tensor] = (),
        interleaved: bool = False,
        compact: bool = False,
        memory: WeightMemory | None = None,
    ) -> None:
        """The map whose outputs are those of all `parts`, one after the other.

        Parts are weights [n, num_inputs] in a float type, which are kept in `dtype`, or blocks of
        one kind, which stay as they are. `interleaved`: 16 outputs of each part in turn. Otherwise
        the last tile is filled up with outputs of no meaning. `compact`: bfloat16 is kept in 12
        bits, for kernels that have these, unless too many numbers are far below their neighbours.
        It lies in `memory`, or by itself. Raises ValueError for shapes that cannot be cut into
        tiles.
        """
        native = extension()
        num_outputs = sum(map(len, parts))
        first = parts[0]
        if isinstance(first, Blocks):
            source = _Source[first.kind]
            self.format = BLOCK_FORMATS[first.kind]
            rows = torch.cat([part.rows for part in parts if isinstance(part, Blocks)])
        else:
            weights = [part for part in parts if isinstance(part, torch.Tensor)]
            kept = all(part.dtype == torch.bfloat16 for part in weights)
            taken = torch.bfloat16 if kept else torch.float32
            source = _Source.BFLOAT16 if kept else _Source.FLOAT32
            self.format = Format.BFLOAT16 if dtype == torch.bfloat16 else Format.FLOAT32
            rows = torch.cat([part.to(taken) for part in weights])
        is_whole = num_outputs % (TILE * len(parts)) == 0 or not interleaved
        if not num_outputs or not is_whole or num_inputs % BLOCK:
            raise ValueError(f"[{num_outputs}, {num_inputs}] cannot be cut into tiles")
        order = np.arange(num_outputs, dtype=np.int64)
        if interleaved:
            order = order.reshape(len(parts), -1, TILE).swapaxes(0, 1).reshape(-1)
        order = np.pad(order, (0, -num_outputs % TILE), mode="edge")
        num_outputs = len(order)
        weight = source, rows.data_ptr(), order.ctypes.data, num_outputs, num_inputs
        num_threads = torch.get_num_threads()
        num_outside = 0
        if compact and self.format is Format.BFLOAT16:
            num_outside = native.most_outside(*weight, num_threads)
            if num_outside <= num_inputs * _MOST_OUTSIDE:
                self.format = Format.B12
        tile_bytes = native.tile_bytes(self.format, num_inputs, num_outside)
        num_bytes = num_outputs // TILE * tile_bytes
        self.num_outputs, self.num_inputs = num_outputs, num_inputs
        self.weight = (memory or WeightMemory(num_bytes)).take(num_bytes)
        native.pack(*weight, self.format, tile_bytes, self.weight.data_ptr(), num_threads)
        self.bias = None
        if biases:
            self.bias = torch.cat([each.float() for each in biases])[torch.from_numpy(order)]
            self.bias = self.bias.contiguous()
        self.handle = native.Linear(
            self.weight.data_ptr(),
            0 if self.bias is None else self.bias.data_ptr(),
            num_outputs,
            num_inputs,
            self.format,
            tile_bytes,
        )

    def rows(self) -> torch.Tensor:
        """What is kept, float32 [num_outputs, num_inputs]."""
        rows = torch.empty(self.num_outputs, self.num_inputs)
        for index, row in enumerate(rows):
            extension().read_row(self.handle, index, row.data_ptr())
        return rows

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)
