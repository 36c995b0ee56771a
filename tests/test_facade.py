"""What `import palmette` gives, and what it leaves alone."""

from __future__ import annotations

import subprocess
import sys

import pytest

import palmette as pm

LARGE = ("torch", "transformers", "numpy", "pydantic", "httpx", "rich", "fastapi", "jinja2")


def python(program: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=120
    ).stdout


def test_importing_it_loads_no_large_library() -> None:
    program = f"""
import sys, time
started = time.perf_counter()
import palmette
seconds = time.perf_counter() - started
print([name for name in {LARGE!r} if name in sys.modules])
print(f"import palmette took {{seconds:.3f}} s", file=sys.stderr)
"""
    assert python(program) == "[]\n"


def test_a_program_runs_on_the_scripted_backend_without_a_large_library() -> None:
    program = f"""
import sys
import palmette as pm

@pm.function
def program(s):
    s += pm.user("x") + pm.assistant(pm.gen("y") + pm.select("z", ["a", "b"]))
    s.fork(2).join()

print(program.run(backend=pm.ScriptedBackend("ok"))["y"])
print([name for name in {LARGE!r} if name in sys.modules])
"""
    assert python(program) == "ok\n[]\n"


def test_every_public_name_is_there() -> None:
    lazy = {"Engine"}  # loads torch
    for name in set(pm.__all__) - lazy:
        assert getattr(pm, name) is not None
    assert set(pm.__all__) <= set(dir(pm))
    assert list(pm.__all__) == sorted(pm.__all__)


def test_the_engine_is_loaded_when_it_is_asked_for() -> None:
    program = """
import palmette
from palmette.runtime.async_engine import AsyncEngine
print(palmette.Engine is AsyncEngine)
"""
    assert python(program) == "True\n"


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Motor'"):
        pm.Motor  # noqa: B018
