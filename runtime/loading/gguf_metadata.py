"""The metadata of a GGUF file, read leanly and without torch.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3, little-endian:
magic ``GGUF``, u32 version, u64 number of tensors, u64 number of key-value pairs, then for each
pair a key, a u32 type and the value. A string is a u64 length and that many bytes; an array is a
u32 type, a u64 count and the items. The `gguf` package's reader is not used: it makes an array
object for every string of the vocabulary, 2 s for 49,152 tokens, and trusts the counts in the file.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

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
MAX_NAME_BYTES = 1 << 16  # of a key or of a tensor; the format allows 65,535 and 64


@dataclass(frozen=True, slots=True)
class Array:
    """Where an array of the metadata lies; decoded only when it is asked for."""

    item_type: int
    length: int
    offset: int


class GGUFMetadata:
    """The key-value pairs of a GGUF file, every length checked against the file's size.

    Raises ModelFileError for what is not a GGUF file, is damaged or truncated. Work and memory are
    bounded by the size of the file, whatever its counts say. A context manager; scalars and
    strings can be read after `close`, arrays cannot.
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

    def __enter__(self) -> GGUFMetadata:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unmaps the file."""
        self._bytes.release()
        self._map.close()

    def text(self, key: str) -> str | None:
        """The string under a key, or None. Raises ModelFileError if it is something else."""
        value = self.metadata.get(key)
        if value is not None and not isinstance(value, str):
            raise ModelFileError(self.path, f"{key} should be a string, is {value!r}")
        return value

    def integer(self, key: str) -> int | None:
        """The integer under a key, or None. Raises ModelFileError if it is something else."""
        value = self.metadata.get(key)
        if value is not None and (not isinstance(value, int) or isinstance(value, bool)):
            raise ModelFileError(self.path, f"{key} should be an integer, is {value!r}")
        return value

    def strings(self, key: str) -> list[str]:
        """The items of an array of strings; none if there is no such key.

        Raises ModelFileError if it is something else, or a string is not UTF-8.
        """
        items = self.array(key) or []
        for item in items:
            if not isinstance(item, str):
                raise ModelFileError(self.path, f"{key} should be an array of strings")
            try:
                item.encode()
            except UnicodeEncodeError:
                raise ModelFileError(self.path, f"{key} has a string that is not UTF-8") from None
        return [str(item) for item in items]

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

    def _read_header(self) -> None:
        if bytes(self._bytes[:4]) != b"GGUF":
            raise ModelFileError(self.path, "is not a GGUF file")
        version, self.num_tensors, num_keys = struct.unpack_from("<IQQ", self._bytes, 4)
        if version not in (2, 3):
            swapped = version & 0xFFFF == 0
            what = "is big-endian" if swapped else f"has GGUF version {version}"
            raise ModelFileError(self.path, f"{what}; supported: versions 2 and 3, little-endian")
        self._position = 24
        metadata: dict[str, Scalar | Array] = {}
        for _ in range(num_keys):
            key = self._text(MAX_NAME_BYTES)
            if key in metadata:
                raise ModelFileError(self.path, f"has the key {key} twice")
            metadata[key] = self._value(key)
        self.metadata = MappingProxyType(metadata)
        # Of all that was read so far, so it changes with any entry of the vocabulary.
        self.digest = hashlib.sha256(self._bytes[: self._position]).hexdigest()

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
