"""Frozen prefixes: the keys and values of a token prefix in one file, for a later process.

The file is safetensors with two tensors, `token_ids` [T] and `keys_and_values`
[num_layers, 2, num_kv_heads, T, head_dim]: the prefix's tokens and nothing of the pages they lay
in, so that a file does not depend on the page size. Its metadata says what the numbers were
computed with (`Identity`) and holds a SHA-256 over the whole file, itself read as zeros: there is
no byte that could change unnoticed. A file is written beside its place and then moved there.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from palmette.errors import FrozenPrefixError
from palmette.runtime.models.config import RopeConfig

_FORMAT = "palmette-frozen-prefix"
# Raised whenever the same model would put other numbers into its pages, as for another order of
# the keys' entries.
_VERSION = "1"

_LENGTH_BYTES = 8  # what a safetensors file begins with: the length of its header
_MAX_HEADER = 1 << 16
_NO_CHECKSUM = "0" * 64
_CHECKSUM = re.compile(rb'"checksum":"([0-9a-f]{64})"')
_CHUNK = 1 << 24  # bytes hashed at a time
_KV, _IDS = "keys_and_values", "token_ids"
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """What keys and values depend on besides the tokens. All texts, as a file holds them.

    `weights` and `tokenizer` are hashes. That of the tokenizer is over what each token id stands
    for: which ids a text becomes is the reader's own matter.
    """

    weights: str
    tokenizer: str
    dtype: str
    rope: str
    num_layers: str
    num_kv_heads: str
    head_dim: str

    @classmethod
    def of(
        cls,
        *,
        weights: str,
        tokenizer: str,
        dtype: torch.dtype,
        rope: RopeConfig,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
    ) -> Identity:
        """The identity of a loaded model."""
        return cls(
            weights=weights,
            tokenizer=tokenizer,
            dtype=_DTYPES[dtype],
            rope=hashlib.sha256(repr(sorted(asdict(rope).items())).encode()).hexdigest(),
            num_layers=str(num_layers),
            num_kv_heads=str(num_kv_heads),
            head_dim=str(head_dim),
        )


@dataclass(frozen=True, slots=True)
class FrozenPrefix:
    """Tokens, and their keys and values [num_layers, 2, num_kv_heads, T, head_dim]."""

    token_ids: tuple[int, ...]
    keys_and_values: torch.Tensor


def check_writable(path: str | Path) -> Path:
    """Where a file at `path` would lie: links are followed.

    Raises FrozenPrefixError where no file could be, or where something is that is none.
    """
    path = Path(path)
    try:
        # Of the path as it is given: the target of a link in /proc has no path of its own.
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = None
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise FrozenPrefixError(path, f"cannot be written: {why}") from error
    if mode is not None and not stat.S_ISREG(mode):
        why = os.strerror(errno.EISDIR) if stat.S_ISDIR(mode) else "it is no regular file"
        raise FrozenPrefixError(path, f"cannot be written: {why}")
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir():
        raise FrozenPrefixError(path, f"cannot be written: {os.strerror(errno.ENOENT)}")
    return target


def write_frozen(path: str | Path, prefix: FrozenPrefix, identity: Identity) -> None:
    """Put the prefix into a file: all of it or, if that fails, nothing.

    A file that is there is replaced, and so is what a link leads to. Raises FrozenPrefixError if
    the file cannot be written.
    """
    target = check_writable(path)
    tensors = {
        _IDS: torch.tensor(prefix.token_ids, dtype=torch.int64),
        _KV: prefix.keys_and_values.contiguous(),
    }
    metadata = {
        "format": _FORMAT,
        "format_version": _VERSION,
        "palmette_version": importlib.metadata.version("palmette"),
        "checksum": _NO_CHECKSUM,
        **asdict(identity),
    }
    try:
        with _replacing(target) as written:
            save_file(tensors, written, metadata)
            header = _read_header(written)
            place = _CHECKSUM.search(header)
            assert place is not None
            with written.open("r+b") as file:
                file.seek(place.start(1))
                file.write(_checksum(header, tensors).encode())
                file.flush()
                os.fsync(file.fileno())
    except OSError as error:
        raise FrozenPrefixError(path, f"cannot be written: {error.strerror or error}") from error
    except SafetensorError as error:
        raise FrozenPrefixError(path, f"cannot be written: {error}") from error


def read_frozen(path: str | Path, identity: Identity) -> FrozenPrefix:
    """The prefix in a file; its keys and values are mapped from the file, not read into memory.

    Every byte is verified. Raises FrozenPrefixError for a file that cannot be read, is none of
    ours, of another version, damaged or cut short, or was computed with anything but `identity`.
    """
    path = Path(path)
    if not path.is_file():
        raise FrozenPrefixError(path, "there is no such file")
    try:
        header = _read_header(path)
        with safe_open(path, framework="pt") as file:
            metadata: dict[str, str] = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise FrozenPrefixError(path, "is not a frozen prefix")
            version = metadata.get("format_version")
            if version != _VERSION:
                raise FrozenPrefixError(
                    path, f"has format version {version!r}, this Palmette reads {_VERSION!r}"
                )
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except OSError as error:
        raise FrozenPrefixError(path, f"cannot be read: {error.strerror or error}") from error
    except (SafetensorError, UnicodeDecodeError) as error:
        raise FrozenPrefixError(path, f"is damaged or not a frozen prefix: {error}") from error
    _check_bytes(path, header, tensors)
    _check_identity(path, metadata, identity)
    return _prefix(path, tensors, identity)


def tokenizer_digest(
    token_bytes: list[bytes], special: list[tuple[int, str]], prefix_ids: tuple[int, ...]
) -> str:
    """A hash of what each token id stands for; `special` spells those that stand for no bytes."""
    digest = hashlib.sha256(repr(list(map(len, token_bytes))).encode())
    digest.update(b"".join(token_bytes))
    digest.update(repr((special, prefix_ids)).encode("utf-8", "surrogatepass"))
    return digest.hexdigest()


def _check_bytes(path: Path, header: bytes, tensors: dict[str, torch.Tensor]) -> None:
    found = _CHECKSUM.findall(header)
    if len(found) != 1 or set(tensors) != {_IDS, _KV}:
        raise FrozenPrefixError(path, "is damaged: its header is not that of a frozen prefix")
    if _checksum(header, tensors).encode() != found[0]:
        raise FrozenPrefixError(path, "is damaged: its checksum does not fit its contents")


def _check_identity(path: Path, metadata: dict[str, str], identity: Identity) -> None:
    for field in fields(Identity):
        frozen, ours = metadata.get(field.name, "nothing"), getattr(identity, field.name)
        if frozen != ours:
            kind = {"weights": "other weights", "tokenizer": "another tokenizer"}.get(
                field.name, f"another {field.name}"
            )
            raise FrozenPrefixError(
                path,
                f"was frozen with {kind} ({frozen[:12]}) than this engine has ({ours[:12]}): "
                "freeze it again",
            )


def _prefix(path: Path, tensors: dict[str, torch.Tensor], identity: Identity) -> FrozenPrefix:
    """What a file holds that is whole and ours, whoever made it."""
    ids, keys_and_values = tensors[_IDS], tensors[_KV]
    shape = (
        int(identity.num_layers),
        2,
        int(identity.num_kv_heads),
        len(ids) if ids.dim() == 1 else 0,
        int(identity.head_dim),
    )
    if ids.dtype != torch.int64 or not shape[3] or tuple(keys_and_values.shape) != shape:
        raise FrozenPrefixError(
            path,
            f"is damaged: it holds ids of shape {list(ids.shape)} and keys and values of shape "
            f"{list(keys_and_values.shape)}, expected {list(shape)}",
        )
    if _DTYPES.get(keys_and_values.dtype) != identity.dtype:
        raise FrozenPrefixError(path, f"is damaged: its numbers are {keys_and_values.dtype}")
    return FrozenPrefix(tuple(ids.tolist()), keys_and_values)


def _read_header(path: Path) -> bytes:
    """The header of a safetensors file and the length before it, as they stand in the file."""
    with path.open("rb") as file:
        length = file.read(_LENGTH_BYTES)
        num_bytes = int.from_bytes(length, "little")
        if len(length) < _LENGTH_BYTES or num_bytes > _MAX_HEADER:
            raise FrozenPrefixError(path, "is not a frozen prefix, or its first bytes are damaged")
        header = file.read(num_bytes)
    if len(header) < num_bytes:
        raise FrozenPrefixError(path, "is cut short")
    return length + header


def _checksum(header: bytes, tensors: dict[str, torch.Tensor]) -> str:
    """SHA-256 of the header, with zeros for its checksum, and of the tensors' bytes.

    safetensors itself refuses a file with bytes that belong to no tensor.
    """
    zeroed = _CHECKSUM.sub(b'"checksum":"' + _NO_CHECKSUM.encode() + b'"', header)
    digest = hashlib.sha256(zeroed)
    for name in (_IDS, _KV):
        content = tensors[name].contiguous().flatten().view(torch.uint8).numpy().data
        for start in range(0, len(content), _CHUNK):
            digest.update(content[start : start + _CHUNK])
    return digest.hexdigest()


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A file beside `path` to write to, which takes its place when the block ends without error."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    os.close(handle)
    try:
        yield Path(name)
        # mkstemp makes files for the owner's eyes; this one is as any other.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
