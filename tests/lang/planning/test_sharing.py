"""Requests of a batch that are equal are asked once; results, order and errors are as without."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

import palmette as pm
from palmette.errors import EngineError, PrimitiveFailed
from palmette.lang.backends.scripted import ByteTokenizer, Reply, ScriptedBackend
from palmette.lang.planning.sharing import SharingBackend, sharing_on
from palmette.protocol import (
    Outlook,
    ProgramListener,
    Request,
    SamplingParams,
    ScoreRequest,
    TokenEvent,
)


def repeating(outputs: Any = "abc", **options: Any) -> ScriptedBackend:
    return ScriptedBackend(outputs, is_repeatable=True, **options)


@pm.function
def ask(s: pm.State, x: str) -> None:
    s += f"About {x}: " + pm.gen("a") + pm.select("b", ["yes", "no"])


ITEMS = [{"x": "tea"}, {"x": "milk"}, {"x": "tea"}, {"x": "tea"}]


@pytest.mark.parametrize("num_threads", [1, 4])
def test_equal_greedy_requests_and_selects_are_asked_once(num_threads: int) -> None:
    backend = repeating()
    states = ask.run_batch(ITEMS, backend=backend, temperature=0, num_threads=num_threads)
    assert [state["a"] for state in states] == ["abc"] * 4
    assert len(backend.requests) == len(backend.score_requests) == 2
    without = repeating()
    plain = ask.run_batch(ITEMS, backend=without, temperature=0, plan=False)
    assert len(without.requests) == len(without.score_requests) == 4
    for state, other in zip(states, plain, strict=True):
        assert state.token_ids() == other.token_ids()
        assert state.meta("b")["probabilities"] == other.meta("b")["probabilities"]
        assert state.meta("a")["completion_tokens"] == other.meta("a")["completion_tokens"]


def test_what_is_drawn_or_explained_or_not_promised_is_asked_each_time() -> None:
    for options, backend in (
        ({"temperature": 1}, repeating()),
        ({"temperature": 0, "explain": True}, repeating()),
        ({"temperature": 0}, ScriptedBackend("abc")),
    ):
        ask.run_batch(ITEMS, backend=backend, **options)
        assert len(backend.requests) == 4


def test_healed_prompts_are_shared_among_themselves() -> None:
    @pm.function
    def program(s: pm.State, prompt: str, boundary: str) -> None:
        s += prompt + pm.gen("x", boundary=boundary)  # type: ignore[arg-type]

    backend = repeating("//x", tokenizer=ByteTokenizer(["://"]))
    items = [("http:", "heal"), ("http", "exact"), ("http:", "heal")]
    states = program.run_batch(items, backend=backend, temperature=0)
    # The ids of all three prompts are those of "http".
    assert sorted(request.healed for request in backend.requests) == ["", ":"]
    assert [state.text() for state in states] == ["http://x", "http//x", "http://x"]


def test_side_effects_of_programs_are_kept() -> None:
    did: list[str] = []

    @pm.function
    def program(s: pm.State, x: str) -> None:
        did.append(x)
        s += x + pm.gen("a", temperature=0)
        did.append(s["a"])

    backend = repeating()
    program.run_batch(["t"] * 5, backend=backend)
    assert sorted(did) == ["abc"] * 5 + ["t"] * 5
    assert len(backend.requests) == 1


def test_the_usage_says_who_computed_and_who_shared() -> None:
    backend = repeating()
    states = ask.run_batch(["tea"] * 3, backend=backend, temperature=0)
    usages = [state.usage() for state in states]
    for usage in usages:
        assert usage.prompt_tokens == usage.cached_tokens + usage.prefilled_tokens
        assert usage.completion_tokens == (
            usage.decoded_tokens + usage.forced_tokens + usage.shared_tokens
        )
        assert usage.completion_tokens == 4
    assert sorted(usage.shared_tokens for usage in usages) == [0, 4, 4]
    alone = ask.run("tea", backend=ScriptedBackend("abc"), temperature=0).usage()
    assert sum(usage.prefilled_tokens for usage in usages) == alone.prefilled_tokens
    assert sum(usage.decoded_tokens for usage in usages) == alone.decoded_tokens
    shown = io.StringIO()
    for state in states:
        assert {row.shared for row in state.figures()} == {0, state.usage().shared_tokens}
        state.print_figures(shown)
    assert shown.getvalue().count("shared") == 2


def test_other_options_and_other_constraints_are_other_requests() -> None:
    @pm.function
    def program(s: pm.State, options: dict[str, Any]) -> None:
        s += "p" + pm.gen("a", **{"temperature": 0, "max_tokens": 3, **options})

    backend = repeating("1")
    others: list[dict[str, Any]] = [
        {},
        {"max_tokens": 4},
        {"regex": "[0-9]"},
        {"regex": "[0-9]+"},
        {"stop": "x"},
        {"return_logprob": True},
        {"frequency_penalty": 1},
    ]
    items = [{"options": each} for each in (*others, *others, {"seed": 3})]
    program.run_batch(items, backend=backend)
    assert len(backend.requests) == len(others)


def test_log_probabilities_and_finish_reasons_are_those_of_the_answer() -> None:
    backend = repeating(probabilities={"": {"a": 0.5, "b": 0.25, "c": 0.25}})
    states = ask.run_batch(
        ["t", "t"], backend=backend, temperature=0, return_logprob=True, max_tokens=2
    )
    assert len(backend.requests) == 1
    one, two = (state.meta("a") for state in states)
    for name in ("logprobs", "finish_reason", "stop_reason", "token_ids"):
        assert one[name] == two[name]
    assert one["finish_reason"] == "length"


# -- By hand: who comes when ----------------------------------------------------------------------


def request(number: int, **options: Any) -> Request:
    return Request(
        request_id=f"r{number}",
        token_ids=tuple(b"prompt"),
        sampling=SamplingParams(temperature=0, **options),
    )


def shared(backend: ScriptedBackend) -> SharingBackend:
    sharing = sharing_on(backend)
    assert sharing is not None
    return sharing


async def read(backend: SharingBackend, number: int) -> list[TokenEvent]:
    return [event async for event in backend.generate(request(number))]


async def until(backend: ScriptedBackend, num_running: int) -> None:
    while backend.num_running != num_running:
        await asyncio.sleep(0.001)


async def test_each_reader_gets_every_event_under_its_own_id_however_late_it_comes() -> None:
    backend = repeating(Reply(text="abc", token_delay=0.005))
    sharing = shared(backend)
    first = asyncio.create_task(read(sharing, 0))
    await asyncio.sleep(0.008)
    both = [await first, await read(sharing, 1), await read(sharing, 2)]
    assert len(backend.requests) == 1
    for number, events in enumerate(both):
        assert "".join(event.text for event in events) == "abc"
        assert {event.request_id for event in events} == {f"r{number}"}
        assert len(events) == len(both[0])


@pytest.mark.parametrize("gone", [0, 1])
async def test_who_goes_away_does_not_disturb_the_others(gone: int) -> None:
    backend = repeating(Reply(text="abcdef", token_delay=0.005))
    sharing = shared(backend)
    tasks = [asyncio.create_task(read(sharing, number)) for number in range(3)]
    await asyncio.sleep(0.012)
    tasks[gone].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[gone], asyncio.CancelledError)
    rest = [result for result in results if isinstance(result, list)]
    assert ["".join(event.text for event in events) for events in rest] == ["abcdef"] * 2
    assert backend.aborted == []
    usages = [events[-1].usage for events in rest]
    assert sorted(usage.shared_tokens for usage in usages if usage) == [0, 7]


async def test_with_the_last_reader_the_request_is_aborted_and_is_asked_anew_later() -> None:
    backend = repeating(Reply(text="abcdef", token_delay=0.005))
    sharing = shared(backend)
    tasks = [asyncio.create_task(read(sharing, number)) for number in range(2)]
    await until(backend, 1)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert backend.aborted == ["r0"]
    assert backend.num_running == 0
    assert "".join(event.text for event in await read(sharing, 2)) == "abcdef"
    assert len(backend.requests) == 2


async def test_scores_are_shared_and_survive_who_goes_away() -> None:
    backend = repeating(delay=0.01)
    sharing = shared(backend)
    asked = [
        ScoreRequest(request_id=f"s{n}", token_ids=(1, 2), continuations=((3,), (4, 5)))
        for n in range(3)
    ]
    tasks = [asyncio.create_task(sharing.score(each)) for each in asked]
    await asyncio.sleep(0)
    tasks[0].cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[0], asyncio.CancelledError)
    one, two = results[1:]
    assert not isinstance(one, BaseException)
    assert not isinstance(two, BaseException)
    assert (one.request_id, two.request_id) == ("s1", "s2")
    assert one.logprobs == two.logprobs
    assert len(backend.score_requests) == 1
    assert sorted((one.usage.prefilled_tokens, two.usage.prefilled_tokens)) == [0, 3]


def test_an_error_reaches_all_that_wait_and_is_not_kept() -> None:
    answers: list[Reply | str] = [Reply(error=EngineError("no power"), delay=0.05), "abc"]

    def answer(prompt: str, asked: Request) -> Reply | str:
        return answers.pop(0) if len(answers) > 1 else answers[0]

    @pm.function
    def program(s: pm.State, again: bool) -> None:
        s += "p" + pm.gen("a", temperature=0)
        try:
            s.sync()
        except PrimitiveFailed:
            if not again:
                raise

    states = program.run_batch(
        [[False], [False]], backend=repeating(answer), on_error="return", num_threads=2
    )
    assert all(isinstance(state, PrimitiveFailed) for state in states)
    assert [str(state.__cause__) for state in states] == ["no power"] * 2
    backend = repeating(["abc"])  # one output: a second request would fail
    good = program.run_batch([[False], [False]], backend=backend)
    assert [state["a"] for state in good] == ["abc", "abc"]


def test_a_program_that_is_cancelled_leaves_the_answer_to_the_others() -> None:
    @pm.function
    def program(s: pm.State, seconds: float | None) -> None:
        with s.copy(timeout=seconds) as branch:
            branch += "p" + pm.gen("a", temperature=0)

    backend = repeating(Reply(text="abc", delay=0.15))
    results = program.run_batch([[0.02], [None], [None]], backend=backend, on_error="return")
    assert isinstance(results[0], pm.ProgramTimeout)
    assert [state["a"] for state in results[1:]] == [["abc"], ["abc"]]
    assert len(backend.requests) == 1
    assert backend.aborted == []


def test_nothing_is_kept_when_the_batch_is_over() -> None:
    backend = repeating()
    states = ask.run_batch(ITEMS, backend=backend, temperature=0)
    ask.run_batch(ITEMS, backend=backend, temperature=0)
    assert len(backend.requests) == 4
    sharing = states[0]._branch.run.backend
    assert isinstance(sharing, SharingBackend)
    assert sharing.num_answers == 0


async def test_answers_that_are_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("palmette.lang.planning.sharing._MAX_KEPT_TOKENS", 60)
    backend = repeating()
    sharing = shared(backend)
    for number in range(8):
        asked = Request(
            request_id="r", token_ids=(number + 1,), sampling=SamplingParams(temperature=0)
        )
        assert [event async for event in sharing.generate(asked)]
    assert sharing.num_answers == 3  # of three tokens each, and what an answer itself takes


async def test_an_answer_that_comes_after_the_end_of_the_batch_is_not_kept() -> None:
    backend = repeating(Reply(text="abc", delay=0.01))
    sharing = shared(backend)
    waiting = asyncio.create_task(read(sharing, 0))
    await until(backend, 1)
    sharing.forget()
    assert "".join(event.text for event in await waiting) == "abc"
    assert sharing.num_answers == 0


class Listening(ScriptedBackend):
    """Notes which programs have ended, and how many requests of theirs ran then."""

    def __init__(self) -> None:
        super().__init__(Reply(text="abc", delay=0.02), is_repeatable=True)
        self.ended: list[tuple[str, int]] = []

    def announce(self, outlook: Outlook, ended: Sequence[tuple[int, ...]] = ()) -> None:
        pass

    def end_program(self, program_id: str) -> None:
        self.ended.append((program_id, self.num_running))


async def test_a_program_ends_when_nothing_that_was_asked_in_its_name_runs_any_more() -> None:
    backend = Listening()
    sharing = sharing_on(backend)
    assert isinstance(sharing, ProgramListener)

    async def of_program(number: int) -> str:
        asked = replace(request(number), outlook=Outlook(program_id=f"p{number}"))
        try:
            return "".join([event.text async for event in sharing.generate(asked)])
        finally:
            sharing.end_program(f"p{number}")

    first, second = (asyncio.create_task(of_program(number)) for number in range(2))
    await asyncio.sleep(0)  # both have asked, nothing has reached the backend
    first.cancel()
    assert await second == "abc"
    await asyncio.gather(first, return_exceptions=True)
    await asyncio.sleep(0)
    assert sorted(backend.ended) == [("p0", 0), ("p1", 0)]
    assert len(backend.requests) == 1
