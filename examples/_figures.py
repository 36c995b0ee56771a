"""A table of what each primitive of a program cost, shared by the examples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table

import palmette as pm

COLUMNS = ("prefilled", "cached", "forced", "decoded")


def print_figures(state: pm.State) -> None:
    """Print one row for each primitive that set a variable, and the sum of all.

    Prefilled and cached tokens make up its prompt, forced and decoded ones what came out of it.
    """
    table = Table("primitive", title="What each primitive cost, in tokens")
    for column in (*COLUMNS, "ms"):
        table.add_column(column, justify="right")
    for label, meta in _primitives(state):
        counts = (str(meta[f"{column}_tokens"]) for column in COLUMNS)
        table.add_row(label, *counts, f"{meta['milliseconds']:.0f}")
    table.add_section()
    usage = state.usage()  # of the whole program, its branches included
    table.add_row("all", *(str(getattr(usage, f"{column}_tokens")) for column in COLUMNS), "")
    Console().print(table)


def _primitives(state: pm.State) -> Iterator[tuple[str, dict[str, Any]]]:
    """A label and the figures of each; a variable gathered by a join has one for each branch."""
    for name in state.names():
        meta = state.meta(name)
        if isinstance(meta, list):
            yield from ((f"{name}[{index}]", each) for index, each in enumerate(meta) if each)
        elif meta:  # a variable that the program has set itself cost nothing
            yield name, meta
