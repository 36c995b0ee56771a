"""Whole programs: what is held between their requests, and who may begin."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palmette.protocol import Outlook
from palmette.radix_cache import Namespace
from palmette.runtime.scheduler.programs import Program, _can_all_end
from palmette.runtime.sequence import Sequence, Status
from tests.runtime.scheduler.test_scheduler import World


class ProgramWorld(World):
    """Requests of programs; each adds `num_outputs` tokens and is followed by what `Chat` says."""

    def ask(
        self,
        program_id: str,
        token_ids: list[int],
        *,
        num_outputs: int = 1,
        constants: int = 0,
        generated: int = 0,
        goes_on: bool = True,
        path: tuple[int, ...] = (),
    ) -> Sequence:
        outlook = Outlook(
            program_id=program_id, constant_tokens=constants, generated_tokens=generated
        )
        name = f"{program_id}-{len(self.num_left)}"
        sequence = Asking(
            request_id=name,
            namespace=Namespace(),
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            submitted_at=self.now,
            max_length=self.kv.num_pages * self.page_size,
            path=path,
            program=self.scheduler.programs.hear(outlook)
            if self.scheduler.knows_programs
            else None,
            goes_on=goes_on,
        )
        sequence.num_outputs = num_outputs
        self.num_left[name] = num_outputs
        self.scheduler.add(sequence)
        return sequence

    def finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence, goes_on=sequence.goes_on)

    def end(self, program_id: str) -> None:
        self.scheduler.programs.end(program_id)


class Asking(Sequence):
    """A sequence that says how many tokens it will produce."""

    num_outputs = 0

    @property
    def num_tokens_to_come(self) -> int:
        return self.num_outputs - (len(self.token_ids) - self.num_prompt_tokens)


def run_chats(
    world: ProgramWorld, prompts: list[list[int]], *, turns: int, pause: int = 2
) -> list[Sequence]:
    """Every chat asks, is answered with four tokens, and asks again `pause` steps later."""
    asked: list[Sequence] = []

    def ask(chat: int, token_ids: list[int], turn: int) -> Sequence:
        left = turns - 1 - turn
        return world.ask(
            f"c{chat}",
            token_ids,
            num_outputs=4,
            goes_on=left > 0,
            constants=4 * left,
            generated=4 * left,
        )

    live = {chat: (ask(chat, prompt, 0), 0, 0) for chat, prompt in enumerate(prompts)}
    asked += [sequence for sequence, _, _ in live.values()]
    for _ in range(5000):
        if not live:
            return asked
        world.now += 0.01
        world.step()
        for chat, (sequence, turn, waited) in list(live.items()):
            if sequence.status is not Status.FINISHED:
                continue
            if turn + 1 == turns:
                world.end(f"c{chat}")
                del live[chat]
            elif waited < pause:
                live[chat] = sequence, turn, waited + 1
            else:
                question = [2000 + 10 * chat + n for n in range(4)]
                following = ask(chat, sequence.token_ids + question, turn + 1)
                asked.append(following)
                live[chat] = following, turn + 1, 0
    raise AssertionError("the chats do not end")


def six_prompts() -> list[list[int]]:
    return [[100 * chat + n for n in range(20)] for chat in range(6)]


def test_chats_in_a_pool_of_twice_the_longest_compute_nothing_twice() -> None:
    """With 16 pages of four tokens two chats of 32 tokens fit; without holding, most was lost."""
    world = ProgramWorld(num_pages=16, page_size=4)
    asked = run_chats(world, six_prompts(), turns=2)
    second = [s for s in asked if s.num_prompt_tokens > 20]
    assert [s.num_prompt_tokens - s.tally.cached for s in second] == [4] * 6  # the question
    assert not any(s.tally.num_preemptions for s in asked)


@pytest.mark.parametrize("turns", [2, 4, 7])
@pytest.mark.parametrize("pause", [0, 1, 5])
def test_long_chats_lose_nothing_whatever_they_wait_between_turns(turns: int, pause: int) -> None:
    longest = 20 + 8 * turns
    world = ProgramWorld(num_pages=2 * -(-longest // 4), page_size=4)
    asked = run_chats(world, six_prompts(), turns=turns, pause=pause)
    missed = [s.num_prompt_tokens - s.tally.cached for s in asked if s.num_prompt_tokens > 20]
    assert missed == [4] * (6 * (turns - 1))


def test_several_programs_are_under_way_at_once_where_they_can_all_end() -> None:
    world = ProgramWorld(num_pages=16, page_size=4)
    for chat, prompt in enumerate(six_prompts()):
        world.ask(f"c{chat}", prompt, num_outputs=4, constants=4, generated=4)
    world.step()
    world.step()
    assert world.scheduler.programs.num_begun == 2


def test_all_programs_begin_where_there_is_room_for_all() -> None:
    world = ProgramWorld(num_pages=64, page_size=4, max_batch_tokens=500)
    for chat, prompt in enumerate(six_prompts()):
        world.ask(f"c{chat}", prompt, num_outputs=4, constants=4, generated=4)
    world.step()
    assert world.scheduler.programs.num_begun == 6


def test_the_next_request_goes_on_from_the_handle_without_a_look_at_the_tree() -> None:
    world = ProgramWorld()
    first = world.ask("p", list(range(10)), num_outputs=3)
    world.run()
    num_matches = world.cache.stats.num_matches
    following = world.ask("p", [*first.token_ids, 7, 8], goes_on=False)
    world.run()
    assert world.cache.stats.num_matches == num_matches
    assert following.tally.cached == 12
    world.end("p")
    assert world.cache.num_evictable_pages == world.cache.num_cached_pages


def test_branches_go_on_from_where_their_parent_was() -> None:
    world = ProgramWorld()
    trunk = world.ask("p", list(range(10)), num_outputs=3)
    world.run()
    num_matches = world.cache.stats.num_matches
    children = [
        world.ask("p", [*trunk.token_ids, 70 + i], path=(0, i), goes_on=False) for i in range(3)
    ]
    world.run()
    assert world.cache.stats.num_matches == num_matches
    assert [child.tally.cached for child in children] == [12, 12, 12]
    grandchild = world.ask("p", [*trunk.token_ids, 70, 1, 2], path=(0, 0, 0, 0), goes_on=False)
    world.run()
    assert grandchild.tally.cached == 13


@pytest.mark.parametrize("path", [(), (0, 1)])
@pytest.mark.parametrize("num_outputs", [1, 2, 3, 4])
def test_what_a_request_that_goes_on_takes_is_known_before(
    path: tuple[int, ...], num_outputs: int
) -> None:
    """With a tail behind the handle or without; a tail of its own branch comes back to it."""
    world = ProgramWorld()
    first = world.ask("p", list(range(9)), num_outputs=num_outputs)
    world.run()
    following = world.ask("p", [*first.token_ids, 1, 2, 3, 4, 5], path=path)
    available = world.kv.num_available_pages
    taken = world.kv.num_pages_taken(following)
    world.step()
    assert following.num_computed_tokens == len(first.token_ids) + 5
    assert available - world.kv.num_available_pages == taken


def test_what_a_program_gives_back_when_it_ends_is_known_before() -> None:
    world = ProgramWorld()
    trunk = world.ask("p", list(range(10)), num_outputs=3)
    world.run()
    world.ask("p", [*trunk.token_ids, 1, 2, 3, 4, 5], path=(0, 0))
    world.run()
    runs = world.ask("p", [*trunk.token_ids, 6, 7, 8], path=(0, 1), num_outputs=9)
    other = world.submit("other", trunk.token_ids[:6], 9)  # holds a page of the trunk as well
    world.step()
    world.step()
    assert runs.status is other.status is Status.RUNNING
    program = world.scheduler.programs.hear(Outlook(program_id="p"))
    known = world.kv.num_pages_freed_without(program.handles.values(), program.running.values())
    available = world.kv.num_available_pages
    world.scheduler.finish(runs)
    world.end("p")
    assert world.kv.num_available_pages - available == known > 0


def test_a_handle_of_other_tokens_is_no_use_and_no_harm() -> None:
    world = ProgramWorld()
    world.ask("p", list(range(10)), num_outputs=3)
    world.run()
    other = world.ask("p", [0, 1, 2, 3, 4, 99, 98], goes_on=False)
    world.run()
    assert other.tally.cached == 5


def test_a_branch_that_is_over_holds_nothing() -> None:
    world = ProgramWorld()
    world.ask("p", list(range(10)), path=())
    world.run()
    world.ask("p", [*range(10), 5, 6, 7, 8, 9], path=(0, 0))
    world.run()
    held = world.cache.num_cached_pages - world.cache.num_evictable_pages
    world.scheduler.programs.end_branches("p", [(0, 0)])
    assert world.cache.num_cached_pages - world.cache.num_evictable_pages < held
    world.end("p")
    assert world.cache.num_evictable_pages == world.cache.num_cached_pages


def test_a_program_that_thinks_for_long_gives_way_and_may_come_back() -> None:
    world = ProgramWorld(num_pages=8, page_size=4)
    first = world.ask("slow", list(range(20)), num_outputs=2, constants=4, generated=8)
    world.run()
    second = world.ask("other", list(range(100, 120)), num_outputs=2)
    world.step()
    assert second.status is Status.WAITING
    plan = world.step()
    assert plan.wait_seconds == pytest.approx(1.0)
    world.now += 1.0
    world.run()
    assert second.status is Status.FINISHED
    back = world.ask("slow", [*first.token_ids, 1, 2, 3, 4])
    world.now += 1.0
    world.run()
    assert back.status is Status.FINISHED


def test_a_program_that_thinks_is_waited_for_no_longer_than_anybody_should_wait() -> None:
    world = ProgramWorld(num_pages=8, page_size=4, max_wait=0.4)
    world.ask("slow", list(range(20)), num_outputs=2, constants=4, generated=8)
    world.run()
    world.now = 0.1
    second = world.ask("other", list(range(100, 120)), num_outputs=2)
    plan = world.step()
    assert plan.wait_seconds == pytest.approx(0.3)  # the program may think until 1.0
    world.now = 0.4
    world.step()
    assert second.status is Status.RUNNING


def test_requests_of_no_program_run_beside_programs_that_think() -> None:
    world = ProgramWorld(num_pages=32, page_size=4)
    world.ask("p", list(range(20)), constants=4, generated=4)
    world.run()
    plain = world.submit("plain", list(range(100, 120)), 3)
    world.run()
    assert plain.status is Status.FINISHED


def test_one_that_has_waited_too_long_takes_the_pages_of_a_program_without_end() -> None:
    """It fills the pool, came first, and always goes on as soon as it is answered."""
    world = ProgramWorld(num_pages=10, page_size=4, max_wait=20.0)
    endless: Sequence | None = None
    cold: Sequence | None = None
    for step in range(400):
        world.now = step / 2
        if endless is None or endless.status is Status.FINISHED:
            token_ids = list(range(30 + step % 7))
            endless = world.ask("endless", token_ids, constants=1, generated=1)
        if step == 10:
            cold = world.submit("cold", list(range(500, 530)), 2)
        world.step()
        if cold is not None and cold.admitted_at is not None:
            break
    assert cold is not None
    assert cold.admitted_at is not None
    assert 15.0 <= cold.admitted_at - cold.submitted_at <= 16.0


def programs_that_hold(world: ProgramWorld, *begin: float) -> list[Program]:
    """Programs a, b, ... that began at these times, have computed three pages each, and think."""
    made = []
    for name, now in zip("abcdef", begin, strict=False):
        world.now = now
        world.ask(name, [ord(name)] * 10, num_outputs=2)
        world.run()
        made.append(world.scheduler.programs.hear(Outlook(program_id=name)))
    return made


def given_up(world: ProgramWorld, made: list[Program], **how: Any) -> str:
    """Whose handles go, one after the other."""
    order = ""
    while world.scheduler.programs.give_up(world.now, **how):
        (name,) = [p.program_id for p in made if not p.handles and p.program_id not in order]
        order += name
    return order


def test_handles_go_of_programs_that_think_for_long_first_and_then_of_the_youngest() -> None:
    world = ProgramWorld()
    made = programs_that_hold(world, 0.0, 0.1, 0.9, 0.9)
    world.now = 1.5  # a and b have thought for longer than a second
    assert given_up(world, made) == "abdc"


def test_handles_of_the_one_that_asks_go_last() -> None:
    world = ProgramWorld()
    made = programs_that_hold(world, 0.0, 0.1, 0.9, 0.9)
    world.now = 1.5
    assert given_up(world, made, keep=made[3]) == "abcd"
    assert not any(program.handles for program in made)


def test_handles_of_the_one_that_asks_may_be_left_alone() -> None:
    world = ProgramWorld()
    made = programs_that_hold(world, 0.0, 0.1, 0.9, 0.9)
    world.now = 1.5
    assert given_up(world, made, keep=made[1], of_others=True) == "adc"
    assert made[1].handles


def test_handles_of_programs_that_think_for_long_may_go_alone() -> None:
    world = ProgramWorld(max_wait=1.2)
    made = programs_that_hold(world, 0.0, 0.6, 0.8)
    world.now = 1.0
    world.scheduler.programs.give_up_idle(world.now)
    assert [bool(program.handles) for program in made] == [False, True, True]


def test_only_programs_that_came_together_are_a_batch_and_only_while_nobody_else_asks() -> None:
    world = ProgramWorld(max_wait=10.0)
    programs = world.scheduler.programs
    for now, name in ((5.0, "a"), (5.5, "b"), (6.0, "c")):
        world.now = now
        world.ask(name, [ord(name)] * 10)
    assert programs.are_one_batch(world.now)
    world.run()
    plain = world.submit("plain", [1, 2, 3])
    assert not programs.are_one_batch(world.now)
    world.run()
    assert plain.status is Status.FINISHED
    assert programs.are_one_batch(world.now)
    world.now = 6.5
    world.ask("late", [7] * 10)
    assert not programs.are_one_batch(world.now)
    world.end("a")
    assert programs.are_one_batch(world.now)
    world.now = 9.0
    world.ask("later", [8] * 10)
    assert not programs.are_one_batch(world.now)
    world.run()
    programs.account(20.0)  # all have thought for long
    assert programs.are_one_batch(world.now)
    world.submit("aborted", [1, 2, 3])
    (sequence,) = world.scheduler.waiting
    assert not programs.are_one_batch(world.now)
    world.scheduler.finish(sequence)
    assert programs.are_one_batch(world.now)
    world.now = 50.0
    world.ask("at last", [9] * 10)
    assert programs.are_one_batch(50.0 + 39.0)
    assert not programs.are_one_batch(50.0 + 40.0)


def test_a_program_that_thinks_for_long_has_to_begin_again() -> None:
    world = ProgramWorld()
    programs_that_hold(world, 0.0, 0.5)
    programs = world.scheduler.programs
    programs.account(0.9)
    assert programs.num_begun == 2
    programs.account(1.0)
    assert [program.program_id for program in programs.begun()] == ["b"]
    world.ask("a", [ord("a")] * 10)
    world.run()
    assert [program.program_id for program in programs.begun()] == ["b", "a"]


def test_generations_are_expected_to_be_as_long_as_those_before() -> None:
    programs = ProgramWorld().scheduler.programs
    assert programs.num_expected(100) == 100
    for _ in range(1000):
        programs.note_output(100, 10)
    assert 10 <= programs.num_expected(100) <= 15
    for _ in range(5000):  # what was long ago counts less
        programs.note_output(100, 80)
    assert 80 <= programs.num_expected(100) <= 100


def test_one_that_has_waited_too_long_need_not_wait_until_nothing_runs() -> None:
    """As above, with a sequence that runs all the while and grows by a token in each step."""
    world = ProgramWorld(num_pages=26, page_size=4, max_wait=5.0)
    endless = world.ask("endless", list(range(30)), constants=1, generated=1)
    runs = world.submit("runs", [700], 90)
    cold: Sequence | None = None
    for step in range(80):
        world.now = float(step) / 2
        if endless.status is Status.FINISHED:
            token_ids = list(range(30 + step % 7))
            endless = world.ask("endless", token_ids, constants=1, generated=1)
        if step == 10:
            cold = world.submit("cold", list(range(500, 560)), 2)  # no room beside both
        world.step()
        if cold is not None and cold.admitted_at is not None:
            break
    assert runs.status is Status.RUNNING
    assert cold is not None
    assert cold.admitted_at is not None
    assert cold.admitted_at == 9.0  # three quarters of five seconds after it came, in whole steps


def test_handles_go_before_anything_that_runs_is_preempted() -> None:
    world = ProgramWorld(num_pages=10, page_size=4)
    world.ask("thinks", list(range(20)))
    world.run()
    runs = world.submit("runs", list(range(100, 110)), num_outputs=30)  # ten pages in the end
    world.run()
    assert runs.tally.num_preemptions == 0
    assert runs.status is Status.FINISHED


def test_a_program_that_came_to_need_more_goes_on_and_the_ones_behind_it_wait() -> None:
    world = ProgramWorld(num_pages=20, page_size=4)
    first, second = (world.ask(name, [ord(name)] * 20, num_outputs=2) for name in "ab")
    runs = world.submit("plain", list(range(6)), 40)  # so that there is always something to do
    for _ in range(4):
        world.step()
    following = [
        world.ask(name, [*asked.token_ids, 1, 2], constants=40, num_outputs=2)
        for name, asked in (("b", second), ("a", first))
    ]
    for _ in range(4):
        world.step()
    assert runs.status is Status.RUNNING
    assert [sequence.status for sequence in following] == [Status.WAITING, Status.FINISHED]


def test_programs_long_under_way_do_not_go_on_in_turns_while_somebody_starves() -> None:
    """Two of them, one of which always runs, so that there is never room for a third."""
    world = ProgramWorld(num_pages=10, page_size=4, max_wait=5.0)
    tokens = {name: [ord(name)] * 16 for name in "ab"}
    live = {"a": world.ask("a", tokens["a"], num_outputs=4)}
    cold = None
    for step in range(200):
        world.now = step / 2
        for name in "ab":
            asked = live.get(name)
            if (asked is None and step == 2) or (asked and asked.status is Status.FINISHED):
                live[name] = world.ask(name, tokens[name], num_outputs=4)
        if step == 10:
            cold = world.submit("cold", list(range(500, 530)), 2)
        world.step()
        if cold is not None and cold.admitted_at is not None:
            break
    assert cold is not None
    assert cold.admitted_at is not None
    assert cold.admitted_at - cold.submitted_at <= 3.75 + 3.0  # and one answer that was under way


def test_overdue_requests_that_begin_alike_go_together() -> None:
    world = World(max_running=1, max_wait=10.0, num_pages=64)
    names = []
    for index in range(8):
        trunk = [index % 2] * 8
        names.append(world.submit(f"{index % 2}-{index}", [*trunk, 50 + index]))
    world.now = 9.0
    order = []
    while world.scheduler.has_work:
        order += [item.sequence.request_id[0] for item in world.step().work]
    assert order == ["0"] * 4 + ["1"] * 4
    assert len(names) == 8


def test_all_end_but_perhaps_the_last() -> None:
    assert _can_all_end(3, [(3, 5), (8, 1), (2, 0)])
    assert _can_all_end(2, [(8, 0), (2, 6), (9, 0)])
    assert not _can_all_end(2, [(8, 0), (2, 5), (9, 0)])
    assert not _can_all_end(1, [(3, 5), (2, 0)])
    assert _can_all_end(0, [(100, 0)])
    assert not _can_all_end(2, [(100, 0), (5, 9)])


def turns_of(rng: random.Random, longest: int) -> Iterator[tuple[list[int], int]]:
    """What a program appends and how many tokens it has generated, request by request."""
    length = 0
    while length < longest:
        constants = [rng.randrange(3) for _ in range(rng.randrange(1, 6))]
        outputs = rng.randrange(1, 6)
        length += len(constants) + outputs
        yield constants, outputs
        if rng.random() < 0.2:
            return


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    num_pages=st.integers(6, 40),
    page_size=st.sampled_from([1, 2, 4]),
    max_batch_tokens=st.integers(1, 40),
    max_running=st.integers(1, 8),
)
def test_any_programs_end_with_every_page_in_one_place(
    seed: int, num_pages: int, page_size: int, max_batch_tokens: int, max_running: int
) -> None:
    """Programs that tell the truth, little or nonsense, that fork, go away or never come back."""
    rng = random.Random(seed)
    world = ProgramWorld(
        num_pages=num_pages,
        page_size=page_size,
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        max_wait=rng.choice([0.5, 4.0, 20.0]),
    )
    longest = min(num_pages * page_size - 12, 40)
    programs: dict[str, list[tuple[Sequence, tuple[int, ...]]]] = {}
    for index in range(rng.randrange(1, 12)):
        programs[f"p{index}"] = []
        world.now += rng.choice([0.0, 0.0, 3.0])
        prompt = [rng.randrange(3) for _ in range(rng.randrange(1, max(2, longest // 2)))]
        if rng.random() < 0.2:
            world.submit(f"plain{index}", prompt[::-1], rng.randrange(1, 6))
        first = world.ask(
            f"p{index}",
            prompt,
            num_outputs=rng.randrange(1, 6),
            constants=rng.choice([0, 8, 1000]),
            generated=rng.choice([0, 8, 1000]),
        )
        programs[f"p{index}"].append((first, ()))
    for _ in range(rng.randrange(120)):
        world.now += rng.choice([0.0, 0.01, 0.6])
        world.step()
        for program_id, branches in list(programs.items()):
            if rng.random() < 0.01:  # it goes away
                for sequence, _ in branches:
                    if sequence.status is not Status.FINISHED:
                        world.scheduler.finish(sequence, keep=rng.random() < 0.5)
                world.end(program_id)
                del programs[program_id]
                world.check()
                continue
            sequence, path = rng.choice(branches)
            if sequence.status is not Status.FINISHED or rng.random() < 0.5:
                continue
            token_ids = sequence.token_ids + [rng.randrange(3) for _ in range(rng.randrange(1, 4))]
            if len(token_ids) + 6 > longest:
                if rng.random() < 0.5:
                    world.scheduler.programs.end_branches(program_id, [path])
                continue
            if rng.random() < 0.3:
                path = (*path, rng.randrange(3), rng.randrange(3))
            following = world.ask(
                program_id,
                token_ids,
                num_outputs=rng.randrange(1, 6),
                constants=rng.choice([0, 4]),
                generated=rng.choice([0, 4]),
                path=path,
                goes_on=rng.random() < 0.8,
            )
            branches.append((following, path))
    for _ in range(4000):
        if not world.scheduler.has_work:
            break
        world.now += 0.05
        world.step()
    assert not world.scheduler.has_work
    for program_id in programs:
        world.end(program_id)
    world.cache.flush()
    assert world.cache.pages.num_free == num_pages


def test_an_outlook_that_comes_late_replaces_no_newer_one() -> None:
    programs = ProgramWorld().scheduler.programs
    newer = Outlook(program_id="p", version=2, constant_tokens=50, generated_tokens=9)
    older = Outlook(program_id="p", version=1, constant_tokens=3)
    programs.hear(newer)
    program = programs.hear(older)
    assert (program.constant_tokens, program.generated_tokens) == (50, 9)
    programs.hear(Outlook(program_id="p", version=3, constant_tokens=1))
    assert (program.constant_tokens, program.generated_tokens) == (1, 0)


def test_whatever_a_program_announces_it_runs() -> None:
    num_tokens = 10**400
    world = ProgramWorld(num_pages=8)
    beside = world.ask("other", list(range(500, 510)), num_outputs=3)
    asked = world.ask("p", list(range(10)), constants=num_tokens, generated=num_tokens)
    world.run()
    assert asked.status is beside.status is Status.FINISHED


def test_a_batch_that_takes_longer_than_anybody_should_wait_loses_nothing_by_it() -> None:
    """All came together and all are overdue: nobody takes another's pages."""
    world = ProgramWorld(num_pages=26, page_size=4, max_wait=0.2)
    asked = run_chats(world, six_prompts(), turns=4)
    assert world.now > 3 * 0.2
    missed = [s.num_prompt_tokens - s.tally.cached for s in asked if s.num_prompt_tokens > 20]
    assert missed == [4] * (6 * 3)
