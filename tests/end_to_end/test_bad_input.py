"""Bad input: one clear sentence that says what and where, and the engine goes on serving others."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

import palmette as pm
from palmette.errors import (
    ConstraintError,
    InvalidConstraint,
    ModelFileError,
    ModelNotFound,
    PalmetteError,
    PromptTooLong,
    UnsupportedConstraint,
)
from palmette.runtime.async_engine import AsyncEngine


@pytest.fixture(scope="module")
def engine(smollm2: Path) -> Iterator[AsyncEngine]:
    with AsyncEngine(smollm2, kv_memory=256 << 20) as engine:
        yield engine


@pm.function
def continued(s: pm.State, text: str, options: dict[str, object]) -> None:
    s += text
    s += pm.gen("x", max_tokens=8, temperature=0, **options)  # type: ignore[arg-type]


def test_an_unknown_model_is_named_with_the_known_ones() -> None:
    with pytest.raises(ModelNotFound, match=r"no model named 'smollm3'.*smollm2-135m"):
        AsyncEngine("smollm3")


@pytest.mark.parametrize("kept", [3, 5000, 50_000_000], ids=["magic", "metadata", "tensors"])
def test_a_truncated_gguf_is_refused_by_path(smollm2: Path, tmp_path: Path, kept: int) -> None:
    cut = tmp_path / "cut.gguf"
    shutil.copy(smollm2, cut)
    with cut.open("r+b") as file:
        file.truncate(kept)
    with pytest.raises(ModelFileError) as caught:
        AsyncEngine(cut)
    assert str(cut) in str(caught.value)
    assert "\n" not in str(caught.value)


SCHEMA = {"type": "object", "properties": {"a": {"not": {"uniqueItems": True}}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("text", "options", "error", "words"),
    [
        ("word " * 9000, {}, PromptTooLong, ["9001", "8192"]),
        ("x", {"regex": "[a-"}, InvalidConstraint, ["regex"]),
        ("x", {"json_schema": SCHEMA}, UnsupportedConstraint, ["uniqueItems", "perties/a"]),
        ("x", {"json_schema": {"type": "strnig"}}, ConstraintError, ["strnig"]),
        ("x", {"regex": "[0-9]{20}"}, PalmetteError, ["20", "8"]),
    ],
    ids=["prompt", "regex", "keyword", "type", "budget"],
)
def test_a_bad_request_says_what_and_where_while_others_are_served(
    engine: AsyncEngine,
    text: str,
    options: dict[str, object],
    error: type[Exception],
    words: list[str],
) -> None:
    async def both() -> tuple[object, object]:
        return await asyncio.gather(
            continued.run_async(text="Once upon a", options={}, backend=engine),
            continued.run_async(text=text, options=options, backend=engine),
            return_exceptions=True,
        )

    good, bad = asyncio.run(both())
    assert isinstance(good, pm.State)
    assert good["x"]
    assert isinstance(bad, PalmetteError)
    cause = bad.__cause__ or bad
    assert isinstance(cause, error)
    for word in words:
        assert word in str(bad)
    stats = engine.stats()
    assert stats.num_running == stats.num_waiting == 0
