"""A GGUF file: its metadata, read leanly, and its tensors, memory-mapped.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian.
The `gguf` package decodes the quantised blocks. Its reader is not used: it makes an array object
for every string of the vocabulary, 2 s for 49,152 tokens, and trusts the counts in the file.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import gguf
import numpy as np
import torch
from gguf import quants

from palmette.errors import ModelFileError

Scalar = int | float | bool | str

_STRING, _ARRAY, _BOOL = 8, 9, 7
_SCALAR_FORMATS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    _BOOL: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_MAX_NESTING = 4
_MAX_DIMENSIONS = 4
_MAX_NAME_BYTES = 1 << 16  # of a key or of a tensor; the format allows 65,535 and 64
_FLOATS = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}  # read without the package


@dataclass(frozen=True, slots=True)
class Array:
    """Where an array of the metadata lies; decoded only when it is asked for."""

    item_type: int
    length: int
    offset: int


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


class GGUFFile:
    """The metadata and tensors of a GGUF file, every length checked against the file's size.

    Raises ModelFileError for what is not a GGUF file, is damaged or truncated, or uses a type of
    tensor that cannot be decoded. Work and memory are bounded by the size of the file, whatever
    its counts say.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise ModelFileError(path, f"cannot be read: {error.strerror}") from error
        except ValueError:
            raise ModelFileError(path, "is empty") from None
        self._bytes = memoryview(self._map)
        try:
            self._read_header()
        except struct.error:
            self.close()
            raise ModelFileError(path, "is truncated: its header runs past its end") from None
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Unmaps the file; tensors that were read stay valid."""
        self._bytes.release()
        self._map.close()

    def _read_header(self) -> None:
        if bytes(self._bytes[:4]) != b"GGUF":
            raise ModelFileError(self.path, "is not a GGUF file")
        version, num_tensors, num_keys = struct.unpack_from("<IQQ", self._bytes, 4)
        if version not in (2, 3):
            swapped = version & 0xFFFF == 0
            what = "is big-endian" if swapped else f"has GGUF version {version}"
            raise ModelFileError(self.path, f"{what}; supported: versions 2 and 3, little-endian")
        self._position = 24
        metadata: dict[str, Scalar | Array] = {}
        for _ in range(num_keys):
            key = self._text(_MAX_NAME_BYTES)
            if key in metadata:
                raise ModelFileError(self.path, f"has the key {key} twice")
            metadata[key] = self._value(key)
        self.metadata = MappingProxyType(metadata)
        infos = [self._tensor_info() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
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

    def array(self, key: str) -> list[Scalar] | None:
        """The items of an array of scalars or strings; None if there is no such key.

        Bytes that are not UTF-8 become surrogate escapes.
        """
        value = self.metadata.get(key)
        if value is None:
            return None
        if not isinstance(value, Array) or value.item_type == _ARRAY:
            raise ModelFileError(self.path, f"{key} is not an array of scalars or strings")
        if value.item_type == _STRING:
            return [
                bytes(self._bytes[start:end]).decode("utf-8", "surrogateescape")
                for start, end in self._strings(value)
            ]
        code = _SCALAR_FORMATS[value.item_type]
        items = struct.unpack_from(f"<{value.length}{code[1]}", self._bytes, value.offset)
        return list(items)

    def read(self, name: str) -> torch.Tensor:
        """The tensor, decoded to float32; stored floats keep their type. In memory of its own."""
        info = self.tensors[name]
        raw = np.frombuffer(self._bytes, np.uint8, info.num_bytes, info.offset).copy()
        if info.kind in _FLOATS:
            return torch.from_numpy(raw).view(_FLOATS[info.kind]).view(info.shape)
        rows = raw.reshape(*info.shape[:-1], -1)
        decoded = quants.dequantize(rows, gguf.GGMLQuantizationType(info.kind))
        return torch.from_numpy(np.ascontiguousarray(decoded, dtype=np.float32)).view(info.shape)

    def _strings(self, array: Array) -> Iterator[tuple[int, int]]:
        position = array.offset
        for _ in range(array.length):
            (length,) = struct.unpack_from("<Q", self._bytes, position)
            yield position + 8, position + 8 + length
            position += 8 + length

    def _take(self, num_bytes: int) -> int:
        """The current position, after moving past `num_bytes` that must be in the file."""
        start = self._position
        if num_bytes > len(self._bytes) - start:
            raise ModelFileError(
                self.path,
                f"is truncated or damaged: {num_bytes} bytes announced at byte {start}, "
                f"the file ends at {len(self._bytes)}",
            )
        self._position = start + num_bytes
        return start

    def _number(self, code: str) -> int:
        (value,) = struct.unpack_from(code, self._bytes, self._take(struct.calcsize(code)))
        return int(value)

    def _text(self, max_bytes: int | None = None) -> str:
        length = self._number("<Q")
        if max_bytes is not None and length > max_bytes:
            raise ModelFileError(
                self.path, f"is damaged: a name of {length} bytes, at most {max_bytes} are read"
            )
        start = self._take(length)
        return bytes(self._bytes[start : start + length]).decode("utf-8", "surrogateescape")

    def _value(self, key: str) -> Scalar | Array:
        kind = self._number("<I")
        if kind == _STRING:
            return self._text()
        if kind == _ARRAY:
            return self._array(key, 1)
        code = _SCALAR_FORMATS.get(kind)
        if code is None:
            raise ModelFileError(self.path, f"is damaged: {key} has the unknown type {kind}")
        (value,) = struct.unpack_from(code, self._bytes, self._take(struct.calcsize(code)))
        scalar: Scalar = value
        return scalar

    def _array(self, key: str, depth: int) -> Array:
        """Moves past an array, checking that it lies in the file."""
        item_type, length = self._number("<I"), self._number("<Q")
        found = Array(item_type, length, self._position)
        if item_type == _STRING:
            position, end, data = self._position, len(self._bytes), self._bytes
            unpack = struct.Struct("<Q").unpack_from
            if length > (end - position) // 8:
                self._take(length * 8)  # raises
            for _ in range(length):
                position += 8 + unpack(data, position)[0]
                if position > end:
                    raise ModelFileError(self.path, f"is truncated or damaged inside {key}")
            self._position = position
        elif item_type == _ARRAY:
            if depth == _MAX_NESTING:
                raise ModelFileError(self.path, f"{key} nests arrays deeper than {_MAX_NESTING}")
            if length > (len(self._bytes) - self._position) // 12:
                self._take(length * 12)  # raises
            for _ in range(length):
                self._array(key, depth + 1)
        elif item_type in _SCALAR_FORMATS:
            self._take(length * struct.calcsize(_SCALAR_FORMATS[item_type]))
        else:
            raise ModelFileError(
                self.path, f"is damaged: {key} is an array of the unknown type {item_type}"
            )
        return found

    def _tensor_info(self) -> TensorInfo:
        """The next tensor's description; its offset still counts from the start of the data."""
        name = self._text(_MAX_NAME_BYTES)
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
