"""What a program tells a backend of its own future."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest

import palmette as pm
from palmette.errors import InvalidRequest
from palmette.lang.backends.scripted import ByteTokenizer, ScriptedBackend
from palmette.lang.outlook import Ahead, Forecast
from palmette.lang.run import Run
from palmette.protocol import Outlook, Piece, Request, ScoreRequest, TokenEvent


class Listener(ScriptedBackend):
    """Notes what is asked and announced, in order."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)  # type: ignore[arg-type]
        self.heard: list[tuple[Outlook, tuple[tuple[int, ...], ...]]] = []
        self.ended: list[str] = []

    def announce(self, outlook: Outlook, ended: Sequence[tuple[int, ...]] = ()) -> None:
        self.heard.append((outlook, tuple(ended)))

    def end_program(self, program_id: str) -> None:
        self.ended.append(program_id)

    def paths_ended(self) -> list[tuple[int, ...]]:
        return [path for _, paths in self.heard for path in paths]

    def asked(self) -> list[Request | ScoreRequest]:
        return [*self.score_requests, *self.requests]


def wait_until(is_so: Callable[[], bool]) -> None:
    """For what happens on the loop's thread soon after."""
    deadline = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


class Gate(ByteTokenizer):
    """Encodes nothing while it is closed, so that a program runs ahead of what it asks for."""

    def __init__(self) -> None:
        self.is_open = threading.Event()
        self.is_open.set()
        super().__init__()

    def encode(self, text: str | Sequence[Piece]) -> list[int]:
        assert self.is_open.wait(timeout=30)
        return super().encode(text)


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Listener:
    """A backend that is asked for the first time when the program's function has returned."""
    gate = Gate()
    backend = Listener("abcd", tokenizer=gate)
    gate.is_open.clear()
    close_all = Run.close_all

    def close_and_open(run: Run) -> None:
        close_all(run)
        gate.is_open.set()

    monkeypatch.setattr(Run, "close_all", close_and_open)
    return backend


def test_a_request_comes_with_what_is_queued_behind_it(ahead: Listener) -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += "x" * 10 + pm.gen("a", max_tokens=4)
        s += "y" * 7 + pm.gen("b", max_tokens=3)
        s += "z" * 5

    program.run(backend=ahead)
    first, second = ahead.asked()
    assert first.outlook is not None
    assert second.outlook is not None
    # A byte is a token here.
    assert (first.outlook.constant_tokens, first.outlook.generated_tokens) == (12, 3)
    assert (second.outlook.constant_tokens, second.outlook.generated_tokens) == (5, 0)
    assert first.goes_on
    assert not second.goes_on  # there are constants, but nobody will ask for what follows them
    assert ahead.ended == [first.outlook.program_id]


def test_every_run_is_a_program_of_its_own(ahead: Listener) -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += "x" + pm.gen("a", max_tokens=2)

    states = program.run_batch([{}, {}], backend=ahead)
    assert len(states) == 2
    ids = [request.outlook.program_id for request in ahead.asked() if request.outlook]
    assert len(set(ids)) == 2
    assert sorted(ahead.ended) == sorted(ids)


def test_branches_count_with_what_waits_in_them(ahead: Listener) -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += "x" * 10 + pm.gen("a", max_tokens=4)
        branches = s.fork(3)
        branches += "y" * 5 + pm.gen("b", max_tokens=2) + "z" * 5 + pm.gen("c", max_tokens=2)

    program.run(backend=ahead)
    first, *others = ahead.asked()
    assert first.outlook is not None
    assert (first.outlook.constant_tokens, first.outlook.generated_tokens) == (30, 12)
    assert first.goes_on  # its branches do
    by_branch: dict[tuple[int, ...], list[bool]] = {}
    for request in others:
        by_branch.setdefault(request.path, []).append(request.goes_on)
    assert by_branch == {(0, i): [True, False] for i in range(3)}


def test_what_branches_made_is_expected_to_come_back_while_the_program_is_open() -> None:
    backend = Listener("ab")

    @pm.function
    def program(s: pm.State) -> None:
        s += "x" + pm.gen("a", max_tokens=2)
        s.sync()
        branches = s.fork(2)
        branches += "y" * 5 + pm.gen("b", max_tokens=2)
        branches.join("concate_and_append")
        wait_until(lambda: backend.paths_ended() == [(0, 1)])
        s += pm.gen("end", max_tokens=2)
        # The parent went on from where the first one was; now nobody does any more.
        wait_until(lambda: (0, 0) in backend.paths_ended())

    program.run(backend=backend)
    known = [o for o, _ in backend.heard] + [r.outlook for r in backend.asked() if r.outlook]
    # Both branches are queued, and then, or still to come, what they bring back.
    assert max(outlook.constant_tokens for outlook in known) >= 10
    ended = backend.paths_ended()
    assert sorted(ended) == [(0, 0), (0, 1)]


def test_an_outlook_has_what_is_queued_and_while_more_may_come_what_branches_bring_back() -> None:
    forecast = Forecast("p")
    queued = Ahead(num_chars=40, num_generated=7, num_asks=1)
    forecast.ahead.add(queued)
    forecast.in_branches.add(queued)
    first = forecast.ask()
    assert (first.constant_tokens, first.generated_tokens) == (20, 14)
    forecast.is_open = False
    second = forecast.ask()
    assert (second.constant_tokens, second.generated_tokens) == (10, 7)
    forecast.note_encoded(num_tokens=30, num_chars=60)
    assert forecast.ask().constant_tokens == 20
    assert forecast.news() is None


@pytest.mark.parametrize("wrong", [-1, 0.5, "7", None, True])
@pytest.mark.parametrize("name", ["version", "constant_tokens", "generated_tokens"])
def test_an_outlook_counts_in_whole_numbers(name: str, wrong: object) -> None:
    given: dict[str, Any] = {name: wrong}
    with pytest.raises(InvalidRequest, match=f"^{name} must be an integer of at least 0"):
        Outlook(program_id="p", **given)


def test_joined_branches_are_over_and_others_when_the_program_is() -> None:
    backend = Listener("ab")

    @pm.function
    def program(s: pm.State) -> None:
        s += "x"
        joined, free = s.fork(2), s.fork(1)
        joined += pm.gen("a", max_tokens=2)
        free += pm.gen("b", max_tokens=2)
        free[0].sync()
        joined.join()
        ended = backend.paths_ended()
        assert (1, 0) not in ended

    program.run(backend=backend)
    ended = backend.paths_ended()
    # Joined branches may have known at their last request that they are over.
    assert set(ended) <= {(0, 0), (0, 1), (1, 0)}
    assert (1, 0) in ended
    assert len(ended) == len(set(ended))


def test_a_branch_that_was_joined_may_go_on_and_is_over_again() -> None:
    backend = Listener("ab")

    @pm.function
    def program(s: pm.State) -> None:
        s += "x"
        branches = s.fork(2)
        branches += pm.gen("a", max_tokens=2)
        branches.join()
        wait_until(lambda: backend.paths_ended() == [(0, 1)])
        branches[1] += "more" + pm.gen("b", max_tokens=2)
        assert branches[1]["b"] == "ab"

    state = program.run(backend=backend)
    assert state.text() == "x"
    assert len(backend.ended) == 1
    assert sorted(backend.paths_ended()) == [(0, 0), (0, 1), (0, 1)]


@pytest.mark.parametrize("mode", ["gather_variable", "concate_and_append"])
def test_the_first_joined_branch_is_held_until_the_parent_asks_again(mode: str) -> None:
    backend = Listener("ab")

    @pm.function
    def program(s: pm.State) -> None:
        s += "x"
        for _ in range(3):  # only that of the last join
            branches = s.fork(2)
            branches += "y" + pm.gen("a", max_tokens=2)
            branches.join(mode)
        s.sync()
        wait_until(lambda: len(backend.paths_ended()) == 5)
        assert (2, 0) not in backend.paths_ended()
        s += "z" + pm.gen("end", max_tokens=2)
        wait_until(lambda: (2, 0) in backend.paths_ended())

    program.run(backend=backend)
    assert len(backend.paths_ended()) == 6


def test_a_program_that_fails_or_asks_nothing_leaves_nothing_behind() -> None:
    backend = Listener("ab")

    @pm.function
    def fails(s: pm.State) -> None:
        s += "x" + pm.gen("a", max_tokens=2)
        s.sync()
        raise KeyError("gone")

    @pm.function
    def silent(s: pm.State) -> None:
        s += "nothing is asked"

    with pytest.raises(KeyError):
        fails.run(backend=backend)
    assert len(backend.ended) == 1
    silent.run(backend=backend)
    assert len(backend.ended) == 1
    assert len(backend.asked()) == 1


class Patient(Listener):
    """Answers the first request when it has heard of the three tokens of the second one."""

    async def generate(self, request: Request) -> AsyncIterator[TokenEvent]:
        while not any(outlook.generated_tokens == 3 for outlook in self.known(request)):
            await asyncio.sleep(0.001)
        async for event in super().generate(request):
            yield event

    def known(self, request: Request) -> list[Outlook]:
        asked = [r.outlook for r in (*self.asked(), request)]
        return [o for o in (*asked, *(heard for heard, _ in self.heard)) if o is not None]


def test_a_program_says_what_it_knows_when_it_stops_to_read() -> None:
    """Whether with the first request or after it: else this would never end."""
    backend = Patient("abcd")

    @pm.function
    def program(s: pm.State) -> None:
        s += "x" * 10 + pm.gen("a", max_tokens=4)
        s += "y" * 8 + pm.gen("b", max_tokens=3)
        assert s["a"] == "abcd"

    state = program.run(backend=backend)
    assert state["b"] == "abc"


class Endless(Listener):
    """Answers nothing until the request is given up."""

    def __init__(self) -> None:
        super().__init__("ab")
        self.is_asked = threading.Event()
        self.ended_before: list[str] | None = None

    async def generate(self, request: Request) -> AsyncIterator[TokenEvent]:
        self.is_asked.set()
        try:
            await asyncio.sleep(60)
            yield TokenEvent(request_id=request.request_id)
        finally:
            await asyncio.sleep(0.05)  # it takes its time to end
            self.ended_before = list(self.ended)


def test_an_interrupted_program_is_over_when_its_requests_are() -> None:
    """Or one that is on its way would come after the end, and make the program known again."""
    backend = Endless()

    @pm.function
    def program(s: pm.State) -> None:
        s += "x" + pm.gen("a", max_tokens=2)
        assert backend.is_asked.wait(timeout=30)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        program.run(backend=backend)
    wait_until(lambda: len(backend.ended) == 1)
    assert backend.ended_before == []


def test_the_scores_of_a_select_are_requests_of_the_program(ahead: Listener) -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += "x" * 10 + pm.select("pick", ["one", "three"]) + "y" * 4 + pm.gen("a", max_tokens=2)

    program.run(backend=ahead)
    score, generation = ahead.asked()
    assert isinstance(score, ScoreRequest)
    assert score.outlook is not None
    assert (score.outlook.constant_tokens, score.outlook.generated_tokens) == (4, 2)
    assert score.goes_on
    assert score.path == generation.path == ()
    assert not generation.goes_on


def test_a_backend_that_does_not_listen_is_told_nothing() -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += "x" + pm.gen("a", max_tokens=2)

    assert program.run(backend=ScriptedBackend("ab"))["a"] == "ab"


def test_every_outlook_is_newer_than_the_one_before() -> None:
    backend = Listener("abcd")

    @pm.function
    def program(s: pm.State) -> None:
        for turn in range(4):
            s += "x" * 10 + pm.gen("a", max_tokens=4, append=True)
            s.sync() if turn % 2 else None

    program.run(backend=backend)
    asked = [r.outlook.version for r in backend.asked() if r.outlook]
    heard = [outlook.version for outlook, _ in backend.heard]
    assert asked == sorted(asked)
    assert heard == sorted(heard)
    assert len({*asked, *heard}) == len(asked) + len(heard)
