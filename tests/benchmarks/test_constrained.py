"""The benchmark of constrained objects, on a model with random weights."""

from __future__ import annotations

import pytest

from benchmarks import constrained
from palmette.runtime.testing import tiny_model
from palmette.runtime.tokenization.byte import ByteTokenizer


def test_guesses_save_passes_and_change_no_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constrained, "NAMES", constrained.NAMES[:6])
    ways, is_same = constrained.measure(
        tiny_model(), ByteTokenizer(), rounds=1, at_once=4, temperature=0.0, clock=lambda: 0.0
    )
    assert is_same
    neither, token, guessed, *_ = ways
    assert neither.share("forced_tokens") == neither.share("saved_passes") == 0
    assert 0 < token.share("forced_tokens") == token.share("saved_passes")
    assert guessed.share("saved_passes") > token.share("saved_passes")
    assert sum(guessed.steps) < sum(token.steps) < sum(neither.steps)
    for way in ways:
        assert way.num_tokens == neither.num_tokens
        assert way.name in way.told(neither)
