"""The benchmark of the host tier at its smallest, on a model with random weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import host_tier
from palmette.runtime.testing import tiny_model
from palmette.runtime.tokenization.byte import ByteTokenizer


def test_the_tier_computes_less_and_answers_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {"prompts": 4, "prompt-tokens": 60, "new-tokens": 2, "rounds": 2}
    args = host_tier.parse([f"--{name}={value}" for name, value in options.items()])
    ways, is_same = host_tier.measure(tiny_model(), ByteTokenizer(), args, str(tmp_path))
    assert is_same
    off, in_memory, mapped = ways
    # Of each prompt and its first new token, what is behind the last whole page.
    assert in_memory.computed == mapped.computed == [4 * (61 - 48)] * 2
    assert min(off.computed) > 3 * in_memory.computed[0]
    assert "4 prompts of 60 tokens" in capsys.readouterr().out
    for way in ways:
        assert len(way.seconds) == 2
        assert way.name in way.told(off)
