"""examples/few_shot_eval.py"""

from __future__ import annotations

import csv
import json
import math
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from contextlib import closing, nullcontext
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

import palmette as pm
from palmette.errors import EngineError, EngineStopped
from palmette.runtime.recording import Recording
from tests.examples.conftest import EXAMPLES, LoadExample
from tests.examples.quizzed import Quizzed

ROOT = EXAMPLES.parent


@pytest.fixture
def example(load_example: LoadExample) -> ModuleType:
    return load_example("few_shot_eval")


def questions_of(example: ModuleType, num: int | None = None) -> list[str]:
    return [question.text for question in example.read_table(example.QUESTIONS)[:num]]


def run_main(
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    backend: pm.ScriptedBackend,
    output: Path,
    *arguments: str,
) -> int:
    """The exit status of the command, on this backend."""
    monkeypatch.setattr(pm, "Engine", lambda model: nullcontext(backend))
    if "--plot" not in arguments:
        monkeypatch.setattr(example, "draw", lambda answers, path: None)  # which takes its time
    return example.main(["--output", str(output), *arguments])


def stored(output: Path) -> dict[str, tuple[str, ...]]:
    """What is kept, by question: what was chosen, the probabilities, the error."""
    with closing(sqlite3.connect(output / "answers.sqlite")) as file:
        rows = file.execute("SELECT text, chosen, probabilities, error, run FROM answers")
        return {text: rest for text, *rest in rows}


def num_stored(output: Path) -> int:
    """How many answers are kept, while a run may be writing them."""
    if not (output / "answers.sqlite").exists():
        return 0
    with closing(sqlite3.connect(output / "answers.sqlite")) as file:
        try:
            return file.execute("SELECT count(*) FROM answers").fetchone()[0]
        except sqlite3.OperationalError:
            return 0  # it is being made


# -- On the real model ---------------------------------------------------------------------------


def test_the_solved_questions_are_computed_once(
    engine: pm.Engine, example: ModuleType, tmp_path: Path
) -> None:
    questions = example.read_table(example.QUESTIONS)[:24]
    solved = example.read_table(example.SOLVED)
    run = example.make_run("some model", solved, "text", None)
    backend = Recording(engine)
    before = engine.stats()
    with example.Results(tmp_path / "answers.sqlite") as results:
        answers = example.evaluate(backend, run, solved, questions, results)
    did = engine.stats().since(before)

    # Each distinct token of the tree of all prompts once, worked out from the requests alone.
    assert len(backend.asked) == len(answers) == 24
    assert did.computed_tokens == backend.num_tokens_to_compute()
    # And the rows say so too.
    num_tokens = sum(answer.prompt_tokens for answer in answers)
    num_cached = sum(answer.cached_tokens for answer in answers)
    assert num_tokens - num_cached == did.computed_tokens
    assert num_cached > 0.8 * num_tokens

    for answer in answers:
        assert sum(answer.probabilities.values()) == pytest.approx(1)
        assert set(answer.probabilities) == set(answer.question.options)
        assert answer.confidence == max(answer.probabilities.values())
    num_right = sum(answer.is_right for answer in answers)
    low, _ = sys.modules["evaluation.statistics"].wilson_interval(num_right, 24)
    assert low > 0.25  # better than guessing


# -- Going on ------------------------------------------------------------------------------------

_COMMAND = """
import signal, sys
from contextlib import nullcontext
from pathlib import Path
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have turned it off
sys.path[:0] = [{root!r}, {examples!r}]
import palmette as pm
from tests.examples.quizzed import Quizzed
import few_shot_eval
backend = Quizzed(Path({log!r}), num_answers=20)
pm.Engine = lambda model: nullcontext(backend)
sys.exit(few_shot_eval.main(["--output", {output!r}, *{few!r}]))
"""


@pytest.mark.parametrize(("by", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -9)])
def test_a_run_that_was_stopped_goes_on_and_no_answered_question_is_asked_again(
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    by: signal.Signals,
    status: int,
) -> None:
    log, output = tmp_path / "log", tmp_path / "stopped"
    few = ("--limit", "60", "--shots", "2")
    code = _COMMAND.format(
        root=str(ROOT), examples=str(EXAMPLES), log=str(log), output=str(output), few=few
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    deadline = time.monotonic() + 120
    while num_stored(output) < 20:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(by)
    _, told = process.communicate(timeout=60)
    assert process.returncode == status, told
    if by is signal.SIGINT:
        assert told.endswith("what was answered is kept, the same command goes on\n")
        assert "Traceback" not in told

    kept = stored(output)
    answered = log.read_text().splitlines()
    everything = questions_of(example, 60)
    assert len(kept) == 20
    assert set(kept) == set(answered)

    backend = Quizzed()
    assert run_main(example, monkeypatch, backend, output, *few) == 0
    assert Counter(backend.asked) == Counter(set(everything) - set(kept))
    resumed = capsys.readouterr().out
    assert f"60 questions, {len(kept)} of them answered before" in resumed

    # Once more asks nothing, and all is as if nobody had stopped it.
    backend = Quizzed()
    assert run_main(example, monkeypatch, backend, output, *few) == 0
    assert backend.asked == []
    assert run_main(example, monkeypatch, Quizzed(), tmp_path / "at once", *few) == 0
    assert stored(output) == stored(tmp_path / "at once")
    at_once = capsys.readouterr().out.rpartition("run ")[2]
    tables = [text[text.index("┏") : text.index("prompts:")] for text in (resumed, at_once)]
    assert tables[0] == tables[1]


def test_a_higher_limit_asks_what_is_new(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = []
    for limit in ("4", "4", "6", "2"):
        backend = Quizzed()
        run_main(example, monkeypatch, backend, tmp_path, "--limit", limit)
        asked.append(sorted(backend.asked))
    first = questions_of(example, 6)
    assert asked == [sorted(first[:4]), [], sorted(first[4:]), []]


def test_fresh_asks_everything_again(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for arguments, num_asked in [((), 4), (("--resume",), 0), (("--fresh",), 4)]:
        backend = Quizzed()
        run_main(example, monkeypatch, backend, tmp_path, "--limit", "4", *arguments)
        assert len(backend.asked) == num_asked


def test_what_an_answer_depends_on_is_never_reused_when_it_changes(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = tmp_path / "model.gguf"
    model.write_text("weights")

    def num_asked(*arguments: str) -> int:
        backend = Quizzed()
        run_main(
            example, monkeypatch, backend, tmp_path, "--limit", "4", "--model", str(model),
            *arguments,
        )  # fmt: skip
        return len(backend.asked)

    letters = ("--answers", "letters")
    for arguments in [
        (),
        ("--shots", "2"),
        letters,
        (*letters, "--shuffle-options", "1"),
        (*letters, "--shuffle-options", "2"),
        ("--model", "smollm2-135m"),
    ]:
        assert num_asked(*arguments) == 4
        assert num_asked(*arguments) == 0

    # Another program, other weights in the file, another version.
    with monkeypatch.context() as patched:
        patched.setattr(example, "shown", lambda question, style: f"Question: {question.text}\nA: ")
        assert num_asked() == 4
    assert num_asked() == 0
    model.write_text("other weights")
    assert num_asked() == 4
    monkeypatch.setattr(pm, "__version__", "9.9")
    assert num_asked() == 4

    # A table in which one question was changed, and one was moved.
    with example.QUESTIONS.open(encoding="utf-8", newline="") as file:
        rows = list(csv.reader(file))[:5]
    rows[1][2], rows[2:] = "Coimbra", [rows[4], rows[3], rows[2]]
    table = tmp_path / "table.csv"
    with table.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file).writerows(rows)
    assert num_asked("--questions", str(table)) == 1


def test_a_question_that_fails_is_kept_with_its_error_and_asked_again_on_request(
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    backend = Quizzed()
    backend.fails_at = {"capital of Portugal": EngineError("no power")}
    assert run_main(example, monkeypatch, backend, tmp_path, "--limit", "5") == 1
    printed = capsys.readouterr().out
    assert "failed: What is the capital of Portugal? EngineError: no power" in printed
    assert "1 failed and do not count; ask them again with --retry-failed" in printed
    assert "│ all " in printed
    assert sum(error != "" for _, _, error, _ in stored(tmp_path).values()) == 1

    backend = Quizzed()
    assert run_main(example, monkeypatch, backend, tmp_path, "--limit", "5") == 1
    assert backend.asked == []
    retry = ("--limit", "5", "--retry-failed")
    assert run_main(example, monkeypatch, backend, tmp_path, *retry) == 0
    assert backend.asked == ["What is the capital of Portugal?"]
    assert all(error == "" for _, _, error, _ in stored(tmp_path).values())


def test_an_engine_that_died_ends_the_run_and_is_no_failure_of_the_questions(
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    backend = Quizzed()
    backend.fails_at = {"": EngineStopped("its thread died")}
    with pytest.raises(SystemExit, match="1"):
        run_main(example, monkeypatch, backend, tmp_path)
    assert "its thread died" in capsys.readouterr().err
    assert stored(tmp_path) == {}


# -- The file of results -------------------------------------------------------------------------


def test_a_file_that_cannot_be_used_is_named_with_what_to_do(
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def told(output: Path, *arguments: str) -> str:
        with pytest.raises(SystemExit, match="1"):
            run_main(example, monkeypatch, Quizzed(), output, "--limit", "4", *arguments)
        error = capsys.readouterr().err
        assert str(output) in error
        assert "Traceback" not in error
        return error

    file = tmp_path / "answers.sqlite"
    file.write_bytes(b"no database, but long enough to be looked at" * 100)
    assert "damaged, or no file of results" in told(tmp_path)
    file.unlink()
    with closing(sqlite3.connect(file)) as other:
        other.execute("CREATE TABLE holidays (day TEXT)")
    assert "a database, but not one of results" in told(tmp_path)
    file.unlink()

    run_main(example, monkeypatch, Quizzed(), tmp_path, "--limit", "2")
    capsys.readouterr()
    assert "no run has an id that begins with 'x'" in told(tmp_path, "--compare", "x", "y")
    monkeypatch.setattr(sys.modules["evaluation.results"], "_WAIT_SECONDS", 0.05)
    with closing(sqlite3.connect(file)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert "another process is writing to it" in told(tmp_path)

    data = bytearray(file.read_bytes())  # the pages behind the first
    data[4096:] = b"\xff" * len(data[4096:])
    file.write_bytes(data)
    assert "damaged" in told(tmp_path)
    (tmp_path / "a file").touch()
    assert "answers.sqlite" in told(tmp_path / "a file")


def test_the_results_can_be_read_while_a_run_writes_them(
    example: ModuleType, tmp_path: Path
) -> None:
    solved = example.read_table(example.SOLVED)
    run = example.make_run("model", solved, "text", None)
    answer = example.Answer(
        question=solved[0], chosen=solved[0].right, probabilities={solved[0].right: 1.0}
    )
    with example.Results(tmp_path / "x") as writer, example.Results(tmp_path / "x") as reader:
        assert reader.runs() == []
        writer.add(run, answer)
        assert [each.id for each in reader.runs()] == [run.id]
        assert reader.answers(run) == {solved[0].key: answer}


# -- Tables --------------------------------------------------------------------------------------


def test_the_quiz_has_each_question_once_and_its_answers_in_all_places(
    example: ModuleType,
) -> None:
    questions, solved = example.read_table(example.QUESTIONS), example.read_table(example.SOLVED)
    assert len({question.text for question in (*questions, *solved)}) == 156
    assert all(len(question.options) == 4 for question in questions)
    assert set(Counter(question.category for question in questions).values()) == {25}
    places = Counter(question.options.index(question.right) for question in questions)
    assert max(places.values()) - min(places.values()) <= 1


def test_a_jsonl_table_is_the_same_as_the_csv_one(example: ModuleType, tmp_path: Path) -> None:
    with example.QUESTIONS.open(encoding="utf-8", newline="") as file:
        lines = [json.dumps(row) for row in csv.DictReader(file)]
    (tmp_path / "table.jsonl").write_text("\n".join(lines))
    assert example.read_table(tmp_path / "table.jsonl") == example.read_table(example.QUESTIONS)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "question,a,b,answer\nx,1,2,c\n", r"t.csv, line 2: 'answer' must be one of a, b"),
        ("t.csv", "question,a,b,answer\nx,1,1,a\n", r"line 2: .* at least two options that differ"),
        ("t.csv", "question,a,b,answer\nx,1,2,a\nx,1,2,a\n", r"line 3: the question of line 2"),
        ("t.csv", "text,a,b,answer\nx,1,2,a\n", r"line 2: no 'question' can be read"),
        ("t.csv", "question,a,b,answer\n", "there are no questions"),
        (
            "t.jsonl",
            '{"question": "x", "a": 0, "b": 1, "answer": "a"}\n{"',
            "line 2: no 'question'",
        ),
        ("t.parquet", "", "is a .csv or a .jsonl file"),
    ],
)
def test_a_table_that_is_none_is_refused_with_its_line(
    example: ModuleType, tmp_path: Path, name: str, text: str, message: str
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(example.TableError, match=message):
        example.read_table(tmp_path / name)


def test_the_order_of_options_depends_on_seed_and_question_alone(example: ModuleType) -> None:
    questions = example.read_table(example.QUESTIONS)
    shuffled = [question.shuffled(1) for question in questions]
    assert shuffled == [question.shuffled(1) for question in questions]
    assert questions[3].shuffled(None) == questions[3]
    assert shuffled != [question.shuffled(2) for question in questions]
    places = Counter(question.options.index(question.right) for question in shuffled)
    assert set(places) == {0, 1, 2, 3}
    for before, after in zip(questions, shuffled, strict=True):
        assert sorted(before.options) == sorted(after.options)
        assert before.right == after.right


def test_letters_stand_for_the_options_in_the_order_they_were_listed_in(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = [question.shuffled(5) for question in example.read_table(example.QUESTIONS)[:4]]
    backend = Quizzed()
    # Of every question B is likely, and the others are not.
    backend._probabilities = {"": {letter: 0.1 + 0.6 * (letter == "B") for letter in "ABCD"}}
    arguments = ("--answers", "letters", "--shuffle-options", "5", "--limit", "4")
    run_main(example, monkeypatch, backend, tmp_path, *arguments)
    kept = stored(tmp_path)
    for question in asked:
        chosen, probabilities, *_ = kept[question.text]
        assert chosen == question.options[1]
        assert json.loads(probabilities)[chosen] == pytest.approx(0.7)


# -- Statistics ----------------------------------------------------------------------------------


@pytest.fixture
def statistics(example: ModuleType) -> ModuleType:
    return sys.modules["evaluation.statistics"]


@pytest.mark.parametrize(
    ("num_right", "num_all", "low", "high"),
    # Newcombe, "Two-sided confidence intervals for the single proportion", 1998, table I.
    [
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ],
)
def test_the_interval_is_the_published_one(
    statistics: ModuleType, num_right: int, num_all: int, low: float, high: float
) -> None:
    found = statistics.wilson_interval(num_right, num_all)
    assert found == pytest.approx((low, high), abs=5e-5)


@pytest.mark.parametrize("num_right", [0, 1, 24, 48])
def test_the_interval_is_where_the_score_test_changes_its_mind(
    statistics: ModuleType, num_right: int
) -> None:
    low, high = statistics.wilson_interval(num_right, 48)
    share = num_right / 48
    assert 0 <= low <= share + 1e-12 <= high + 2e-12 <= 1 + 3e-12
    for bound in (low, high):
        if 1e-9 < bound < 1 - 1e-9:
            error = math.sqrt(bound * (1 - bound) / 48)
            assert abs(share - bound) / error == pytest.approx(1.96)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=40))
def test_a_comparison_turned_around_is_the_same_with_another_sign(
    pairs: list[tuple[bool, bool]],
) -> None:
    from evaluation.statistics import compare

    first, second = zip(*pairs, strict=True)
    there, back = compare(first, second), compare(second, first)
    assert there.difference == -back.difference
    assert there.difference == pytest.approx((sum(second) - sum(first)) / len(pairs))
    assert there.p_value == back.p_value
    assert 0 < there.p_value <= 1
    low, high = there.difference_interval(num_samples=500)
    assert -1 <= low <= high <= 1


def test_a_comparison_has_the_figures_of_the_binomial(statistics: ModuleType) -> None:
    comparison = statistics.Comparison(both=50, only_first=2, only_second=10, neither=20)
    # 2 * (1 + 12 + 66) / 2**12
    assert comparison.p_value == pytest.approx(158 / 4096)
    # The normal approximation is close for so many: the variance of -1, 0 and 1.
    low, high = comparison.difference_interval()
    margin = 1.96 * math.sqrt((12 / 82 - (8 / 82) ** 2) / 82)
    assert (low, high) == pytest.approx((8 / 82 - margin, 8 / 82 + margin), abs=0.015)
    assert statistics.Comparison(5, 0, 0, 5).p_value == 1
    assert statistics.Comparison(5, 0, 0, 5).difference_interval() == (0, 0)


def test_the_calibration_error_is_how_far_confidence_and_accuracy_are_apart(
    statistics: ModuleType,
) -> None:
    answers = [(0.9, True)] * 6 + [(0.94, False)] * 4 + [(0.31, False)] * 10 + [(1.0, True)] * 5
    bins = statistics.calibration(answers)
    assert [(each.num_answers, each.num_right) for each in bins] == [(10, 0), (15, 11)]
    expected = (10 * 0.31 + abs(6 * 0.9 + 4 * 0.94 + 5 - 11)) / 25
    assert statistics.calibration_error(bins) == pytest.approx(expected)


def test_two_runs_are_compared_on_the_questions_that_both_answered(
    example: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_main(example, monkeypatch, Quizzed(), tmp_path, "--limit", "20")
    backend = Quizzed()
    backend._probabilities = {"": {letter: 0.1 + 0.6 * (letter == "B") for letter in "ABCD"}}
    run_main(example, monkeypatch, backend, tmp_path, "--limit", "12", "--answers", "letters")
    with example.Results(tmp_path / "answers.sqlite") as results:
        ids = [run.id[:8] for run in results.runs()]
        first, second = (results.answers(run) for run in results.runs())
    capsys.readouterr()
    assert run_main(example, monkeypatch, Quizzed(), tmp_path, "--compare", *ids) == 0
    printed = capsys.readouterr().out
    assert "12 questions that both answered" in printed
    assert "answers=text" in printed
    assert "answers=letters" in printed
    alone = [
        sum(ours[key].is_right and not theirs[key].is_right for key in second)
        for ours, theirs in ((first, second), (second, first))
    ]
    assert f"right in {ids[0]} alone: {alone[0]}, in {ids[1]} alone: {alone[1]}, p = " in printed
    assert f"difference: {(alone[1] - alone[0]) / 12:+.1%}" in printed

    assert run_main(example, monkeypatch, Quizzed(), tmp_path, "--runs") == 0
    printed = capsys.readouterr().out
    assert all(run_id in printed for run_id in ids)


@pytest.mark.parametrize("ending", ["png", "svg"])
def test_the_plot_is_drawn_and_the_same_for_the_same_answers(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ending: str
) -> None:
    plots = [tmp_path / "new" / f"{number}.{ending}" for number in (1, 2)]
    for plot in plots:
        arguments = ("--limit", "12", "--plot", str(plot))
        run_main(example, monkeypatch, Quizzed(), tmp_path, *arguments)
    first, second = (plot.read_bytes() for plot in plots)
    assert first == second
    assert b"PNG" in first[:8] if ending == "png" else b"biology (2)" in first


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shuffle-options", "1"], "--shuffle-options needs --answers letters"),
        (["--plot", "plot.doc"], "--plot takes a .png, .svg or .pdf file"),
        (["--fresh", "--retry-failed"], "not allowed with argument"),
    ],
)
def test_what_would_change_nothing_or_end_in_an_error_is_refused_before_anything_is_asked(
    example: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        example.main(arguments)
    assert message in capsys.readouterr().err


def test_the_commands_of_the_page_are_ones_that_it_takes(example: ModuleType) -> None:
    page = (ROOT / "docs" / "evaluation.md").read_text(encoding="utf-8")
    commands = re.findall(r"^\$ python examples/few_shot_eval.py(.*?)(?: \|.*)?$", page, re.M)
    assert len(commands) == 5
    for command in commands:
        example.make_parser().parse_args(command.split())
    options = {o for action in example.make_parser()._actions for o in action.option_strings}
    assert set(re.findall(r"`(--[a-z-]+)", page.partition("## With lm-eval")[0])) <= options
