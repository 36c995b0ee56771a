"""Which option a select picks, with what probability, and what stays in the state."""

from __future__ import annotations

import math

import pytest

import palmette as pm
from palmette.lang.backends.scripted import ByteTokenizer, ScriptedBackend

EMPTY: dict[str, dict[str | bytes | int, float]] = {}


def run(backend: ScriptedBackend, prompt: str, choices: list[str], **options: object) -> pm.State:
    @pm.function
    def program(s: pm.State) -> None:
        s += prompt + pm.select("x", choices, **options)  # type: ignore[arg-type]

    return program.run(backend=backend)


def test_an_option_that_begins_another_counts_for_not_going_on() -> None:
    probabilities = {"p": {"a": 0.9}, "pa": {"a": 0.3}, "paa": {"a": 0.0}}
    state = run(ScriptedBackend(probabilities=probabilities), "p", ["a", "aa"])
    meta = state.meta("x")
    assert state["x"] == "a"
    likelihoods = {option: math.exp(value) for option, value in meta["log_likelihoods"].items()}
    assert likelihoods == pytest.approx({"a": 0.63, "aa": 0.27})
    assert meta["probabilities"] == pytest.approx({"a": 0.7, "aa": 0.3})
    probabilities["pa"] = {"a": 0.8}
    assert run(ScriptedBackend(probabilities=probabilities), "p", ["a", "aa"])["x"] == "aa"


def test_an_option_that_begins_several_others_counts_each_way_on_once() -> None:
    probabilities = {"p": {"a": 1.0}, "pa": {"b": 0.3, "c": 0.5}, "pab": {"c": 0.5, "d": 0.5}}
    backend = ScriptedBackend(probabilities=probabilities)
    meta = run(backend, "p", ["abc", "abd", "ac", "a"]).meta("x")
    assert meta["probabilities"] == pytest.approx({"abc": 0.15, "abd": 0.15, "ac": 0.5, "a": 0.2})


def test_only_tokens_of_the_option_enter_the_score() -> None:
    tokenizer = ByteTokenizer(["Call", " >>>", "all", "get", "_time"])
    backend = ScriptedBackend(
        tokenizer=tokenizer,
        probabilities={"Call >>>": {"all": 0.3, "get": 0.5}, "get": {"_time": 0.9}},
    )
    state = run(backend, "Call >>>", ["all", "get_time"])
    [request] = backend.score_requests
    assert [tokenizer.decode([i]) for i in request.token_ids] == ["Call", " >>>"]
    spelled = [[tokenizer.decode([i]) for i in ids] for ids in request.continuations]
    assert spelled == [["all"], ["get", "_time"]]
    assert state.meta("x")["token_logprobs"]["get_time"] == pytest.approx(
        (math.log(0.5), math.log(0.9))
    )
    assert state["x"] == "get_time"


def test_a_boundary_token_that_merges_is_scored_for_all_options() -> None:
    tokenizer = ByteTokenizer([" =", " 1", " 12"])
    backend = ScriptedBackend(tokenizer=tokenizer, probabilities={"x =": {" 1": 0.2, " 12": 0.5}})
    state = run(backend, "x = ", ["1", "12"])
    [request] = backend.score_requests
    assert tokenizer.decode(request.token_ids) == "x ="
    assert [tokenizer.decode(ids) for ids in request.continuations] == [" 1", " 12"]
    assert state.text() == "x = 12"
    assert tokenizer.decode(state.token_ids()) == "x = 12"
    assert state.token_ids()[-1] == tokenizer.single_id(" 12")


def test_all_options_are_scored_from_one_place() -> None:
    # The first option merges with the space before it, the second does not.
    tokenizer = ByteTokenizer([" one"])
    backend = ScriptedBackend(tokenizer=tokenizer)
    run(backend, "x ", ["one", "two"])
    [request] = backend.score_requests
    assert tokenizer.decode(request.token_ids) == "x"
    assert [tokenizer.decode(ids) for ids in request.continuations] == [" one", " two"]


def test_after_a_generation_options_are_encoded_on_their_own() -> None:
    tokenizer = ByteTokenizer([" one"])
    backend = ScriptedBackend(" ", tokenizer=tokenizer)

    @pm.function
    def program(s: pm.State) -> None:
        s += "x" + pm.gen("space") + pm.select("y", ["one", "two"])

    program.run(backend=backend)
    [request] = backend.score_requests
    assert request.token_ids == tuple(b"x ")
    assert request.continuations == (tuple(b"one"), tuple(b"two"))


def test_a_prompt_that_would_merge_away_stays() -> None:
    backend = ScriptedBackend(tokenizer=ByteTokenizer(["The"]))
    state = run(backend, "T", ["he", "ea"])
    assert backend.score_requests[0].token_ids == (ord("T"),)
    assert state.token_ids() == tuple(b"The")


def test_each_option_is_scored_along_its_own_prefix() -> None:
    backend = ScriptedBackend(
        tokenizer=ByteTokenizer(["Yes", "No"]),
        probabilities={
            "?": {"Yes": 0.6, "No": 0.4},
            "Yes": {"No": 0.1, "Yes": 0.9},
            "No": {"Yes": 0.8, "No": 0.2},
        },
    )
    state = run(backend, "?", ["YesNo", "NoYes"])
    assert state["x"] == "NoYes"
    likelihoods = state.meta("x")["log_likelihoods"]
    assert [math.exp(likelihoods[o]) for o in ("YesNo", "NoYes")] == pytest.approx([0.06, 0.32])


@pytest.mark.parametrize(
    "option",
    ["Dr. Ek", "a|b", "line1\nline2", 'say "x"', "(c) 50%", "tab\there", "back\\n", "<|eos|>"],
)
def test_options_are_literal_text(option: str) -> None:
    first = option[0]
    backend = ScriptedBackend(probabilities={"p": {first: 1.0}})
    state = run(backend, "p", [option, "~other"])
    assert state["x"] == option
    assert state.text() == "p" + option
    assert state.token_ids() == tuple(b"p" + option.encode())


@pytest.mark.parametrize("batch_size", [1, 3, 8])
def test_the_first_of_equal_options_wins_in_every_batch(batch_size: int) -> None:
    @pm.function
    def program(s: pm.State, i: int) -> None:
        s += "p" + pm.select("x", ["left", "rite"])

    states = program.run_batch(list(range(50)), num_threads=batch_size, backend=ScriptedBackend())
    assert {state["x"] for state in states} == {"left"}


def test_options_that_share_bytes_of_a_character_are_walked() -> None:
    cat, dog = "🐈".encode(), "🐕".encode()
    assert cat[:3] == dog[:3]
    # Both characters are three tokens, the first two of them shared.
    backend = ScriptedBackend(
        tokenizer=ByteTokenizer([cat[:2]]),
        probabilities=lambda text: (
            {cat[2]: 1.0, cat[3]: 0.2, dog[3]: 0.6} if text.endswith("\ufffd") else None
        ),
    )
    state = run(backend, "p", ["🐈", "🐕"])
    assert state["x"] == "🐕"
    assert state.text() == "p🐕"


def test_methods_disagree_and_the_one_asked_for_is_used() -> None:
    tokenizer = ByteTokenizer(["sk", "ill", "cl", "oud"])
    probabilities: dict[str, dict[str | bytes | int, float]] = {
        "p": {"sk": 0.7, "cl": 0.2},
        "sk": {"ill": 0.01},
        "cl": {"oud": 0.9},
    }
    found = {}
    for method in pm.ChoicesMethod:
        backend = ScriptedBackend(tokenizer=tokenizer, probabilities=probabilities)
        state = run(backend, "p", ["skill", "cloud"], choices_method=method.value)
        found[method.value] = state["x"]
        meta = state.meta("x")
        assert meta["method"] == method.value
        assert meta["probabilities"] == pytest.approx(
            {"skill": 0.007 / 0.187, "cloud": 0.18 / 0.187}
        )
        assert set(meta["scores"]) == {"skill", "cloud"}
    assert found == {
        "probability": "cloud",
        "token_length_normalized": "cloud",
        "greedy_token_selection": "skill",
        "unconditional_likelihood_normalized": "skill",
    }


def test_token_length_normalized_takes_the_mean() -> None:
    backend = ScriptedBackend(
        tokenizer=ByteTokenizer(["Paris", "An", "ti"]),
        probabilities={"p": {"Paris": 0.5, "An": 0.3}, "An": {"ti": 1.0}},
    )
    state = run(backend, "p", ["Paris", "Anti"], choices_method=pm.token_length_normalized)
    assert state["x"] == "Anti"
    assert state.meta("x")["scores"]["Anti"] == pytest.approx(math.log(0.3) / 2)
    assert state.meta("x")["probabilities"]["Paris"] == pytest.approx(0.5 / 0.8)


def test_greedy_selection_extends_the_shorter_option_with_its_mean() -> None:
    # "ab" has ended where "abc" goes on with 0.9; its mean is sqrt(0.8 * 0.9) of 0.848.
    probabilities = {"p": {"a": 0.8}, "pa": {"b": 0.9}, "pab": {"c": 0.9}}
    backend = ScriptedBackend(probabilities=probabilities)
    method = pm.greedy_token_selection
    assert run(backend, "p", ["ab", "abc"], choices_method=method)["x"] == "abc"
    probabilities["pab"] = {"c": 0.8}
    backend = ScriptedBackend(probabilities=probabilities)
    assert run(backend, "p", ["ab", "abc"], choices_method=method)["x"] == "ab"


def test_the_unconditional_rule_takes_off_what_is_likely_anyway() -> None:
    backend = ScriptedBackend(
        tokenizer=ByteTokenizer(["New", " York", " Ulm"]),
        probabilities={
            "p": {"New": 0.5},
            "pNew": {" York": 0.6, " Ulm": 0.3},
            "New": {" York": 0.9, " Ulm": 0.1},
        },
    )
    method = pm.unconditional_likelihood_normalized
    state = run(backend, "p", ["New York", "New Ulm"], choices_method=method)
    assert state["x"] == "New Ulm"
    expected = (math.log(0.5) + math.log(0.3) - math.log(0.1)) / 2
    assert state.meta("x")["scores"]["New Ulm"] == pytest.approx(expected)


def test_an_impossible_option_is_never_the_best_by_any_rule() -> None:
    for method in pm.ChoicesMethod:
        backend = ScriptedBackend(probabilities={"p": {"a": 0.5}, "pa": {"b": 0.5}, "zb": {}})
        assert run(backend, "p", ["zb", "ab"], choices_method=method)["x"] == "ab"


def test_one_option_is_taken_without_asking_the_model() -> None:
    backend = ScriptedBackend()
    state = run(backend, "p", ["only"])
    assert state["x"] == "only"
    assert state.meta("x")["probabilities"] == {"only": 1.0}
    assert state.text() == "ponly"
    assert backend.score_requests == []
    assert state.usage().prompt_tokens == 0


def test_options_in_one_pass_are_one_request_and_shared_beginnings_one_computation() -> None:
    backend = ScriptedBackend()
    state = run(backend, "prompt: ", ["alpha", "alps", "beta"])
    assert len(backend.score_requests) == 1
    # The prompt, "alp", "alph", "b", "be", "bet": a last token is never fed.
    assert state.usage().prefilled_tokens == 8 + len("alp") + len("h") + len("bet")


def test_degenerate_choice_lists_are_refused_where_the_program_says_them() -> None:
    for choices, error, words in (
        ([], ValueError, "must not be empty"),
        (["", "x"], ValueError, "empty choice"),
        (["left", "right", "left"], ValueError, "'left' twice"),
        ([3, "x"], TypeError, "must be strings, got 3"),
        ("abc", TypeError, "got one string"),
        (None, ValueError, "needs choices"),
    ):
        with pytest.raises(error, match=words):
            pm.select("x", choices)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must not be empty"):
        pm.gen("x", choices=[])


def test_probabilities_do_not_depend_on_the_order_of_the_options() -> None:
    probabilities = {"p": {"a": 0.5, "b": 0.3}, "pa": {"b": 0.4, "c": 0.1}}
    options = ["a", "ab", "ac", "b"]
    seen = []
    for choices in (options, options[::-1], ["ab", "b", "a", "ac"]):
        meta = run(ScriptedBackend(probabilities=probabilities), "p", choices).meta("x")
        seen.append(meta["probabilities"])
        assert sum(meta["probabilities"].values()) == pytest.approx(1)
    assert seen[0] == pytest.approx(seen[1])
    assert seen[0] == pytest.approx(seen[2])


def test_impossible_options_are_equally_likely_and_the_first_wins() -> None:
    state = run(ScriptedBackend(probabilities={"p": {"z": 1.0}}), "p", ["a", "b"])
    assert state["x"] == "a"
    assert state.meta("x")["probabilities"] == {"a": 0.5, "b": 0.5}


def test_a_temperature_draws_and_a_seed_repeats() -> None:
    backend = ScriptedBackend(probabilities={"p": {"a": 0.5, "b": 0.3, "c": 0.2}})
    drawn = [run(backend, "p", ["a", "b", "c"], temperature=1.0, seed=i)["x"] for i in range(60)]
    again = [run(backend, "p", ["a", "b", "c"], temperature=1.0, seed=i)["x"] for i in range(60)]
    assert drawn == again
    assert set(drawn) == {"a", "b", "c"}
    cold = [run(backend, "p", ["a", "b", "c"], temperature=0.01, seed=i)["x"] for i in range(20)]
    assert set(cold) == {"a"}


def test_the_temperature_of_the_run_is_not_for_a_select() -> None:
    backend = ScriptedBackend(probabilities={"p": {"a": 0.51, "b": 0.49}})

    @pm.function
    def program(s: pm.State) -> None:
        s += "p" + pm.select("x", ["a", "b"])

    chosen = {program.run(backend=backend, temperature=5, seed=seed)["x"] for seed in range(40)}
    assert chosen == {"a"}


def test_branches_with_one_seed_draw_differently() -> None:
    backend = ScriptedBackend(probabilities={"p": {"a": 0.5, "b": 0.5}})

    @pm.function
    def program(s: pm.State) -> None:
        s += "p"
        branches = s.fork(30)
        branches += pm.select("x", ["a", "b"], temperature=1.0)
        branches.join()

    first, second = program.run(backend=backend, seed=1), program.run(backend=backend, seed=1)
    assert first["x"] == second["x"]
    assert set(first["x"]) == {"a", "b"}


def test_only_the_default_method_draws() -> None:
    with pytest.raises(pm.UnsupportedFeature, match="temperature with choices_method"):
        pm.select("x", ["a"], temperature=1, choices_method="token_length_normalized")
    with pytest.raises(pm.UnsupportedFeature, match="'best_of_three'"):
        pm.select("x", ["a"], choices_method="best_of_three")


def test_gen_with_choices_is_a_select() -> None:
    backend = ScriptedBackend(probabilities={"p": {"a": 0.1, "b": 0.9}})

    @pm.function
    def program(s: pm.State) -> None:
        s += "p" + pm.gen("x", choices=["a", "b"])
        s += "p" + pm.gen("xs", choices=["a", "b"], append=True)

    state = program.run(backend=backend)
    assert state["x"] == "b"
    assert state["xs"] == ["b"]
    with pytest.raises(pm.UnsupportedFeature, match="stop with choices"):
        pm.gen("x", choices=["a"], stop="\n")


def test_what_follows_computes_only_what_is_new() -> None:
    backend = ScriptedBackend("!")

    @pm.function
    def program(s: pm.State) -> None:
        s += "prompt: " + pm.select("x", ["yes", "no"]) + ". " + pm.gen("y")

    state = program.run(backend=backend)
    # "ye" was computed to score "s"; the last token of the option and the constant are new.
    assert state.meta("y")["prefilled_tokens"] == len("s. ")
