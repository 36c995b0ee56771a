"""examples/few_shot_eval.py"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

import palmette as pm
from palmette.runtime.recording import Recording
from tests.examples.conftest import LoadExample


def test_the_shared_block_is_computed_once(engine: pm.Engine, load_example: LoadExample) -> None:
    example = load_example("few_shot_eval")
    rows = example.read_rows()
    backend = Recording(engine)
    evaluation = example.run(backend, rows)

    num_asked = len(rows) - 16
    block = "".join(f"{row.text} It was {example.WORDS[row.label]}.\n\n" for row in rows[:16])
    num_block_tokens = len(engine.tokenizer.encode(block))
    num_own_tokens = [len(request.token_ids) - num_block_tokens for request in backend.asked]
    assert len(backend.asked) == num_asked
    assert min(num_own_tokens) > 0

    # Each distinct token of the tree of all prompts once, worked out from the requests alone.
    assert evaluation.computed_tokens == backend.num_tokens_to_compute()
    # So the block once, and of the rest less than all: some reviews begin with the same words.
    assert evaluation.computed_tokens <= num_block_tokens + sum(num_own_tokens)
    assert evaluation.computed_tokens > num_block_tokens + 0.8 * sum(num_own_tokens)
    assert evaluation.prompt_tokens == sum(len(request.token_ids) for request in backend.asked)
    assert evaluation.cached_tokens == evaluation.prompt_tokens - evaluation.computed_tokens

    # Once more, with everything there: one token for the first logits of each row.
    again = example.run(engine, rows)
    assert again.computed_tokens == num_asked
    assert [answer.label for answer in again.answers] == [a.label for a in evaluation.answers]


def test_it_reads_reviews_far_better_than_chance_and_draws_its_plot(
    engine: pm.Engine,
    load_example: LoadExample,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    example = load_example("few_shot_eval")
    evaluation = example.run(engine, example.read_rows())
    low, high = example.wilson_interval(evaluation.num_right, len(evaluation.answers))
    assert 0.5 < low < evaluation.accuracy < high
    for answer in evaluation.answers:
        assert (answer.label == "positive") == (answer.probability >= 0.5)

    example.report(evaluation)
    assert f"accuracy: {evaluation.num_right} of 48" in capsys.readouterr().out
    example.draw(evaluation, tmp_path / "new" / "plot.png")
    assert (tmp_path / "new" / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_the_file_is_balanced_and_has_no_row_twice(load_example: LoadExample) -> None:
    example = load_example("few_shot_eval")
    rows = example.read_rows()
    assert len({row.text for row in rows}) == len(rows) == 64
    for part in (rows[:16], rows[16:]):
        assert sum(row.label == "positive" for row in part) * 2 == len(part)


@pytest.mark.parametrize("num_right", [0, 1, 24, 48])
def test_the_interval_is_where_the_score_test_changes_its_mind(
    load_example: LoadExample, num_right: int
) -> None:
    low, high = load_example("few_shot_eval").wilson_interval(num_right, 48)
    share = num_right / 48
    assert -1e-12 <= low <= share + 1e-12 <= high + 2e-12 <= 1 + 3e-12
    for bound in (low, high):
        if 1e-9 < bound < 1 - 1e-9:
            error = math.sqrt(bound * (1 - bound) / 48)
            assert abs(share - bound) / error == pytest.approx(1.96)
