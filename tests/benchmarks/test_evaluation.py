"""lm-eval over the server and over transformers, where lm-eval is installed."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from benchmarks.evaluation.__main__ import RUNS, TASKS, Found, main


@pytest.mark.slow
def test_accuracy_over_the_server_equals_that_of_transformers(
    smollm2: Path, tmp_path: Path
) -> None:
    program = os.environ.get("LM_EVAL") or shutil.which("lm_eval")
    if program is None:
        pytest.skip("lm-eval is not installed; LM_EVAL may name its program in an environment")
    told = tmp_path / "figures.json"
    assert main(["--lm-eval", program, "--model", str(smollm2), "--json", str(told)]) == 0
    facts, facts_by_them, *answers = json.loads(told.read_text())
    assert facts["acc"] == facts_by_them["acc"] > 0.5
    raw, raw_by_them, chat, chat_by_them = (each["exact_match"] for each in answers)
    assert raw == raw_by_them > 0.2
    assert chat == chat_by_them > 0.2
    assert [facts["rows"], *(each["rows"] for each in answers)] == [40, 20, 20, 20, 20]


def test_every_task_that_is_run_is_here() -> None:
    assert {run.task for runs in RUNS for run in runs} == {
        path.stem for path in TASKS.glob("*.yaml")
    }


def test_a_row_that_differs_is_no_agreement() -> None:
    one = Found({"acc": 0.5}, [[-1.0, -2.0], [-3.0, -4.0]], 1.0)
    assert one.agrees_with(Found({"acc": 0.5}, [[-1.0, -2.0001], [-3.0, -4.0]], 2.0))
    assert not one.agrees_with(Found({"acc": 0.5}, [[-1.0, -2.0], [-3.0, -4.1]], 2.0))
    assert not one.agrees_with(Found({"acc": 0.6}, one.answers, 2.0))
    texts = Found({"exact_match": 1.0}, ["a", "b"], 1.0)
    assert texts.agrees_with(texts)
    assert texts.distance(Found({"exact_match": 1.0}, ["a", "c"], 1.0)) == 1
    assert not texts.agrees_with(Found({"exact_match": 1.0}, ["a", "c"], 1.0))
