"""What is asked of the engines: schemas, and instances of which some are valid."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Instance:
    """A JSON document, compact and with its keys in the order of the data."""

    text: str
    is_valid: bool


@dataclass(frozen=True, slots=True)
class Case:
    """A schema as JSON text and its instances. `family` is what the results are grouped by."""

    name: str
    family: str
    schema: str
    instances: tuple[Instance, ...]


def read_schemas(path: Path) -> list[Case]:
    """Cases of a JSON Lines file, or one packed with gzip: id, schema, tests of valid and data.

    Raises ValueError, with the line, for one that is nothing of the kind.
    """
    return [
        Case(entry["id"], family_of(entry["id"]), _text(entry["schema"]), _instances(entry))
        for entry in _entries(path, ("id", "schema", "tests"))
    ]


def read_suite(path: Path) -> list[Case]:
    """The groups of the official test suite; a family is a draft and a file, such as
    `draft7 items.json`.
    """
    return [
        Case(
            entry["description"],
            f"{entry['draft']} {entry['file']}",
            _text(entry["schema"]),
            _instances(entry),
        )
        for entry in _entries(path, ("draft", "file", "description", "schema", "tests"))
    ]


def family_of(name: str) -> str:
    """What comes before three dashes, or else before the first underline."""
    head, dashes, _ = name.partition("---")
    return head if dashes else name.partition("_")[0]


def _entries(path: Path, keys: Iterable[str]) -> Iterator[dict[str, Any]]:
    with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                entry = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: {error}") from error
            missing = [key for key in keys if not isinstance(entry, dict) or key not in entry]
            if missing:
                raise ValueError(f"{path}, line {number}: it has no {', '.join(missing)}")
            yield entry


def _instances(entry: dict[str, Any]) -> tuple[Instance, ...]:
    return tuple(Instance(_text(test["data"]), bool(test["valid"])) for test in entry["tests"])


def _text(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, which only an escape can spell
        return json.dumps(value, separators=(",", ":"))
    return text
