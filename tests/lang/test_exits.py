"""What ends a task that is not the program's to end: an exit, or a cancellation from elsewhere. Who
waits hears of it, and other programs go on.
"""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

import palmette as pm
from palmette.errors import PrimitiveFailed, RequestAborted
from palmette.protocol import Request, ScoreRequest, ScoreResult, TokenEvent

SECONDS = 20


def outcome(function: Callable[[], Any]) -> Any:
    """What it returns or raises; fails where it never does."""
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(function())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert found, "it waits for ever"
    return found[0]


class Broken(pm.ScriptedBackend):
    """Whose requests end with what is no Exception."""

    def __init__(self, error: BaseException) -> None:
        super().__init__("ok", is_repeatable=True)
        self._error = error

    async def generate(self, request: Request) -> AsyncIterator[TokenEvent]:
        await asyncio.sleep(0.01)
        raise self._error
        yield

    async def score(self, request: ScoreRequest) -> ScoreResult:
        raise self._error


@pm.function
def plain(s: pm.State) -> None:
    s += "once" + pm.gen("x", temperature=0)


@pm.function
def sampled(s: pm.State) -> None:
    s += "once" + pm.gen("x", n=3)


@pm.function
def chosen(s: pm.State) -> None:
    s += "once" + pm.select("x", ["a", "b"])


def goes_on() -> None:
    assert outcome(lambda: plain.run(backend=pm.ScriptedBackend("ok"))["x"]) == "ok"


def test_a_rule_that_exits_fails_its_select_and_no_other_program() -> None:
    def rule(**_: Any) -> str:
        sys.exit(3)

    @pm.function
    def program(s: pm.State) -> None:
        s += "once" + pm.select("x", ["a", "b"], choices_method=rule)

    error = outcome(lambda: program.run(backend=pm.ScriptedBackend("ok")))
    assert isinstance(error, PrimitiveFailed)
    assert isinstance(error.__cause__, SystemExit)
    assert str(error).endswith("failed: SystemExit(3)")
    goes_on()


def test_an_async_program_that_exits_raises_it_where_it_was_called() -> None:
    @pm.function
    async def leaving(s: pm.State) -> None:
        s += "once" + pm.gen("x")
        sys.exit(3)

    @pm.function
    async def staying(s: pm.State) -> str:
        s += "once" + pm.gen("x")
        return str(await s.value("x"))

    backend = pm.ScriptedBackend("ok")
    assert isinstance(outcome(lambda: leaving.run(backend=backend)), SystemExit)
    assert isinstance(outcome(lambda: leaving.stream(backend=backend).error()), SystemExit)
    assert outcome(lambda: staying.run(backend=backend).ret_value) == "ok"


@pytest.mark.parametrize("program", [plain, sampled, chosen])
@pytest.mark.parametrize("error", [asyncio.CancelledError(), SystemExit(4)])
def test_a_backend_that_gives_up_a_request_fails_the_primitive(
    program: pm.Function, error: BaseException
) -> None:
    failed = outcome(lambda: program.run(backend=Broken(error)))
    assert isinstance(failed, PrimitiveFailed)
    assert isinstance(failed.__cause__, SystemExit | RequestAborted)
    goes_on()


@pytest.mark.parametrize("program", [plain, chosen])
def test_all_that_share_an_answer_hear_that_the_backend_gave_it_up(program: pm.Function) -> None:
    backend = Broken(asyncio.CancelledError())
    results = outcome(lambda: program.run_batch([{}] * 3, backend=backend, on_error="return"))
    assert [type(each.__cause__) for each in results] == [RequestAborted] * 3


def test_a_rule_or_a_program_on_a_thread_that_runs_out_of_items_fails() -> None:
    def rule(choices: list[str], **_: Any) -> str:
        return next(choice for choice in choices if choice == "c")

    @pm.function
    def program(s: pm.State) -> None:
        s += "once" + pm.select("x", ["a", "b"], choices_method=rule)

    @pm.function
    def empty(s: pm.State) -> None:
        next(iter(()))

    backend = pm.ScriptedBackend("ok")
    failed = outcome(lambda: program.run(backend=backend))
    assert isinstance(failed.__cause__.__cause__, StopIteration)
    failed = outcome(lambda: asyncio.run(empty.run_async(backend=backend)))
    assert isinstance(failed.__cause__, StopIteration)


def test_a_failure_reaches_forks_of_forks_however_deep() -> None:
    entered, leave = threading.Event(), threading.Event()

    class Failing(pm.ScriptedBackend):
        async def generate(self, request: Request) -> AsyncIterator[TokenEvent]:
            entered.set()
            while not leave.is_set():
                await asyncio.sleep(0.005)
            raise ZeroDivisionError("division by zero")
            yield

    @pm.function
    def program(s: pm.State) -> list[str]:
        s += "once" + pm.gen("x")
        entered.wait(20)
        branches = [s]
        for _ in range(1200):
            branches.append(branches[-1].fork()[0])
        leave.set()
        return [str(branch.error()) for branch in branches]

    messages = outcome(lambda: program.run(backend=Failing("ok")).ret_value)
    assert len(messages) == 1201
    assert len(set(messages)) == 1
    assert messages[0].endswith("failed: division by zero")
