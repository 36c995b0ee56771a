"""Whatever interrupts a program, and whenever, its run ends and whoever listens hears of it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Sequence

import pytest

import palmette as pm
from palmette.lang.backends.scripted import ScriptedBackend
from palmette.lang.run import Run
from palmette.protocol import Outlook, Request, TokenEvent


class SlowToStop(ScriptedBackend):
    """Its generations never end, and end when they are given up only once they may."""

    def __init__(self) -> None:
        super().__init__()
        self.has_begun = threading.Event()
        self.may_stop = threading.Event()
        self.has_ended = threading.Event()

    async def generate(self, request: Request) -> AsyncIterator[TokenEvent]:
        self.has_begun.set()
        try:
            await asyncio.sleep(60)
            yield TokenEvent(request_id=request.request_id)
        finally:
            while not self.may_stop.is_set():
                await asyncio.sleep(0.001)

    def announce(self, outlook: Outlook, ended: Sequence[tuple[int, ...]] = ()) -> None:
        pass

    def end_program(self, program_id: str) -> None:
        self.has_ended.set()


async def test_a_task_cancelled_while_its_failed_program_winds_up_ends_the_run() -> None:
    backend = SlowToStop()
    has_failed = asyncio.Event()
    states: list[pm.State] = []

    @pm.function
    async def program(s: pm.State) -> None:
        states.append(s)
        s += "p" + pm.gen("x")
        await asyncio.to_thread(backend.has_begun.wait, 20)
        has_failed.set()
        raise ValueError("of the program")

    task = asyncio.create_task(program.run_async(backend=backend))
    await has_failed.wait()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    assert not backend.has_ended.is_set()
    backend.may_stop.set()
    assert await asyncio.to_thread(backend.has_ended.wait, 20)
    assert states[0]._branch.run.is_finished


def test_ctrl_c_while_a_failed_program_winds_up_ends_the_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = SlowToStop()

    def interrupted(run: Run) -> None:
        raise KeyboardInterrupt

    @pm.function
    def program(s: pm.State) -> None:
        s += "p" + pm.gen("x")
        assert backend.has_begun.wait(20)
        raise ValueError("of the program")

    monkeypatch.setattr(Run, "wait_idle", interrupted)
    with pytest.raises(KeyboardInterrupt):
        program.run(backend=backend)
    backend.may_stop.set()
    assert backend.has_ended.wait(20)
