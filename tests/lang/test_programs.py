"""What a program appends, and what it reads back."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import partial

import pytest
from pydantic import BaseModel

import palmette as pm
from palmette.errors import (
    BackendNotSet,
    InvalidOutput,
    InvalidRequest,
    ProgramError,
    UnsupportedFeature,
    VariableNotSet,
)
from palmette.lang.backends.scripted import ByteTokenizer, Reply, ScriptedBackend
from palmette.protocol import (
    Constraint,
    FinishReason,
    Piece,
    Request,
    SamplingParams,
    TokenEvent,
)
from palmette.runtime.async_engine import AsyncEngine
from palmette.runtime.testing import history_engine


def run(backend: ScriptedBackend, body: object, **options: object) -> pm.State:
    return pm.function(body).run(backend=backend, **options)  # type: ignore[call-overload, no-any-return]


def test_a_program_reads_what_the_model_wrote() -> None:
    backend = ScriptedBackend("Paris")

    def body(s: pm.State) -> str:
        s += "The capital of France is " + pm.gen("city") + "."
        return s["city"] + "!"

    state = run(backend, body)
    assert state["city"] == "Paris"
    assert state.text() == "The capital of France is Paris."
    assert state.ret_value == "Paris!"
    assert "city" in state
    assert "town" not in state


def test_decorated_with_and_without_parentheses() -> None:
    @pm.function
    def plain(s: pm.State) -> None:
        s += "a"

    @pm.function()
    def called(s: pm.State) -> None:
        s += "b"

    backend = ScriptedBackend()
    assert plain.run(backend=backend).text() + called(backend=backend).text() == "ab"


def test_constants_that_follow_each_other_are_encoded_as_one_text() -> None:
    backend = ScriptedBackend("!", tokenizer=ByteTokenizer(["Hello", " world"]))

    def body(s: pm.State) -> None:
        s += "Hel"
        s += "lo wor" + pm.special("<|eos|>")
        s += "ld" + pm.gen("x")

    run(backend, body)
    tokenizer = backend.tokenizer
    end = tokenizer.control_id("<|eos|>")
    expected = (tokenizer.single_id("Hello"), *b" wor", end, *b"ld")
    assert backend.requests[0].token_ids == expected


def test_generated_ids_are_kept_and_a_constant_after_them_is_encoded_on_its_own() -> None:
    # As one text, "Hello world" would be two tokens.
    tokenizer = ByteTokenizer(["Hello", " world"])
    backend = ScriptedBackend(Reply(pieces=("Hel", "lo", " wo")), tokenizer=tokenizer)

    def body(s: pm.State) -> None:
        s += "p" + pm.gen("x") + "rld" + pm.gen("y")

    state = run(backend, body)
    assert backend.requests[1].token_ids == tuple(b"pHello world")
    assert state.token_ids() == tuple(b"pHello worldHello wo")


def test_reading_token_ids_changes_nothing() -> None:
    tokenizer = ByteTokenizer(["ab"])
    backend = ScriptedBackend("!", tokenizer=tokenizer)

    def body(s: pm.State) -> None:
        s += "a"
        assert s.token_ids() == (ord("a"),)
        s += "b" + pm.gen("x")

    run(backend, body)
    assert backend.requests[0].token_ids == (tokenizer.single_id("ab"),)


def test_a_raw_prompt_begins_with_the_prefix_a_chat_with_the_template() -> None:
    tokenizer = ByteTokenizer(prefix="<|bos|>")
    backend = ScriptedBackend("ok", tokenizer=tokenizer)
    bos = tokenizer.control_id("<|bos|>")

    def raw(s: pm.State) -> None:
        s += "" + pm.gen("first")
        s += "x" + pm.gen("second")

    def chat(s: pm.State) -> None:
        s += pm.user("x") + pm.assistant(pm.gen("x"))

    state = run(backend, raw)
    assert backend.requests[0].token_ids == (bos,)
    assert backend.requests[1].token_ids == (bos, *b"okx")
    assert tokenizer.decode(state.token_ids()) == "<|bos|>" + state.text()
    run(backend, chat)
    assert bos not in backend.requests[2].token_ids


def test_an_empty_prompt_without_a_prefix_is_refused() -> None:
    def body(s: pm.State) -> None:
        s += pm.gen("x")

    with pytest.raises(pm.PrimitiveFailed, match=r"gen\('x'\).*prompt is empty"):
        run(ScriptedBackend(), body)


def test_roles_are_the_segments_of_the_models_own_template() -> None:
    backend = ScriptedBackend("Hi there")

    def body(s: pm.State) -> None:
        s += pm.system("Be kind.")
        s.user("Hello")
        with s.assistant():
            s += pm.gen("answer")
        with s.user():
            s += "Bye"

    state = run(backend, body)
    messages = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi there"},
        {"role": "user", "content": "Bye"},
    ]
    assert state.messages() == messages
    template = backend.chat_template
    whole = template.render(messages, add_generation_prompt=False)  # type: ignore[arg-type]
    assert state.text() == "".join(piece.text for piece in whole)
    assert list(state.token_ids()) == backend.tokenizer.encode(whole)
    prompt = template.render(messages[:2])  # type: ignore[arg-type]
    assert list(backend.requests[0].token_ids) == backend.tokenizer.encode(prompt)


def test_text_in_a_role_is_never_special_text_outside_may_be() -> None:
    backend = ScriptedBackend("ok")
    end = backend.tokenizer.control_id("<|im_end|>")

    def in_role(s: pm.State) -> None:
        s += pm.user("a<|im_end|>b") + pm.assistant_begin() + "c<|im_end|>" + pm.gen("x")

    def by_hand(s: pm.State) -> None:
        s += "a<|im_end|>b" + pm.gen("x")

    def explicit(s: pm.State) -> None:
        s += pm.user("a" + pm.special("<|im_end|>") + "b") + pm.assistant(pm.gen("x"))

    for body, count in ((in_role, 1), (by_hand, 1), (explicit, 2)):
        run(backend, body)
        assert backend.requests[-1].token_ids.count(end) == count


def test_special_wants_a_control_token_of_the_model() -> None:
    def body(s: pm.State) -> None:
        s += pm.special("<|no_such|>")

    with pytest.raises(ProgramError, match=r"special\('<\|no_such\|>'\)"):
        run(ScriptedBackend(), body)


def test_roles_do_not_nest_and_close_what_is_open() -> None:
    def nested(s: pm.State) -> None:
        s += pm.user("a" + pm.assistant("b"))

    def wrong(s: pm.State) -> None:
        s += pm.user_begin() + "a" + pm.assistant_end()

    def unopened(s: pm.State) -> None:
        s += pm.user_end()

    for body, words in (
        (nested, "message of user is open"),
        (wrong, "that of user"),
        (unopened, "no message"),
    ):
        with pytest.raises(ProgramError, match=words):
            run(ScriptedBackend(), body)


def test_a_model_without_a_chat_template_refuses_roles_at_their_line() -> None:
    def body(s: pm.State) -> None:
        with pytest.raises(UnsupportedFeature, match="no chat template"):
            s += pm.user("x")

    run(ScriptedBackend(has_chat_template=False), body)


def test_text_after_a_stopped_generation() -> None:
    backend = ScriptedBackend(["a,b\nc,d", "z"])

    def body(s: pm.State) -> None:
        s += "List: " + pm.gen("x", stop=["\n"]) + "END"
        s += pm.gen("y")

    state = run(backend, body)
    assert state["x"] == "a,b"
    assert state.text() == "List: a,bENDz"
    assert backend.prompts[1] == "List: a,bEND"
    assert state.meta("x")["stop_reason"] == "\n"


def test_options_of_one_call_do_not_leak_into_the_next() -> None:
    backend = ScriptedBackend({"h=": "12\n", "d=": "-3 ", "": "free text\nwith breaks"})

    def body(s: pm.State) -> None:
        s += "h=" + pm.gen_int("h") + "\n"
        s += "d=" + pm.gen_int("d", stop=";") + "\n"
        s += pm.gen("free", max_tokens=20)

    before = backend.default_sampling
    for _ in range(2):
        state = run(backend, body)
        assert (state["h"], state["d"]) == (12, -3)
        assert state["free"] == "free text\nwith break"
    stops = [request.sampling.stop for request in backend.requests]
    assert stops == [(" ", "\n"), (" ", "\n", ";"), ()] * 2
    assert backend.requests[2].constraint is None
    assert backend.default_sampling == before == SamplingParams()


def test_a_call_overrides_the_run_and_the_run_the_model() -> None:
    model = SamplingParams(temperature=0.6, top_p=0.9, top_k=40)
    backend = ScriptedBackend("ok", default_sampling=model)

    def body(s: pm.State) -> None:
        s += "a" + pm.gen("x", temperature=0) + pm.gen("y", max_tokens=7, stop="!")

    run(backend, body, top_p=0.5, max_new_tokens=9, stop=["."], seed=3)
    first, second = (request.sampling for request in backend.requests)
    assert first == SamplingParams(
        temperature=0, top_p=0.5, top_k=40, max_tokens=9, stop=(".",), seed=3
    )
    assert (second.temperature, second.max_tokens, second.stop) == (0.6, 7, ("!",))


def test_max_tokens_is_128_where_nobody_says() -> None:
    backend = ScriptedBackend("ok", default_sampling=SamplingParams(max_tokens=5))

    def body(s: pm.State) -> None:
        s += "a" + pm.gen("x")

    run(backend, body)
    assert backend.requests[0].sampling.max_tokens == 128


def test_a_parameter_of_the_program_goes_before_an_option_of_its_name() -> None:
    @pm.function
    def f(s: pm.State, seed: str) -> None:
        s += seed + pm.gen("x")

    backend = ScriptedBackend("ok")
    f.run(seed="a seed", temperature=0, backend=backend)
    assert backend.prompts == ["a seed"]
    assert backend.requests[0].sampling.seed is None
    assert backend.requests[0].sampling.temperature == 0


def test_arguments_are_checked_when_the_program_is_called() -> None:
    @pm.function
    def f(s: pm.State, question: str) -> None:
        s += question

    backend = ScriptedBackend()
    for call in (
        lambda: f.run(backend=backend),
        lambda: f.run("a", "b", backend=backend),
        lambda: f.run("a", answer="b", backend=backend),
        lambda: f.bind(answer=1),
        lambda: f.bind(question="a").run(question="b", backend=backend),
        lambda: f.run_batch([{"question": "a"}, {"q": "b"}], backend=backend),
    ):
        with pytest.raises(TypeError, match=r"f has no|f: |is bound|item 1"):
            call()
    with pytest.raises(UnsupportedFeature, match="use_thread=False"):
        f.run("a", use_thread=False, backend=backend)
    assert f.run("a", use_thread=True, backend=backend).text() == "a"


def test_bind_gives_some_arguments_in_advance() -> None:
    @pm.function
    def f(s: pm.State, a: str, b: str = "2") -> None:
        s += a + b

    bound = f.bind(a="1")
    assert bound.run(backend=ScriptedBackend()).text() == "12"
    assert bound.run(b="3", backend=ScriptedBackend()).text() == "13"
    assert f.arg_names == ["a", "b"]


def test_a_program_called_with_a_state_appends_to_it() -> None:
    @pm.function
    def part(s: pm.State, word: str) -> None:
        s += word + pm.gen(word)

    @pm.function
    def whole(s: pm.State) -> None:
        part(s, "a")
        part.bind(word="b")(s)

    assert whole.run(backend=ScriptedBackend("-")).text() == "a-b-"


def test_append_collects_into_a_list() -> None:
    backend = ScriptedBackend(["3", "4", "x", "y"])
    own = ["1", "2"]

    def body(s: pm.State) -> None:
        s += "p"
        s.set("xs", own)
        s += pm.gen(name="xs", regex="[0-9]", append=True)
        s += pm.gen(name="xs", regex="[0-9]", append=True)
        s += pm.gen("new", append=True) + pm.gen("new", append=True)

    state = run(backend, body)
    assert state["xs"] == ["1", "2", "3", "4"]
    assert state["new"] == ["x", "y"]
    assert own == ["1", "2"]
    assert [meta.get("finish_reason") for meta in state.meta("xs")] == [None, None, "stop", "stop"]


def test_append_to_a_plain_value_is_refused_at_its_line() -> None:
    def body(s: pm.State) -> None:
        s += "p" + pm.gen("x")
        with pytest.raises(ProgramError, match="'x' is one value, not a list"):
            s += pm.gen("x", append=True)
        s["y"] = "text"
        with pytest.raises(ProgramError, match="'y' is one value"):
            s += pm.select("y", ["a", "b"], append=True)

    run(ScriptedBackend(), body)


def test_a_name_that_is_set_again_has_the_newest_value() -> None:
    backend = ScriptedBackend(["1", "2"])

    def body(s: pm.State) -> None:
        s += "p" + pm.gen("x") + pm.gen("x")
        assert s["x"] == "2"
        s["x"] = 5

    assert run(backend, body)["x"] == 5


def test_a_read_gives_what_stands_before_it_in_the_program() -> None:
    backend = ScriptedBackend([Reply(text="1", delay=0.01), "2"])

    def body(s: pm.State) -> None:
        s += "p" + pm.gen("x")
        chunks = s.text_iter("x")
        first = next(chunks)
        value = s["x"]
        s += pm.gen("x")
        assert (value, first + "".join(chunks), s["x"]) == ("1", "1", "2")

    run(backend, body)


def test_a_list_that_a_variable_is_set_to_is_copied() -> None:
    def body(s: pm.State) -> None:
        values = ["a"]
        s["x"] = values
        values.append("b")
        assert s["x"] == ["a"]
        s["x"].append("c")
        s += "p" + pm.gen("x", append=True)
        assert s["x"] == ["a", "ok"]

    run(ScriptedBackend(), body)


def test_a_run_ends_when_all_its_branches_are_done_read_or_not() -> None:
    backend = ScriptedBackend(Reply(text="late", delay=0.02))
    branches: list[pm.State] = []

    def body(s: pm.State) -> None:
        s += "p"
        branches.extend(s.fork(2))
        for branch in branches:
            branch += pm.gen("x")

    run(backend, body)
    assert backend.num_running == 0
    assert [branch["x"] for branch in branches] == ["late", "late"]


def test_a_control_token_that_was_generated_has_an_id_and_no_text() -> None:
    turn = 257

    def logits_of(history: tuple[int, ...]) -> dict[int, float]:
        return {turn: 9.0} if len(history) == 1 else {ord("a"): 9.0}

    def body(s: pm.State) -> None:
        s += "p" + pm.gen("x", max_tokens=3, temperature=0)

    with AsyncEngine.over(lambda: history_engine(logits_of)[0]) as engine:
        state = run(engine, body)
        assert state.token_ids() == (ord("p"), turn, *b"aa")
        assert state.text() == "paa"
        assert engine.tokenizer.decode(state.token_ids()) == "p<|turn|>aa"


def test_dtypes_give_python_values_and_raw_the_text() -> None:
    backend = ScriptedBackend({"i": "-12\nx", "f": "2.50 ", "b": "True", "s": '"a \\"b\\""'})

    def body(s: pm.State) -> None:
        s += "i" + pm.gen("i", dtype=int)
        s += "f" + pm.gen("f", dtype="float")
        s += "b" + pm.gen("b", dtype=bool)
        s += "s" + pm.gen_string("s")

    state = run(backend, body)
    assert [state[name] for name in "ifbs"] == [-12, 2.5, True, 'a "b"']
    assert [state.raw(name) for name in "ifbs"] == ["-12", "2.50", "True", '"a \\"b\\""']
    assert state.text() == 'i-12f2.50bTrues"a \\"b\\""'


class Ticket(BaseModel):
    team: str
    urgency: int = 3


@dataclass
class Point:
    x: int
    y: int


def test_a_model_class_gives_an_instance_a_schema_gives_text() -> None:
    backend = ScriptedBackend({"t": '{"team": "net"}', "p": '{"x": 1, "y": 2}', "d": "{}"})

    def body(s: pm.State) -> None:
        s += "t" + pm.gen("ticket", json_schema=Ticket)
        s += "p" + pm.gen("point", json_schema=Point)
        s += "d" + pm.gen("dict", json_schema={"type": "object"})

    state = run(backend, body)
    assert state["ticket"] == Ticket(team="net", urgency=3)
    assert state["point"] == Point(1, 2)
    assert state["dict"] == "{}"
    assert state.raw("ticket") == '{"team": "net"}'
    kinds = {request.constraint.kind for request in backend.requests if request.constraint}
    assert kinds == {"json_schema"}
    assert backend.requests[2].constraint == Constraint.json_schema({"type": "object"})


def test_a_value_that_was_cut_off_says_so_when_it_is_read() -> None:
    backend = ScriptedBackend('{"team": "network"}')

    def body(s: pm.State) -> None:
        s += "t" + pm.gen("ticket", json_schema=Ticket, max_tokens=5)

    state = run(backend, body)
    assert state.raw("ticket") == '{"tea'
    with pytest.raises(
        InvalidOutput, match=r"'ticket' cannot be read as Ticket.*max_tokens"
    ) as info:
        state["ticket"]
    assert info.value.text == '{"tea'


def test_meta_tells_tokens_times_and_logprobs() -> None:
    probabilities = {"": {"a": 0.5, "b": 0.25}}
    backend = ScriptedBackend("ab", probabilities=probabilities)

    def body(s: pm.State) -> None:
        s += "ppp" + pm.gen("x", return_logprob=True, top_logprobs_num=1) + pm.gen("y")

    state = run(backend, body)
    meta = state.get_meta_info("x")
    assert meta["prompt_tokens"] == meta["prefilled_tokens"] == 3
    assert (meta["completion_tokens"], meta["decoded_tokens"], meta["forced_tokens"]) == (3, 3, 0)
    assert meta["finish_reason"] == "stop"
    assert meta["milliseconds"] >= meta["first_token_milliseconds"] > 0
    assert [entry.token_id for entry in meta["logprobs"]] == list(b"ab")
    assert meta["logprobs"][1].top[0][0] == ord("a")
    later = state.meta("y")
    assert "logprobs" not in later
    assert (later["cached_tokens"], later["prefilled_tokens"]) == (4, 1)
    usage = state.usage()
    assert (usage.prompt_tokens, usage.cached_tokens, usage.prefilled_tokens) == (8, 4, 4)


def test_a_variable_scope_holds_the_text_of_its_block() -> None:
    def body(s: pm.State) -> None:
        s += "a"
        with s.var_scope("middle"):
            s += "b" + pm.gen("x") + "c"
        s += "d"

    assert run(ScriptedBackend("-"), body)["middle"] == "b-c"


def test_reading_what_nothing_sets_raises_at_once() -> None:
    def body(s: pm.State) -> None:
        s += "p" + pm.gen("x")
        assert s.get("y") is None
        assert s.get("y", "z") == "z"
        assert s.get("x") == "ok"
        with pytest.raises(VariableNotSet, match="no variable named 'y' was set; set so far: x"):
            s["y"]

    run(ScriptedBackend(), body)


def test_only_text_and_expressions_can_be_appended() -> None:
    def body(s: pm.State) -> None:
        for value in (5, None, ["a"], b"x"):
            with pytest.raises(TypeError):
                s += value  # type: ignore[operator]
        with pytest.raises(TypeError, match="f-string"):
            s += f"Answer: {pm.gen('x')}"
        with pytest.raises(TypeError):
            s += pm.gen("x") + 5  # type: ignore[operator]
        with pytest.raises(InvalidRequest, match="lone surrogate"):
            s += "\ud800"

    assert run(ScriptedBackend(), body).text() == ""


def test_a_program_that_has_ended_goes_on_no_more_but_takes_variables() -> None:
    def body(s: pm.State) -> None:
        s += "a" + pm.gen("x")

    state = run(ScriptedBackend("12"), body)
    with pytest.raises(ProgramError, match="has ended"):
        state += "b"
    with pytest.raises(ProgramError, match="has ended"):
        state.fork()
    state["x"] = int(state["x"])
    state["y"] = [state["x"], "b"]
    assert (state["x"], state["y"]) == (12, [12, "b"])
    assert state.text() == "a12"


def test_a_primitive_needs_no_name() -> None:
    def body(s: pm.State) -> None:
        s += "p" + pm.gen() + pm.select(choices=["a", "b"]) + pm.gen("x")

    state = run(ScriptedBackend("-"), body)
    assert state.text() == "p-a-"
    assert state.names() == ["x"]


def test_a_backend_that_breaks_its_promises_is_an_error_not_a_hang() -> None:
    class Silent(ScriptedBackend):
        async def generate(self, request: Request) -> AsyncIterator[TokenEvent]:
            yield TokenEvent(request_id=request.request_id, token_ids=(65,), text="A")

    class Aborting(ScriptedBackend):
        async def generate(self, request: Request) -> AsyncIterator[TokenEvent]:
            yield TokenEvent(request_id=request.request_id, finish_reason=FinishReason.ABORT)

    def body(s: pm.State) -> None:
        s += "p" + pm.gen("x")

    with pytest.raises(pm.PrimitiveFailed, match="without saying why"):
        run(Silent(), body)
    with pytest.raises(pm.PrimitiveFailed, match="was aborted") as info:
        run(Aborting(), body)
    assert isinstance(info.value.__cause__, pm.RequestAborted)


def test_the_default_backend_is_used_where_none_is_given() -> None:
    def body(s: pm.State) -> None:
        s += "a" + pm.gen("x")

    program = pm.function(body)
    assert pm.get_default_backend() is None
    with pytest.raises(BackendNotSet, match="set_default_backend"):
        program.run()
    backend = ScriptedBackend()
    pm.set_default_backend(backend)
    try:
        program.run()
        assert len(backend.requests) == 1
        pm.flush_cache()
        assert program.run().usage().cached_tokens == 0
    finally:
        pm.set_default_backend(None)
    with pytest.raises(TypeError, match="a backend is an object such as"):
        program.run(backend="smollm2-135m")


def test_a_long_constant_is_encoded_off_the_loop_that_all_programs_share() -> None:
    threads: list[tuple[int, str]] = []

    class Watched(ByteTokenizer):
        def encode(self, text: str | Sequence[Piece]) -> list[int]:
            ids = super().encode(text)
            threads.append((len(ids), threading.current_thread().name))
            return ids

    def body(s: pm.State) -> None:
        s += "short" + pm.gen("x")
        s += "l" * 30_000 + pm.gen("y")
        s += "l" * 15_000 + pm.select("z", ["a", "b"])
        s.sync()

    run(ScriptedBackend(tokenizer=Watched()), body)
    long = [name for length, name in threads if length >= 15_000]
    assert len(long) == 4  # the constant, then the prompt alone and with each option
    assert all(name.startswith("asyncio") for name in long)
    assert (5, "palmette-lang") in threads


def test_appending_does_not_wait_for_the_model() -> None:
    import asyncio

    goes_on = threading.Event()

    async def answer(prompt: str, request: object) -> str:
        while not goes_on.is_set():
            await asyncio.sleep(0.001)
        return "ok"

    def body(s: pm.State) -> None:
        s += "a" + pm.gen("x")
        s += "b" + pm.gen("y")
        branches = s.fork(2)
        branches += "c" + pm.gen("z")
        goes_on.set()  # had anything above waited, it would wait for ever
        branches.join()

    state = run(ScriptedBackend(answer), body)
    assert state["z"] == ["ok", "ok"]


def test_generators_and_functions_without_a_state_are_no_programs() -> None:
    with pytest.raises(TypeError, match="does not yield"):

        @pm.function
        def generator(s: pm.State) -> object:
            yield 1

    with pytest.raises(TypeError, match="first parameter"):

        @pm.function
        def nothing() -> None: ...

    with pytest.raises(pm.InvalidRequest, match="num_api_spec_tokens must be at least 1"):
        pm.function(num_api_spec_tokens=0)


def test_a_program_is_made_of_a_function_or_a_method() -> None:
    class Asker:
        def ask(self, s: pm.State) -> None:
            s += "once" + pm.gen("x")

        def __call__(self, s: pm.State) -> None:
            raise AssertionError

    asker = Asker()
    assert pm.function(asker.ask).run(backend=pm.ScriptedBackend("ok"))["x"] == "ok"
    for other in (asker, partial(Asker.ask, asker), Asker, "text"):
        with pytest.raises(TypeError, match=r"is made of a function or a method.*bind"):
            pm.function(other)  # type: ignore[call-overload]


def test_variable_scopes_of_one_name_nest() -> None:
    @pm.function
    def program(s: pm.State) -> list[str]:
        with s.var_scope("x"):
            s += "a"
            with s.var_scope("x"):
                s += "b"
            inner = s["x"]
            s += "c"
        return [inner, s["x"]]

    assert program.run(backend=pm.ScriptedBackend("ok")).ret_value == ["b", "abc"]
