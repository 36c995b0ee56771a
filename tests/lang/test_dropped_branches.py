"""Branches that a program lets go of without joining them: nothing is held for them any more."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence

import palmette as pm
from palmette.lang.backends.scripted import ScriptedBackend
from palmette.protocol import Outlook


class Listening(ScriptedBackend):
    """Notes which branches are over, and the last outlook."""

    def __init__(self) -> None:
        super().__init__("12")
        self.ended: list[tuple[int, ...]] = []
        self.outlook: Outlook | None = None

    def announce(self, outlook: Outlook, ended: Sequence[tuple[int, ...]] = ()) -> None:
        self.ended += ended
        self.outlook = outlook

    def end_program(self, program_id: str) -> None:
        pass

    def wait_for(self, *paths: tuple[int, ...]) -> None:
        """A branch's coroutine may take a moment to let go of it, too."""
        assert eventually(lambda: set(paths) <= set(self.ended))


def eventually(is_so: Callable[[], bool]) -> bool:
    """Whether it comes to be so, what is let go of being collected."""
    for _ in range(2000):
        gc.collect()
        if is_so():
            return True
        time.sleep(0.01)
    return False


def test_a_branch_that_is_let_go_of_is_over() -> None:
    backend = Listening()

    @pm.function
    def search(s: pm.State) -> None:
        s += "p" + pm.gen("x", max_tokens=3)
        for turn in range(4):
            branches = s.fork(2)
            branches += "way" + pm.gen("y", max_tokens=50)
            for branch in branches:
                branch.sync()
            del branches, branch
            backend.wait_for((turn, 0), (turn, 1))
        assert backend.outlook is not None
        assert backend.outlook.generated_tokens == backend.outlook.constant_tokens == 0

    search.run(backend=backend)
    assert sorted(backend.ended) == [(turn, index) for turn in range(4) for index in range(2)]


def test_a_joined_branch_is_over_once_the_one_forked_from_it_is_let_go_of() -> None:
    backend = Listening()

    @pm.function
    def nested(s: pm.State) -> None:
        branches = s.fork(1)
        branches += "a" + pm.gen("x", max_tokens=3)
        inner = branches[0].fork(1)
        inner += "b" + pm.gen("y", max_tokens=3)
        inner[0].sync()
        branches.join()
        s += "c" + pm.gen("z", max_tokens=3)  # until then the first one is held for it
        s.sync()
        assert backend.ended == []
        del inner
        backend.wait_for((0, 0, 0, 0), (0, 0))

    nested.run(backend=backend)


def test_a_run_that_has_ended_is_told_of_no_branch() -> None:
    backend = Listening()
    kept: list[pm.State] = []

    @pm.function
    def program(s: pm.State) -> None:
        s += "p" + pm.gen("x", max_tokens=3)
        kept.extend(s.fork(2))

    state = program.run(backend=backend)
    assert sorted(backend.ended) == [(0, 0), (0, 1)]
    kept.clear()
    gc.collect()
    assert len(backend.ended) == 2
    assert not state._branch.run.open_paths


def test_no_branch_is_kept_by_what_watches_it() -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += "p" + pm.gen("x", max_tokens=3)
        branches = s.fork(2)
        branches += "q" + pm.gen("y", max_tokens=3)
        branches.join("concate_and_append")

    def num_branches() -> int:
        return sum(type(found).__name__ == "Branch" for found in gc.get_objects())

    gc.collect()
    before = num_branches()
    for _ in range(3):
        program.run(backend=Listening())
    assert eventually(lambda: num_branches() <= before)
