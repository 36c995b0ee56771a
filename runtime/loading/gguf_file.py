"""A GGUF file: its metadata, and its tensors, memory-mapped.

The `gguf` package decodes the quantised blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import gguf
import numpy as np
import torch
from gguf import quants

from palmette.errors import ModelFileError
from palmette.runtime.kernels.cpu import Blocks
from palmette.runtime.loading.gguf_metadata import MAX_NAME_BYTES, GGUFMetadata

_MAX_DIMENSIONS = 4
_FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # read without the package


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor of the file: `shape` is in numpy's order, rows first."""

    name: str
    shape: tuple[int, ...]
    kind: int  # a ggml type
    offset: int  # from the start of the file
    num_bytes: int

    @property
    def kind_name(self) -> str:
        return str(gguf.GGMLQuantizationType(self.kind).name)


class GGUFFile(GGUFMetadata):
    """The metadata and tensors of a GGUF file, every length checked against the file's size.

    Raises ModelFileError also for a type of tensor that cannot be decoded. Tensors that were read
    stay valid after `close`.
    """

    def _read_header(self) -> None:
        super()._read_header()
        infos = [self._tensor_info() for _ in range(self.num_tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise ModelFileError(self.path, f"general.alignment is {alignment!r}")
        start = -(-self._position // alignment) * alignment
        tensors: dict[str, TensorInfo] = {}
        for info in infos:
            if info.name in tensors:
                raise ModelFileError(self.path, f"has tensor {info.name} twice")
            placed = TensorInfo(
                info.name, info.shape, info.kind, start + info.offset, info.num_bytes
            )
            end = placed.offset + placed.num_bytes
            if end > len(self._bytes):
                raise ModelFileError(
                    self.path,
                    f"is truncated: tensor {info.name} ends at byte {end}, "
                    f"the file at {len(self._bytes)}",
                )
            tensors[info.name] = placed
        self.tensors = MappingProxyType(tensors)

    def read(self, name: str) -> torch.Tensor:
        """The tensor, decoded to float32; stored floats keep their type. In memory of its own."""
        info = self.tensors[name]
        raw = np.frombuffer(self._bytes, np.uint8, info.num_bytes, info.offset).copy()
        if info.kind in _FLOATS:
            return torch.from_numpy(raw).view(_FLOATS[info.kind]).view(info.shape)
        rows = raw.reshape(*info.shape[:-1], -1)
        decoded = quants.dequantize(rows, gguf.GGMLQuantizationType(info.kind))
        return torch.from_numpy(np.ascontiguousarray(decoded, dtype=np.float32)).view(info.shape)

    def blocks(self, name: str) -> Blocks | None:
        """A matrix as it lies in the file, rows of packed blocks; None for floats and vectors."""
        info = self.tensors[name]
        if info.kind in _FLOATS or len(info.shape) != 2:
            return None
        raw = np.frombuffer(self._bytes, np.uint8, info.num_bytes, info.offset).copy()
        return Blocks(info.kind_name, torch.from_numpy(raw).view(info.shape[0], -1))

    def _tensor_info(self) -> TensorInfo:
        """The next tensor's description; its offset still counts from the start of the data."""
        name = self._text(MAX_NAME_BYTES)
        num_dimensions = self._number("<I")
        if not 1 <= num_dimensions <= _MAX_DIMENSIONS:
            raise ModelFileError(
                self.path, f"is damaged: tensor {name} has {num_dimensions} dimensions"
            )
        # The file lists the fastest-changing dimension first.
        shape = tuple(self._number("<Q") for _ in range(num_dimensions))[::-1]
        kind, offset = self._number("<I"), self._number("<Q")
        try:
            block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        except (ValueError, KeyError):
            raise ModelFileError(
                self.path, f"tensor {name} has the ggml type {kind}, which is not known"
            ) from None
        num_items = 1
        for size in shape:
            num_items *= size
        if num_items == 0 or shape[-1] % block:
            raise ModelFileError(
                self.path,
                f"is damaged: tensor {name} of shape {list(shape)} is not whole blocks of {block}",
            )
        return TensorInfo(name, shape, kind, offset, num_items // block * block_bytes)
