"""benchmarks/speculation.py"""

from __future__ import annotations

import pytest

from benchmarks import speculation


def test_a_program_of_three_fields_sends_half_of_the_prompt_tokens_at_most(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = speculation.main([])
    assert len(rows) == 3
    for row in rows:
        assert row.each.values == row.shared.values == (" Albert Einstein", " 1879", " physics")
        assert (row.each.num_requests, row.shared.num_requests) == (3, 1)
        assert row.ratio >= speculation.GOAL_RATIO
    assert "3 → 1" in capsys.readouterr().out
