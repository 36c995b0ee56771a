"""Programs of the kinds that SGLang's documentation and examples show, with the import changed.

Each runs on the scripted backend, where what it makes is known, and on a tiny engine with random
weights, where what holds of its text and variables is checked all the same.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

import palmette as sgl
from palmette.lang.backends.scripted import ByteTokenizer
from palmette.protocol import Request, TokenBackend
from palmette.runtime.async_engine import AsyncEngine
from palmette.runtime.testing import tiny_engine


@pytest.fixture(scope="module")
def engine() -> Iterator[AsyncEngine]:
    with AsyncEngine.over(lambda: tiny_engine(num_pages=512)) as engine:
        yield engine


@pytest.fixture(params=["scripted", "tiny"])
def backend(request: pytest.FixtureRequest, engine: AsyncEngine) -> Iterator[TokenBackend]:
    """The default backend of the test."""
    chosen: TokenBackend = sgl.ScriptedBackend(answer) if request.param == "scripted" else engine
    sgl.set_default_backend(chosen)
    yield chosen
    sgl.set_default_backend(None)


# What the script has for a constraint; other requests get words.
SCRIPTED = {
    r"((25[0-5]|2[0-4]\d|[01]?\d\d?)\.){3}(25[0-5]|2[0-4]\d|[01]?\d\d?)": "10.0.0.1",
    "[A-Z]{3}-[0-9]{2}": "ABC-12",
    "是|否": "是",
}


def answer(prompt: str, request: Request) -> str:
    constraint = request.constraint
    if constraint is None:
        return "some words\nand more"
    if constraint.kind == "regex":
        return SCRIPTED.get(constraint.source, "12 ")
    return '{"name":"Ann","age":31}'


def chatml(*messages: tuple[str, str]) -> str:
    return "".join(f"<|im_start|>{role}\n{content}<|im_end|>\n" for role, content in messages)


# -- Completions ---------------------------------------------------------------------------------


@sgl.function
def few_shot(s, question):
    s += "Q: Where is the Prado?\nA: Madrid\n"
    s += "Q: Where is the Uffizi?\nA: Florence\n"
    s += "Q: " + question + "\n"
    s += "A:" + sgl.gen("answer", stop="\n", temperature=0, max_tokens=16)


def test_few_shot_prompts_complete(backend: TokenBackend) -> None:
    state = few_shot.run(question="Where is the Louvre?")
    assert state.text().endswith("Where is the Louvre?\nA:" + state["answer"])
    assert "\n" not in state["answer"]
    state = few_shot.run("Where is the Tate?")  # by position
    assert (
        "".join(few_shot.run("Where is the Tate?", stream=True).text_iter("answer"))
        == (state["answer"])
    )


def test_a_batch_keeps_its_order_and_shows_its_progress(
    backend: TokenBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = [f"Where is number {i}?" for i in range(6)]
    states = few_shot.run_batch(
        [{"question": question} for question in questions], num_threads=2, progress_bar=True
    )
    for question, state in zip(questions, states, strict=True):
        assert question in state.text()
        assert state.text().endswith(state["answer"])
    assert "6/6" in capsys.readouterr().err


def test_retrieved_passages_are_passed_by_position(backend: TokenBackend) -> None:
    @sgl.function
    def rag(s, question, *passages):
        s += "Passages:\n" + "".join(f"- {passage}\n" for passage in passages)
        s += question + " " + sgl.gen("answer", max_tokens=4)

    state = rag.run("Who?", "Ann did.", "Bob did not.")
    assert state.text() == "Passages:\n- Ann did.\n- Bob did not.\nWho? " + state["answer"]


def test_a_call_of_the_function_runs_it(backend: TokenBackend) -> None:
    assert few_shot("Where?")["answer"] == few_shot.run("Where?")["answer"]


# -- Chats ---------------------------------------------------------------------------------------


@sgl.function
def two_turns(s, first, second):
    s += sgl.system("You are brief.")
    s += sgl.user(first)
    s += sgl.assistant(sgl.gen("first", max_tokens=8, stop="\n"))
    s += sgl.user(second)
    s += sgl.assistant_begin() + sgl.gen("second", max_tokens=8, stop="\n") + sgl.assistant_end()


def test_a_chat_of_two_turns_has_its_messages(backend: TokenBackend) -> None:
    state = two_turns.run("Hello.", "And then?")
    assert state.messages() == [
        {"role": "system", "content": "You are brief."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": state["first"]},
        {"role": "user", "content": "And then?"},
        {"role": "assistant", "content": state["second"]},
    ]


def test_roles_around_blocks_and_as_methods_are_the_same() -> None:
    @sgl.function
    def blocks(s):
        with s.system():
            s += "You are brief."
        s.user("Hello.")
        with s.assistant():
            s += "I say: " + sgl.gen("words", stop="\n")
        return s["words"]

    state = blocks.run(backend=sgl.ScriptedBackend(answer))
    assert state.ret_value == "some words"
    assert state.text() == chatml(
        ("system", "You are brief."), ("user", "Hello."), ("assistant", "I say: some words")
    )


def test_a_tool_is_chosen_and_its_result_goes_on(backend: TokenBackend) -> None:
    @sgl.function
    def use_tool(s, question):
        s += sgl.assistant(f"To answer {question!r} I need a tool: ")
        with s.var_scope("spoken"):
            s += "use " + sgl.gen("tool", choices=["calculator", "search"]) + ". "
        if s["tool"] == "calculator":
            s += sgl.assistant("It computes " + sgl.gen("sum", max_tokens=4, stop="\n"))
        else:
            s += sgl.assistant("The keyword is " + sgl.gen("keyword", max_tokens=4, stop="\n"))

    state = use_tool.run(question="2 + 2")
    assert state["tool"] in ("calculator", "search")
    assert state["spoken"] == f"use {state['tool']}. "
    assert ("sum" in state) == (state["tool"] == "calculator")
    assert len(state.messages()) == 2


def test_an_agent_acts_until_it_is_done(backend: TokenBackend) -> None:
    @sgl.function
    def react(s, question):
        s += f"Question: {question}\n"
        for turn in range(1, 4):
            s += f"Thought {turn}:" + sgl.gen(stop="\n", max_tokens=6) + "\n"
            s += f"Act {turn}: " + sgl.select(f"act{turn}", ["look", "finish"]) + "\n"
            if s[f"act{turn}"] == "finish":
                break
            s += f"Seen {turn}: nothing\n"

    state = react.run("Where?")
    acts = [state[name] for name in ("act1", "act2", "act3") if name in state]
    assert set(acts[:-1]) <= {"look"}
    assert state.text().count("Thought") == len(acts)


def test_a_variable_is_read_while_the_prompt_is_built(backend: TokenBackend) -> None:
    @sgl.function
    def expert(s, question):
        s += sgl.user(f"Who can answer this: {question}")
        s += sgl.assistant("A good one is " + sgl.gen("expert", max_tokens=6, stop="\n") + ".")
        s += sgl.user(f"What would {s['expert'].strip()} say?")
        s += sgl.assistant(sgl.gen("answer", max_tokens=8, stop="\n"))

    state = expert.run("Why?")
    assert f"What would {state['expert'].strip()} say?" in state.text()


def test_a_shortest_length_is_kept(engine: AsyncEngine) -> None:
    @sgl.function
    def long(s):
        s += sgl.user("Say something long.")
        s += sgl.assistant(sgl.gen("words", min_tokens=20, max_tokens=24))

    meta = long.run(backend=engine, temperature=0).get_meta_info("words")
    assert 20 <= meta["completion_tokens"] <= 24


# -- Branches ------------------------------------------------------------------------------------


def test_tips_are_expanded_side_by_side(backend: TokenBackend) -> None:
    @sgl.function
    def tips(s):
        s += "Two tips: 1. Sleep. 2. Eat.\n"
        forks = s.fork(2)
        for i, f in enumerate(forks):
            f += f"Tip {i + 1} in detail: " + sgl.gen("detail", max_tokens=6, stop="\n")
        s += "Tip 1: " + forks[0]["detail"] + "\n" + "Tip 2: " + forks[1]["detail"] + "\n"
        s += "To sum up: " + sgl.gen("summary", max_tokens=6, stop="\n")
        return [f["detail"] for f in forks]

    state = tips.run()
    one, two = state.ret_value
    assert state.text() == (
        f"Two tips: 1. Sleep. 2. Eat.\nTip 1: {one}\nTip 2: {two}\nTo sum up: {state['summary']}"
    )


def test_a_parameter_called_n_is_the_programs(backend: TokenBackend) -> None:
    @sgl.function
    def sample(s, question, n):
        s += question
        forks = s.fork(n)
        forks += " Because " + sgl.gen("why", max_tokens=5, stop="\n")
        forks += " So: " + sgl.gen("verdict", choices=["yes", "no"])
        forks.join()

    state = sample.run(question="Is it?", n=5)
    assert len(state["why"]) == len(state["verdict"]) == 5
    assert set(state["verdict"]) <= {"yes", "no"}


def test_passages_are_encoded_side_by_side_and_appended(backend: TokenBackend) -> None:
    @sgl.function
    def joined(s):
        s += "Read.\n"
        forks = s.fork(3)
        forks += lambda i: f"Passage {i}.\n"
        forks.join(mode="concate_and_append")
        s += "Now: " + sgl.gen("answer", max_tokens=4)

    state = joined.run()
    assert state.text() == "Read.\nPassage 0.\nPassage 1.\nPassage 2.\nNow: " + state["answer"]


def test_branches_of_branches_and_a_copy(backend: TokenBackend) -> None:
    @sgl.function
    def stages(s):
        s += "A"
        for f in (outer := s.fork(2)):
            f += "B" + sgl.gen("b", max_tokens=2, stop="\n")
            inner = f.fork(2)
            inner += "C" + sgl.gen("c", max_tokens=2, stop="\n")
            inner.join()
        outer.join()
        with s.copy() as aside:
            aside += "D" + sgl.gen("d", max_tokens=2, stop="\n")
        s += "E"

    state = stages.run()
    assert state.text() == "AE"
    assert [len(each) for each in state["c"]] == [2, 2]
    assert len(state["b"]) == 2
    assert len(state["d"]) == 1


# -- Constraints and types -----------------------------------------------------------------------


def test_a_regex_holds_for_the_whole_text(backend: TokenBackend) -> None:
    address, code, word = SCRIPTED

    @sgl.function
    def written(s):
        s += "The server is at " + sgl.gen("address", regex=address, max_tokens=20)
        s += ", its code " + sgl.gen("code", regex=code, max_tokens=20)
        s += "、对吗？" + sgl.gen("word", regex=word, max_tokens=20)

    state = written.run(temperature=0)
    assert re.fullmatch(address, state["address"])
    assert re.fullmatch(code, state["code"])
    assert re.fullmatch(word, state["word"])


def test_a_character_comes_as_json(backend: TokenBackend) -> None:
    class Character(BaseModel):
        name: str
        age: int

    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"enum": [30, 31]}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }

    @sgl.function
    def character(s):
        s += "A character: " + sgl.gen("text", json_schema=json.dumps(schema), max_tokens=90)
        s += "\nOnce more: " + sgl.gen("made", json_schema=Character, max_tokens=90)

    state = character.run(temperature=0)
    assert set(json.loads(state["text"])) == {"name", "age"}
    assert isinstance(state["made"], Character)


def test_a_number_is_one_and_can_be_set_again_after_the_run(backend: TokenBackend) -> None:
    @sgl.function
    def hours(s):
        s += "There are " + sgl.gen_int("hours", max_tokens=5) + " hours in a day. "
        s += "And " + sgl.gen("days", dtype=int, max_tokens=5) + " days in a week."

    state = hours.run(temperature=0)
    assert int(state["hours"]) == state["hours"]
    assert f"There are {state.raw('hours')} hours" in state.text()
    before = state["days"]
    state["days"] = int(state["days"]) + 1
    assert state["days"] == before + 1


def test_an_option_is_chosen_by_each_of_the_rules(backend: TokenBackend) -> None:
    @sgl.function
    def answer_by(s, method):
        s += "The capital of Spain is" + sgl.gen(
            "city", choices=[" Madrid", " Barcelona"], choices_method=method
        )

    for method in (
        sgl.token_length_normalized,
        sgl.greedy_token_selection,
        sgl.unconditional_likelihood_normalized,
    ):
        state = answer_by.run(method)
        assert state["city"] in (" Madrid", " Barcelona")
        assert state.get_meta_info("city")["method"] == method.value


def test_endings_are_compared_by_their_likelihood() -> None:
    tokenizer = ByteTokenizer([" barks", " sings", "The dog", "The bird"])
    backend = sgl.ScriptedBackend(
        tokenizer=tokenizer,
        probabilities={
            "The dog": {" barks": 0.7, " sings": 0.1},
            "The bird": {" barks": 0.1, " sings": 0.6},
        },
    )

    @sgl.function
    def ending(s, start, endings):
        s += start + sgl.select("ending", endings)

    items = [{"start": f"The {who}", "endings": [" barks", " sings"]} for who in ("dog", "bird")]
    states = ending.run_batch(items, backend=backend, temperature=0)
    right = [state["ending"] == wanted for state, wanted in zip(states, (" barks", " sings"))]  # noqa: B905
    assert right == [True, True]


# -- Several texts and log-probabilities ---------------------------------------------------------


def test_two_answers_of_one_gen_are_a_list(backend: TokenBackend) -> None:
    @sgl.function
    def answers(s, question):
        s += sgl.user(question)
        s += sgl.assistant(sgl.gen("answer", max_tokens=8, n=2, stop="\n"))

    state = answers.run("What?")
    assert len(state["answer"]) == 2
    assert state.messages()[-1] == {"role": "assistant", "content": state["answer"][0]}


def test_decoding_branches_at_the_likeliest_first_tokens(backend: TokenBackend) -> None:
    @sgl.function
    def cot(s, question, k):
        s += f"Q: {question}\nA:"
        forks = s.fork(1)
        forks[0] += sgl.gen(
            "first",
            max_tokens=1,
            return_logprob=True,
            top_logprobs_num=k,
            return_text_in_logprobs=True,
        )
        tops = forks[0].get_meta_info("first")["output_top_logprobs"][0]
        branches = s.fork(k)
        for branch, (logprob, token_id, text) in zip(branches, tops):  # noqa: B905
            assert isinstance(token_id, int)
            branch["start"] = math.exp(logprob)
            branch += text.replace("<", "(") + sgl.gen("path", max_tokens=3, return_logprob=True)
        branches.join()

    state = cot.run("Why?", 3)
    assert len(state["path"]) == 3
    assert state["start"] == sorted(state["start"], reverse=True)
    for meta in state.get_meta_info("path"):
        entries = meta["output_token_logprobs"]
        assert all(text is None and logprob <= 0 for logprob, _, text in entries)


def test_the_log_probabilities_of_a_prompt_are_read(backend: TokenBackend) -> None:
    @sgl.function
    def perplexity(s, text):
        s += text + sgl.gen(
            "x", max_tokens=1, return_logprob=True, logprob_start_len=0, temperature=0
        )

    entries = perplexity.run("some text").get_meta_info("x")["input_token_logprobs"]
    assert [token_id for _, token_id, _ in entries] == list(b"some text")
    assert entries[0][0] is None
    assert all(logprob < 0 for logprob, _, _ in entries[1:])


# -- Streams, arguments, defaults ----------------------------------------------------------------


async def test_async_iterators_give_the_text_and_one_variable(backend: TokenBackend) -> None:
    state = two_turns.run("Hello.", "And?", stream=True, temperature=0)
    first = "".join([chunk async for chunk in state.text_async_iter(var_name="first")])
    whole = "".join([chunk async for chunk in state.text_async_iter()])
    pairs = [pair async for pair in state.text_async_iter("second", return_meta_data=True)]
    assert first == state["first"]
    assert whole == state.text()
    assert "".join(text for text, _ in pairs) == state["second"]
    assert pairs[-1][1]["finish_reason"] == state.get_meta_info("second")["finish_reason"]


def test_bound_arguments_and_defaults_of_a_run(backend: TokenBackend) -> None:
    bound = two_turns.bind(first="Hello.")
    state = bound.run(second="And?", temperature=0, max_new_tokens=3)
    assert state.messages()[1]["content"] == "Hello."
    assert two_turns.arg_names == ["first", "second"]


def test_variables_by_every_name_they_have(backend: TokenBackend) -> None:
    @sgl.function
    def named(s):
        s += "x" + sgl.gen("a", max_tokens=2)
        s.set_var("b", s.get_var("a") + "!")
        s["c"] = "a" in s
        s.sync()
        assert s.error() is None

    state = named.run()
    assert (state["b"], state["c"]) == (state["a"] + "!", True)
    assert "d" not in state
    with pytest.raises(KeyError, match="d"):
        state.get_meta_info("d")


def test_what_a_text_model_cannot_do_is_refused_by_name() -> None:
    @sgl.function
    def look(s, path):
        s += sgl.user(sgl.image(path) + "What is this?")

    with pytest.raises(sgl.UnsupportedFeature, match="image"):
        look.run("cat.png", backend=sgl.ScriptedBackend())
    for build in (lambda: sgl.video("v.mp4", 8), lambda: sgl.separate_reasoning(sgl.gen("x"))):
        with pytest.raises(sgl.UnsupportedFeature):
            build()


def test_every_argument_of_a_run_is_known(backend: TokenBackend) -> None:
    arguments: dict[str, Any] = {
        "max_new_tokens": 6,
        "n": 1,
        "stop": ["#"],
        "stop_token_ids": [3],
        "stop_regex": ["@@+"],
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 50,
        "min_p": 0.01,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
        "ignore_eos": False,
        "return_logprob": True,
        "logprob_start_len": 0,
        "return_text_in_logprobs": True,
        "stream": False,
        "use_thread": True,
    }
    state = few_shot.run("Where?", backend=backend, **arguments)
    meta = state.get_meta_info("answer")
    assert meta["input_token_logprobs"][0] == (None, ord("Q"), "Q")
    assert len(meta["output_token_logprobs"]) <= 16
    state = few_shot.run("Where?", return_logprob=True, top_logprobs_num=2)
    assert all(len(top) == 2 for top in state.meta("answer")["output_top_logprobs"])
