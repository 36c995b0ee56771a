"""The scheduler over a real KV manager, without a model: computing is setting a number."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palmette.radix_cache import Namespace, RadixCache, Tier
from palmette.radix_cache.invariants import check
from palmette.runtime.config import PolicyName, SchedulerSection
from palmette.runtime.kv.manager import KVManager
from palmette.runtime.kv.moves import PageCopy
from palmette.runtime.scheduler import Plan, Scheduler
from palmette.runtime.sequence import Sequence, Status


class World:
    """A scheduler and its pages; a step computes by bookkeeping and appends one token."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        page_size: int = 4,
        max_batch_tokens: int = 32,
        max_running: int = 64,
        prefix_cache: bool = True,
        policy: PolicyName = "program",
        max_wait: float = 1000.0,
        num_slots: int = 0,
        max_step_seconds: float | None = None,
        step_seconds: Callable[[Plan], float] = lambda plan: 0.0,
    ) -> None:
        self.now = 0.0
        tier = Tier(num_slots, self.store) if num_slots else None
        self.cache = RadixCache(num_pages=num_pages, page_size=page_size, tier=tier)
        self.kv = KVManager(self.cache, page_size, prefix_cache=prefix_cache)
        config = SchedulerSection(
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            policy=policy,
            max_wait=max_wait,
            max_step_seconds=max_step_seconds,
        )
        self.step_seconds = step_seconds
        self.scheduler = Scheduler(config, self.kv, clock=lambda: self.now)
        self.num_left: dict[str, int] = {}
        self.computed = Counter[str]()
        # What each page holds by slot: (token, all tokens before it), to see wrong reuse.
        self.content: dict[tuple[int, int], tuple[int, ...]] = {}
        self.stored: dict[int, list[tuple[int, ...]]] = {}  # the same, by slot of the tier
        self.page_size = page_size

    def store(self, page_ids: SequenceOf[int], slots: SequenceOf[int]) -> None:
        for page_id, slot in zip(page_ids, slots, strict=True):
            self.stored[slot] = [self.content[page_id, at] for at in range(self.page_size)]

    def submit(self, name: str, token_ids: list[int], num_outputs: int = 1) -> Sequence:
        sequence = Sequence(
            request_id=name,
            namespace=Namespace(),
            token_ids=list(token_ids),
            num_prompt_tokens=len(token_ids),
            submitted_at=self.now,
            max_length=self.kv.num_pages * self.page_size,
        )
        self.num_left[name] = num_outputs
        self.scheduler.add(sequence)
        return sequence

    def step(self) -> Plan:
        plan = self.scheduler.next_plan()
        for move in self.kv.take_moves():
            if isinstance(move, PageCopy):
                for at in range(self.page_size):
                    if (move.source, at) in self.content:
                        self.content[move.destination, at] = self.content[move.source, at]
            else:
                for at, held in enumerate(self.stored[move.slot]):
                    self.content[move.page, at] = held
        for item in plan.work:
            sequence = item.sequence
            for position in range(item.start, item.end):
                page = sequence.page_ids[position // self.page_size]
                slot = (page, position % self.page_size)
                self.content[slot] = tuple(sequence.token_ids[: position + 1])
            for position in range(item.end):
                page = sequence.page_ids[position // self.page_size]
                held = self.content[page, position % self.page_size]
                assert held == tuple(sequence.token_ids[: position + 1]), "reads another's tokens"
        self.scheduler.note_step(plan.work, self.step_seconds(plan))
        for item in plan.work:
            sequence = item.sequence
            sequence.note_computed(item.num_tokens)
            self.computed[sequence.request_id] += item.num_tokens
            self.kv.publish(sequence)
            if sequence.num_uncomputed_tokens == 0:
                self.num_left[sequence.request_id] -= 1
                if (
                    self.num_left[sequence.request_id] == 0
                    or len(sequence.token_ids) == sequence.max_length
                ):
                    self.finish(sequence)
                else:
                    sequence.token_ids.append(1000 + len(sequence.token_ids))
        self.check()
        return plan

    def finish(self, sequence: Sequence) -> None:
        self.scheduler.finish(sequence)

    def check(self) -> None:
        owned: list[int] = []
        for sequence in self.scheduler.running:
            held = 0 if sequence.lease is None else sequence.lease.num_tokens // self.page_size
            owned += sequence.page_ids[held:]
        check(self.cache, owned=owned)

    def run(self, max_steps: int = 2000) -> int:
        for num_steps in range(max_steps):
            if not self.scheduler.has_work:
                return num_steps
            self.step()
        raise AssertionError("the work does not end")


def names(plan: Plan) -> list[tuple[str, int]]:
    return [(item.sequence.request_id, item.num_tokens) for item in plan.work]


def test_a_long_prompt_is_prefilled_in_chunks() -> None:
    world = World(max_batch_tokens=8)
    world.submit("a", list(range(20)))
    assert [names(world.step()) for _ in range(3)] == [[("a", 8)], [("a", 8)], [("a", 4)]]


def test_a_long_prompt_does_not_hold_up_a_decoding_sequence() -> None:
    world = World(max_batch_tokens=8)
    world.submit("short", [1, 2], num_outputs=4)
    world.step()
    world.submit("long", list(range(100, 130)))
    for _ in range(3):
        assert names(world.step()) == [("short", 1), ("long", 7)]


def test_siblings_that_start_together_compute_their_prefix_once() -> None:
    world = World(max_batch_tokens=64)
    trunk = list(range(10))  # two pages and a half
    for index in range(3):
        world.submit(f"s{index}", [*trunk, 50 + index, 60 + index])
    assert names(world.step()) == [("s0", 12)]
    assert names(world.step()) == [("s1", 2), ("s2", 2)]
    assert sum(world.computed.values()) == len(trunk) + 3 * 2


def test_siblings_are_exact_when_the_leader_has_not_filled_the_shared_page() -> None:
    world = World(max_batch_tokens=64, page_size=16)
    world.submit("leader", [1, 2, 3, 4, 5], num_outputs=5)
    world.submit("follower", [1, 2, 3, 9], num_outputs=1)
    world.step()
    assert names(world.step()) == [("leader", 1), ("follower", 1)]


def test_others_pass_a_deferred_sequence() -> None:
    world = World(max_batch_tokens=64)
    world.submit("a", [1, 2, 3, 4, 5])
    world.submit("b", [1, 2, 3, 4, 6])
    world.submit("c", [7, 8])
    assert names(world.step()) == [("a", 5), ("c", 2)]
    assert names(world.step()) == [("b", 1)]


def test_the_last_token_of_a_cached_prompt_is_computed() -> None:
    world = World()
    world.submit("a", list(range(8)))
    world.run()
    again = world.submit("b", list(range(8)))
    world.run()
    assert world.computed["b"] == 1
    assert again.tally.cached == 7


def test_the_next_turn_computes_the_last_token_and_what_is_new() -> None:
    world = World()
    first = world.submit("a", list(range(9)), num_outputs=6)
    world.run()
    assert world.computed["a"] == 9 + 5
    world.submit("b", [*first.token_ids, 70, 71])
    # The sixth output token was drawn, but never computed.
    world.submit("c", [*first.token_ids, 1014, 70, 71])
    world.run()
    assert len(first.token_ids) == 14
    assert world.computed["b"] == 2


def test_one_that_cannot_grow_preempts_the_youngest() -> None:
    world = World(num_pages=4, max_batch_tokens=64)
    old = world.submit("old", [1, 2, 3, 4, 5, 6, 7], num_outputs=6)
    young = world.submit("young", [11, 12, 13, 14, 15, 16, 17], num_outputs=6)
    world.run()
    assert old.tally.num_preemptions == 0
    assert young.tally.num_preemptions > 0
    assert old.status is young.status is Status.FINISHED


def test_preemption_raises_no_hit_rate() -> None:
    world = World(num_pages=16, page_size=4, max_batch_tokens=64)
    sequences = [
        world.submit(f"r{i}", [100 * i + j for j in range(20)], num_outputs=30) for i in range(6)
    ]
    world.run()
    assert any(s.tally.num_preemptions for s in sequences)
    for sequence in sequences:
        assert sequence.tally.cached == 0
        assert sequence.tally.prefilled == 20


def test_a_sequence_that_outgrows_the_pool_ends_with_it() -> None:
    world = World(num_pages=4)
    sequence = world.submit("a", [1, 2, 3], num_outputs=500)
    world.run()
    assert len(sequence.token_ids) == 16


def test_the_number_of_running_sequences_is_bounded() -> None:
    world = World(max_running=2)
    for index in range(5):
        world.submit(f"s{index}", [index * 10, index * 10 + 1], num_outputs=3)
    world.step()
    assert len(world.scheduler.running) == 2
    world.run()


def test_without_the_prefix_cache_everything_is_computed_and_nothing_kept() -> None:
    world = World(prefix_cache=False)
    for index in range(3):
        world.submit(f"s{index}", list(range(10)))
    world.run()
    assert sum(world.computed.values()) == 30
    assert world.cache.pages.num_free == 64


def test_a_status_that_cannot_follow_is_refused() -> None:
    world = World()
    sequence = world.submit("a", [1])
    world.run()
    with pytest.raises(RuntimeError, match="FINISHED"):
        sequence.move_to(Status.RUNNING)


@settings(deadline=None, max_examples=150)
@given(
    seed=st.integers(0, 2**32),
    num_pages=st.integers(5, 40),
    page_size=st.sampled_from([1, 2, 4, 7]),
    max_batch_tokens=st.integers(1, 30),
    max_running=st.integers(1, 8),
    prefix_cache=st.booleans(),
    policy=st.sampled_from(["program", "lpm", "fcfs"]),
    num_slots=st.integers(0, 20),
    max_step_seconds=st.sampled_from([None, 0.0, 0.5, 2.0]),
)
def test_any_workload_ends_with_every_page_in_one_place(
    seed: int,
    num_pages: int,
    page_size: int,
    max_batch_tokens: int,
    max_running: int,
    prefix_cache: bool,
    policy: PolicyName,
    num_slots: int,
    max_step_seconds: float | None,
) -> None:
    """`World.step` checks that every slot read holds its own prefix, and the page ledger."""
    rng = random.Random(seed)
    world = World(
        num_pages=num_pages,
        page_size=page_size,
        max_batch_tokens=max_batch_tokens,
        max_running=max_running,
        prefix_cache=prefix_cache,
        policy=policy,
        max_wait=3.0,
        num_slots=num_slots,
        max_step_seconds=max_step_seconds,
        step_seconds=lambda plan: rng.random() * 0.1 * sum(item.num_tokens for item in plan.work),
    )
    live: list[Sequence] = []
    longest = min(num_pages * page_size - 1, 30)
    for index in range(rng.randrange(1, 25)):
        length = rng.randrange(1, longest + 1)
        token_ids = [rng.randrange(2) for _ in range(length)]
        if live and rng.random() < 0.4:  # a next turn
            token_ids = (live[rng.randrange(len(live))].token_ids + token_ids)[:longest]
        live.append(world.submit(f"r{index}", token_ids, rng.randrange(1, 12)))
        for _ in range(rng.randrange(4)):
            world.now += rng.random()
            world.step()
        if rng.random() < 0.2:  # a client goes away
            victim = live[rng.randrange(len(live))]
            if victim.status is not Status.FINISHED:
                world.scheduler.finish(victim, keep=rng.random() < 0.5)
                world.check()
    world.run()
    world.cache.flush()
    assert world.cache.pages.num_free == num_pages


def two_level_prompts(rng: random.Random) -> list[list[int]]:
    """Prompts that share a root, a trunk and a branch of it, in random order."""

    def tokens(count: int) -> list[int]:
        return [rng.randrange(900) for _ in range(count)]

    root = tokens(20)
    prompts = []
    for _ in range(6):
        trunk = root + tokens(40)
        for _ in range(3):
            branch = trunk + tokens(14)
            prompts += [branch + tokens(6) for _ in range(4)]
    rng.shuffle(prompts)
    return prompts


@pytest.mark.parametrize("num_requests_held", [2, 4, 100])
@pytest.mark.parametrize("max_batch_tokens", [16, 64])
def test_a_known_batch_computes_each_edge_of_its_tree_once(
    num_requests_held: int, max_batch_tokens: int
) -> None:
    """Even in a pool that holds only twice the longest request."""
    prompts = two_level_prompts(random.Random(7))
    longest = max(map(len, prompts)) + 3
    world = World(num_pages=-(-longest // 4) * num_requests_held, max_batch_tokens=max_batch_tokens)
    sequences = [world.submit(f"r{i}", prompt, 3) for i, prompt in enumerate(prompts)]
    world.run()
    edges = {tuple(p[: n + 1]) for p in prompts for n in range(len(p))}
    assert sum(s.tally.prefilled for s in sequences) == len(edges)


def seconds_waited_under_hot_traffic(max_wait: float) -> float | None:
    """How long a cold request waits while every step brings new ones that share more with what
    runs; None if it is not served in 200 s.
    """
    world = World(max_batch_tokens=16, max_running=4, num_pages=64, max_wait=max_wait)
    hot = list(range(12))
    cold: Sequence | None = None
    for step in range(210):
        world.now = float(step)
        for index in range(2):
            world.submit(f"hot-{step}-{index}", [*hot, 100 + step, 500 + index], num_outputs=4)
        if step == 10:
            cold = world.submit("cold", list(range(800, 812)), num_outputs=2)
        world.step()
        if cold is not None and cold.admitted_at is not None:
            return cold.admitted_at - cold.submitted_at
    return None


def test_a_cold_request_waits_for_a_bounded_time_under_hot_traffic() -> None:
    waited = seconds_waited_under_hot_traffic(max_wait=20.0)
    assert waited is not None
    assert 15.0 <= waited <= 20.0
    assert seconds_waited_under_hot_traffic(max_wait=1e9) is None
