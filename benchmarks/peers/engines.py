"""Engines in processes of their own: started, asked one task at a time, ended."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = 1 << 16


class WorkerDied(Exception):
    """The process ended, did not start, or gave no answer in time; it is ended by now."""


@dataclass(frozen=True, slots=True)
class Engine:
    """How to start a worker: an interpreter, the module it runs, and the worker's options."""

    name: str
    python: Path
    module: str
    options: Mapping[str, Any]


class Worker:
    """A running engine. Between two tasks it waits for a line, and computes nothing."""

    def __init__(self, engine: Engine, num_threads: int, log: Path) -> None:
        self.name = engine.name
        self.start_seconds = 0.0  # from spawning the process until the model is ready
        self.about: dict[str, str] = {}
        self.weights = ""
        self.peak_bytes = 0
        self._seconds = self._elsewhere = 0.0  # of tasks, and of others' processors meanwhile
        self._engine = engine
        self._num_threads = num_threads
        self._log = log
        self._rest = b""
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, timeout: float) -> None:
        """Raises WorkerDied with what the library said."""
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": str(self._num_threads),
            "PYTHONUNBUFFERED": "1",
        }
        options = {**self._engine.options, "threads": self._num_threads}
        start = time.perf_counter()
        with self._log.open("wb") as log:
            try:
                self._process = subprocess.Popen(
                    [str(self._engine.python), "-m", self._engine.module, json.dumps(options)],
                    cwd=ROOT,
                    env=environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    start_new_session=True,  # so that it ends with all it started
                )
            except OSError as error:
                raise WorkerDied(f"cannot start {self._engine.python}: {error.strerror}") from error
        ready = self._answer(timeout)
        self.start_seconds = time.perf_counter() - start
        if "error" in ready:
            self.stop()
            raise WorkerDied(ready["error"])
        self.about, self.weights = ready["about"], ready["weights"]

    def ask(self, task: Mapping[str, Any], timeout: float) -> dict[str, Any]:
        """The answer to a task, which may be an `error` or `unsupported`. Raises WorkerDied."""
        if self._process is None:
            raise WorkerDied("it is not running")
        pid = self._process.pid
        start, busy, own = time.monotonic(), _busy_seconds(), _processor_seconds(pid)
        try:
            stdin = _opened(self._process.stdin)
            stdin.write(json.dumps(task).encode() + b"\n")
            stdin.flush()
        except OSError:
            self._fail("its process died")
        answer = self._answer(timeout)
        self._seconds += time.monotonic() - start
        self._elsewhere += _busy_seconds() - busy - (_processor_seconds(pid) - own)
        return answer

    @property
    def busy_elsewhere(self) -> float | None:
        """How many processors were busy with other things, on average, while it worked; None where
        the system does not tell. Figures taken beside much other work say little.
        """
        if not self._seconds or not _busy_seconds():
            return None
        return max(0.0, self._elsewhere / self._seconds)

    def stop(self) -> None:
        """End the process and what it started, first by closing its stdin."""
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(OSError):
            _opened(process.stdin).close()
        try:
            process.wait(5)
        except subprocess.TimeoutExpired:
            process.kill()
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)  # its group, should others be left in it
        process.wait()
        _opened(process.stdout).close()

    def _answer(self, timeout: float) -> dict[str, Any]:
        assert self._process is not None
        stdout = _opened(self._process.stdout)
        until = time.monotonic() + timeout
        parts = [self._rest]
        while b"\n" not in parts[-1]:
            left = until - time.monotonic()
            if left <= 0 or not select.select([stdout], [], [], left)[0]:
                self._fail(f"no answer in {timeout:g} s")
            block = os.read(stdout.fileno(), _BLOCK)
            if not block:
                self._fail("its process died")
            parts.append(block)
        line, _, self._rest = b"".join(parts).partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        self.peak_bytes = max(self.peak_bytes, answer.get("peak_bytes", 0))
        return answer

    def _fail(self, why: str) -> None:
        self.stop()
        raise WorkerDied(f"{why}{_last_line(self._log)}")


def _busy_seconds() -> float:
    """Of all processors since the system began, those taken by other systems included."""
    with contextlib.suppress(OSError, ValueError), open("/proc/stat", encoding="ascii") as file:
        user, nice, system, _, _, *rest = map(int, file.readline().split()[1:9])
        return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _processor_seconds(pid: int) -> float:
    """That a process has had, all its threads together."""
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return 0.0


def _opened(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    said: Sequence[str] = [line for line in lines if line]
    return f": {said[-1][:300]}" if said else ""
