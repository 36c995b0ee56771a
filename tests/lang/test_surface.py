"""Names known from SGLang beside the primitives: settings, server info, rules, prefixes ahead."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import palmette as pm
from palmette.errors import BackendNotSet, PrimitiveFailed, ProgramError, UnsupportedFeature
from palmette.lang.backends.scripted import ByteTokenizer, ScriptedBackend
from palmette.runtime.async_engine import AsyncEngine
from palmette.runtime.testing import tiny_engine


@pytest.fixture(autouse=True)
def no_default_backend() -> Iterator[None]:
    yield
    pm.set_default_backend(None)


# -- Backends ------------------------------------------------------------------------------------


def test_flush_cache_says_that_it_is_done() -> None:
    backend = ScriptedBackend()

    @pm.function
    def program(s: pm.State) -> None:
        s += "prompt" + pm.gen("x")

    program.run(backend=backend)
    assert pm.flush_cache(backend) is True
    assert program.run(backend=backend).meta("x")["cached_tokens"] == 0
    pm.set_default_backend(backend)
    assert pm.flush_cache(empty_cache=False) is True
    assert program.run().meta("x")["cached_tokens"] == 0
    with pytest.raises(UnsupportedFeature, match="empty_cache"):
        pm.flush_cache(backend, True)


def test_server_info_tells_of_the_backend() -> None:
    scripted = ScriptedBackend(model_name="stub", max_context=99)
    info = pm.get_server_info(scripted)
    assert (info["model_name"], info["max_context"]) == ("stub", 99)
    assert info["version"] == pm.__version__
    assert info["vocab_size"] == scripted.tokenizer.vocab_size
    assert info["default_sampling"]["temperature"] == 1.0
    assert "stats" not in info
    with pytest.raises(BackendNotSet):
        pm.get_server_info()
    with AsyncEngine.over(lambda: tiny_engine()) as engine:
        pm.set_default_backend(engine)
        assert pm.get_server_info()["stats"]["requests_started"] == 0


def test_global_config_is_the_default_backend_and_what_is_fixed() -> None:
    config, backend = pm.global_config, ScriptedBackend()
    assert config.default_backend is None
    config.default_backend = backend
    assert config.default_backend is pm.get_default_backend() is backend
    for name in (
        "verbosity",
        "skip_special_tokens_in_output",
        "spaces_between_special_tokens_in_out",
        "enable_precache_with_tracing",
        "enable_parallel_encoding",
    ):
        value = getattr(config, name)
        setattr(config, name, value)  # as it is
        with pytest.raises(UnsupportedFeature, match=name):
            setattr(config, name, not value)
    for unknown in (lambda: config.speed, lambda: setattr(config, "speed", 1)):
        with pytest.raises(AttributeError, match="speed"):
            unknown()


def test_a_state_shows_its_path_and_its_variables() -> None:
    @pm.function
    def program(s: pm.State) -> list[str]:
        s += "p" + pm.gen("x")
        return [repr(s), repr(s.fork(2)[1])]

    shown = program.run(backend=ScriptedBackend()).ret_value
    assert shown == ["<State path=() variables: x>", "<State path=(0, 1) variables: x>"]


def test_an_engine_takes_no_options_that_it_does_not_know() -> None:
    with pytest.raises(TypeError, match="model_path"):
        pm.Engine("tiny", model_path="some/model")  # type: ignore[call-arg]
    assert not hasattr(pm.Engine, "shutdown")
    assert not hasattr(pm.Engine, "async_generate")
    with AsyncEngine.over(lambda: tiny_engine()) as engine, pytest.raises(TypeError):
        engine.generate("some text", {"temperature": 0})  # type: ignore[call-arg]


# -- Prefixes computed ahead ---------------------------------------------------------------------


@pm.function
def about(s: pm.State, subject: str) -> None:
    s += "You know everything. "
    s += "Tell me about " + subject + ": " + pm.gen("x", max_tokens=2)


@pm.function
async def about_async(s: pm.State, subject: str) -> None:
    s += "You know everything. "
    s += "Tell me about " + subject + ": " + pm.gen("x", max_tokens=2)


@pytest.mark.parametrize("program", [about, about_async])
def test_cache_computes_the_constant_prefix_ahead(program: pm.Function) -> None:
    prefix = "You know everything. Tell me about "
    with AsyncEngine.over(lambda: tiny_engine()) as engine:
        assert program.cache(engine) == len(prefix)
        assert engine.stats().computed_tokens == len(prefix)
        meta = program.run("cats", backend=engine).meta("x")
        assert meta["cached_tokens"] == len(prefix)
        # With an argument given, more of it is constant.
        pm.set_default_backend(engine)
        assert program.cache(subject="dogs") == len(prefix + "dogs: ")


def test_a_program_without_a_constant_prefix_caches_nothing() -> None:
    @pm.function
    def program(s: pm.State, text: str) -> None:
        s += text + pm.gen("x")

    backend = ScriptedBackend()
    assert program.cache(backend) == 0
    assert backend.requests == []


async def test_an_async_program_cannot_cache_a_prefix() -> None:
    @pm.function
    async def program(s: pm.State) -> None:
        s += "text"
        with pytest.raises(ProgramError, match="can neither cache nor freeze"):
            about.cache(ScriptedBackend())

    program.run(backend=ScriptedBackend())


# -- Rules of choice -----------------------------------------------------------------------------

PROBABILITIES: dict[str, dict[str | bytes | int, float]] = {
    "p": {"New": 0.5, "Old": 0.25},
    "pNew": {" York": 0.6, " Ulm": 0.3},
    "New": {" York": 0.9, " Ulm": 0.1},
    "pOld": {" Ulm": 1.0},
    "Old": {" Ulm": 1.0},
}
CITIES = ["New York", "New Ulm", "Old Ulm"]


def cities() -> ScriptedBackend:
    return ScriptedBackend(
        tokenizer=ByteTokenizer(["New", "Old", " York", " Ulm"]), probabilities=PROBABILITIES
    )


def choose(method: Any) -> pm.State:
    @pm.function
    def program(s: pm.State) -> None:
        s += "p" + pm.select("x", CITIES, choices_method=method)

    return program.run(backend=cities())


class Unlikeliest(pm.ChoicesSamplingMethod):
    """The choice with the lowest mean, and what it was told."""

    def __init__(self, requires: bool) -> None:
        self.requires = requires

    @property
    def requires_unconditional_logprobs(self) -> bool:
        return self.requires

    def __call__(
        self,
        *,
        choices: Sequence[str],
        normalized_prompt_logprobs: Sequence[float],
        input_token_logprobs: Sequence[Sequence[Any]],
        output_token_logprobs: Sequence[Sequence[Any]],
        unconditional_token_logprobs: Sequence[Sequence[Any]] | None = None,
    ) -> pm.ChoicesDecision:
        lowest = min(range(len(choices)), key=lambda i: normalized_prompt_logprobs[i])
        told = {
            "inputs": input_token_logprobs,
            "outputs": output_token_logprobs,
            "unconditional": unconditional_token_logprobs,
            "method": "mine",  # what is ours stays
        }
        return pm.ChoicesDecision(choices[lowest], told)


@pytest.mark.parametrize("requires", [False, True])
def test_a_rule_of_the_programs_own_decides(requires: bool) -> None:
    state = choose(Unlikeliest(requires))
    meta = state.meta("x")
    assert state["x"] == "New Ulm" == min(meta["scores"], key=meta["scores"].__getitem__)
    assert state.text() == "pNew Ulm"
    assert meta["method"] == "Unlikeliest"
    for city, entries in zip(CITIES, meta["inputs"], strict=True):
        assert tuple(value for value, _, _ in entries) == meta["token_logprobs"][city]
        assert tuple(token_id for _, token_id, _ in entries) == meta["token_ids"][city]
    assert meta["outputs"] == [[], [], []]
    if requires:
        assert [entries[0][0] for entries in meta["unconditional"]] == [0.0, 0.0, 0.0]
        assert [entries[1][0] for entries in meta["unconditional"]] == pytest.approx(
            [-0.10536, -2.302585, 0.0], abs=1e-5
        )
    else:
        assert meta["unconditional"] is None
    assert meta["probabilities"] == choose("probability").meta("x")["probabilities"]


def test_a_function_is_a_rule_and_may_return_the_choice_alone() -> None:
    def last(*, choices: Sequence[str], **_: Any) -> str:
        return choices[-1]

    state = choose(last)
    assert state["x"] == "Old Ulm"
    assert state.meta("x")["method"] == "last"


def test_a_rule_may_take_its_time_and_scores_are_the_means_of_log_probabilities() -> None:
    told = threading.Event()

    def waits(*, choices: Sequence[str], **_: Any) -> str:
        assert told.wait(timeout=60)  # for another program, which runs on the loop of all states
        return choices[0]

    @pm.function
    def other(s: pm.State) -> None:
        s += "p" + pm.gen("x")

    with ThreadPoolExecutor(1) as pool:
        chosen = pool.submit(choose, waits)
        assert other.run(backend=pm.ScriptedBackend("ok"))["x"] == "ok"
        told.set()
        meta = chosen.result().meta("x")
    for city in CITIES:
        logprobs = meta["token_logprobs"][city]
        assert meta["scores"][city] == pytest.approx(sum(logprobs) / len(logprobs))


def test_what_a_rule_may_not_do_is_said() -> None:
    def wrong(**_: Any) -> str:
        return "Paris"

    def failing(**_: Any) -> str:
        raise RuntimeError("no idea")

    with pytest.raises(PrimitiveFailed, match="wrong decided on 'Paris', which is no choice"):
        choose(wrong)
    with pytest.raises(PrimitiveFailed, match="no idea"):
        choose(failing)

    async def rule(choices: list[str], **_: Any) -> str:
        return choices[0]

    with pytest.raises(TypeError, match="takes a plain function, rule is async"):
        pm.select("x", ["a", "b"], choices_method=rule)
    with pytest.raises(TypeError, match="not a class of them: Unlikeliest"):
        pm.select("x", CITIES, choices_method=Unlikeliest)
    with pytest.raises(UnsupportedFeature, match="temperature with choices_method='wrong'"):
        pm.select("x", CITIES, temperature=1, choices_method=wrong)


def test_the_settings_load_no_large_library() -> None:
    program = """
import sys
import palmette as pm
pm.set_default_backend(pm.ScriptedBackend())
pm.get_server_info(), pm.global_config.verbosity, pm.flush_cache()
print([name for name in ("torch", "numpy", "pydantic") if name in sys.modules])
"""
    found = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    )
    assert found.stdout == "[]\n"
