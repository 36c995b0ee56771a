"""The constant prefix of a program: all that every run begins with, and nothing more."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any

import pytest

import palmette as pm
from palmette.errors import InvalidRequest
from palmette.lang.backends.scripted import ByteTokenizer


def prefix(program: pm.Function, backend: pm.ScriptedBackend | None = None, **given: Any) -> str:
    backend = backend or pm.ScriptedBackend("ok")
    text = backend.tokenizer.decode(program.constant_prefix(backend=backend, **given))
    assert backend.requests == []
    assert not backend.score_requests
    return text


@pm.function
def sorts(s: pm.State, ticket: str, team: str = "accounts") -> None:
    s += pm.system("You sort tickets.")
    s += pm.user("I have no password.") + pm.assistant(f"Team: {team}")
    s += pm.user("Ticket: " + ticket)
    s += pm.assistant("Team: " + pm.select("team", ["billing", "network"]))


HEAD = "<|im_start|>system\nYou sort tickets.<|im_end|>\n<|im_start|>user\n"
SHOT = f"{HEAD}I have no password.<|im_end|>\n<|im_start|>assistant\nTeam: "


def test_it_ends_at_the_first_argument_without_a_value() -> None:
    whole = f"{SHOT}accounts<|im_end|>\n<|im_start|>user\nTicket: "
    assert prefix(sorts) == whole
    assert prefix(sorts.bind(team="x")) == whole.replace("accounts", "x")
    assert prefix(sorts, team="y") == whole.replace("accounts", "y")


def test_it_ends_at_the_first_primitive_if_all_arguments_have_values() -> None:
    tail = "accounts<|im_end|>\n<|im_start|>user\nTicket: No tone.<|im_end|>\n"
    assert prefix(sorts, ticket="No tone.") == f"{SHOT}{tail}<|im_start|>assistant\nTeam: "


@pytest.mark.parametrize("ticket", ["", "No dial tone.", "\U0010fffd", "x" * 100])
def test_every_run_begins_with_it(ticket: str) -> None:
    backend = pm.ScriptedBackend("ok")
    token_ids = sorts.constant_prefix(backend=backend)
    sorts.run(ticket=ticket, backend=backend)
    for request in backend.score_requests:
        assert request.token_ids[: len(token_ids)] == token_ids


def begins(body: Callable[[pm.State, Any], Any]) -> str:
    """The constant prefix of a program of one argument, without a chat."""
    return prefix(pm.function(body))


def as_fstring(s: pm.State, x: Any) -> None:
    s += f"A{x:>10}B"


def added(s: pm.State, x: Any) -> None:
    s += "A" + x + "B"


def added_to(s: pm.State, x: Any) -> None:
    s += "A"
    s += x


def percent(s: pm.State, x: Any) -> None:
    s += "A%s" % x  # noqa: UP031


def changed(s: pm.State, x: Any) -> None:
    s += f"A{x!r}B".lower().upper().strip()[:3]


def compared(s: pm.State, x: Any) -> None:
    s += "A"
    s += "B" if x == "b" else "C"


def asked_whether(s: pm.State, x: Any) -> None:
    s += "A"
    if x:
        s += "B"
    s += "C"


def looped(s: pm.State, x: Any) -> None:
    s += "A"
    for item in x:
        s += item
    s += "C"


def taken_apart(s: pm.State, x: Any) -> None:
    s += "A"
    s += x["key"].upper() + x[:3]


def asked_its_type(s: pm.State, x: Any) -> None:
    s += "A"
    s += "B" if isinstance(x, str) else "C"


def dumped(s: pm.State, x: Any) -> None:
    s += "A"
    s += json.dumps({"x": x})


def escaped(s: pm.State, x: Any) -> None:
    s += "A" + json.dumps(str(x))[1:]


def measured(s: pm.State, x: Any) -> None:
    s += "A"
    s += "#" * len(str(x)) if len(str(x)) != 1 else "B"


def computed_with(s: pm.State, x: Any) -> None:
    s += "A"
    s += str(x * 2 + 1)


def of_a_wrong_type(s: pm.State, x: Any) -> None:
    s += "A"
    s += str(bytearray(x))


def caught(s: pm.State, x: Any) -> None:
    s += "A"
    try:
        s += x.text
    except Exception:
        s += "B"


def caught_for_good(s: pm.State, x: Any) -> None:
    s += "A"
    try:
        s += f"{x}"
    except BaseException:  # noqa: BLE001, RUF100
        s += "B"


def as_a_limit(s: pm.State, x: Any) -> None:
    s += "A"
    s += pm.gen("answer", max_tokens=x)


def as_a_role(s: pm.State, x: Any) -> None:
    s += "A"
    s += pm.special(f"{x}")


def forked(s: pm.State, x: Any) -> None:
    s += "A"
    branches = s.fork(2)
    branches += "B"
    branches.join()


def read(s: pm.State, x: Any) -> None:
    with s.var_scope("v"):
        s += "A"
    assert s["v"] == s.text() == "A"
    assert s.token_ids() == (*b"A",)
    s += pm.gen("answer") + s["v"]
    s += s["answer"]


def nowhere(s: pm.State, x: Any) -> None:
    s += "A"
    s.set("x", x)


@pytest.mark.parametrize(
    "body",
    [
        *(
            as_fstring,
            added,
            added_to,
            percent,
            changed,
            compared,
            asked_whether,
            looped,
            taken_apart,
        ),
        *(asked_its_type, dumped, escaped, measured, computed_with, of_a_wrong_type, caught),
        *(caught_for_good, as_a_limit, as_a_role, forked, read, nowhere),
    ],
)
def test_whatever_depends_on_the_argument_or_a_primitive_ends_it(
    body: Callable[[pm.State, Any], Any],
) -> None:
    assert begins(body) == "A"


def test_what_differs_from_run_to_run_ends_it() -> None:
    numbers = itertools.count(10)

    def body(s: pm.State, x: str) -> None:
        s += f"Run {next(numbers)}"

    assert begins(body) == "Run 1"


def test_an_unknown_message_begins_with_its_role() -> None:
    @pm.function
    def program(s: pm.State, text: str) -> None:
        s += pm.user(text) + pm.assistant(pm.gen("answer"))

    assert prefix(program) == "<|im_start|>user\n"


def test_a_program_of_constants_alone_is_constant_in_whole() -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += "one "
        s += "two"

    assert prefix(program) == "one two"
    backend = pm.ScriptedBackend("ok", tokenizer=ByteTokenizer())
    run = program.run(backend=backend)
    assert run.token_ids() == program.constant_prefix(backend=backend)


def test_a_program_without_a_constant_beginning_has_an_empty_one() -> None:
    @pm.function
    def generates(s: pm.State) -> None:
        s += pm.gen("x") + "A"

    @pm.function
    def begins_with_it(s: pm.State, x: str) -> None:
        s += f"{x} A"

    assert prefix(generates) == prefix(begins_with_it) == ""


async def test_an_async_program_has_one_too() -> None:
    @pm.function
    async def program(s: pm.State, x: str) -> None:
        s += f"A{x}"
        await s.value("y")

    @pm.function
    async def waits(s: pm.State) -> None:
        s += "A"
        s += pm.gen("y")
        s += await s.value("y")

    assert prefix(program) == prefix(waits) == "A"


def test_arguments_by_position_or_keyword_alone_are_unknown_as_well() -> None:
    def body(s: pm.State, a: str, /, *rest: str, b: str, c: str = "c", **more: str) -> None:
        s += f"{c}{rest}{more}{b}{a}"

    assert begins(body) == "c(){}"


def test_an_error_is_raised_unless_it_may_come_of_a_missing_argument() -> None:
    @pm.function
    def program(s: pm.State, x: str) -> None:
        s += "A"
        raise InvalidRequest("no such thing")

    assert prefix(program) == "A"
    with pytest.raises(InvalidRequest, match="no such thing"):
        prefix(program, x="x")
    with pytest.raises(TypeError, match="has no parameter named 'y'"):
        prefix(program, y="y")


def test_a_backend_without_keys_and_values_cannot_freeze() -> None:
    backend = pm.ScriptedBackend("ok")
    with pytest.raises(pm.UnsupportedFeature, match="freeze on scripted is not supported"):
        sorts.freeze("prefix", backend=backend)
