"""Several `gen`s from one call of an API: fewer prompt tokens sent, the same text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import palmette as pm
from palmette.errors import PrimitiveFailed, RemoteError
from palmette.lang.backends.scripted import Reply, ScriptedBackend
from palmette.lang.speculation import cut
from palmette.protocol import FinishReason
from tests.runtime.server.harness import live

CARD = "Ada Lovelace\nBorn: 1815\nWork: engines\n\nThe end"


def form(s: pm.State) -> None:
    s += "A person.\nName: " + pm.gen("name", stop="\n")
    s += "\nBorn: " + pm.gen("born", stop="\n")
    s += "\nWork: " + pm.gen("work", stop="\n")


@contextmanager
def behind_api(behind: ScriptedBackend, api: str = "completions") -> Iterator[pm.OpenAI]:
    options = {"base_url": "", "api_key": "unused", "api": api}
    with live(behind) as url:
        options["base_url"] = f"{url}/v1"
        with pm.OpenAI("scripted", **options) as backend:  # type: ignore[arg-type]
            yield backend


def writing(text: str) -> ScriptedBackend:
    """Whoever asks is told what comes behind the prompt in `text`."""
    return ScriptedBackend(lambda prompt, _: text[text.index(prompt[-6:]) + 6 :] + "")


def test_three_fields_cost_one_prompt() -> None:
    text = "A person.\nName: " + CARD
    once, thrice = writing(text), writing(text)
    with behind_api(once) as backend:
        state = pm.function(num_api_spec_tokens=60)(form).run(backend=backend)
    with behind_api(thrice) as backend:
        plain = pm.function(form).run(backend=backend)
    for name, value in {"name": "Ada Lovelace", "born": "1815", "work": "engines"}.items():
        assert state[name] == plain[name] == value
    assert state.text() == plain.text()
    assert (len(once.requests), len(thrice.requests)) == (1, 3)
    assert 2 * state.usage().prompt_tokens < plain.usage().prompt_tokens
    assert once.requests[0].sampling.max_tokens == 60
    assert once.requests[0].sampling.stop == ()
    assert state.meta("born")["finish_reason"] == "stop"
    assert state.meta("born")["stop_reason"] == "\n"


@pytest.mark.parametrize("of_fork", [False, True])
def test_a_limit_of_tokens_is_not_passed(of_fork: bool) -> None:
    def limited(s: pm.State) -> None:
        branch = s.fork(max_total_tokens=40)[0] if of_fork else s
        branch += "A person.\nName: " + pm.gen("name", stop="\n", max_tokens=20)
        branch += "\nBorn: " + pm.gen("born", stop="\n", max_tokens=20)
        branch.sync()

    behind = writing("A person.\nName: " + CARD)
    limit = None if of_fork else 40
    with behind_api(behind) as backend:
        program = pm.function(num_api_spec_tokens=60)(limited)
        state = program.run(backend=backend, max_total_tokens=limit)
    assert [request.sampling.max_tokens for request in behind.requests] == [20, 20]
    assert state.usage().completion_tokens <= 40


def test_a_model_that_goes_on_otherwise_is_asked_again() -> None:
    behind = ScriptedBackend(["Ada\nDied: 1852", "1815\nFame: much", "engines\n"])
    with behind_api(behind) as backend:
        state = pm.function(num_api_spec_tokens=60)(form).run(backend=backend)
    assert [state[name] for name in ("name", "born", "work")] == ["Ada", "1815", "engines"]
    assert len(behind.requests) == 3


def test_what_a_call_had_no_room_for_is_asked_for() -> None:
    behind = ScriptedBackend(["Ada\nBorn: 18", "1815\n", "engines"])
    with behind_api(behind) as backend:
        state = pm.function(num_api_spec_tokens=12)(form).run(backend=backend)
    assert [state[name] for name in ("name", "born", "work")] == ["Ada", "1815", "engines"]
    assert len(behind.requests) == 3


def test_branches_and_runs_are_asked_for_by_themselves() -> None:
    @pm.function(num_api_spec_tokens=60)
    def program(s: pm.State) -> None:
        s += "A person.\nName: " + pm.gen("name", stop="\n")
        branches = s.fork(2)
        branches += "\nBorn: " + pm.gen("born", stop="\n")
        branches.join()

    behind = ScriptedBackend({"Name: ": "Ada\nBorn: 1\n", "Born: ": Reply(text="2\n")})
    with behind_api(behind) as backend:
        for _ in range(2):
            assert program.run(backend=backend)["born"] == ["2", "2"]
    assert len(behind.requests) == 6


def test_constrained_and_endless_gens_are_asked_for_as_ever() -> None:
    @pm.function(num_api_spec_tokens=60)
    def program(s: pm.State) -> None:
        s += "n: " + pm.gen("n", json_schema={"type": "integer"}, stop="x")
        s += " more: " + pm.gen("more", max_tokens=4)

    behind = ScriptedBackend({"n: ": "12", "more: ": "abcdefgh"})
    with (
        live(behind) as url,
        pm.OpenAI(
            "scripted", base_url=f"{url}/v1", api_key="k", api="completions", dialect="palmette"
        ) as backend,
    ):
        state = program.run(backend=backend)
    assert (state["n"], state["more"]) == ("12", "abcd")
    assert [request.sampling.max_tokens for request in behind.requests] == [128, 4]


def test_in_a_chat_the_model_writes_the_message_as_the_program_does() -> None:
    @pm.function(num_api_spec_tokens=60)
    def program(s: pm.State) -> None:
        s += pm.user("A person?")
        with s.assistant():
            s += "Name: " + pm.gen("name", stop="\n")
            s += "\nBorn: " + pm.gen("born", stop="\n")

    behind = ScriptedBackend(["Sure! Name: X", "Name: Ada\nBorn: 1815\n"])
    with behind_api(behind, "chat") as backend:
        state = program.run(backend=backend)
    assert (state["name"], state["born"]) == ("Ada", "1815")
    assert state.messages()[-1]["content"] == "Name: Ada\nBorn: 1815"
    assert len(behind.requests) == 2
    with (
        behind_api(ScriptedBackend("Sure!"), "chat") as backend,
        pytest.raises(PrimitiveFailed, match="in 3 tries") as caught,
    ):
        program.run(backend=backend)
    assert isinstance(caught.value.__cause__, RemoteError)


def test_an_engine_is_not_changed_by_it() -> None:
    backend = writing("A person.\nName: " + CARD)
    state = pm.function(num_api_spec_tokens=60)(form).run(backend=backend)
    assert state["work"] == "engines"
    assert len(backend.requests) == 3


@pytest.mark.parametrize(
    ("rest", "is_whole", "is_fresh", "expected"),
    [
        (b"ab\ncd", True, False, (b"ab", FinishReason.STOP, "\n")),
        (b"ab##c", False, False, (b"ab", FinishReason.STOP, "##")),
        (b"abcd", True, False, (b"abcd", FinishReason.STOP, None)),
        (b"abcd", False, True, (b"abcd", FinishReason.LENGTH, None)),
        (b"abcd", False, False, None),
    ],
)
def test_a_rest_is_cut_at_the_first_and_longest_stop(
    rest: bytes, is_whole: bool, is_fresh: bool, expected: object
) -> None:
    found = cut(rest, ["\n", "#", "##"], is_whole=is_whole, is_fresh=is_fresh)
    assert (found and (found.text, found.finish_reason, found.stop_reason)) == expected
