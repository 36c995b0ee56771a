"""Questions with several options, read from a .csv or .jsonl file."""

from __future__ import annotations

import csv
import hashlib
import json
import random
import string
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any


class TableError(ValueError):
    """A table cannot be used; the message has the file and the line."""


@dataclass(frozen=True, slots=True)
class Question:
    """A question, its options in the order of the table, and the one that is right."""

    text: str
    options: tuple[str, ...]
    right: str
    category: str = ""

    @property
    def key(self) -> str:
        """The same for the same question, and another one when anything in it was changed."""
        return digest(self.text, self.options, self.right, self.category)

    def shuffled(self, seed: int | None) -> Question:
        """With the options in another order: the same one for the same seed, whatever else is
        in the table. None leaves them as they are.
        """
        if seed is None:
            return self
        order = random.Random(f"{seed} {self.key}")
        return replace(self, options=tuple(order.sample(self.options, len(self.options))))


def digest(*parts: object) -> str:
    """Sixteen hexadecimal digits for anything that JSON can say."""
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def read_table(path: Path) -> list[Question]:
    """A question for each row, with the columns `question`, `answer`, `a`, `b` and so on for the
    options, of which `answer` names one, and, if there is one, `category`.

    Raises TableError for a row that is no such question or is there twice, and OSError.
    """
    readers = {".csv": _csv_rows, ".jsonl": _jsonl_rows}
    if path.suffix not in readers:
        raise TableError(f"{path}: a table is a .csv or a .jsonl file")
    questions: dict[Question, int] = {}  # with their lines
    with path.open(encoding="utf-8", newline="") as file:
        line = 1
        try:
            for line, row in readers[path.suffix](file):
                question = _question(row)
                if question in questions:
                    raise ValueError(f"the question of line {questions[question]} again")
                questions[question] = line
        except ValueError as error:
            raise TableError(f"{path}, line {line}: {error}") from error
        except csv.Error as error:
            raise TableError(f"{path}, after line {line}: {error}") from error
    if not questions:
        raise TableError(f"{path}: there are no questions in it")
    return list(questions)


def _csv_rows(file: Iterable[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    reader = csv.DictReader(file, strict=True)
    for row in reader:
        yield reader.line_num, row


def _jsonl_rows(file: Iterable[str]) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for number, line in enumerate(file, start=1):
        row: Any = None
        with suppress(ValueError):
            row = json.loads(line)
        yield number, row if isinstance(row, dict) else {}


def _question(row: Mapping[str, Any]) -> Question:
    """Raises ValueError if the row is not one."""
    if not row.get("question"):
        raise ValueError("no 'question' can be read")
    letters = [letter for letter in string.ascii_lowercase if row.get(letter) not in (None, "")]
    options = tuple(str(row[letter]) for letter in letters)
    answer = str(row.get("answer") or "").lower()
    if len(set(options)) < len(options) or len(options) < 2:
        raise ValueError(f"the columns a, b, ... need at least two options that differ: {options}")
    if answer not in letters:
        raise ValueError(f"'answer' must be one of {', '.join(letters)}, got {answer!r}")
    return Question(
        text=str(row["question"]),
        options=options,
        right=options[letters.index(answer)],
        category=str(row.get("category") or ""),
    )
