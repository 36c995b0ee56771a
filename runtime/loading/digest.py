"""A hash of the files that a model was loaded from."""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from pathlib import Path

from palmette.errors import ModelFileError
from palmette.runtime.home import palmette_home

_CHUNK = 1 << 22
_DIGEST = re.compile(r"[0-9a-f]{64}")


class WeightFiles:
    """The files of a model, as they are when this is made: right after the model was loaded.

    The hash is over the files and not over the tensors in memory: hashing a quantised file takes a
    fraction of the time, and what the tensors become differs by processor and number type. A digest
    is remembered by path, inode, size and time of change in the folder of Palmette's own files.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._stamps = _stamps(path)

    def digest(self) -> str:
        """SHA-256 over names and contents; that of a single file is over its contents alone.

        Raises ModelFileError if the files are not those any more that were loaded.
        """
        stamps = _stamps(self.path)
        if stamps != self._stamps or not stamps:
            raise ModelFileError(
                self.path, "has changed since it was loaded: load it again before freezing"
            )
        digests = {file.name: _remembered(file, stamp) for file, stamp in stamps.items()}
        if self.path.is_file():
            return digests[self.path.name]
        return hashlib.sha256(repr(sorted(digests.items())).encode()).hexdigest()


def _stamps(path: Path) -> dict[Path, tuple[int, int, int]]:
    """What tells one state of a file from another, for each file with weights or shapes."""
    if path.is_file():
        files = [path]
    else:
        files = [path / "config.json", *sorted(path.glob("*.safetensors*"))]
    stamps = {}
    for file in files:
        if file.is_file():
            status = file.stat()
            stamps[file] = (status.st_ino, status.st_size, status.st_mtime_ns)
    return stamps


def _remembered(file: Path, stamp: tuple[int, int, int]) -> str:
    """The digest of a file, computed where it is not known yet."""
    key = hashlib.sha256(repr((str(file.resolve()), *stamp)).encode()).hexdigest()
    place = palmette_home() / "digests" / key
    try:
        known = place.read_text(encoding="ascii")
        if _DIGEST.fullmatch(known):
            return known
    except (OSError, ValueError):
        pass
    try:
        digest = _hash(file)
    except OSError as error:
        raise ModelFileError(file, f"cannot be read: {error.strerror}") from error
    _remember(place, digest)
    return digest


def _hash(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _remember(place: Path, digest: str) -> None:
    """Put it in place whole. A folder that cannot be written only costs time later."""
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=place.parent, prefix=".writing-")
        try:
            with os.fdopen(handle, "w", encoding="ascii") as file:
                file.write(digest)
            os.replace(name, place)
        except BaseException:
            os.unlink(name)
            raise
    except OSError:
        pass
