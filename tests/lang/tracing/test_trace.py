"""What `state.trace()` tells of a run."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

import palmette as pm
from palmette import ByteTokenizer, Reply, ScriptedBackend
from palmette.lang.tracing import recording
from palmette.lang.tracing.model import Counts, Event, RunTrace
from palmette.lang.tracing.recording import Status
from palmette.protocol import Request

COUNTED = tuple(Counts.__dataclass_fields__)


def summed(events: Iterator[Event]) -> dict[str, int]:
    """The counts of all primitives together."""
    used = [event.usage for event in events if event.usage is not None]
    return {name: sum(getattr(each, name) for each in used) for name in COUNTED}


def counts(usage: Any) -> dict[str, int]:
    return {name: getattr(usage, name) for name in COUNTED}


def only_run(state: pm.State) -> RunTrace:
    (run,) = state.trace().runs
    return run


def kinds(run: RunTrace, branch: int = 0) -> list[str]:
    return [event.kind for event in run.branches[branch].events]


@pm.function
def triage(s: pm.State, ticket: str) -> None:
    s += pm.system("You sort tickets.")
    s += pm.user(ticket)
    s += pm.assistant_begin()
    s += "Team: " + pm.select("team", ["billing", "network"])
    branches = s.fork(3)
    for branch, angle in zip(branches, ["cause", "urgency", "next"], strict=True):
        branch += f"\nOn the {angle}: " + pm.gen("note", max_tokens=6, stop="\n")
    branches.join()
    s += "\nRecord: " + pm.gen("record", max_tokens=20, n=2)
    s += pm.assistant_end()


def test_the_tokens_of_the_primitives_add_up_to_those_of_the_run() -> None:
    state = triage.run(
        "wrong", backend=ScriptedBackend(lambda *_: Reply(text="héllo", num_forced=2))
    )
    trace = state.trace()
    assert summed(trace.events()) == counts(state.usage()) == counts(trace.runs[0].usage)
    assert trace.runs[0].usage.forced_tokens > 0


def test_primitives_stand_in_the_order_of_the_program_and_branches_below_their_fork() -> None:
    run = only_run(triage.run("wrong", backend=ScriptedBackend("ok")))
    message = ["role_begin", "text", "role_end"]
    assert kinds(run) == [
        *message,
        *message,
        "role_begin",
        *["text", "select", "fork", "join", "text", "gen", "gen", "role_end"],
    ]
    root = run.branches[0]
    fork, join = root.events[9], root.events[10]
    assert fork.children == join.children == (1, 2, 3)
    assert [branch.path for branch in run.branches] == [(), (0, 0), (0, 1), (0, 2)]
    assert {(branch.parent, branch.forked_by) for branch in run.branches[1:]} == {(0, 9)}
    assert kinds(run, 2) == ["text", "gen"]
    assert [root.events[12].sample, root.events[13].sample] == [None, 1]
    assert all(event.where.startswith(__file__) for event in root.events)
    assert root.events[8].variable == "team"
    assert run.program == "triage"
    assert run.arguments == {"ticket": "'wrong'"}


def test_times_go_on_and_lie_within_the_run() -> None:
    run = only_run(triage.run("wrong", backend=ScriptedBackend("ok", delay=0.01)))
    assert run.end is not None
    for branch in run.branches:
        before = branch.start or 0.0
        for event in branch.events:
            assert event.start is not None
            assert event.end is not None
            assert event.asked <= event.end <= run.end
            if event.kind != "join" and event.sample is None:
                assert event.start >= before
                before = event.end
    gen = run.branches[1].events[1]
    assert gen.end is not None
    assert gen.start is not None
    assert gen.end - gen.start >= 0.01
    assert gen.prefill is not None
    assert gen.decode is not None
    assert 0.01 <= gen.prefill + gen.decode <= gen.end - gen.start


def test_the_texts_of_tokens_join_to_the_text_though_a_character_takes_several() -> None:
    backend = ScriptedBackend("héllo 🎉!", tokenizer=ByteTokenizer(["llo"]))
    gen = the_gen(answer.run(backend=backend, max_tokens=20))
    assert gen.tokens is not None
    assert "".join(gen.tokens.texts) == gen.text == "héllo 🎉!"
    assert gen.tokens.texts[:4] == ("h", "", "é", "llo")
    assert backend.tokenizer.decode(gen.tokens.ids) == gen.text


PROBABILITIES = {"": {"o": 0.5, "k": 0.25, "x": 0.25}}


@pm.function
def answer(s: pm.State, **options: Any) -> None:
    s += "Say: " + pm.gen("x", **options)


def the_gen(state: pm.State) -> Event:
    return only_run(state).branches[0].events[1]


def test_a_detailed_trace_has_log_probabilities_and_reasons_and_a_plain_one_has_not() -> None:
    backend = ScriptedBackend(
        lambda *_: Reply(text="ok", num_forced=1), probabilities=PROBABILITIES
    )
    plain, detailed = (answer.run(backend=backend, trace=trace) for trace in (False, True))
    for state in (plain, detailed):
        assert "logprobs" not in state.meta("x")
        assert "prompt" not in state.meta("x")
        assert the_gen(state).tokens.forced == (0,)
    assert the_gen(plain).tokens.logprobs is None
    assert the_gen(plain).prompt.stretches == ()
    assert not only_run(plain).detailed
    gen = the_gen(detailed)
    assert gen.tokens.logprobs[0] is None  # it was forced
    assert gen.tokens.logprobs[1] == pytest.approx(-1.386294)
    assert [token for token, _ in gen.tokens.top[1]] == [ord("o"), ord("k"), ord("x")]
    assert detailed.trace().vocabulary[0][str(ord("o"))] == "o"
    assert [(s.start, s.end, s.reason) for s in gen.prompt.stretches] == [
        (0, 4, "cached"),
        (4, 5, "never seen"),
    ]


def test_a_program_gets_the_log_probabilities_it_asked_for_and_the_trace_has_more() -> None:
    backend = ScriptedBackend("ok", probabilities=PROBABILITIES)
    state = answer.run(backend=backend, trace=True, top_logprobs_num=1)
    assert [len(each.top) for each in state.meta("x")["logprobs"]] == [1, 1]
    assert [len(top) for top in the_gen(state).tokens.top] == [3, 3]
    state = answer.run(backend=backend, trace=True, return_logprob=True)
    assert [each.top for each in state.meta("x")["logprobs"]] == [(), ()]


def test_a_select_has_its_options_with_probabilities() -> None:
    run = only_run(triage.run("wrong", backend=ScriptedBackend("ok")))
    select = run.branches[0].events[8]
    assert [option.text for option in select.options] == ["billing", "network"]
    assert sum(option.probability for option in select.options) == pytest.approx(1)
    assert select.options[select.chosen].text == select.text
    assert select.method == "probability"
    tokens = select.options[0].tokens
    assert "".join(tokens.texts) == "billing"
    assert sum(tokens.logprobs) == pytest.approx(select.options[0].log_likelihood)


def failing(prompt: str, request: Request) -> Reply:
    if "bad" in prompt:
        return Reply(text="abc", error=RuntimeError("broken"), fails_after=1, delay=0.05)
    return Reply(text="ok", delay=5 if "slow" in prompt else 0)


def test_a_failure_is_told_where_it_happened_and_what_it_kept_from_being_done() -> None:
    @pm.function
    def program(s: pm.State) -> None:
        branches = s.fork(2)
        branches[0] += "bad" + pm.gen("a") + "after" + pm.gen("b")
        branches[1] += "slow" + pm.gen("c")
        branches.join()

    state = program.stream(backend=ScriptedBackend(failing))
    assert isinstance(state.error(), pm.PrimitiveFailed)
    run = only_run(state)
    assert run.status is Status.FAILED
    assert "broken" in run.error
    bad, slow = run.branches[1:]
    assert [event.status.value for event in bad.events] == ["ok", "failed", "not_done", "not_done"]
    assert "broken" in bad.events[1].error
    assert bad.status is Status.FAILED
    assert bad.events[1].tokens.ids == (ord("a"),)  # what had come by then
    assert slow.status is Status.CANCELLED
    assert slow.events[1].status is Status.CANCELLED
    assert "join()" in slow.events[1].error or "cancelled" in slow.events[1].error
    assert run.branches[0].events[1].status is Status.FAILED


def test_a_timeout_and_a_cancelled_branch_are_told_apart() -> None:
    @pm.function
    def program(s: pm.State) -> None:
        late = s.fork(1, timeout=0.2)[0]
        late += "slow" + pm.gen("a")
        dropped = s.fork(1)[0]
        dropped += "slow" + pm.gen("b")
        while len(backend.requests) < 2:
            time.sleep(0.001)
        dropped.cancel()
        assert isinstance(late.error(), pm.ProgramTimeout)

    backend = ScriptedBackend(failing)
    run = only_run(program.run(backend=backend))
    assert [branch.status.value for branch in run.branches] == ["ok", "timed_out", "cancelled"]
    assert [branch.events[-1].status.value for branch in run.branches[1:]] == [
        "timed_out",
        "cancelled",
    ]
    assert run.status is Status.OK


def test_a_run_that_goes_on_is_shown_as_it_is() -> None:
    proceed = threading.Event()

    async def wait(prompt: str, request: Request) -> Reply:
        await asyncio.to_thread(proceed.wait)
        return Reply(text="ok")

    @pm.function
    def program(s: pm.State) -> None:
        s += "a" + pm.gen("x") + "b" + pm.gen("y")

    backend = ScriptedBackend(wait)
    state = program.stream(backend=backend)
    while not backend.requests:
        pass
    run = only_run(state)
    assert run.status is Status.RUNNING
    assert run.end is None
    assert [event.status.value for event in run.branches[0].events] == [
        "ok",
        "running",
        "waiting",
        "waiting",
    ]
    assert pm.Trace.from_json(state.trace().to_json()).runs[0].branches == run.branches
    proceed.set()
    state.sync()
    assert only_run(state).status is Status.OK


def test_async_programs_and_first_k_are_traced() -> None:
    @pm.function
    async def program(s: pm.State) -> None:
        branches = s.fork(3)
        for branch, word in zip(branches, ["slow", "quick", "quick"], strict=True):
            branch += word + pm.gen("x")
        await pm.first_k_async(list(branches), 2)
        await branches.join_async("concate_and_append")

    run = only_run(program.run(backend=ScriptedBackend(failing)))
    fork, first, join = run.branches[0].events
    assert first.kind == "first_k"
    assert first.children == fork.children == (1, 2, 3)
    assert sorted(first.winners) == [2, 3]
    assert (join.mode, join.text) == ("concate_and_append", "quickokquickok")
    assert run.branches[1].status is Status.CANCELLED


def test_a_batch_lies_on_one_time_axis_in_order_and_errors_are_passed_over() -> None:
    failed: list[Any] = [ValueError("no state")]
    states = answer.run_batch([{}, {}, {}], backend=ScriptedBackend("ok"))
    trace = pm.Trace.of([states[0], *failed, *states])
    assert len(trace.runs) == 3  # each once
    assert min(run.start for run in trace.runs) == 0
    assert trace.duration == max(run.end or 0 for run in trace.runs)
    with pytest.raises(TypeError, match="taken of states, got str"):
        pm.Trace.of(["x"])  # type: ignore[list-item]


def test_runs_of_a_backend_are_told_as_one_whatever_stands_before_it() -> None:
    backend = ScriptedBackend("ok", is_repeatable=True)
    batches = [answer.run_batch([{}, {}], backend=backend, temperature=0) for _ in range(2)]
    trace = pm.Trace.of([*batches[0], *batches[1], answer.run(backend=backend)])
    assert [each.kind for each in trace.backends] == ["ScriptedBackend"]
    assert sum(node.ends for node in trace.prefixes.nodes) == 5
    assert sum(run.usage.shared_tokens for run in trace.runs) == 2 * 3
    assert ", 6 shared" in trace.summary()


def test_two_thousand_branches_are_told_in_little_memory() -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += "Shared beginning."
        branches = s.fork(2000)
        for index, branch in enumerate(branches):
            branch += f" {index}" + pm.gen("x", max_tokens=2)
        branches.join()

    state = program.run(backend=ScriptedBackend("ok"))
    trace = state.trace()
    assert len(trace.runs[0].branches) == 2001
    assert len(list(trace.events())) == 2000 * 2 + 3
    assert summed(trace.events()) == counts(state.usage())
    shared = trace.prefixes.nodes[0]
    assert (shared.text, shared.uses, shared.ends) == ("Shared beginning. ", 2000, 0)
    assert shared.computed == shared.num_tokens  # once


def test_the_records_go_with_the_state_and_keep_no_branch_alive() -> None:
    @pm.function
    def program(s: pm.State) -> None:
        branch = s.fork(1)[0]
        branch += "a" + pm.gen("x")
        branch.sync()
        dropped.append(weakref.ref(branch._branch))
        del branch
        deadline = time.monotonic() + 5  # the loop may still be about to let go of it
        while dropped[0]() is not None and time.monotonic() < deadline:
            gc.collect()
            time.sleep(0.01)
        is_gone.append(dropped[0]() is None)

    dropped: list[weakref.ref[Any]] = []
    is_gone: list[bool] = []
    state = program.run(backend=ScriptedBackend("ok"))
    assert is_gone == [True]
    assert len(only_run(state).branches) == 2
    record = weakref.ref(state._branch.run)
    del state
    gc.collect()
    assert record() is None


def test_beyond_a_bound_primitives_are_counted_and_no_longer_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recording, "MAX_EVENTS", 5)

    @pm.function
    def program(s: pm.State) -> None:
        for _ in range(4):
            s += "a" + pm.gen("x")
        branch = s.fork(1)[0]
        branch += pm.gen("y")

    state = program.run(backend=ScriptedBackend("ok"))
    run = only_run(state)
    assert len(run.branches[0].events) == 5
    assert len(run.branches) == 1
    assert run.omitted_events == 4 * 2 + 2 - 5
    assert pm.Trace.from_json(state.trace().to_json()) is not None


def test_arguments_are_told_in_short_whatever_they_are() -> None:
    class Secretive:
        def __repr__(self) -> str:
            raise AssertionError("it may be large")

    @pm.function
    def program(s: pm.State, long: str, thing: Any, many: Any) -> None:
        s += "x"

    run = only_run(
        program.run(
            "y" * 10**6, Secretive(), dict.fromkeys(range(10**5)), backend=ScriptedBackend()
        )
    )
    assert len(run.arguments["long"]) < 200
    assert run.arguments["thing"] == "<Secretive>"
    assert run.arguments["many"] == "<dict of 100000>"


def test_the_text_of_a_trace_is_ascii_json_without_what_is_not_there() -> None:
    told = json.loads(answer.run(backend=ScriptedBackend("ok")).trace().to_json())
    assert (told["format"], told["version"]) == ("palmette.trace", 1)
    text = told["runs"][0]["branches"][0]["events"][0]
    assert set(text) == {"kind", "name", "where", "asked", "start", "end", "status", "text"}
