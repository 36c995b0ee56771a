"""examples/rag.py"""

from __future__ import annotations

from pathlib import Path

import pytest

import palmette as pm
from tests.examples.conftest import LoadExample


def test_answers_cite_nothing_but_what_was_retrieved(
    engine: pm.Engine, load_example: LoadExample
) -> None:
    example = load_example("rag")
    retriever = example.Retriever(example.TEXTS)
    questions = [*example.QUESTIONS, "Where can I borrow garden tools?", "How high is the tower?"]
    for each in example.run(engine, retriever, questions):
        assert each.text
        assert 1 <= len(each.cited) <= 2
        assert set(each.cited) <= set(each.retrieved)
        assert set(each.retrieved) <= set(retriever.texts)


def test_the_question_about_the_pool_is_answered_from_the_text_about_it(
    engine: pm.Engine, load_example: LoadExample, capsys: pytest.CaptureFixture[str]
) -> None:
    example = load_example("rag")
    (pool,) = example.run(engine, example.Retriever(example.TEXTS), example.QUESTIONS[:1])
    assert next(iter(pool.retrieved)) == "baths"
    assert "34 degrees" in pool.text
    assert pool.cited[0] == "baths"


def test_retrieval_finds_the_text_a_question_is_about(load_example: LoadExample) -> None:
    example = load_example("rag")
    retriever = example.Retriever(example.TEXTS)
    for question, name in [
        ("When is the weekly market held?", "market"),
        ("Are bicycles free of charge on the ferry?", "ferry"),
        ("On which day is the Clock Museum closed?", "museum"),
    ]:
        found = retriever.find(question)
        assert next(iter(found)) == name
        assert len(found) <= 3
        assert found[name] == (example.TEXTS / f"{name}.txt").read_text(encoding="utf-8").strip()


def test_a_question_that_no_text_fits_is_refused_by_name(
    load_example: LoadExample, tmp_path: Path
) -> None:
    example = load_example("rag")
    (tmp_path / "a.txt").write_text("Apples grow on trees.", encoding="utf-8")
    (tmp_path / "b.txt").write_text("Boats float on water.", encoding="utf-8")
    retriever = example.Retriever(tmp_path)
    assert list(retriever.find("Do boats sink?")) == ["b"]
    with pytest.raises(ValueError, match="Zeppelins"):
        example.run(pm.ScriptedBackend([]), retriever, ["Zeppelins?"])
