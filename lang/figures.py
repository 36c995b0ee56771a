"""What each primitive of a program cost, as rows and as a table."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palmette.lang.state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """Tokens and time of one primitive that set a variable.

    `prefilled` and `cached` tokens make up its prompt, `forced` and `decoded` ones what came out;
    or `shared` ones, which were made for an equal request of the same batch.
    A variable that a join gathered has one of these for each branch, labelled ``name[0]`` and so
    on.
    """

    label: str
    prefilled: int
    cached: int
    forced: int
    decoded: int
    milliseconds: float
    shared: int = 0


def figures_of(state: State) -> list[Figures]:
    """One for each primitive that set a variable, in the order of the variables."""
    return [
        Figures(
            label=label,
            prefilled=meta["prefilled_tokens"],
            cached=meta["cached_tokens"],
            forced=meta["forced_tokens"],
            decoded=meta["decoded_tokens"],
            milliseconds=meta["milliseconds"],
            shared=meta["shared_tokens"],
        )
        for label, meta in _primitives(state)
    ]


def print_figures(state: State, file: IO[str] | None = None) -> None:
    """Print the figures as a table, with the sum over the whole program, its branches included."""
    from rich.console import Console
    from rich.table import Table

    table = Table("primitive", title="What each primitive cost, in tokens")
    usage = state.usage()
    shared = ("shared",) if usage.shared_tokens else ()
    for column in ("prefilled", "cached", "forced", "decoded", *shared, "ms"):
        table.add_column(column, justify="right")
    for row in figures_of(state):
        counts = (row.prefilled, row.cached, row.forced, row.decoded, row.shared)
        table.add_row(row.label, *map(str, counts[: 4 + len(shared)]), f"{row.milliseconds:.0f}")
    table.add_section()
    total = (
        usage.prefilled_tokens,
        usage.cached_tokens,
        usage.forced_tokens,
        usage.decoded_tokens,
        usage.shared_tokens,
    )
    table.add_row("all", *map(str, total[: 4 + len(shared)]), "")
    Console(file=file).print(table)


def _primitives(state: State) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in state.names():
        meta = state.meta(name)
        if isinstance(meta, list):
            yield from ((f"{name}[{index}]", each) for index, each in enumerate(meta) if each)
        elif meta:  # a variable that the program has set itself cost nothing
            yield name, meta
