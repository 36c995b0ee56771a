"""The programs of clients, which may die without a word: each is ended once."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from palmette.protocol import Outlook, ProgramListener
from palmette.runtime.server.limits import ServerLimits


@dataclass(slots=True)
class _Program:
    num_requests: int = 0  # that run
    heard_at: float = 0.0


class ClientPrograms:
    """What a backend that listens is told of programs elsewhere.

    One that was not heard of for `limits.program_seconds`, or has been silent for longest where
    there are more than `limits.max_programs`, is ended for its client.
    """

    def __init__(
        self,
        listener: ProgramListener,
        limits: ServerLimits,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._listener = listener
        self._limits = limits
        self._clock = clock
        self._known: OrderedDict[str, _Program] = OrderedDict()  # the one heard last comes last

    def __len__(self) -> int:
        return len(self._known)

    @contextmanager
    def asking(self, outlook: Outlook) -> Iterator[None]:
        """A request of the program runs."""
        program = self._hear(outlook.program_id)
        program.num_requests += 1
        try:
            yield
        finally:
            program.num_requests -= 1
            if self._known.get(outlook.program_id) is program:
                self._touch(outlook.program_id, program)

    def announce(self, outlook: Outlook, ended: Sequence[tuple[int, ...]]) -> None:
        """What a program knows by now, and which of its branches ask no more."""
        self._hear(outlook.program_id)
        self._listener.announce(outlook, ended)

    def end(self, program_id: str) -> None:
        """The program asks no more. One that is not known has ended."""
        if self._known.pop(program_id, None) is not None:
            self._listener.end_program(program_id)

    def _hear(self, program_id: str) -> _Program:
        program = self._known.setdefault(program_id, _Program())
        self._touch(program_id, program)
        self._end_silent(program)
        return program

    def _touch(self, program_id: str, program: _Program) -> None:
        program.heard_at = self._clock()
        self._known.move_to_end(program_id)

    def _end_silent(self, heard: _Program) -> None:
        """End those that are silent for too long; not the one that was `heard` just now."""
        latest = self._clock() - self._limits.program_seconds
        num_over = len(self._known) - self._limits.max_programs
        silent = []
        for program_id, program in self._known.items():
            if num_over <= 0 and program.heard_at >= latest:
                break
            if program is not heard and not program.num_requests:
                silent.append(program_id)
                num_over -= 1
        for program_id in silent:
            self.end(program_id)
