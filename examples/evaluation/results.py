"""Answers in a SQLite file, each written as it comes."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from evaluation.table import Question, digest

_VERSION = 1  # of the tables below
_WAIT_SECONDS = 5.0  # for another process that is writing

_TABLES = (
    """
CREATE TABLE runs (
    id TEXT PRIMARY KEY,      -- a hash of the settings
    settings TEXT NOT NULL    -- JSON
)""",
    """
CREATE TABLE answers (
    run TEXT NOT NULL REFERENCES runs (id),
    question TEXT NOT NULL,   -- a hash of its text, its options, what is right and its category
    text TEXT NOT NULL,
    options TEXT NOT NULL,    -- JSON, in the order of the table
    right TEXT NOT NULL,
    category TEXT NOT NULL,
    chosen TEXT,              -- NULL if it failed
    probabilities TEXT NOT NULL,  -- JSON: by option
    error TEXT NOT NULL,
    prompt_tokens INTEGER NOT NULL,
    cached_tokens INTEGER NOT NULL,
    asked_at TEXT NOT NULL DEFAULT CURRENT_TIMESTAMP,
    PRIMARY KEY (run, question)
)""",
)


class ResultsError(Exception):
    """The file cannot be used, or does not have what is asked for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What a run says to a question: an option with the probabilities of all, or an error."""

    question: Question
    chosen: str | None = None
    probabilities: Mapping[str, float] = field(default_factory=dict)
    error: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0

    @property
    def has_failed(self) -> bool:
        return self.chosen is None

    @property
    def is_right(self) -> bool:
        return self.chosen == self.question.right

    @property
    def confidence(self) -> float:
        """The probability of what was chosen."""
        return 0.0 if self.chosen is None else self.probabilities[self.chosen]


@dataclass(frozen=True, slots=True)
class Run:
    """All that an answer depends on besides its question, by name.

    Whatever is another setting is another run, so that no answer is taken for one of other
    settings.
    """

    settings: Mapping[str, Any]

    @property
    def id(self) -> str:
        return digest(sorted(self.settings.items()))


class Results:
    """The answers of any number of runs. Close it, or use it with ``with``.

    Every method raises ResultsError if the file is damaged, locked or otherwise of no use.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._explained():
            path.parent.mkdir(parents=True, exist_ok=True)
            # Each statement is a transaction of its own: what was added is there after a crash.
            self._file = sqlite3.connect(path, timeout=_WAIT_SECONDS, isolation_level=None)
            try:
                self._prepare()
            except BaseException:
                self._file.close()
                raise

    def __enter__(self) -> Results:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def add(self, run: Run, answer: Answer) -> None:
        """Keep an answer, in the place of an earlier one to the same question."""
        question = answer.question
        row = {
            "run": run.id,
            "question": question.key,
            "text": question.text,
            "options": json.dumps(question.options),
            "right": question.right,
            "category": question.category,
            "chosen": answer.chosen,
            "probabilities": json.dumps(answer.probabilities),
            "error": answer.error,
            "prompt_tokens": answer.prompt_tokens,
            "cached_tokens": answer.cached_tokens,
        }
        names = ", ".join(row)
        places = ", ".join("?" * len(row))
        with self._explained(), self._transaction():
            self._file.execute(
                "INSERT OR IGNORE INTO runs VALUES (?, ?)", (run.id, json.dumps(run.settings))
            )
            self._file.execute(
                f"INSERT OR REPLACE INTO answers ({names}) VALUES ({places})", tuple(row.values())
            )

    def answers(self, run: Run) -> dict[str, Answer]:
        """Those of a run, by the keys of their questions."""
        with self._explained():
            rows = self._file.execute("SELECT * FROM answers WHERE run = ?", (run.id,)).fetchall()
            answers = [_answer(row) for row in rows]
        return {answer.question.key: answer for answer in answers}

    def forget(self, run: Run) -> None:
        """Drop the answers of a run."""
        with self._explained():
            self._file.execute("DELETE FROM answers WHERE run = ?", (run.id,))

    def runs(self) -> list[Run]:
        """All that have answers, in the order in which they were begun."""
        with self._explained():
            rows = self._file.execute(
                "SELECT settings FROM runs WHERE id IN (SELECT run FROM answers) ORDER BY rowid"
            ).fetchall()
            return [Run(json.loads(row["settings"])) for row in rows]

    def find(self, beginning: str) -> Run:
        """The run whose id begins so. Raises ResultsError if there is none or more than one."""
        found = [run for run in self.runs() if run.id.startswith(beginning)]
        if len(found) != 1:
            number = "more than one run has" if found else "no run has"
            raise ResultsError(f"{self.path}: {number} an id that begins with {beginning!r}")
        return found[0]

    def _prepare(self) -> None:
        self._file.row_factory = sqlite3.Row
        self._file.execute("PRAGMA journal_mode = WAL")  # can be read while it is written to
        with self._transaction():
            (version,) = self._file.execute("PRAGMA user_version").fetchone()
            (num_tables,) = self._file.execute("SELECT count(*) FROM sqlite_master").fetchone()
            if version == 0 and not num_tables:
                for table in _TABLES:
                    self._file.execute(table)
                self._file.execute(f"PRAGMA user_version = {_VERSION}")
            elif version != _VERSION:
                raise ResultsError(f"{self.path}: a database, but not one of results")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._file.execute("BEGIN IMMEDIATE")
        with self._file:
            yield

    @contextmanager
    def _explained(self) -> Iterator[None]:
        """Every error of SQLite as one that says what to do about it."""
        try:
            yield
        except sqlite3.OperationalError as error:
            is_locked = "locked" in str(error)
            hint = "; another process is writing to it, wait until it has ended"
            raise ResultsError(f"{self.path}: {error}{hint if is_locked else ''}") from error
        except (sqlite3.DatabaseError, ValueError) as error:
            raise ResultsError(
                f"{self.path}: damaged, or no file of results ({error}); move it away"
            ) from error
        except OSError as error:
            raise ResultsError(f"{self.path}: {error}") from error


def _answer(row: Mapping[str, Any]) -> Answer:
    """Raises ValueError if the row is not one."""
    return Answer(
        question=Question(
            row["text"], tuple(json.loads(row["options"])), row["right"], row["category"]
        ),
        chosen=row["chosen"],
        probabilities=json.loads(row["probabilities"]),
        error=row["error"],
        prompt_tokens=row["prompt_tokens"],
        cached_tokens=row["cached_tokens"],
    )


def in_order(answers: Mapping[str, Answer], questions: Sequence[Question]) -> list[Answer]:
    """The answers to these questions that there are."""
    return [answers[question.key] for question in questions if question.key in answers]
