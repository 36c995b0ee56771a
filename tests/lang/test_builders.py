"""Arguments are checked where the program says them; what is not honoured is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest

import palmette as pm
from palmette.errors import InvalidRequest, UnsupportedFeature
from palmette.lang.backends.scripted import ScriptedBackend
from palmette.protocol import Constraint


@pytest.mark.parametrize(
    ("arguments", "feature"),
    [
        ({"dtype": bytes}, "dtype"),
        ({"dtype": Literal[b"x"]}, "dtype"),
        ({"dtype": Callable[[int], int]}, "dtype"),
        ({"dtype": "decimal"}, "dtype"),
    ],
)
def test_what_is_not_honoured_is_refused_by_name(arguments: dict[str, Any], feature: str) -> None:
    with pytest.raises(UnsupportedFeature, match=feature) as info:
        pm.gen("x", **arguments)
    assert info.value.param == feature


@pytest.mark.parametrize("refused", [pm.image, pm.video, pm.separate_reasoning])
def test_primitives_that_cannot_work_are_refused_by_name(refused: Any) -> None:
    with pytest.raises(UnsupportedFeature, match=refused.__name__):
        refused("cat.png")


def test_log_probabilities_are_asked_for_by_call_and_run_together() -> None:
    backend = pm.ScriptedBackend()

    @pm.function
    def program(s: pm.State) -> None:
        s += "p" + pm.gen("x", return_logprob=True) + pm.gen("y", return_logprob=False)
        s += pm.gen("z") + pm.gen("u", top_logprobs_num=1)

    program.run(top_logprobs_num=3, backend=backend)
    program.run(return_logprob=False, backend=backend)
    found = [request.sampling.logprobs for request in backend.requests]
    assert found == [3, None, 3, 1, 0, None, None, 1]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": 1.5}, "top_k"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 3, "min_tokens": 4}, "min_tokens"),
        ({"stop": [""]}, "stop"),
        ({"stop": 5}, "stop"),
        ({"stop_regex": [""]}, "stop_regex strings must be non-empty"),
        ({"stop_regex": 5}, "stop_regex must be a string or a list of strings, got int"),
        ({"stop_regex": ["x"] * 17}, "at most 16 patterns, got 17"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"seed": "x"}, "seed"),
        ({"return_logprob": False, "top_logprobs_num": 2}, "top_logprobs_num"),
        ({"regex": "a", "json_schema": {}}, "regex and json_schema exclude each other"),
        ({"grammar": "a", "ebnf": "a"}, "grammar and ebnf exclude each other"),
        ({"regex_syntax": "python"}, "regex_syntax needs regex="),
        ({"regex": "a", "regex_syntax": "posix"}, "syntax of a regex is one of ecma, python"),
        ({"json_schema": {}, "grammar_syntax": "lark"}, "grammar_syntax needs grammar="),
        ({"grammar": "a", "grammar_syntax": "yacc"}, "syntax of a grammar is one of gbnf, lark"),
        ({"regex": "a", "whitespace": "flexible"}, "whitespace needs json_schema= or"),
        ({"json_schema": {}, "whitespace": "none"}, "whitespace is one of compact, flexible"),
        ({"json_schema": {}, "property_order": "sorted"}, "order is one of declared, any"),
        ({"json_schema": {}, "undeclared_properties": "no"}, "undeclared is one of allowed, forb"),
        ({"regex": "a", "undeclared_properties": "forbidden"}, "undeclared_properties needs json"),
        ({"regex": "a", "grammar_backend": "guess"}, "backend is one of palmette"),
        ({"grammar_backend": "xgrammar"}, "grammar_backend needs regex="),
        ({"jump_forward": "far"}, "jump_forward must be 'token' or 'canonical'"),
        ({"choices_method": "probability"}, "choices_method needs choices"),
        ({"append": True, "name": None}, "append needs a name"),
    ],
)
def test_values_that_make_no_sense_are_refused(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        pm.gen(**{"name": "x", **arguments})


def test_types_that_make_no_sense_are_refused() -> None:
    for call in (
        lambda: pm.gen("x", regex=5),  # type: ignore[arg-type]
        lambda: pm.gen("x", json_schema=5),
        lambda: pm.gen("x", grammar=5),  # type: ignore[arg-type]
        lambda: pm.gen("x", structural_tag=5),  # type: ignore[arg-type]
        lambda: pm.gen(5),  # type: ignore[arg-type]
        lambda: pm.special(5),  # type: ignore[arg-type]
        lambda: pm.user(5),  # type: ignore[arg-type]
        lambda: pm.gen("x", max_tokens=1, max_new_tokens=2),
        lambda: pm.gen("x", colour="red"),  # type: ignore[call-arg]
    ):
        with pytest.raises(TypeError):
            call()


TAG = {"structures": [{"begin": "<f>", "schema": {}, "end": "</f>"}], "triggers": ["<f>"]}


@pytest.mark.parametrize(
    ("arguments", "constraint"),
    [
        ({"regex": "a", "regex_syntax": "python"}, Constraint.regex("a", syntax="python")),
        ({"grammar": "root ::= a"}, Constraint.grammar("root ::= a")),
        ({"ebnf": "root ::= a"}, Constraint.grammar("root ::= a", syntax="gbnf")),
        ({"regex": "a", "regex_syntax": "ecma"}, Constraint.regex("a")),
        ({"grammar": "root ::= a", "grammar_syntax": "gbnf"}, Constraint.grammar("root ::= a")),
        (
            {"grammar": "start: a", "grammar_syntax": "lark"},
            Constraint.grammar("start: a", syntax="lark"),
        ),
        ({"structural_tag": TAG}, Constraint.structural_tag(TAG)),
        (
            {"json_schema": True, "whitespace": "flexible", "property_order": "any"},
            Constraint.json_schema(True, whitespace="flexible", order="any"),
        ),
        (
            {"json_schema": True, "undeclared_properties": "forbidden"},
            Constraint.json_schema(True, undeclared="forbidden"),
        ),
        (
            {"dtype": bool, "grammar_backend": "llguidance"},
            Constraint.regex("True|False", backend="llguidance"),
        ),
    ],
)
def test_constraints_and_their_options_reach_the_request(
    arguments: dict[str, Any], constraint: Constraint
) -> None:
    backend = pm.ScriptedBackend("True" if "dtype" in arguments else "1")
    if "regex" in arguments:
        backend = pm.ScriptedBackend("a")

    @pm.function
    def program(s: pm.State) -> None:
        s += "p" + pm.gen("x", **arguments)

    program.run(backend=backend)
    assert backend.requests[0].constraint == constraint


def test_min_tokens_above_the_default_maximum_waits_for_the_run() -> None:
    backend = pm.ScriptedBackend("x" * 300)

    @pm.function
    def program(s: pm.State) -> None:
        s += "p" + pm.gen("x", min_tokens=200)

    with pytest.raises(InvalidRequest, match="min_tokens"):
        program.run(backend=backend)
    assert len(program.run(max_tokens=250, backend=backend)["x"]) == 250


def test_every_sampling_option_reaches_the_request() -> None:
    backend = pm.ScriptedBackend("x" * 300)
    options = {
        "max_tokens": 7,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_p": 0.6,
        "top_k": 7,
        "min_p": 0.1,
        "frequency_penalty": 0.2,
        "presence_penalty": 0.3,
        "repetition_penalty": 1.2,
        "ignore_eos": True,
        "seed": 11,
        "jump_forward": "canonical",
    }

    @pm.function
    def given(s: pm.State) -> None:
        s += "p" + pm.gen("x", stop=["a", "b"], stop_token_ids=[3], top_logprobs_num=2, **options)

    @pm.function
    def default(s: pm.State) -> None:
        s += "p" + pm.gen("x")

    given.run(backend=backend)
    default.run(
        backend=backend, stop=["a", "b"], stop_token_ids=[3], return_logprob=True, **options
    )
    for request, num_top in zip(backend.requests, (2, 0), strict=True):
        sampling = request.sampling
        assert {name: getattr(sampling, name) for name in options} == options
        assert (sampling.stop, sampling.stop_token_ids) == (("a", "b"), (3,))
        assert sampling.logprobs == num_top


def test_explaining_is_an_option_of_the_run_alone() -> None:
    with pytest.raises(TypeError, match="explain"):
        pm.gen("x", explain=True)  # type: ignore[call-arg]


def test_building_changes_nothing_that_was_passed_in() -> None:
    stop, schema, options = ["."], {"type": "object", "properties": {"a": {}}}, ["a", "b"]
    backend = ScriptedBackend({"": '{"a":1}', "p": "x"})

    @pm.function
    def program(s: pm.State) -> None:
        s += "p" + pm.gen("x", stop=stop, max_tokens=3)
        s += pm.gen("y", json_schema=schema, stop=stop) + pm.select("z", options)

    defaults = {"stop": ["!"]}
    program.run(backend=backend, **defaults)
    assert (stop, options, defaults) == (["."], ["a", "b"], {"stop": ["!"]})
    assert schema == {"type": "object", "properties": {"a": {}}}


def test_a_jump_mode_of_the_run_is_for_generations_with_a_constraint() -> None:
    backend = ScriptedBackend({"": "x"})

    @pm.function
    def program(s: pm.State) -> None:
        s += "p" + pm.gen("x") + pm.gen("y", regex="x")

    state = program.run(backend=backend, jump_forward="canonical")
    assert (state["x"], state["y"]) == ("x", "x")
    assert {request.sampling.jump_forward for request in backend.requests} == {"canonical"}
