"""Each row of `docs/errors.md`: the error, the message and the line are those of the page, and
afterwards nothing is held, running or queued.

A case is a function that goes wrong. The line of the row ends in ``# here``: its place stands for
HERE in the message or, where the message names no place, the traceback leads to it. ``# there`` is
THERE.
"""

from __future__ import annotations

import inspect
import re
import signal
import socket
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import fastapi as http
import pytest
from fastapi import FastAPI
from fastapi.responses import JSONResponse

import palmette as pm
from palmette.protocol import Request, TokenEvent
from tests.end_to_end.load import WatchedEngine, check_ledger
from tests.end_to_end.test_limits import slow_engine
from tests.runtime.server.harness import served, wait_for

PAGE = Path(__file__).parents[2] / "docs" / "errors.md"

Case = Callable[[Any], object]
CASES: dict[str, Case] = {}


def row(title: str) -> Callable[[Case], Case]:
    """The case shows the row of this title."""

    def keep(case: Case) -> Case:
        assert title not in CASES
        CASES[title] = case
        return case

    return keep


class Troubled(WatchedEngine):
    """A tiny model; a prompt that ends in a fault meets it."""

    async def generate(self, request: Request) -> AsyncIterator[TokenEvent]:
        if self.tokenizer.decode(request.token_ids).endswith("<fault>"):
            raise ZeroDivisionError("division by zero")
        generating = cast("Any", super().generate(request))
        async with aclosing(generating) as events:
            async for event in events:
                yield event


def closed_port() -> str:
    """The URL of an API at which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


@contextmanager
def refusing() -> Iterator[tuple[str, list[Any]]]:
    """The URL of an API that has had too many requests, and what it was asked."""
    asked: list[Any] = []
    app = FastAPI()

    @app.post("/v1/completions")
    async def completions(request: http.Request) -> JSONResponse:
        asked.append(await request.json())
        told = {"message": "Rate limit reached", "type": "requests", "param": None, "code": None}
        return JSONResponse({"error": told}, 429, headers={"retry-after-ms": "1"})

    with served(app) as url:
        yield f"{url}/v1", asked


def long_gen(name: str) -> Any:
    """It takes some hundred milliseconds."""
    return pm.gen(name, max_tokens=120, ignore_eos=True)


@dataclass
class Point:
    x: int
    y: int


# -- In a program ----------------------------------------------------------------------------------


@row("an exception of the program's own while branches run")
def _(backend: Any) -> object:
    @pm.function
    def program(s: pm.State) -> None:
        branches = s.fork(3)
        branches += "once" + long_gen("x")
        wait_for(lambda: backend.stats().num_running == 3)
        int("three")  # here

    return program.run(backend=backend)


@row("a primitive of a branch fails")
def _(backend: Any) -> object:
    @pm.function
    def program(s: pm.State) -> None:
        branches = s.fork(2)
        branches[0] += "once" + long_gen("x")
        branches[1] += "<fault>" + pm.gen("x")  # here
        branches.join()

    return program.run(backend=backend)


@row("a primitive fails and nobody reads it")
def _(backend: Any) -> object:
    @pm.function
    def program(s: pm.State) -> None:
        (branch,) = s.fork(1)
        branch += "<fault>" + pm.gen("x")  # here
        s += "once" + pm.gen("y", max_tokens=3)

    return program.run(backend=backend)


@row("what a branch was forked from fails")
def _(backend: Any) -> object:
    @pm.function
    def program(s: pm.State) -> None:
        s += "<fault>" + pm.gen("x")  # here
        branches = s.fork(2)
        branches += "more" + pm.gen("y")
        branches[1]["y"]

    return program.run(backend=backend)


@row("too few branches succeed for `first_k`")
def _(backend: Any) -> object:
    @pm.function
    def program(s: pm.State) -> None:
        branches = s.fork(3)
        branches[0] += "once" + long_gen("x")
        branches[1] += "<fault>" + pm.gen("x")  # here
        branches[2] += "once upon" + long_gen("x")
        pm.first_k(branches, 3)

    return program.run(backend=backend)


@row("a variable is read that nothing sets")
def _(backend: Any) -> object:
    @pm.function
    def program(s: pm.State) -> None:
        s += "once" + pm.gen("answer", max_tokens=3)
        s["anwser"]  # here

    return program.run(backend=backend)


@row("an async program reads without awaiting")
def _(backend: Any) -> object:
    @pm.function
    async def program(s: pm.State) -> None:
        s += "once" + long_gen("x")
        s["x"]  # here

    return program.run(backend=backend)


@row("a text was cut and is not of its type")
def _(backend: Any) -> object:
    @pm.function
    def program(s: pm.State) -> None:
        s += "once" + pm.gen("point", json_schema=Point, stop=",")
        s["point"]  # here

    return program.run(backend=backend)


@row("a message is begun in a message")
def _(backend: Any) -> object:
    @pm.function
    def program(s: pm.State) -> None:
        s += pm.user_begin() + "once"
        s += pm.assistant_begin()  # here

    return program.run(backend=backend)


@row("a variable with one value is appended to")
def _(backend: Any) -> object:
    @pm.function
    def program(s: pm.State) -> None:
        s += "once" + pm.gen("x", max_tokens=3)
        s += pm.gen("x", append=True)  # here

    return program.run(backend=backend)


@row("a branch that left its role is appended to the parent")
def _(backend: Any) -> object:
    @pm.function
    def program(s: pm.State) -> None:
        s += pm.user_begin() + "once"
        branches = s.fork(1)
        branches[0] += pm.user_end()
        branches.join(mode="concate_and_append")  # here

    return program.run(backend=backend)


@row("a state is appended to after its run")
def _(backend: Any) -> object:
    state = pm.function(lambda s: None).run(backend=backend)
    state += "more"  # here
    return state


# -- In what is asked for --------------------------------------------------------------------------


@row("a schema that is malformed")
def _(backend: Any) -> object:
    @pm.function
    def program(s: pm.State) -> None:
        s += "once" + pm.gen("x", json_schema={"type": "strin"})  # here
        s["x"]

    return program.run(backend=backend)


@row("a schema that cannot be enforced")
def _(backend: Any) -> object:
    @pm.function
    def program(s: pm.State) -> None:
        s += "once" + pm.gen("x", json_schema={"uniqueItems": True})  # here
        s["x"]

    return program.run(backend=backend)


@row("a regex that is malformed")
def _(backend: Any) -> object:
    @pm.function
    def program(s: pm.State) -> None:
        s += "once" + pm.gen("x", regex="(a|b")  # here
        s["x"]

    return program.run(backend=backend)


@row("an option out of its range")
def _(backend: Any) -> object:
    @pm.function
    def program(s: pm.State) -> None:
        s += "once" + pm.gen("x", temperature=-1)  # here

    return program.run(backend=backend)


@row("a feature that is not there")
def _(backend: Any) -> object:
    @pm.function
    def program(s: pm.State) -> None:
        s.fork(2, position_ids_offset=[0, 1])  # here

    return program.run(backend=backend)


@row("a choice between nothing")
def _(backend: Any) -> object:
    @pm.function
    def program(s: pm.State) -> None:
        s += "once" + pm.select("x", [])  # here

    return program.run(backend=backend)


@row("a prompt that is too long")
def _(backend: Any) -> object:
    @pm.function
    def program(s: pm.State) -> None:
        s += "once" * 5000 + pm.gen("x")  # here

    return program.run(backend=backend)


@row("arguments that the program does not take")
def _(backend: Any) -> object:
    @pm.function
    def program(s: pm.State, question: str) -> None:
        s += question

    return program.run(questoin="why?", backend=backend)  # here


@row("no backend")
def _(backend: Any) -> object:
    return pm.function(lambda s: None).run()  # here


# -- Limits and cancelling -------------------------------------------------------------------------


@row("the timeout of a run")
def _(backend: Any) -> object:
    @pm.function
    def program(s: pm.State) -> None:
        s += "once" + long_gen("x")  # here
        s["x"]

    return program.run(backend=backend, timeout=0.1)


@row("a timeout in a fork")
def _(backend: Any) -> object:
    @pm.function
    def program(s: pm.State) -> None:
        branches = s.fork(2, timeout=0.1)  # there
        branches += "once" + long_gen("x")  # here
        branches.join()

    return program.run(backend=backend)


@row("no tokens left")
def _(backend: Any) -> object:
    @pm.function
    def program(s: pm.State) -> None:
        s += "once" + pm.gen("x", max_tokens=20, ignore_eos=True)
        s += pm.gen("y", max_tokens=20)  # here
        s["y"]

    return program.run(backend=backend, max_total_tokens=20)


@row("a branch that was cancelled")
def _(backend: Any) -> object:
    @pm.function
    def program(s: pm.State) -> None:
        branches = s.fork(2)
        branches += "once" + long_gen("x")  # here
        wait_for(lambda: backend.stats().num_running == 2)
        branches[1].cancel()  # there
        branches[1]["x"]

    return program.run(backend=backend)


@row("a run that was cancelled")
def _(backend: Any) -> object:
    @pm.function
    def program(s: pm.State) -> None:
        s += "once" + long_gen("x")  # here

    state = program.stream(backend=backend)
    wait_for(lambda: backend.stats().num_running == 1)
    state.cancel()  # there
    return state.text()


@row("Ctrl-C in a batch")
def _(backend: Any) -> object:
    has_ended = threading.Event()

    @pm.function
    def program(s: pm.State, number: int) -> None:
        s += f"{number}"
        if number == 0:
            has_ended.set()
        else:
            assert has_ended.wait(20)
            signal.raise_signal(signal.SIGINT)
            s += long_gen("x")
            while True:  # it does not end by itself: nothing can be appended once it is cancelled
                s += "."
                time.sleep(0.005)

    return program.run_batch([0, 1], backend=backend, num_threads=1)  # here


# -- The backend -----------------------------------------------------------------------------------


@row("a backend that is down")
def _(backend: Any) -> object:
    @pm.function
    def program(s: pm.State) -> None:
        s += "once" + pm.gen("x")  # here
        s["x"]

    with pm.OpenAI(
        "m", base_url=closed_port(), api_key="k", api="completions", max_retries=1
    ) as api:
        try:
            return program.run(backend=api)
        finally:
            assert (api.stats().num_tries, api.stats().num_running) == (2, 0)


@row("an API that refuses more requests")
def _(backend: Any) -> object:
    @pm.function
    def program(s: pm.State, number: int) -> None:
        s += f"{number}" + pm.gen("x", max_tokens=3)  # here
        s["x"]

    with (
        refusing() as (url, asked),
        pm.OpenAI("m", base_url=url, api_key="k", api="completions", max_retries=2) as api,
    ):
        try:
            return program.run_batch([0, 1], backend=api, num_threads=1)
        finally:
            assert (len(asked), api.stats().num_running) == (3, 0)


@row("an engine that was closed")
def _(backend: Any) -> object:
    @pm.function
    def program(s: pm.State) -> None:
        backend.close()
        s += "once" + pm.gen("x")  # here
        s["x"]

    return program.run(backend=backend)


# -- The page --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One of the page: code of the line, class and message."""

    line: str
    error: str
    message: str


def rows() -> dict[str, Row]:
    """By title."""
    found = {}
    for text in PAGE.read_text().splitlines():
        cells = [cell.strip() for cell in text.strip("|").split(" | ")]
        if text.startswith("| ") and len(cells) == 4 and cells[1].startswith("`"):
            title, *rest = cells
            found[title] = Row(*(cell.strip("`") for cell in rest))
    return found


def place(case: Case, mark: str) -> tuple[str, str]:
    """File and line of the mark, as messages name it, and the code there."""
    lines, first = inspect.getsourcelines(case)
    ((number, code),) = (
        (number, line) for number, line in enumerate(lines, first) if f"# {mark}" in line
    )
    return f"{inspect.getsourcefile(case)}:{number}", code


@pytest.fixture
def backend() -> Iterator[Troubled]:
    with Troubled.watching(slow_engine) as backend:
        yield cast("Troubled", backend)


def test_the_page_has_a_row_for_each_case_and_a_case_for_each_row() -> None:
    assert list(rows()) == list(CASES)
    assert len(CASES) >= 20


@pytest.mark.parametrize("title", CASES)
def test_what_goes_wrong_is_told_as_the_page_says_and_leaves_nothing(
    title: str, backend: Troubled
) -> None:
    case, told = CASES[title], rows()[title]
    here, code = place(case, "here")
    assert told.line.replace("…", "") in code.replace("  # here", "")
    with pytest.raises(BaseException) as info:  # noqa: PT011  # which one is the point
        case(backend)
    assert type(info.value).__name__ == told.error
    pattern = re.escape(told.message).replace("…", ".*").replace("HERE", re.escape(here))
    if "THERE" in told.message:
        pattern = pattern.replace("T" + re.escape(here), re.escape(place(case, "there")[0]))
    assert re.fullmatch(pattern, str(info.value)), str(info.value)
    if "HERE" not in told.message.replace("THERE", ""):
        frames = traceback.extract_tb(info.value.__traceback__)
        assert here in [f"{frame.filename}:{frame.lineno}" for frame in frames]
    if title == "an engine that was closed":
        return
    wait_for(lambda: backend.is_idle)
    check_ledger(backend.engine)
    stats = backend.stats()
    assert stats.num_available_pages == stats.num_pages
    assert stats.num_running == stats.num_waiting == 0
    assert backend.engine._kv.cache.tree.num_holds == 0
