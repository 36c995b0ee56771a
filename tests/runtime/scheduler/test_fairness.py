"""Programs and requests of none, more than there is room for: everybody gets their turn."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from palmette.runtime.config import PolicyName
from palmette.runtime.sequence import Sequence, Status
from tests.runtime.scheduler.test_programs import ProgramWorld


@pytest.mark.parametrize("max_running", [1, 4])
def test_a_program_under_way_for_long_is_answered_although_more_comes_than_can_be_served(
    max_running: int,
) -> None:
    world = ProgramWorld(num_pages=24, max_running=max_running, max_wait=2.0)
    program = world.ask("p", list(range(30)), num_outputs=2)
    others: list[Sequence] = []
    num_answers = 0
    for step in range(600):
        world.now = step / 10
        while sum(other.status is Status.WAITING for other in others[-40:]) < 30:
            name = f"other {len(others)}"
            others.append(world.submit(name, [5000 + 30 * len(others) + n for n in range(30)], 2))
        world.step()
        if program.status is Status.FINISHED:
            num_answers += 1
            program = world.ask("p", [*range(30), 100 + num_answers], num_outputs=2)
        waited = world.now - program.submitted_at
        # Thirty others wait at any time and take up to two steps each.
        assert program.status is not Status.WAITING or waited <= 7.0
    assert others[-40].admitted_at is not None
    assert num_answers >= 8


MAX_WAIT = 10.0
STEP = 0.05


class Saturated:
    """24 programs soon and from then on, each of so many calls in a row, of which it tells the
    truth; where one ends, another begins. Some seconds later, one cold request of no program.
    """

    def __init__(
        self,
        policy: PolicyName,
        num_pages: int,
        cold_pages: int,
        num_calls: float,
        num_outputs: int,
    ) -> None:
        self.world = ProgramWorld(
            policy=policy,
            num_pages=num_pages,
            max_running=4,
            max_wait=MAX_WAIT,
        )
        self.cold_pages, self.num_calls, self.num_outputs = cold_pages, num_calls, num_outputs
        self.random = random.Random(0)
        self.live: dict[str, Sequence] = {}
        self.num_asked: dict[str, int] = {}
        self.asked: list[Sequence] = []

    def longest_waits(self, seconds: float) -> tuple[float, float]:
        """Of the cold request, and of any other: how long it waited, or has by the end."""
        cold = None
        for step in range(round(seconds / STEP)):
            self.world.now = step * STEP
            if step == round(5 / STEP):
                cold = self.world.submit("cold", [7] * (4 * self.cold_pages))
            for name, sequence in [*self.live.items()]:
                if sequence.status is Status.FINISHED:
                    self.go_on(name, sequence)
            while len(self.live) < min(24, 1 + step // 4):
                self.ask(f"p{len(self.num_asked)}", [*range(40), *self.question()])
            self.world.step()
        assert cold is not None
        return self.waited(cold), max(map(self.waited, self.asked))

    def go_on(self, name: str, answered: Sequence) -> None:
        if self.num_asked[name] >= self.num_calls:
            self.world.end(name)
            del self.live[name]
            return
        token_ids = [*answered.token_ids, *self.question()]
        # A chat that keeps a window of what was said.
        self.ask(name, token_ids if len(token_ids) < 64 else [*range(40), *self.question()])

    def ask(self, name: str, token_ids: list[int]) -> None:
        asked = self.num_asked[name] = self.num_asked.get(name, 0) + 1
        left = int(min(self.num_calls - asked, 3))
        self.live[name] = self.world.ask(
            name,
            token_ids,
            num_outputs=self.num_outputs,
            constants=3 * left,
            generated=self.num_outputs * left,
            goes_on=left > 0,
        )
        self.asked.append(self.live[name])

    def question(self) -> Iterator[int]:
        return (self.random.randrange(97, 103) for _ in range(3))

    def waited(self, sequence: Sequence) -> float:
        admitted_at = sequence.admitted_at
        return (self.world.now if admitted_at is None else admitted_at) - sequence.submitted_at


@pytest.mark.parametrize(
    ("num_pages", "cold_pages", "num_calls", "num_outputs"),
    [
        (32, 4, 10, 8),
        (32, 30, 10, 8),
        (32, 4, float("inf"), 8),
        (64, 40, 10, 8),
        (64, 62, float("inf"), 8),
        (64, 4, 2, 60),
    ],
)
def test_nobody_waits_longer_beside_programs_than_the_bound_and_what_arrival_would_cost(
    num_pages: int, cold_pages: int, num_calls: float, num_outputs: int
) -> None:
    """However few of the programs fit: neither the cold request nor any call of any of them."""
    what = num_pages, cold_pages, num_calls, num_outputs
    by_arrival = Saturated("fcfs", *what).longest_waits(25.0)
    by_program = Saturated("program", *what).longest_waits(25.0)
    for waited, fair in zip(by_program, by_arrival, strict=True):
        assert waited <= 0.75 * MAX_WAIT + fair + 1.0


def chats_beside(
    world: ProgramWorld, num_chats: int, num_calls: float, outsider_at: float, seconds: float
) -> tuple[list[float], float]:
    """When each of some chats that begin together was first admitted, and how long a request
    of no program waited that came later.
    """
    num_asked = dict.fromkeys(range(num_chats), 0)

    def ask(chat: int, token_ids: list[int]) -> Sequence:
        num_asked[chat] += 1
        left = int(min(num_calls - num_asked[chat], 4))
        return world.ask(
            f"c{chat}",
            token_ids,
            num_outputs=4,
            constants=4 * left,
            generated=4 * left,
            goes_on=left > 0,
        )

    live = {chat: ask(chat, [100 * chat + n for n in range(20)]) for chat in num_asked}
    first = dict(live)
    outsider: Sequence | None = None
    for step in range(round(10 * seconds)):
        world.now = step / 10
        if outsider is None and world.now >= outsider_at:
            outsider = world.submit("outsider", list(range(5000, 5030)))
        world.step()
        for chat, sequence in [*live.items()]:
            if sequence.status is not Status.FINISHED:
                continue
            if num_asked[chat] < num_calls:
                is_long = len(sequence.token_ids) > 36
                token_ids = sequence.token_ids[:20] if is_long else sequence.token_ids
                live[chat] = ask(chat, [*token_ids, *range(2000, 2004)])
            else:
                world.end(f"c{chat}")
                del live[chat]
    waited = world.now
    if outsider is not None and outsider.admitted_at is not None:
        waited = outsider.admitted_at - outsider.submitted_at
    return [
        s.admitted_at if s.admitted_at is not None else world.now for s in first.values()
    ], waited


def test_a_batch_of_programs_is_finished_in_turn_until_somebody_else_waits_too_long() -> None:
    alone, _ = chats_beside(ProgramWorld(num_pages=24, max_wait=5.0), 20, 4, 99.0, 19.0)
    assert 12.0 < max(alone) < 19.0
    beside, waited = chats_beside(ProgramWorld(num_pages=24, max_wait=5.0), 20, 4, 1.0, 19.0)
    assert 0.75 * 5.0 <= waited <= 5.0
    assert max(beside) <= 5.0 + 3.0


def test_a_batch_that_never_ends_lets_all_of_it_begin() -> None:
    admitted, _ = chats_beside(
        ProgramWorld(num_pages=24, max_wait=5.0), 10, float("inf"), 99.0, 30.0
    )
    assert 4 * 5.0 <= max(admitted) <= 4 * 5.0 + 3.0
