"""What `gen` gives beyond one text: several of them, stop patterns, log-probabilities, types."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from pydantic import BaseModel

import palmette as pm
from palmette.errors import InvalidOutput, InvalidRequest, PrimitiveFailed, UnsupportedFeature
from palmette.lang.backends.scripted import ByteTokenizer, Reply, ScriptedBackend
from palmette.protocol import Request, TokenLogprob
from palmette.runtime.async_engine import AsyncEngine
from palmette.runtime.testing import history_engine, script, tiny_engine
from tests.end_to_end.load import WatchedEngine, hashed


@pytest.fixture
def engine() -> Iterator[AsyncEngine]:
    with AsyncEngine.over(lambda: tiny_engine()) as engine:
        yield engine


# -- n -------------------------------------------------------------------------------------------


def test_several_texts_are_a_list_and_the_first_goes_on() -> None:
    backend = ScriptedBackend(["one", "two", "three", "!"])

    @pm.function
    def program(s: pm.State) -> None:
        s += "p" + pm.gen("x", n=3) + "." + pm.gen("y")

    state = program.run(backend=backend)
    assert state["x"] == ["one", "two", "three"]
    assert state.raw("x") == ["one", "two", "three"]
    assert state.text() == "pone.!"
    assert backend.prompts == ["p", "p", "p", "pone."]
    assert state.token_ids() == tuple(b"pone.!")
    metas = state.meta("x")
    assert [meta["token_ids"] for meta in metas] == [tuple(b"one"), tuple(b"two"), tuple(b"three")]
    assert state.usage().completion_tokens == sum(
        meta["completion_tokens"] for meta in (*metas, state.meta("y"))
    )
    assert [row.label for row in state.figures()] == ["x[0]", "x[1]", "x[2]", "y"]


def test_each_of_several_texts_has_its_own_draws_and_a_seed_repeats_them(
    engine: AsyncEngine,
) -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += "Once" + pm.gen("x", n=4, max_tokens=12, temperature=1, ignore_eos=True)

    def drawn(seed: int | None) -> list[str]:
        texts: list[str] = program.run(backend=engine, seed=seed)["x"]
        return texts

    assert len(set(drawn(None))) == 4
    assert len(set(drawn(7))) == 4
    assert drawn(7) == drawn(7)
    alone = program.run(backend=engine, seed=7, n=1)  # the call says 4, the run has no say
    assert alone["x"] == drawn(7)


def test_the_first_of_several_texts_is_that_of_one(engine: AsyncEngine) -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += "Once" + pm.gen("x", max_tokens=12)

    one = program.run(backend=engine, seed=3)["x"]
    assert program.run(backend=engine, seed=3, n=3)["x"][0] == one


def test_several_texts_at_temperature_zero_are_all_the_same(engine: AsyncEngine) -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += "Once" + pm.gen("x", n=3, max_tokens=8, temperature=0)

    texts = program.run(backend=engine)["x"]
    assert len(texts) == 3
    assert len(set(texts)) == 1


def test_the_stream_of_the_whole_text_has_the_first_of_several_texts() -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += "p" + pm.gen("x", n=2) + "."

    state = program.stream(backend=ScriptedBackend(["one", "two"]))
    assert "".join(state.text_iter()) == "pone."


def test_several_texts_compute_their_prompt_once() -> None:
    with WatchedEngine.watching(lambda: history_engine(hashed, page_size=4)[0]) as engine:

        @pm.function
        def program(s: pm.State) -> None:
            s += "p" * 100 + pm.gen("x", n=4, max_tokens=8, ignore_eos=True)

        state = program.run(backend=engine, temperature=0)
        # A token drawn last is not computed; each but one computes the prompt's last token again.
        assert engine.stats().computed_tokens == 100 + 4 * 7 + 3
    assert sorted(meta["cached_tokens"] for meta in state.meta("x")) == [0, 99, 99, 99]


def test_several_texts_are_typed_and_joined_as_one_is() -> None:
    backend = ScriptedBackend(["1 ", "2 ", "3 ", "4 "])

    @pm.function
    def program(s: pm.State) -> None:
        s += "p"
        branches = s.fork(2)
        for branch in branches:
            branch += pm.gen_int("x", n=2)
            branch.sync()
        branches.join()

    assert program.run(backend=backend)["x"] == [[1, 2], [3, 4]]


def test_several_texts_of_which_one_fails_fail_and_abort_the_others() -> None:
    backend = ScriptedBackend(
        [Reply(text="long", delay=60), Reply(error=RuntimeError("two")), Reply(text="x", delay=60)]
    )

    @pm.function
    def program(s: pm.State) -> None:
        s += "p" + pm.gen("x", n=3)

    with pytest.raises(PrimitiveFailed, match="two"):
        program.run(backend=backend)
    assert len(backend.aborted) == 2
    assert backend.num_running == 0


def test_several_texts_do_not_stream_as_one() -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += "p" + pm.gen("x", n=2) + "q"

    state = program.stream(backend=ScriptedBackend(["one", "two"]))
    with pytest.raises(UnsupportedFeature, match="streaming 'x', which has n above 1"):
        list(state.text_iter("x"))
    assert "".join(state.text_iter()) == "poneq"


async def test_several_texts_do_not_stream_as_one_to_async_readers() -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += "p" + pm.gen("x", n=2)

    state = program.stream_async(backend=ScriptedBackend(["one", "two"]))
    with pytest.raises(UnsupportedFeature, match="streaming 'x', which has n above 1"):
        [chunk async for chunk in state.text_async_iter("x")]
    assert await state.value("x") == ["one", "two"]


def test_several_texts_are_not_appended_to_a_list() -> None:
    @pm.function
    def program(s: pm.State) -> None:
        with pytest.raises(UnsupportedFeature, match="n=2 with append"):
            s += pm.gen("x", n=2, append=True)

    program.run(backend=ScriptedBackend())
    with pytest.raises(InvalidRequest, match="n must be at least 1, got 0"):
        pm.gen("x", n=0)


# -- stop_regex ----------------------------------------------------------------------------------


@pytest.mark.parametrize("pattern", [r"[0-9]+\.", ["zzz", r"[0-9]+\."]])
@pytest.mark.parametrize("of_run", [True, False])
def test_a_match_ends_the_text_and_is_no_part_of_it(pattern: Any, of_run: bool) -> None:
    options: dict[str, Any] = {"stop_regex": pattern}

    @pm.function
    def program(s: pm.State) -> None:
        s += "p\n" + pm.gen("x", **({} if of_run else options)) + "END" + pm.gen("y")

    def check(state: pm.State) -> None:
        assert state["x"] == "No 7, no "
        assert state.text().startswith("p\nNo 7, no END")
        assert state.token_ids()[: len("p\nNo 7, no END")] == tuple(b"p\nNo 7, no END")
        meta = state.meta("x")
        assert (meta["finish_reason"], meta["stop_reason"]) == ("stop", r"[0-9]+\.")

    given = options if of_run else {}
    check(program.run(backend=ScriptedBackend("No 7, no 12. More"), **given))
    text = "No 7, no 12. More"
    with AsyncEngine.over(lambda: history_engine(script(text))[0]) as engine:
        check(program.run(backend=engine, temperature=0, max_tokens=40, **given))


def test_a_stream_never_shows_what_turns_out_to_be_a_match() -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += "p\n" + pm.gen("x", stop_regex="a+b", max_tokens=40)

    with AsyncEngine.over(lambda: history_engine(script("caaca aaab tail"))[0]) as engine:
        chunks = list(program.stream(backend=engine, temperature=0).text_iter("x"))
    assert "".join(chunks) == "caaca "
    assert chunks == ["c", "aac", "a "]  # what may be a match waits until it is none


@pytest.mark.parametrize("jump_forward", ["token", "canonical"])
def test_a_match_ends_a_constrained_text_too(jump_forward: str) -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += "p\n" + pm.gen("x", regex="[a-z]{3}-12-[a-z]{3}", stop_regex="-[0-9]")

    with AsyncEngine.over(lambda: history_engine(script("abc-12-def"))[0]) as engine:
        state = program.run(backend=engine, temperature=0, jump_forward=jump_forward)
    assert state["x"] == "abc"
    assert state.token_ids() == tuple(b"p\nabc")


@pytest.mark.parametrize(
    ("pattern", "error"),
    [("[", InvalidRequest), ("x*", InvalidRequest), ("x$", UnsupportedFeature)],
)
def test_a_pattern_that_cannot_be_followed_fails_its_own_request(
    engine: AsyncEngine, pattern: str, error: type[Exception]
) -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += "p" + pm.gen("x", stop_regex=pattern)

    with pytest.raises(PrimitiveFailed, match="stop_regex") as info:
        program.run(backend=engine)
    assert isinstance(info.value.__cause__, error)


# -- Log-probabilities ---------------------------------------------------------------------------

PROBABILITIES: dict[str, dict[str | bytes | int, float]] = {
    "": {"a": 0.5, "b": 0.25, "c": 0.25},
    "a": {"b": 0.8, "c": 0.2},
}


def scripted() -> ScriptedBackend:
    return ScriptedBackend("cb", probabilities=PROBABILITIES)


def test_log_probabilities_of_the_prompt_from_a_position_on() -> None:
    backend = scripted()

    @pm.function
    def program(s: pm.State, start: int) -> None:
        s += "aabc" + pm.gen("x", return_logprob=True, logprob_start_len=start)

    meta = program.run(1, backend=backend).meta("x")
    wanted = [math.log(value) for value in (1e-300, 0.8, 0.25)]
    assert [each.token_id for each in meta["prompt_logprobs"]] == list(b"abc")
    found = [each.logprob for each in meta["prompt_logprobs"]]
    assert found[0] == -math.inf  # "a" behind "a" has no probability
    assert found[1:] == pytest.approx(wanted[1:])
    assert meta["input_token_logprobs"] == [
        (each.logprob, each.token_id, None) for each in meta["prompt_logprobs"]
    ]
    whole = program.run(0, backend=backend).meta("x")
    first = whole["prompt_logprobs"][0]
    assert (first.token_id, math.isnan(first.logprob)) == (ord("a"), True)
    assert whole["prompt_logprobs"][1:] == meta["prompt_logprobs"]
    assert whole["input_token_logprobs"][0] == (None, ord("a"), None)
    assert program.run(9, backend=backend).meta("x")["prompt_logprobs"] == ()
    assert "prompt_logprobs" not in program.run(-1, backend=backend).meta("x")


def test_log_probabilities_of_a_prompt_cost_a_request_that_the_usage_counts() -> None:
    backend = scripted()

    @pm.function
    def program(s: pm.State) -> None:
        s += "aabc" + pm.gen("x", return_logprob=True, logprob_start_len=1)

    state = program.run(backend=backend)
    assert len(backend.score_requests) == 1
    assert state.meta("x")["prompt_tokens"] == 4
    # Its nodes: the prompt's first token and those that another one follows.
    assert state.usage().prompt_tokens == 4 + 3


def test_log_probabilities_of_a_prompt_are_those_of_its_continuation(engine: AsyncEngine) -> None:
    """What was drawn has the same log-probability when it is read back as a prompt."""

    @pm.function
    def program(s: pm.State) -> None:
        s += "Once upon " + pm.gen("x", max_tokens=10, return_logprob=True, ignore_eos=True)
        s += pm.gen("y", max_tokens=1, return_logprob=True, logprob_start_len=len("Once upon "))

    state = program.run(backend=engine, temperature=1, seed=5)
    drawn, read = state.meta("x")["logprobs"], state.meta("y")["prompt_logprobs"]
    assert [each.token_id for each in read] == [each.token_id for each in drawn]
    assert [each.logprob for each in read] == pytest.approx([each.logprob for each in drawn])


def test_log_probabilities_come_in_the_form_that_sglang_has() -> None:
    @pm.function
    def program(s: pm.State, **options: Any) -> None:
        s += "p" + pm.gen("x", return_logprob=True, **options)

    meta = program.run(top_logprobs_num=2, backend=scripted()).meta("x")
    entries = [(each.logprob, each.token_id, None) for each in meta["logprobs"]]
    assert meta["output_token_logprobs"] == entries
    assert meta["output_top_logprobs"][0] == [
        (pytest.approx(math.log(0.5)), ord("a"), None),
        (pytest.approx(math.log(0.25)), ord("b"), None),
    ]
    meta = program.run(top_logprobs_num=1, return_text_in_logprobs=True, backend=scripted()).meta(
        "x"
    )
    assert [text for _, _, text in meta["output_token_logprobs"]] == ["c", "b"]
    assert [top[0][2] for top in meta["output_top_logprobs"]] == ["a", "a"]
    assert isinstance(meta["logprobs"][0], TokenLogprob)
    meta = program.run(logprob_start_len=0, return_text_in_logprobs=True, backend=scripted()).meta(
        "x"
    )
    assert meta["input_token_logprobs"] == [(None, ord("p"), "p")]
    assert "output_top_logprobs" not in meta


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"logprob_start_len": 0}, InvalidRequest, "logprob_start_len needs return_logprob=True"),
        ({"return_text_in_logprobs": True}, InvalidRequest, "needs return_logprob=True"),
        (
            {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2},
            UnsupportedFeature,
            "logprob_start_len with top_logprobs_num",
        ),
    ],
)
def test_log_probabilities_that_cannot_be_given_are_refused_at_the_line(
    options: dict[str, Any], error: type[Exception], words: str
) -> None:
    @pm.function
    def program(s: pm.State) -> None:
        with pytest.raises(error, match=words):
            s += "p" + pm.gen("x", **options)

    program.run(backend=scripted())
    for name, value in (("logprob_start_len", -2), ("logprob_start_len", "x")):
        with pytest.raises(InvalidRequest, match=name):
            pm.gen("x", **{name: value})
    with pytest.raises(TypeError, match="return_text_in_logprobs"):
        pm.gen("x", return_text_in_logprobs="yes")


# -- Types ---------------------------------------------------------------------------------------


class Point(BaseModel):
    x: int
    y: int = 0


@pytest.mark.parametrize(
    ("dtype", "text", "value"),
    [
        (list[int], "[1,-2]", [1, -2]),
        (list[str], '["a","b c"]', ["a", "b c"]),
        (list[Point], '[{"x":1,"y":2}]', [Point(x=1, y=2)]),
        (dict[str, float], '{"a":1.5}', {"a": 1.5}),
        (tuple[int, str], '[1,"a"]', (1, "a")),
        (Literal["red", "blue"], "red", "red"),
        (Literal[1, 2, "many", True, None], "2", 2),
        (Literal[1, 2, "many", True, None], "True", True),
        (Literal[1, 2, "many", True, None], "None", None),
        (list[Literal["a", "b"]], '["a","b","a"]', ["a", "b", "a"]),
    ],
)
def test_types_with_arguments_give_their_values(dtype: Any, text: str, value: object) -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += "p" + pm.gen("x", dtype=dtype)

    state = program.run(backend=ScriptedBackend(text))
    assert state["x"] == value
    assert type(state["x"]) is type(value)
    assert state.raw("x") == text


@pytest.mark.parametrize("dtype", [list[int], list[bool], Literal["red", "blue", 12]])
def test_types_with_arguments_are_enforced_by_the_engine(engine: AsyncEngine, dtype: Any) -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += "p" + pm.gen("x", dtype=dtype, max_tokens=24)

    for seed in range(5):
        value = program.run(backend=engine, seed=seed, temperature=1)["x"]
        if dtype == Literal["red", "blue", 12]:
            assert value in ("red", "blue", 12)
        else:
            kind = bool if dtype == list[bool] else int
            assert isinstance(value, list)
            assert all(type(item) is kind for item in value)


def test_a_text_that_is_not_of_its_type_says_so() -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += "p" + pm.gen("x", dtype=list[int])

    backend = ScriptedBackend('["a"]')
    with pytest.raises(InvalidOutput, match=r"'x' cannot be read as list\[int\]"):
        program.run(backend=backend)["x"]
    with pytest.raises(InvalidRequest, match="1 and '1', which are written the same"):
        pm.gen("x", dtype=Literal[1, "1"])


# -- gen_int and gen_string ----------------------------------------------------------------------


def test_gen_int_and_gen_string_take_the_options_by_sglangs_positions() -> None:
    seen: list[Request] = []

    def answer(prompt: str, request: Request) -> str:
        seen.append(request)
        return '"12" ' if prompt.endswith("s") else "12 "

    options: tuple[Any, ...] = (9, 1, ["!"], [3], ["#"], 0.5, 0.6, 7, 0.1, 0.2, 0.3, False)

    @pm.function
    def program(s: pm.State) -> None:
        s += "i" + pm.gen_int("i", *options, True, None, 2, True)
        s += "s" + pm.gen_string("s", *options, True, 0, None, False, seed=4)

    tokenizer = ByteTokenizer(['"12"'])
    state = program.run(backend=ScriptedBackend(answer, tokenizer=tokenizer))
    assert (state["i"], state["s"]) == (12, "12")
    for request, extra in zip(seen, ((" ", "\n"), ()), strict=True):
        sampling = request.sampling
        assert (sampling.max_tokens, sampling.stop) == (9, (*extra, "!"))
        assert (sampling.stop_token_ids, sampling.stop_regex) == ((3,), ("#",))
        assert (sampling.temperature, sampling.top_p, sampling.top_k) == (0.5, 0.6, 7)
        assert (sampling.min_p, sampling.frequency_penalty) == (0.1, 0.2)
        assert (sampling.presence_penalty, sampling.ignore_eos) == (0.3, False)
    assert [request.sampling.logprobs for request in seen] == [2, 0]
    assert seen[1].sampling.seed == 4
    assert state.meta("i")["output_token_logprobs"][0][2] == "1"
    assert len(state.meta("s")["input_token_logprobs"]) == len("i12s")
    assert pm.gen_int.__name__ == "gen_int"
