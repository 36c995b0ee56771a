"""The key-value section of a GGUF file, read without touching the tensors.

Layout (GGUF specification, versions 2 and 3, little endian): magic ``GGUF``, u32 version, u64
number of tensors, u64 number of key-value pairs, then per pair a string key, a u32 type and the
value. A string is a u64 length and that many bytes; an array is a u32 element type, a u64 count
and the elements.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from pathlib import Path
from typing import Any

from palmette.errors import ModelFileError

_STRING, _ARRAY = 8, 9
_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_MAX_DEPTH = 4  # of arrays in arrays; real files have one level


class GgufMetadata:
    """The key-value pairs of a GGUF file; arrays are decoded when asked for.

    `digest` is the SHA-256 of the whole section, so it changes with any entry of the vocabulary.
    """

    def __init__(
        self,
        path: Path,
        scalars: dict[str, Any],
        arrays: dict[str, list[Any]],
        digest: str,
    ) -> None:
        self.path = path
        self.digest = digest
        self._scalars = scalars
        self._arrays = arrays

    def get(self, key: str) -> Any:
        """The value of a key that is no array, or None."""
        return self._scalars.get(key)

    def text(self, key: str) -> str | None:
        """The string under a key, or None. Raises ModelFileError if it is something else."""
        value = self._scalars.get(key)
        if value is not None and not isinstance(value, str):
            raise ModelFileError(self.path, f"{key} should be a string, is {value!r}")
        return value

    def integer(self, key: str) -> int | None:
        """The integer under a key, or None. Raises ModelFileError if it is something else."""
        value = self._scalars.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ModelFileError(self.path, f"{key} should be an integer, is {value!r}")
        return value

    def array(self, key: str) -> list[Any] | None:
        """The elements of the array under a key, or None."""
        return self._arrays.get(key)

    def keys(self) -> list[str]:
        """Every key of the file."""
        return [*self._scalars, *self._arrays]


def read_gguf_metadata(path: Path, *, with_arrays: bool = False) -> GgufMetadata:
    """The metadata of a GGUF file; arrays are skipped unless asked for.

    Raises ModelFileError if the file is no GGUF file, or ends inside the section. Every length is
    checked against the size of the file before anything is read, so a damaged or hostile file
    costs at most time and memory in proportion to its own size.
    """
    try:
        with (
            path.open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _Reader(path, data, with_arrays).read()
    except ValueError as error:  # an empty file cannot be mapped
        raise ModelFileError(path, f"not a GGUF file: {error}") from error
    except OSError as error:
        raise ModelFileError(path, f"cannot be read: {error.strerror or error}") from error


class _Reader:
    def __init__(self, path: Path, data: mmap.mmap, with_arrays: bool) -> None:
        self._path = path
        self._data = data
        self._size = len(data)
        self._position = 0
        self._with_arrays = with_arrays

    def read(self) -> GgufMetadata:
        if self._data[:4] != b"GGUF":
            raise ModelFileError(self._path, "not a GGUF file: it does not begin with GGUF")
        self._position = 4
        version = self._scalar(4)
        if version not in (2, 3):
            raise ModelFileError(self._path, f"GGUF version {version}; versions 2 and 3 are read")
        self._scalar(10)  # number of tensors
        scalars: dict[str, Any] = {}
        arrays: dict[str, list[Any]] = {}
        for _ in range(self._scalar(10)):
            key = self._string()
            kind = self._scalar(4)
            if key in scalars or key in arrays:
                raise self._damaged(f"the key {key!r} comes twice")
            if kind == _ARRAY:
                elements = self._array(depth=1)
                if elements is not None:
                    arrays[key] = elements
            elif kind == _STRING:
                scalars[key] = self._string()
            else:
                scalars[key] = self._scalar(kind)
        digest = hashlib.sha256(self._data[: self._position]).hexdigest()
        return GgufMetadata(self._path, scalars, arrays, digest)

    def _scalar(self, kind: int) -> Any:
        code = _SCALARS.get(kind)
        if code is None:
            raise self._damaged(f"unknown value type {kind}")
        start = self._advance(struct.calcsize(code))
        return struct.unpack_from(code, self._data, start)[0]

    def _string(self) -> str:
        length = self._scalar(10)
        start = self._advance(length)
        try:
            return str(self._data[start : start + length], "utf-8")
        except UnicodeDecodeError as error:
            raise self._damaged("a string is not UTF-8") from error

    def _array(self, depth: int) -> list[Any] | None:
        """The elements, or None where they are only skipped."""
        kind = self._scalar(4)
        count = self._scalar(10)
        if kind in _SCALARS:
            code = _SCALARS[kind]
            start = self._advance(count * struct.calcsize(code))
            if not self._with_arrays:
                return None
            return list(struct.unpack_from(f"<{count}{code[1]}", self._data, start))
        if kind == _STRING:
            return self._strings(count)
        if kind == _ARRAY and depth < _MAX_DEPTH:
            inner = [self._array(depth + 1) for _ in range(count)]
            return inner if self._with_arrays else None
        raise self._damaged(f"unknown array type {kind}")

    def _strings(self, count: int) -> list[Any] | None:
        if count > (self._size - self._position) // 8:
            raise self._damaged(f"an array of {count} strings is longer than the file")
        if self._with_arrays:
            return [self._string() for _ in range(count)]
        unpack, data = struct.Struct("<Q").unpack_from, self._data
        position, last = self._position, self._size - 8
        for _ in range(count):
            if position > last:
                raise self._damaged("it ends inside an array of strings")
            position += 8 + unpack(data, position)[0]
        self._position = position
        self._advance(0)
        return None

    def _advance(self, num_bytes: int) -> int:
        """Step over `num_bytes` and say where they began."""
        start = self._position
        if num_bytes > self._size - start:
            raise self._damaged(f"it ends at byte {self._size}, inside the metadata")
        self._position = start + num_bytes
        return start

    def _damaged(self, why: str) -> ModelFileError:
        return ModelFileError(self._path, f"damaged or truncated GGUF file: {why}")
