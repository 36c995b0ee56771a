"""A fork of many branches costs a step no more than one of some."""

from __future__ import annotations

from palmette.runtime.sequence import Sequence, Status
from tests.runtime.scheduler.test_programs import ProgramWorld


class CountingWorld(ProgramWorld):
    """Counts how often it was looked up in a step what a sequence takes."""

    def count(self) -> list[int]:
        counts: list[int] = []
        look_up = self.kv.num_pages_taken

        def counted(sequence: Sequence) -> int:
            counts[-1] += 1
            return look_up(sequence)

        self.kv.num_pages_taken = counted  # type: ignore[method-assign]
        self.check = lambda: None  # type: ignore[method-assign]
        while self.scheduler.has_work:
            counts.append(0)
            self.step()
        return counts


def test_a_step_looks_up_a_bounded_number_of_the_branches_that_wait() -> None:
    """Their parent never asked, so that there is no handle that would say what they take."""
    world = CountingWorld(num_pages=400, max_running=8)
    trunk = list(range(40))
    branches = [world.ask("p", [*trunk, 100 + n], num_outputs=2, path=(0, n)) for n in range(150)]
    counts = world.count()
    assert all(branch.status is Status.FINISHED for branch in branches)
    assert world.computed.total() == 40 + 2 * 150
    # Some are counted again, and whoever is tried is looked up.
    assert max(counts) <= 64 + 8
    assert sum(counts) > len(branches)


def test_what_a_program_needs_is_the_sum_of_what_its_waiting_sequences_do() -> None:
    world = ProgramWorld(num_pages=64, max_running=2)
    for n in range(100):
        world.ask("p", [*range(20), 100 + n], num_outputs=2, path=(0, n))
    program = next(iter(world.scheduler.programs._by_id.values()))
    while world.scheduler.has_work:
        world.step()
        assert program.num_pages_needed == sum(program.needs.values())
        assert set(program.needs) <= set(program.waiting)
    assert program.num_pages_needed == 0
    assert not program.needs
