"""What steps will take, learned from what they took, and chunks that fit in so much time."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from palmette.runtime.scheduler import Plan
from palmette.runtime.scheduler.step_time import StepLoad, StepTime, num_keys_between
from palmette.runtime.sequence import Sequence
from tests.runtime.scheduler.test_scheduler import World, names

# Seconds for a step, a token, a key and a row of logits, of a small model on two cores.
SMALL = (2e-3, 0.24e-3, 5e-8, 0.24e-3)

Seconds = tuple[float, float, float, float]


def seconds_of(load: StepLoad, parts: Seconds = SMALL) -> float:
    step, token, key, logits = parts
    return step + token * load.num_tokens + key * load.num_keys + logits * load.num_logits


def decoding(num_sequences: int, length: int) -> StepLoad:
    return StepLoad(num_sequences, num_sequences * length, num_sequences)


def mixed(rng: random.Random) -> Iterator[StepLoad]:
    """Steps of an engine: so many decode, and beside some of them a prompt is computed."""
    while True:
        some = decoding(rng.randrange(1, 33), rng.randrange(10, 3000))
        chunk, start = rng.choice([0, 0, 0, 16, 200, 512]), rng.randrange(4000)
        num_keys = some.num_keys + num_keys_between(start, start + chunk)
        yield StepLoad(some.num_tokens + chunk, num_keys, some.num_logits)


def noted(
    loads: Iterator[StepLoad], count: int, seconds: Callable[[StepLoad], float] = seconds_of
) -> StepTime:
    step_time = StepTime()
    for _ in range(count):
        load = next(loads)
        step_time.note(load, seconds(load))
    return step_time


def test_the_keys_of_tokens_are_counted_with_their_own() -> None:
    for start, end in ((0, 0), (0, 1), (3, 9)):
        assert num_keys_between(start, end) == sum(at + 1 for at in range(start, end))


@settings(deadline=None, max_examples=20)
@given(
    step=st.floats(1e-3, 0.1),
    token=st.floats(1e-5, 2e-3),
    key=st.sampled_from([0.0, 2e-8, 1e-7]),
    logits=st.sampled_from([0.0, 2e-4, 1e-3]),
    seed=st.integers(0, 1000),
)
def test_what_a_step_takes_is_found_in_noise(
    step: float, token: float, key: float, logits: float, seed: int
) -> None:
    rng = random.Random(seed)
    parts = (step, token, key, logits)
    step_time = noted(mixed(rng), 400, lambda load: rng.gauss(1, 0.03) * seconds_of(load, parts))
    for load in (decoding(16, 500), decoding(32, 1000), StepLoad(513, num_keys_between(0, 513), 1)):
        assert step_time.seconds(load) == pytest.approx(seconds_of(load, parts), rel=0.15)


def test_what_each_part_takes_is_found() -> None:
    step_time = noted(mixed(random.Random(1)), 400)
    for load in (StepLoad(1, 0, 0), StepLoad(100, 0, 0), StepLoad(0, 100_000, 0), decoding(9, 9)):
        assert step_time.seconds(load) == pytest.approx(seconds_of(load), rel=0.01)
        assert step_time.added_seconds(load) == pytest.approx(seconds_of(load) - 2e-3, rel=0.05)


LOADS = st.builds(StepLoad, st.integers(0, 100_000), st.integers(0, 10**9), st.integers(0, 100_000))


@settings(deadline=None, max_examples=100)
@given(
    steps=st.lists(
        st.tuples(LOADS, st.floats(allow_nan=True, allow_infinity=True) | st.floats(1e-6, 1e3)),
        max_size=60,
    ),
    asked=st.lists(LOADS, min_size=1, max_size=5),
    seconds=st.floats(1e-6, 1e3),
    limit=st.integers(0, 5000),
)
def test_no_expectation_is_negative_whatever_was_measured(
    steps: list[tuple[StepLoad, float]], asked: list[StepLoad], seconds: float, limit: int
) -> None:
    step_time = StepTime()
    for load, took in steps:
        step_time.note(load, took)
        for each in asked:
            assert 0 <= step_time.added_seconds(each) <= step_time.seconds(each) < math.inf
        assert 0 <= step_time.num_tokens_in(seconds, 100, limit) <= limit


def test_times_that_are_none_teach_nothing() -> None:
    step_time = StepTime()
    for took in (0.0, -1.0, math.nan, math.inf, 1e9) * 10:
        step_time.note(decoding(1, 9), took)
    assert not step_time.is_learned
    for _ in range(8):
        assert not step_time.is_learned
        step_time.note(decoding(1, 9), 0.01)
    assert step_time.is_learned


@pytest.mark.parametrize("seconds", [1.0, 60.0, 1e5])
def test_a_machine_that_was_asleep_changes_little(seconds: float) -> None:
    loads = mixed(random.Random(3))
    step_time = noted(loads, 200)
    step_time.note(decoding(4, 100), seconds)
    for load in (decoding(4, 100), StepLoad(512, num_keys_between(0, 512), 1)):
        assert step_time.seconds(load) == pytest.approx(seconds_of(load), rel=0.02)


def test_slow_first_steps_are_soon_forgotten() -> None:
    loads = mixed(random.Random(4))
    slow = iter([100.0, 30.0])
    step_time = noted(loads, 60, lambda load: next(slow, 1.0) * seconds_of(load))
    for load in (decoding(4, 100), StepLoad(512, num_keys_between(0, 512), 1)):
        assert step_time.seconds(load) == pytest.approx(seconds_of(load), rel=0.1)


@pytest.mark.parametrize("factor", [0.4, 2.5])
def test_a_machine_that_has_another_speed_now_is_followed(factor: float) -> None:
    loads = mixed(random.Random(5))
    step_time = noted(loads, 300)
    for _ in range(400):
        load = next(loads)
        step_time.note(load, factor * seconds_of(load))
    for load in (decoding(4, 100), StepLoad(512, num_keys_between(0, 512), 1)):
        assert step_time.seconds(load) == pytest.approx(factor * seconds_of(load), rel=0.1)


def test_hours_of_decoding_leave_what_was_learned_of_prefill() -> None:
    rng = random.Random(6)
    step_time = noted(mixed(rng), 300)
    for count in range(20_000):
        load = decoding(8, 100 + count % 1000)
        step_time.note(load, rng.gauss(1, 0.05) * seconds_of(load))
    prefill = StepLoad(512, num_keys_between(0, 512), 1)
    assert step_time.seconds(prefill) == pytest.approx(seconds_of(prefill), rel=0.2)
    assert step_time.seconds(decoding(8, 500)) == pytest.approx(
        seconds_of(decoding(8, 500)), rel=0.05
    )


def test_what_always_goes_together_is_told_as_one_and_the_rest_learned_when_it_comes() -> None:
    rng = random.Random(7)
    some = decoding(16, 256)
    step_time = noted(
        iter(lambda: some, None), 5000, lambda load: rng.gauss(1, 0.05) * seconds_of(load)
    )
    assert step_time.seconds(some) == pytest.approx(seconds_of(some), rel=0.05)
    prefill = StepLoad(512, num_keys_between(0, 512), 1)
    assert step_time.seconds(prefill) < 2 * seconds_of(prefill)  # never told apart, so it is cheap
    for _ in range(10):
        step_time.note(prefill, rng.gauss(1, 0.05) * seconds_of(prefill))
    assert step_time.seconds(prefill) == pytest.approx(seconds_of(prefill), rel=0.1)
    assert step_time.seconds(some) == pytest.approx(seconds_of(some), rel=0.1)


@settings(deadline=None)
@given(start=st.integers(0, 10_000), seconds=st.floats(1e-4, 1.0), limit=st.integers(1, 600))
def test_as_many_tokens_as_fit_in_the_time(start: int, seconds: float, limit: int) -> None:
    num_tokens = LEARNED.num_tokens_in(seconds, start, limit)
    assert 0 <= num_tokens <= limit

    def added(count: int) -> float:
        return LEARNED.added_seconds(StepLoad(count, num_keys_between(start, start + count), 0))

    assert added(num_tokens) <= 1.01 * seconds
    assert num_tokens == limit or added(num_tokens + 1) > 0.99 * seconds


LEARNED = noted(mixed(random.Random(8)), 300)


def millisecond_a_token(plan: Plan) -> float:
    """A step takes ten of them besides."""
    return 0.010 + 0.001 * sum(item.num_tokens for item in plan.work)


class TimedWorld(World):
    """A world whose steps take some time, which is known of them already."""

    def __init__(
        self,
        max_step_seconds: float | None,
        *,
        max_batch_tokens: int = 512,
        max_running: int = 64,
        max_wait: float = 1000.0,
    ) -> None:
        super().__init__(
            num_pages=1000,
            max_batch_tokens=max_batch_tokens,
            max_running=max_running,
            max_wait=max_wait,
            max_step_seconds=max_step_seconds,
            step_seconds=millisecond_a_token,
        )
        for num_tokens in range(1, 500, 7):
            load = StepLoad(num_tokens, 0, 1 + num_tokens % 16)
            self.scheduler.step_time.note(load, 0.010 + 0.001 * num_tokens)


def streaming(world: World, *, num_streams: int = 1, num_outputs: int = 1000) -> World:
    """So many sequences decode."""
    for index in range(num_streams):
        first = 10_000 * (index + 1)
        world.submit(f"stream {index}", [first, first + 1], num_outputs=num_outputs)
    world.step()
    return world


def test_chunks_fit_the_time_that_others_may_wait() -> None:
    world = streaming(TimedWorld(0.050))
    world.submit("long", list(range(400)))
    plans = [world.step() for _ in range(12)]
    for plan in plans[:9]:
        (stream, *_), (name, num_tokens) = names(plan)
        assert (stream, name) == ("stream 0", "long")
        assert 33 <= num_tokens <= 40
        assert millisecond_a_token(plan) <= 0.051
    assert sum(dict(names(plan)).get("long", 0) for plan in plans) == 400


def test_without_a_bound_a_step_has_all_the_tokens_it_may() -> None:
    world = streaming(TimedWorld(None))
    world.submit("long", list(range(600)))
    assert names(world.step()) == [("stream 0", 1), ("long", 511)]


def test_where_nobody_decodes_chunks_are_as_large_as_they_may_be() -> None:
    world = TimedWorld(0.050)
    world.submit("long", list(range(700)))
    world.submit("other", list(range(1000, 1300)))
    assert names(world.step()) == [("long", 512)]
    assert names(world.step()) == [("long", 188), ("other", 300)]


def test_where_all_decode_none_of_them_waits() -> None:
    world = streaming(TimedWorld(0.001), num_streams=40)
    assert len(world.step().work) == 40


def test_chunks_are_large_again_when_the_stream_has_ended() -> None:
    world = streaming(TimedWorld(0.050), num_outputs=3)
    world.submit("long", list(range(900)))
    sizes = [dict(names(world.step()))["long"] for _ in range(4)]
    assert max(sizes[:2]) <= 40
    assert sizes[2] == 512


def test_before_anything_is_learned_chunks_are_as_large_as_they_may_be() -> None:
    world = streaming(World(num_pages=1000, max_batch_tokens=512, max_step_seconds=0.001))
    world.submit("long", list(range(600)))
    assert names(world.step()) == [("stream 0", 1), ("long", 511)]


@pytest.mark.parametrize(("max_batch_tokens", "chunk"), [(8, 4), (64, 16), (512, 16)])
def test_prefill_goes_on_where_decoding_alone_takes_longer_than_it_should(
    max_batch_tokens: int, chunk: int
) -> None:
    world = streaming(TimedWorld(0.0, max_batch_tokens=max_batch_tokens), num_streams=4)
    world.submit("long", list(range(10 * chunk)))
    assert [dict(names(world.step()))["long"] for _ in range(10)] == [chunk] * 10


def test_much_decoding_leaves_prefill_a_share_of_the_time() -> None:
    world = streaming(TimedWorld(0.0, max_running=128), num_streams=120)
    world.submit("long", list(range(400)))
    # So many decode in 130 ms, a quarter of which is 32 tokens.
    assert dict(names(world.step()))["long"] == pytest.approx(32, abs=1)


def test_forced_tokens_of_a_stream_are_prefill_to_the_others() -> None:
    world = streaming(TimedWorld(0.050), num_streams=2)
    jumper = world.scheduler.running[0]
    jumper.token_ids += range(300)
    for _ in range(5):
        plan = world.step()
        assert dict(names(plan))["stream 1"] == 1
        assert dict(names(plan))["stream 0"] <= 40


def seconds_waited_beside_streams(max_wait: float) -> float | None:
    """A cold request while hot ones come faster than they can be served, and chunks are as small as
    they get; None if it was not admitted at all.
    """
    world = TimedWorld(0.0, max_batch_tokens=64, max_running=8, max_wait=max_wait)
    streaming(world, num_streams=4, num_outputs=10_000)
    cold: Sequence | None = None
    for step in range(210):
        world.now = float(step)
        for index in range(2):
            world.submit(f"hot {step} {index}", [*range(12), 100 + step, 500 + index], 4)
        if step == 10:
            cold = world.submit("cold", list(range(800, 812)), num_outputs=2)
        world.step()
        if cold is not None and cold.admitted_at is not None:
            return cold.admitted_at - cold.submitted_at
    return None


def test_a_cold_request_waits_for_a_bounded_time_beside_streams() -> None:
    waited = seconds_waited_beside_streams(max_wait=20.0)
    assert waited is not None
    assert 15.0 <= waited <= 20.0
    assert seconds_waited_beside_streams(max_wait=1e9) is None
