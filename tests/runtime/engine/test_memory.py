"""Memory goes back to the system."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from palmette.protocol import Request, SamplingParams
from palmette.runtime import engine as engines
from palmette.runtime import memory
from palmette.runtime.testing import tiny_engine


def test_an_engine_gives_memory_back_every_so_many_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    num_trims = []
    monkeypatch.setattr(engines, "_STEPS_BETWEEN_TRIMS", 4)
    monkeypatch.setattr(engines, "trim", lambda: num_trims.append(1))
    engine = tiny_engine()
    sampling = SamplingParams(max_tokens=9, ignore_eos=True)
    engine.submit(Request(request_id="r", token_ids=(1, 2, 3), sampling=sampling))
    while engine.has_work:
        engine.step()
    assert engine.stats().steps == 9
    assert len(num_trims) == 2


def test_trimming_calls_the_c_library_where_it_has_such_a_call(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = []
    monkeypatch.setattr(memory, "_malloc_trim", lambda: asked.append)
    memory.trim()
    assert asked == [0]
    monkeypatch.setattr(memory, "_malloc_trim", lambda: None)
    memory.trim()
    monkeypatch.undo()
    memory.trim()  # the real one


def test_what_the_environment_says_stays() -> None:
    code = "import os, palmette.runtime; print(os.environ['ONEDNN_PRIMITIVE_CACHE_CAPACITY'])"
    base = {k: v for k, v in os.environ.items() if k != "ONEDNN_PRIMITIVE_CACHE_CAPACITY"}
    for given, expected in (({}, "256"), ({"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "77"}, "77")):
        done = subprocess.run(
            [sys.executable, "-c", code], env={**base, **given}, capture_output=True, text=True
        )
        assert done.stdout.strip() == expected
