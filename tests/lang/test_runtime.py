"""A server in a child process, under SGLang's name for it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import palmette as pm
from palmette.cli.options import engine_options
from palmette.errors import EngineStopped, InvalidRequest, RemoteError, UnsupportedFeature
from palmette.lang.backends.runtime import ENGINE_OPTIONS, _arguments
from palmette.lang.backends.scripted import ByteTokenizer, ScriptedBackend
from tests.runtime.server.harness import live, wait_for


@pytest.fixture(scope="module")
def runtime(smollm2: Path) -> Iterator[pm.Runtime]:
    with pm.Runtime(
        str(smollm2), context_length=512, num_pages=64, api_key="secret", launch_timeout=120
    ) as runtime:
        pid = runtime.pid
        assert pid is not None
        assert is_alive(pid)
        yield runtime
    assert not is_alive(pid)
    assert runtime.pid is None
    runtime.shutdown()  # once more
    with pytest.raises(EngineStopped, match="was shut down"):
        runtime.cache_prefix("x")


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    # A process that has ended and that nobody has waited for is still in the table.
    state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return state != "Z"


def test_a_program_runs_on_a_server_that_was_launched(runtime: pm.Runtime) -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += pm.user("What is the capital of France?")
        s += pm.assistant(pm.gen("answer", max_tokens=12, temperature=0))

    pm.set_default_backend(runtime)
    try:
        assert pm.get_default_backend() is runtime.endpoint
        assert "Paris" in program.run()["answer"]
    finally:
        pm.set_default_backend(None)
    assert runtime.endpoint.max_context == 512
    with pm.RuntimeEndpoint(runtime.url, "secret") as endpoint:
        assert program.run(backend=endpoint)["answer"]
    with pytest.raises(RemoteError, match="API key"):
        pm.RuntimeEndpoint(runtime.url)


def test_the_real_model_writes_the_same_as_in_process(runtime: pm.Runtime, smollm2: Path) -> None:
    @pm.function
    def program(s: pm.State) -> None:
        s += pm.user("Name two colours.")
        s += pm.assistant(pm.gen("first", max_tokens=12, temperature=1, seed=7, top_p=0.95))
        s += pm.user("As JSON.")
        s += pm.assistant(pm.gen("json", json_schema=SCHEMA, max_tokens=40, temperature=1, seed=8))
        s += pm.user("Were they warm?")
        for branch in (branches := s.fork(2)):
            branch += pm.assistant_begin() + pm.gen("n", max_tokens=8, temperature=1, seed=9)
        branches.join()
        s += pm.assistant(pm.select("warm", ["yes", "no", "not all"]))

    with pm.Engine(str(smollm2), max_context=512, num_pages=64) as engine:
        here = program.run(backend=engine)
        there = program.run(backend=runtime.endpoint)
        assert there.token_ids() == here.token_ids()
        assert there.text() == here.text()
        assert (there["json"], there["n"]) == (here["json"], here["n"])
        assert there.meta("warm")["probabilities"] == here.meta("warm")["probabilities"]
        assert runtime.get_tokenizer().encode(there.text()) == engine.tokenizer.encode(here.text())


SCHEMA = {
    "type": "object",
    "properties": {"colours": {"type": "array", "items": {"enum": ["red", "blue", "green"]}}},
    "required": ["colours"],
}


def test_texts_are_generated_as_sglang_s_runtime_does(runtime: pm.Runtime) -> None:
    sampling = {"max_new_tokens": 4, "temperature": 0}
    runtime.cache_prefix("The capital of France is")
    told = json.loads(runtime.generate("The capital of France is", sampling, return_logprob=True))
    assert told["text"].startswith(" Paris")
    assert told["meta_info"]["cached_tokens"] > 0
    assert len(told["meta_info"]["output_token_logprobs"]) == 4
    assert [len(json.loads(runtime.generate(["a", "b"], sampling)))] == [2]

    async def streamed() -> tuple[str, int]:
        pieces = runtime.async_generate("The capital of France is", sampling)
        text = "".join([piece async for piece in pieces])
        await runtime._http.aclose()
        return text, (await runtime.get_server_info())["num_requests"]

    assert asyncio.run(streamed()) == (told["text"], 0)
    assert runtime.get_tokenizer().decode(told["output_ids"]) == told["text"]
    with pytest.raises(UnsupportedFeature, match="encode"):
        runtime.encode("text")
    with pytest.raises(InvalidRequest, match="lora_path"):
        runtime.generate("a", lora_path=["x"])


@pytest.mark.slow
@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT])
def test_no_server_is_left_behind(smollm2: Path, end: signal.Signals) -> None:
    code = """
import sys, time, palmette as pm
runtime = pm.Runtime(sys.argv[1], num_pages=16)
print(runtime.pid, flush=True)
time.sleep(600)
"""
    parent = subprocess.Popen(
        [sys.executable, "-c", code, str(smollm2)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_alive(pid)
    parent.send_signal(end)
    parent.communicate(timeout=30)
    wait_for(lambda: not is_alive(pid), 15)


def test_a_server_that_does_not_come_up_is_told_of_with_its_last_lines() -> None:
    with pytest.raises(EngineStopped, match=r"status 1(.|\n)*no model named 'nothing'"):
        pm.Runtime("nothing")
    started = time.monotonic()
    with pytest.raises(EngineStopped, match=r"not ready within launch_timeout=0\.05 s"):
        pm.Runtime("nothing", launch_timeout=0.05)
    assert time.monotonic() - started < 10


def test_options_are_those_of_the_command_under_either_name() -> None:
    assert {option.name for option in engine_options()} == ENGINE_OPTIONS
    given = {
        "context_length": 99,
        "schedule_policy": "dfs-weight",
        "disable_radix_cache": True,
        "thaw": ["a", "b"],
        "served_model_name": "m",
        "max_running_requests": None,
    }
    assert _arguments(given) == [
        *("--port=0", "--grace=1", "--max-context=99", "--policy=dfs", "--no-prefix-cache"),
        *("--thaw=a", "--thaw=b", "--name=m"),
    ]
    for refused in ({"tp_size": 2}, {"schedule_policy": "random"}, {"quantization": "fp8"}):
        with pytest.raises(UnsupportedFeature, match=next(iter(refused))):
            pm.Runtime("smollm2-135m", **refused)
    with pytest.raises(InvalidRequest, match="under two names"):
        _arguments({"context_length": 9, "max_context": 9})
    with pytest.raises(UnsupportedFeature, match="log_level"):
        pm.Runtime("smollm2-135m", log_level="debug")


def test_an_endpoint_has_the_arguments_of_sglang_s() -> None:
    with live(ScriptedBackend("ok"), api_key="k") as url:
        endpoint = pm.RuntimeEndpoint(url, "k", None, None, tokenizer=ByteTokenizer())
        assert isinstance(endpoint, pm.Endpoint)
        assert endpoint.model_name == "scripted"
        with pytest.raises(UnsupportedFeature, match="chat_template_name"):
            pm.RuntimeEndpoint(url, "k", chat_template_name="llama-3")
