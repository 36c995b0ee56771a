"""Each engine in a process of its own, so that one that crashes or hangs takes nothing with it."""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import signal
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from benchmarks.grammar.engines import Maker, Order, Tokens
from benchmarks.grammar.measure import CRASHED, TIMED_OUT, Result, Task, measure, peak_bytes

_START_SECONDS = 180.0  # to import a library and read a vocabulary
_WARM_UP = (
    {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]},
    {"type": "array", "items": {"type": ["number", "boolean", "null", "string"]}},
)


class Worker:
    """A process with one engine. It is started anew for the next task when it has died."""

    def __init__(
        self, engine: str, make: Maker, tokens: Tokens, order: Order, timeout: float
    ) -> None:
        self.engine = engine
        self.base_bytes = 0  # memory before the first task
        self._arguments = (engine.startswith("ours"), make, tokens, order)
        self._timeout = timeout
        self._process: BaseProcess | None = None
        self._connection: Connection | None = None

    def start(self) -> None:
        """Raises RuntimeError if the engine cannot be had."""
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, *self._arguments), daemon=True)
        self._process.start()
        theirs.close()
        try:
            if not self._connection.poll(_START_SECONDS):
                raise RuntimeError(f"{self.engine} did not start in {_START_SECONDS:g} s")
            told = self._connection.recv()
        except EOFError:
            told = "its process died"
        except RuntimeError:
            self.stop()
            raise
        if isinstance(told, str):
            self.stop()
            raise RuntimeError(f"{self.engine} cannot be used: {told}")
        self.base_bytes = self.base_bytes or told

    def run(self, task: Task) -> Result:
        """What came of the task; a process that is late or dies is ended, and that is a result."""
        if self._process is None:
            self.start()
        assert self._connection is not None
        try:
            self._connection.send(task)
            if self._connection.poll(self._timeout):
                result: Result = self._connection.recv()
                return result
            outcome = Result(TIMED_OUT, f"more than {self._timeout:g} s")
        except (EOFError, OSError):
            outcome = Result(CRASHED)
        code = self.stop()
        if outcome.outcome == CRASHED:
            outcome.message = f"exit status {code}"
        return outcome

    def stop(self) -> int | None:
        """End the process, whatever it is doing; its exit status."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection is not None:
            connection.close()
        if process is None:
            return None
        process.join(0.2)
        if process.is_alive():
            process.kill()
        process.join()
        code = process.exitcode
        process.close()
        return code


def _serve(
    connection: Connection, is_ours: bool, make: Maker, tokens: Tokens, order: Order
) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what an interrupt means
    if not is_ours:  # they write warnings of schemas there, past Python
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    try:
        engine = make(tokens, order)
        for schema in _WARM_UP:
            measure(engine, Task(json.dumps(schema), (), ()))
        gc.collect()
        gc.freeze()
    except Exception as error:
        connection.send(f"{type(error).__name__}: {error}")
        return
    connection.send(peak_bytes())
    while True:
        try:
            task = connection.recv()
        except (EOFError, OSError):
            return
        connection.send(measure(engine, task))
