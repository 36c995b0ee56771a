"""Limits of time and tokens of runs and forks, and cancelling a part of a program."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Callable

import pytest

import palmette as pm
from palmette.errors import PrimitiveFailed, ProgramStopped
from palmette.lang.backends.scripted import Reply, ScriptedBackend
from palmette.lang.signals import Signal
from palmette.protocol import Request

NEVER = Reply(text="never", delay=60)


def run(backend: ScriptedBackend, body: Callable[..., object], **options: object) -> pm.State:
    return pm.function(body).run(backend=backend, **options)


def slow_and_quick() -> ScriptedBackend:
    """Prompts that end in "slow" never get an answer, others do so at once."""
    return ScriptedBackend(lambda prompt, _: NEVER if prompt.endswith("slow") else "ok")


# -- Time ------------------------------------------------------------------------------------------


def test_a_run_that_takes_too_long_is_aborted_and_says_what_it_was_busy_with() -> None:
    backend = ScriptedBackend(["ok", NEVER])

    def body(s: pm.State) -> None:
        s += "p" + pm.gen("x")
        s += pm.gen("y")
        try:
            s["y"]
        except pm.ProgramTimeout:
            assert s["x"] == "ok"
            raise

    with pytest.raises(
        pm.ProgramTimeout,
        match=r"^timeout=0\.5 of the run passed before gen\('y'\) at .*limits\.py:\d+ was done$",
    ) as info:
        run(backend, body, timeout=0.5)
    assert isinstance(info.value, TimeoutError)
    assert (info.value.seconds, info.value.primitive, info.value.path) == (0.5, "gen('y')", ())
    assert backend.num_running == 0
    assert len(backend.aborted) == 1


async def test_an_async_run_that_takes_too_long_is_aborted() -> None:
    backend = ScriptedBackend(NEVER)

    @pm.function
    async def program(s: pm.State) -> None:
        s += "p" + pm.gen("x")
        await s.value("x")

    with pytest.raises(pm.ProgramTimeout, match=r"of the run passed before gen\('x'\)"):
        await program.run_async(backend=backend, timeout=0.05)
    assert backend.num_running == 0
    with pytest.raises(pm.ProgramTimeout, match=r"of the run passed before gen\('x'\)"):
        program.run(backend=backend, timeout=0.05)


def test_a_stream_that_takes_too_long_gives_what_there_is_and_then_raises() -> None:
    backend = ScriptedBackend(["12", NEVER])

    @pm.function
    def program(s: pm.State) -> None:
        s += "p" + pm.gen("x") + "q" + pm.gen("y")

    chunks: list[str] = []
    with pytest.raises(pm.ProgramTimeout, match=r"gen\('y'\)"):
        chunks.extend(program.stream(backend=backend, timeout=0.5))
    assert chunks == ["p", "1", "2", "q"]


def test_each_program_of_a_batch_has_the_timeout_for_itself() -> None:
    @pm.function
    def program(s: pm.State, how: str) -> None:
        s += how + pm.gen("x")

    results = program.run_batch(
        ["slow", "quick", "slow"], backend=slow_and_quick(), timeout=0.5, on_error="return"
    )
    assert [type(result) for result in results] == [pm.ProgramTimeout, pm.State, pm.ProgramTimeout]


def test_a_program_that_has_seen_the_timeout_can_end_well() -> None:
    def body(s: pm.State) -> str:
        s += "slow" + pm.gen("x")
        try:
            return str(s["x"])
        except TimeoutError:
            return "too late"

    assert run(slow_and_quick(), body, timeout=0.05).ret_value == "too late"


def test_a_timeout_that_passed_while_the_program_did_something_else_is_raised_at_its_next_use() -> (
    None
):
    backend = ScriptedBackend()
    lines: list[str] = []

    def body(s: pm.State) -> None:
        s += "p"
        while s._branch.stopped is None:
            threading.Event().wait(0.001)
        lines.append("before")
        s += pm.gen("x")
        lines.append("after")

    with pytest.raises(pm.ProgramTimeout, match=r"passed before gen\('x'\) at .*test_limits"):
        run(backend, body, timeout=0.01)
    assert lines == ["before"]
    assert not backend.requests

    def uses_it_no_more(s: pm.State) -> None:
        while s._branch.stopped is None:
            threading.Event().wait(0.001)

    with pytest.raises(pm.ProgramTimeout, match=r"^timeout=0\.01 of the run passed$"):
        run(backend, uses_it_no_more, timeout=0.01)


def test_a_timeout_of_a_fork_stops_its_branches_and_no_others() -> None:
    backend = slow_and_quick()

    def body(s: pm.State) -> None:
        s += "p"
        branches = s.fork(3, timeout=0.5)
        branches += ["quick" + pm.gen("x"), "slow" + pm.gen("x"), "quick" + pm.gen("x")]
        others = s.fork(1)
        inner = branches[2].fork(2)
        inner += "slow" + pm.gen("y")
        for branch in (branches[1], *inner):
            with pytest.raises(
                pm.ProgramTimeout,
                match=r"timeout=0\.5 of fork\(3\) at .*test_limits\.py:\d+ passed before gen",
            ) as info:
                branch.text()
            assert info.value.path == branch.path
        # That a join has to do without one makes nothing else of it.
        with pytest.raises(pm.ProgramTimeout):
            inner.join()
        for branch in inner:
            with pytest.raises(pm.ProgramTimeout, match=r"passed before gen\('y'\)"):
                branch.text()
        # What was done stays; nothing can be added.
        assert branches[0]["x"] == "ok"
        assert branches[0].text() == "pquickok"
        with pytest.raises(pm.ProgramTimeout, match=r"passed before gen\('z'\)"):
            branches[0] += pm.gen("z")
        with pytest.raises(pm.ProgramTimeout, match="passed"):
            branches[0].fork()
        others += "quick" + pm.gen("x")
        assert others[0]["x"] == "ok"
        s += "quick" + pm.gen("x")

    assert run(backend, body)["x"] == "ok"
    assert backend.num_running == 0


def test_branches_that_are_not_born_when_their_timeout_passes_never_are() -> None:
    has_timed_out = threading.Event()

    async def answer(prompt: str, request: Request) -> str:
        while not has_timed_out.is_set():
            await asyncio.sleep(0.001)
        return "late"

    backend = ScriptedBackend(answer)

    def body(s: pm.State) -> None:
        s += "p" + pm.gen("x")
        branches = s.fork(2, timeout=0.02)
        branches += pm.gen("y")
        # It is the parent's generation that they wait for.
        with pytest.raises(pm.ProgramTimeout, match=r"fork\(2\) at .* passed before gen\('x'\)"):
            branches[0]["y"]
        has_timed_out.set()
        assert s["x"] == "late"

    run(backend, body)
    assert len(backend.requests) == 1


def test_copy_takes_the_limits_of_a_fork() -> None:
    backend = ScriptedBackend({"p": NEVER, "q": "1234567890"})

    def body(s: pm.State) -> None:
        s += "p"
        with (
            pytest.raises(pm.ProgramTimeout, match=r"fork\(1\) at .*test_limits\.py"),
            s.copy(timeout=0.02) as branch,
        ):
            branch += pm.gen("x")
        with s.copy(max_total_tokens=3) as branch:
            branch += "q" + pm.gen("x")
        assert s["x"] == ["123"]

    run(backend, body)


def test_a_timeout_of_a_fork_that_nobody_came_to_see_is_raised_at_the_end() -> None:
    def body(s: pm.State) -> None:
        branches = s.fork(2, timeout=0.02)
        branches += "slow" + pm.gen("x")

    with pytest.raises(pm.ProgramTimeout, match=r"gen\('x'\)"):
        run(slow_and_quick(), body)


def test_limits_that_make_no_sense_are_refused() -> None:
    backend = ScriptedBackend()

    def body(s: pm.State) -> None:
        for timeout in (0, -1, float("inf"), float("nan"), True, "1"):
            with pytest.raises(pm.InvalidRequest, match="timeout must be a number of seconds"):
                s.fork(timeout=timeout)  # type: ignore[arg-type]
        for tokens in (0, -1, 2.0, True, "1"):
            with pytest.raises(pm.InvalidRequest, match="max_total_tokens must be an integer"):
                s.fork(max_total_tokens=tokens)  # type: ignore[arg-type]

    run(backend, body)
    for options in ({"timeout": 0}, {"max_total_tokens": 0}):
        with pytest.raises(pm.InvalidRequest):
            run(backend, body, **options)


def test_a_parameter_of_the_program_with_the_name_of_a_limit_is_meant() -> None:
    def body(s: pm.State, timeout: str) -> None:
        s += timeout

    assert run(ScriptedBackend(), body, timeout="never").text() == "never"


# -- Tokens ----------------------------------------------------------------------------------------


def test_a_gen_gets_what_is_left_of_the_tokens_of_the_run_and_the_next_one_nothing() -> None:
    backend = ScriptedBackend("0123456789" * 2)

    def body(s: pm.State) -> None:
        s += "p" + pm.gen("x", max_tokens=8) + "q" + pm.gen("y") + "r"
        assert s["x"] == "01234567"
        assert s["y"] == "0123"
        assert s.meta("y")["finish_reason"] == "length"
        s += pm.select("z", ["a", "b"])  # takes none
        assert s["z"] == "a"
        s += pm.gen("none", max_tokens=0)  # nor does this one
        assert s["none"] == ""
        s += pm.gen("w")
        s["w"]

    with pytest.raises(
        pm.TokenBudgetExceeded,
        match=r"^max_total_tokens=12 of the run has 0 tokens left \(12 used\): no room for a token "
        r"of gen\('w'\) at .*test_limits\.py:\d+$",
    ) as info:
        run(backend, body, max_total_tokens=12)
    assert (info.value.limit, info.value.num_used, info.value.primitive) == (12, 12, "gen('w')")
    assert [request.sampling.max_tokens for request in backend.requests] == [8, 4, 0]


def test_a_gen_that_wants_more_than_is_left_at_least_is_not_begun() -> None:
    backend = ScriptedBackend("0123456789")

    def body(s: pm.State) -> None:
        s += "p" + pm.gen("x", max_tokens=8) + pm.gen("y", max_tokens=8, min_tokens=5)

    with pytest.raises(pm.TokenBudgetExceeded, match=r"2 tokens left .*min_tokens=5 of gen\('y'\)"):
        run(backend, body, max_total_tokens=10)


def test_forced_tokens_and_the_one_that_ends_it_count() -> None:
    backend = ScriptedBackend(Reply(text="abc", num_forced=2))

    def body(s: pm.State) -> None:
        s += "p" + pm.gen("x") + pm.gen("y")

    state = run(backend, body, max_total_tokens=7)
    assert (state["x"], state["y"]) == ("abc", "abc")
    assert state.usage().completion_tokens == 7
    assert state.usage().forced_tokens == 4


def test_constants_and_a_select_take_none_of_the_tokens() -> None:
    def body(s: pm.State) -> None:
        s += "a long constant" + pm.select("x", ["left", "right"]) + "and another" + pm.gen("y")

    state = run(ScriptedBackend("ab"), body, max_total_tokens=3)
    assert (state["x"], state["y"]) == ("left", "ab")
    assert state.usage().completion_tokens == 3


@pytest.mark.parametrize("max_tokens", [5, 30, 100])
def test_branches_together_never_take_more_than_the_limit(max_tokens: int) -> None:
    backend = ScriptedBackend(Reply(text="0123456789", token_delay=0.0002))

    def body(s: pm.State) -> list[int]:
        s += "p"
        branches = s.fork(12, max_total_tokens=100)
        branches += lambda i: f"{i}" + pm.gen("x", max_tokens=max_tokens)
        used = []
        for branch in branches:
            error = branch.error()
            if error is None:
                used.append(branch.meta("x")["completion_tokens"])
            else:
                assert isinstance(error, pm.TokenBudgetExceeded)
                assert error.num_used == 100
                assert "fork(12) at " in str(error)
        return used

    used = run(backend, body).ret_value
    needed = min(max_tokens, 11)
    assert sum(used) == min(100, 12 * needed)
    # Only the last one is cut, whatever the others hold at first.
    assert [count for count in used if count != needed] in ([], [100 % needed])


def test_the_tokens_of_a_fork_count_for_the_run_as_well() -> None:
    backend = ScriptedBackend("0123456789" * 10)

    def body(s: pm.State) -> None:
        s += "p"
        (branch,) = s.fork(1, max_total_tokens=40)
        (inner,) = branch.fork(1, max_total_tokens=15)
        inner += "i" + pm.gen("x", max_tokens=20)
        assert len(inner["x"]) == 15
        branch += "b" + pm.gen("x", max_tokens=30)
        assert len(branch["x"]) == 25
        s += "s" + pm.gen("x", max_tokens=30)
        assert len(s["x"]) == 10

    run(backend, body, max_total_tokens=50)
    assert sorted(request.sampling.max_tokens for request in backend.requests) == [10, 15, 25]


def test_a_generation_that_fails_or_is_cancelled_counts_as_far_as_it_came() -> None:
    broken = Reply(text="0123456789", fails_after=4, error=RuntimeError("lost"))
    backend = ScriptedBackend([broken, "0123456789" * 3])

    def body(s: pm.State) -> None:
        s += "p"
        branches = s.fork(2)
        branches[0] += "0" + pm.gen("x", max_tokens=20)
        with pytest.raises(PrimitiveFailed, match="lost"):
            branches[0].sync()
        branches[1] += "1" + pm.gen("x")
        assert len(branches[1]["x"]) == 16

    run(backend, body, max_total_tokens=20)


# -- Cancelling ------------------------------------------------------------------------------------


def test_cancelling_a_branch_stops_it_and_what_it_forked_and_nothing_else() -> None:
    backend = slow_and_quick()

    def body(s: pm.State) -> None:
        s += "p"
        branches = s.fork(3)
        branches += "0" + pm.gen("x")
        inner = branches[1].fork(2)
        inner += "slow" + pm.gen("y") + pm.gen("z")
        branches[0] += "slow" + pm.gen("y")
        while backend.num_running < 3:
            threading.Event().wait(0.001)
        branches[1].cancel()
        branches[1].cancel()
        for branch in inner:
            for read in (lambda: branch["y"], lambda: branch["z"], branch.text, branch.sync):  # noqa: B023
                with pytest.raises(
                    pm.ProgramCancelled,
                    match=r"^branch \(0, 1\) was cancelled at .*test_limits\.py:\d+ before "
                    r"gen\('y'\) at .*test_limits\.py:\d+ was done$",
                ) as info:
                    read()
                assert info.value.path == branch.path
                assert isinstance(info.value, pm.RequestAborted)
        assert branches[1]["x"] == "ok"
        with pytest.raises(pm.ProgramCancelled, match=r"before gen\('w'\)"):
            branches[1] += pm.gen("w")
        assert backend.num_running == 1
        assert branches[2]["x"] == "ok"
        branches[0].cancel()
        # What the program has cancelled it knows of: nothing is raised at the end.

    run(backend, body)
    assert backend.num_running == 0
    assert len(backend.aborted) == 3


def test_leaving_the_block_of_a_branch_cancels_it_alone() -> None:
    backend = slow_and_quick()

    def body(s: pm.State) -> None:
        s += "p"
        first, second = s.fork(2)
        with first:
            first += "slow" + pm.gen("x")
        second += "quick" + pm.gen("x")
        assert second["x"] == "ok"
        with pytest.raises(pm.ProgramCancelled, match=r"branch \(0, 0\)"):
            first["x"]

    run(backend, body)


def test_a_join_leaves_out_what_the_program_has_cancelled() -> None:
    def body(s: pm.State) -> None:
        s += "p"
        branches = s.fork(3)
        branches += ["a" + pm.gen("x"), "slow" + pm.gen("x"), "c" + pm.gen("x")]
        branches[1].cancel()
        branches.join()
        assert s["x"] == ["ok", "ok"]
        branches = s.fork(2)
        branches += "slow" + pm.gen("y")
        for branch in branches:
            branch.cancel()
        branches.join()
        assert "y" not in s
        branches.join(mode="concate_and_append")
        assert s.text() == "p"

    run(slow_and_quick(), body)


def test_cancelling_the_state_of_the_run_cancels_the_run() -> None:
    backend = slow_and_quick()

    def body(s: pm.State) -> None:
        branches = s.fork(2)
        branches += "slow" + pm.gen("x")
        s.cancel()
        branches[0].sync()

    with pytest.raises(pm.ProgramCancelled, match=r"^the run was cancelled at .*test_limits\.py"):
        run(backend, body)
    assert backend.num_running == 0


def test_cancelling_what_has_ended_changes_nothing() -> None:
    state = pm.function(lambda s: s.fork(2)).run(backend=ScriptedBackend())
    state.ret_value[0].cancel()
    state.cancel()
    assert state.text() == state.ret_value[0].text() == ""


def test_a_failing_join_is_raised_at_once_and_cancels_what_still_runs() -> None:
    backend = ScriptedBackend(
        {
            "slow": NEVER,
            "bad": Reply(error=RuntimeError("broken"), delay=0.05),
            "quick": "ok",
            "p": "on",
        }
    )

    def body(s: pm.State) -> None:
        s += "p"
        branches = s.fork(3)
        branches += ["slow" + pm.gen("x"), "bad" + pm.gen("x"), "quick" + pm.gen("x")]
        with pytest.raises(PrimitiveFailed, match="broken"):
            branches.join()
        assert branches[2]["x"] == "ok"
        with pytest.raises(pm.ProgramCancelled, match=r"\(0, 0\) was cancelled by join\(\) at "):
            branches[0]["x"]
        with pytest.raises(PrimitiveFailed, match="broken"):
            branches.join()
        s += pm.gen("y")
        assert s["y"] == "on"

    run(backend, body)
    assert backend.num_running == 0


# -- The first k -----------------------------------------------------------------------------------


def chained(states: list[pm.State], order: list[int], bad: tuple[int, ...] = ()) -> ScriptedBackend:
    """The branches end one after the other in this order, those in `bad` by failing; others never.

    `states` is filled with the branches when all have been appended to.
    """

    async def answer(prompt: str, request: Request) -> Reply:
        number = int(prompt[-1])
        if number not in order:
            return NEVER
        place = order.index(number)
        while place and not (states and states[order[place - 1]]._branch.is_settled()):
            await asyncio.sleep(0.001)
        return Reply(
            text=f"<{number}>", error=ValueError(f"no {number}") if number in bad else None
        )

    return ScriptedBackend(answer)


def test_the_first_k_come_in_the_order_in_which_they_ended_and_the_others_are_cancelled() -> None:
    states: list[pm.State] = []
    backend = chained(states, [9, 8, 7])

    def body(s: pm.State) -> None:
        s += "p"
        branches = s.fork(10)
        branches += lambda i: f"{i}" + pm.gen("x")
        states.extend(branches)
        best = pm.first_k(branches, 3)
        assert [state["x"] for state in best] == ["<9>", "<8>", "<7>"]
        for state in branches[:7]:
            with pytest.raises(pm.ProgramCancelled, match=r"was cancelled by first_k\(..., 3\) at"):
                state["x"]
        # The winners can go on, and a join brings back theirs alone.
        best[0] += "!"
        branches.join()
        assert s["x"] == ["<7>", "<8>", "<9>"]

    run(backend, body)
    assert backend.num_running == 0
    assert len(backend.aborted) == 7


def test_without_cancelling_the_others_go_on() -> None:
    states: list[pm.State] = []
    backend = chained(states, [0, 1, 2])

    def body(s: pm.State) -> None:
        branches = s.fork(3)
        branches += lambda i: f"{i}" + pm.gen("x")
        states.extend(branches)
        assert pm.first_k(branches, 1, cancel=False) == [branches[0]]
        assert pm.first_k(branches[1:], 2, cancel=False) == branches[1:]
        assert pm.first_k(branches, 3) == branches[:]

    run(backend, body)
    assert not backend.aborted


def test_branches_that_fail_do_not_count_until_too_few_are_left() -> None:
    states: list[pm.State] = []
    backend = chained(states, [0, 1, 3, 2, 4], bad=(0, 1, 3))

    def body(s: pm.State) -> None:
        branches = s.fork(5)
        branches += lambda i: f"{i}" + pm.gen("x")
        states.extend(branches)
        assert {state.path for state in pm.first_k(branches, 2)} == {(0, 2), (0, 4)}
        with pytest.raises(PrimitiveFailed, match="no 0"):
            pm.first_k(branches, 3)
        for branch in (branches[1], branches[3]):
            with pytest.raises(PrimitiveFailed):
                branch.sync()
        others = s.fork(2)
        others += ["0" + pm.gen("x"), "9" + pm.gen("x")]
        with pytest.raises(PrimitiveFailed, match="no 0"):
            pm.first_k(others, 2)
        with pytest.raises(pm.ProgramCancelled, match="first_k"):
            others[1].sync()

    run(backend, body)


def test_what_is_cancelled_already_cannot_win() -> None:
    def body(s: pm.State) -> None:
        branches = s.fork(2)
        branches[0].sync()
        branches[0].cancel()
        branches[1] += "quick" + pm.gen("x")
        assert pm.first_k(branches, 1) == [branches[1]]
        with pytest.raises(pm.ProgramCancelled, match=r"branch \(0, 0\) was cancelled at"):
            pm.first_k(branches, 2)

    run(slow_and_quick(), body)


async def test_an_async_program_awaits_the_first_k() -> None:
    states: list[pm.State] = []
    backend = chained(states, [9, 8])

    @pm.function
    async def program(s: pm.State) -> list[str]:
        s += "p"
        branches = s.fork(10)
        branches += lambda i: f"{i}" + pm.gen("x")
        states.extend(branches)
        with pytest.raises(pm.ProgramError, match=r"await first_k_async"):
            pm.first_k(branches, 2)
        best = await pm.first_k_async(branches, 2)
        await branches.join_async()
        assert s["x"] == ["<8>", "<9>"]
        return [state["x"] for state in best]

    state = await program.run_async(backend=backend)
    assert state.ret_value == ["<9>", "<8>"]
    assert backend.num_running == 0


def test_first_k_refuses_what_makes_no_sense() -> None:
    def body(s: pm.State, others: list[pm.State]) -> None:
        branches = s.fork(2)
        for k in (0, 3, True, 1.0):
            with pytest.raises(ValueError, match=r"first_k\(.*2 branches, so k is from 1 to 2"):
                pm.first_k(branches, k)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="twice"):
            pm.first_k([branches[0], branches[0]], 1)
        with pytest.raises(ValueError, match="not forked"):
            pm.first_k([s, branches[0]], 1)
        others += branches
        if len(others) > 2:
            with pytest.raises(ValueError, match="different runs"):
                pm.first_k(others, 1)

    others: list[pm.State] = []
    run(ScriptedBackend(), body, others=others)
    run(ScriptedBackend(), body, others=others)


def test_whatever_is_stopped_at_whatever_moment_the_run_ends_with_nothing_left() -> None:
    """Branches that are idle, waiting to be born, running and queued, cancelled from outside."""
    for delay in itertools.chain([0.0] * 20, [0.001, 0.002, 0.004, 0.008]):
        backend = ScriptedBackend(Reply(text="abc", token_delay=0.001))

        def body(s: pm.State, delay: float = delay) -> None:
            s += "p" + pm.gen("x")
            branches = s.fork(3, timeout=0.004)
            branches += lambda i: f"{i}" + pm.gen("y") + pm.gen("z")
            inner = branches[1].fork(2)
            inner += pm.gen("w")
            other = threading.Thread(target=branches[1].cancel)
            threading.Event().wait(delay)
            other.start()
            for branch in (*branches, *inner):
                assert isinstance(branch.error(), ProgramStopped | None)
            other.join()
            assert s["x"] == "abc"

        state = run(backend, body)
        assert state.text() == "pabc"
        assert backend.num_running == 0


def test_who_joins_many_branches_is_not_woken_by_each(monkeypatch: pytest.MonkeyPatch) -> None:
    woken = []
    notify = Signal.notify

    def counted(signal: Signal) -> None:
        woken.extend(signal._wakers)
        notify(signal)

    def body(s: pm.State) -> None:
        branches = s.fork(300)
        branches += lambda i: f"{i}" + pm.gen("x")
        monkeypatch.setattr(Signal, "notify", counted)
        branches.join()
        assert s["x"] == ["ok"] * 300

    run(ScriptedBackend("ok", delay=0.05), body)
    assert len(woken) <= 3
