"""One engine for all examples, and a way to load an example as Python would run it."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

import palmette as pm

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"

LoadExample = Callable[[str], ModuleType]


@pytest.fixture(scope="package")
def shared_engine(smollm2: Path) -> Iterator[pm.Engine]:
    with pm.Engine(str(smollm2), kv_memory=256 << 20) as engine:
        yield engine


@pytest.fixture
def engine(shared_engine: pm.Engine) -> pm.Engine:
    """The shared engine with nothing cached."""
    shared_engine.flush_cache()
    return shared_engine


@pytest.fixture
def load_example(monkeypatch: pytest.MonkeyPatch) -> LoadExample:
    """Imports an example by name, with its folder first in the path."""
    monkeypatch.syspath_prepend(str(EXAMPLES))

    def load(name: str) -> ModuleType:
        sys.modules.pop(name, None)
        return importlib.import_module(name)

    return load
