"""What tests of several folders share: the real small model, and settings that make runs repeat."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

# Read by torch, tokenizers and huggingface_hub when they are imported: two threads are what the
# project is tuned for, and no test may reach the network.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as palmette.runtime sets it
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

import hypothesis
import pytest

hypothesis.settings.register_profile(
    "palmette", deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True
)
hypothesis.settings.load_profile("palmette")

SMALL_MODEL = "smollm2-135m"


@pytest.fixture(autouse=True)
def _default_backend_stays() -> Iterator[None]:
    """Programs that tests run may set one, and others would then run on it."""
    module = sys.modules.get("palmette.lang.backend")
    before = None if module is None else module.get_default_backend()
    yield
    if (module := sys.modules.get("palmette.lang.backend")) is not None:
        module.set_default_backend(before)


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The file of the real small model. A test without it fails: it is never skipped in silence."""
    from palmette.errors import ModelNotPulled
    from palmette.runtime.loading.registry import resolve_model

    try:
        return resolve_model(SMALL_MODEL)
    except ModelNotPulled as error:
        pytest.fail(str(error))


def pytest_collection_finish() -> None:
    """Every module is loaded by now and stays: a collection of garbage need not look at them all,
    which over the whole run, and in tests that collect again and again, takes minutes.
    """
    gc.collect()
    gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whatever uses the real model carries the marker `model`."""
    for item in items:
        if "smollm2" in getattr(item, "fixturenames", ()):
            item.add_marker("model")
