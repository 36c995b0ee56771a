"""Admission with a host tier, without a model."""

from __future__ import annotations

from palmette.runtime.kv.moves import PageCopy, PageRestore
from tests.runtime.scheduler.test_scheduler import World, names


def evict(world: World, num_tokens: int) -> None:
    """Something long runs, and nothing else is left in the pool."""
    world.submit("filler", list(range(500, 500 + num_tokens)))
    world.run()


def moves_of_next_step(world: World) -> list[PageCopy | PageRestore]:
    taken: list[PageCopy | PageRestore] = []
    take = world.kv.take_moves

    def noted() -> list[PageCopy | PageRestore]:
        taken.extend(take())
        return list(taken)

    world.kv.take_moves = noted  # type: ignore[method-assign]
    world.step()
    world.kv.take_moves = take  # type: ignore[method-assign]
    return taken


def test_an_evicted_prefix_comes_back_instead_of_being_computed() -> None:
    world = World(num_pages=8, num_slots=16)
    world.submit("a", list(range(22)))
    world.run()
    evict(world, 32)
    again = world.submit("b", list(range(22)))
    assert world.kv.cached_tokens(again) == 20
    world.run()
    assert world.computed["b"] == 2
    assert again.tally.cached == 20
    assert world.cache.tier is not None
    assert world.cache.tier.stats.num_restored_pages == 5


def test_what_came_back_is_shared_as_if_it_had_been_computed() -> None:
    world = World(num_pages=16, num_slots=16)
    world.submit("a", list(range(20)))
    world.run()
    evict(world, 64)
    world.submit("b", [*range(20), 77])
    world.run()
    third = world.submit("c", [*range(20), 88])
    assert moves_of_next_step(world) == []
    assert third.tally.cached == 20


def test_siblings_wait_a_step_for_what_comes_back_for_the_first() -> None:
    world = World(num_pages=24, num_slots=32, max_batch_tokens=64)
    world.submit("a", list(range(20)))
    world.run()
    evict(world, 96)
    siblings = [world.submit(f"s{i}", [*range(20), 50 + i, 60 + i]) for i in range(3)]
    moves = moves_of_next_step(world)
    assert [type(move) for move in moves] == [PageRestore] * 5
    assert sorted(names(world.step())) == [("s1", 2), ("s2", 2)]
    assert [sibling.tally.cached for sibling in siblings] == [20, 20, 20]


def test_the_tier_goes_on_where_the_tree_has_the_beginning_of_a_page() -> None:
    world = World(num_pages=8, num_slots=8)
    world.submit("a", list(range(13)))
    world.run()
    evict(world, 32)
    world.submit("b", [0, 1, 2, 3, 4, 5, 99])
    world.run()
    again = world.submit("c", list(range(13)))
    world.run()
    assert again.tally.cached == 12


def test_the_beginning_of_the_page_behind_the_restored_ones_is_computed_again() -> None:
    world = World(num_pages=8, num_slots=8)
    world.submit("a", list(range(15)))
    world.run()
    evict(world, 32)
    again = world.submit("b", list(range(15)))
    world.run()
    assert again.tally.cached == 12
    assert world.computed["b"] == 3


def test_without_room_nothing_is_promised() -> None:
    world = World(num_pages=8, num_slots=16)
    world.submit("a", list(range(16)))
    world.run()
    evict(world, 32)
    long = world.submit("long", list(range(900, 920)), num_outputs=8)
    world.step()
    again = world.submit("b", list(range(16)))
    world.step()
    assert long.num_uncomputed_tokens == 1
    assert again.page_ids == []
    tier = world.cache.tier
    assert tier is not None
    assert tier.promised_slots() == []
    assert world.kv.cached_tokens(again) == 12
    world.run()
    assert again.tally.cached == 12


def test_a_preempted_sequence_comes_back_from_the_tier() -> None:
    world = World(num_pages=8, num_slots=8, max_batch_tokens=64)
    first = world.submit("a", list(range(12)), num_outputs=16)
    second = world.submit("b", list(range(100, 112)), num_outputs=16)
    world.run()
    assert first.tally.num_preemptions + second.tally.num_preemptions > 0
    recomputed = first.tally.recomputed + second.tally.recomputed
    without = World(num_pages=8, max_batch_tokens=64)
    without.submit("a", list(range(12)), num_outputs=16)
    without.submit("b", list(range(100, 112)), num_outputs=16)
    without.run()
    assert sum(world.computed.values()) < sum(without.computed.values())
    assert recomputed < 2 * world.page_size


def test_a_handle_goes_on_with_what_the_tier_has_behind_it() -> None:
    world = World(num_pages=8, num_slots=16)
    world.submit("a", list(range(22)))
    world.run()
    branch = world.submit("branch", list(range(9)), num_outputs=5)
    world.step()
    handle = world.kv.hold(branch)
    world.scheduler.running.remove(branch)
    assert handle is not None
    assert len(handle.token_ids) == 9
    evict(world, 20)
    again = world.submit("b", list(range(22)))
    again.handle = handle
    moves = moves_of_next_step(world)
    assert [type(move) for move in moves] == [PageRestore] * 2  # the handle holds three pages
    world.run()
    assert again.tally.cached == 20
    handle.lease.release()
    world.check()


def test_copies_are_carried_out_in_the_order_in_which_they_were_planned() -> None:
    """The third evicts the page that the first was to copy; the fourth copies the first's copy."""
    world = World(num_pages=4, policy="fcfs")
    for name, token in (("p", 1), ("z", 8)):
        world.submit(name, [token] * 3)
        world.run()
    for name, token_ids in (
        ("a", [1, 1, 1, 7]),
        ("b", [8, 8, 8, 5]),
        ("c", [4, 4, 4, 4]),
        ("d", [1, 1, 1, 9]),
    ):
        world.submit(name, token_ids)
    first, second, third = moves_of_next_step(world)
    assert isinstance(first, PageCopy)
    assert isinstance(third, PageCopy)
    assert third.source == first.destination
    assert second.source != first.source
    world.run()
    assert world.computed["d"] == 1
