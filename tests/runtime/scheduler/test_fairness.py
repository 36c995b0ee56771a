"""Programs and requests of none, more than there is room for: everybody gets their turn."""

from __future__ import annotations

import pytest

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
