"""Results side by side, as a person reads them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rich.table import Table

from benchmarks.grammar.figures import Jumps, Record, Scores, Speed, by_family, common
from benchmarks.grammar.measure import COMPILED


def score_table(records: Sequence[Record], engines: Sequence[str]) -> Table:
    """Coverage and correctness of each engine."""
    table = _table("Coverage and correctness (schemas; instances of compiled ones)", "engine")
    for heading in (
        "schemas",
        "compiled",
        "refused",
        "broken",
        "all right",
        "of compiled",
        "let invalid in",
        "keep valid out",
        "failing",
        "invalid accepted",
        "valid rejected",
    ):
        table.add_column(heading, justify="right")
    for engine in engines:
        scores = _scores(records, engine)
        table.add_row(
            engine,
            f"{scores.num_schemas}",
            _part(scores.compiled, scores.num_schemas),
            _part(scores.refused, scores.num_schemas),
            f"{scores.broken}",
            _part(scores.right, scores.num_schemas),
            _percent(scores.right, scores.compiled),
            _part(scores.accepting, scores.compiled),
            _part(scores.rejecting, scores.compiled),
            f"{scores.failing}",
            f"{scores.wrongly_accepted} of {scores.num_invalid}",
            f"{scores.wrongly_rejected + scores.failed} of {scores.num_valid}",
        )
    return table


def family_table(records: Sequence[Record], engines: Sequence[str]) -> Table:
    """For each family and engine: schemas all right / wrong / refused."""
    table = _table("All right / wrong / not compiled, by family", "family")
    table.add_column("schemas", justify="right")
    for engine in engines:
        table.add_column(engine, justify="right")
    for family, members in by_family(records).items():
        cells = [_outcomes(members, engine) for engine in engines]
        table.add_row(family, f"{len(members)}", *cells)
    return table


def speed_table(records: Sequence[Record], engines: Sequence[str]) -> Table:
    """Times over the schemas that all `engines` compile."""
    shared = common(records, engines)
    speeds = [Speed.of([record.results[engine] for record in shared]) for engine in engines]
    num_masks = " / ".join(f"{speed.num_masks:,}" for speed in speeds)
    table = _table(
        f"Speed over the {len(shared)} schemas that all compile; masks: {num_masks}", "engine"
    )
    columns: dict[str, Callable[[Speed], str]] = {
        "first mask median": lambda speed: _ms(speed.first_median),
        "p99": lambda speed: _ms(speed.first_p99),
        "per mask mean": lambda speed: _us(speed.mask_mean),
        "median": lambda speed: _us(speed.mask_median),
        "p99 ": lambda speed: _us(speed.mask_p99),
        "max": lambda speed: _us(speed.mask_max),
        "second use median": lambda speed: _us(speed.again_median),
        "p99  ": lambda speed: _us(speed.again_p99),
        "compiled again": lambda speed: _us(speed.compiled_again),
    }
    for heading in columns:
        table.add_column(heading.rstrip(), justify="right")
    for engine, speed in zip(engines, speeds, strict=True):
        table.add_row(engine, *(show(speed) for show in columns.values()))
    return table


def memory_table(records: Sequence[Record], base_bytes: dict[str, int]) -> Table:
    """The most memory of each engine's process, and how much of it came with the schemas."""
    table = _table("Memory of the process", "engine")
    table.add_column("with the vocabulary", justify="right")
    table.add_column("at its peak", justify="right")
    for engine, base in base_bytes.items():
        peaks = [record.results[engine].peak_bytes for record in records]
        table.add_row(engine, _mib(base), _mib(max(peaks, default=base)))
    return table


def jump_table(records: Sequence[Record], ways: dict[str, Sequence[str]]) -> Table:
    """Forced tokens of valid instances, and forward passes saved, by family and way to find them.

    Of the schemas on which every engine is right, so that all have the same texts; but for the row
    of all that each of them accepts. The last row has the mean of the shares of single instances,
    where short ones count as much as long ones.
    """
    table = _table("Valid instances: tokens forced / forward passes saved, by family", "family")
    table.add_column("tokens", justify="right")
    columns = [(engine, way) for engine, each in ways.items() for way in each]
    for engine, way in columns:
        table.add_column(f"{engine}\n{way}", justify="right")
    shared = [r for r in records if all(r.results[engine].is_right for engine in ways)]
    for family, members in {**by_family(shared), "all": shared, "all accepted": records}.items():
        jumps = [Jumps.of((r.results[engine] for r in members), way) for engine, way in columns]
        if family == "all":
            table.add_section()
        num_tokens = f"{jumps[0].num_tokens:,}" if family != "all accepted" else ""
        table.add_row(
            family, num_tokens, *(f"{_share(j.share)} / {_share(j.passes_saved)}" for j in jumps)
        )
    means = [Jumps.of((r.results[engine] for r in shared), way) for engine, way in columns]
    table.add_row("mean of instances", "", *(_share(each.mean_share) for each in means))
    return table


def suite_tables(records: Sequence[Record], engines: Sequence[str]) -> list[Table]:
    """The official suite: groups passed / wrong / refused, for each draft; optional files apart."""
    parts: dict[str, list[Record]] = {}
    for record in records:
        draft, _, file = record.case.family.partition(" ")
        part = f"{draft}, optional" if file.startswith("optional") else draft
        parts.setdefault(part, []).append(record)
    tables = []
    for part, members in parts.items():
        table = _table(f"Official suite, {part}: groups passed / wrong / not compiled", "file")
        table.add_column("groups", justify="right")
        for engine in engines:
            table.add_column(engine, justify="right")
        for family, group in by_family(members).items():
            cells = [_outcomes(group, engine) for engine in engines]
            table.add_row(family.partition(" ")[2], f"{len(group)}", *cells)
        table.add_section()
        cells = [_outcomes(members, engine) for engine in engines]
        table.add_row("all", f"{len(members)}", *cells)
        tables.append(table)
    return tables


def _outcomes(records: Sequence[Record], engine: str) -> str:
    results = [record.results[engine] for record in records]
    right = sum(result.is_right for result in results)
    compiled = sum(result.outcome == COMPILED for result in results)
    return f"{right} / {compiled - right} / {len(results) - compiled}"


def _scores(records: Sequence[Record], engine: str) -> Scores:
    return Scores.of([r.case for r in records], [r.results[engine] for r in records])


def _table(title: str, first: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first, no_wrap=True)
    return table


def _percent(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def _part(part: int, whole: int) -> str:
    return f"{part} ({_percent(part, whole)})" if whole else f"{part}"


def _share(share: float) -> str:
    return "-" if math.isnan(share) else f"{share:.1%}"


def _ms(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1e3:.2f} ms"


def _us(seconds: float) -> str:
    return "-" if math.isnan(seconds) else f"{seconds * 1e6:.1f} µs"


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:.0f} MiB"
