"""Figures side by side, as a person reads them."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from benchmarks.peers.engines import Worker
from benchmarks.peers.measure import Results, Row
from benchmarks.peers.workloads import ONLY_SHOWN


def engine_table(workers: Sequence[Worker]) -> Table:
    """What each engine is, how long it took to start, the most memory it had, and how many
    processors were busy with something else while it worked.
    """
    table = _table("Engines", "engine")
    table.add_column("weights")
    table.add_column("versions and settings")
    table.add_column("start", justify="right")
    table.add_column("peak memory", justify="right")
    table.add_column("others busy", justify="right")
    for worker in workers:
        table.add_row(
            worker.name,
            worker.weights,
            ", ".join(f"{name} {value}" for name, value in worker.about.items()),
            f"{worker.start_seconds:.1f} s",
            f"{worker.peak_bytes / 2**20:,.0f} MiB",
            "-" if worker.busy_elsewhere is None else f"{worker.busy_elsewhere:.1f} CPUs",
        )
    return table


def figure_table(results: Results, workers: Sequence[Worker], title: str) -> Table:
    """Median and range of each figure."""
    table = _table(title, "workload")
    table.add_column("figure", no_wrap=True)
    for worker in workers:
        table.add_column(worker.name, justify="right", no_wrap=True)
    before = ""
    for row in results.rows:
        if before and row.workload != before:
            table.add_section()
        cells = [_cell(row, results, worker.name) for worker in workers]
        label = row.workload if row.workload != before else ""
        table.add_row(label, f"{row.figure}, {row.unit.name}", *cells)
        before = row.workload
    return table


def ratio_table(results: Results, workers: Sequence[Worker]) -> Table | None:
    """How many times as fast ours are as peers that read the same weights; None if there are none.

    Some make other blocks of them, or round more: `alike_table` shows how far they agree.
    """
    pairs = [
        (ours.name, peer.name)
        for peer in workers
        for ours in workers
        if ours.name.startswith("ours")
        and not peer.name.startswith("ours")
        and ours.weights == peer.weights
    ]
    if not pairs:
        return None
    table = _table(
        "Times as fast, from the same file or folder (above 1: ours is faster)", "workload"
    )
    table.add_column("figure", no_wrap=True)
    for ours, theirs in pairs:
        table.add_column(f"{ours}\nbeside {theirs}", justify="right")
    for row in results.rows:
        if row.unit not in ONLY_SHOWN:
            ratios = [row.times_better(ours, theirs) for ours, theirs in pairs]
            cells = ["-" if ratio is None else f"{ratio:.2f}" for ratio in ratios]
            table.add_row(row.workload, row.figure, *cells)
    return table


def alike_table(results: Results, workers: Sequence[Worker]) -> Table:
    """Ids up to where an output parts from that of the first engine. Number types differ, and a
    greedy text that has parted once stays apart, so this shows that the same model was computed.
    """
    table = _table("Ids as the first engine's, before an output parts from it", "workload")
    for worker in workers:
        table.add_column(worker.name, justify="right")
    for name in dict.fromkeys(row.workload for row in results.rows):
        found = [results.alike.get((name, worker.name), (0, 0)) for worker in workers]
        if any(total for _, total in found):
            cells = [f"{alike / total:.0%}" if total else "-" for alike, total in found]
            table.add_row(name, *cells)
    return table


def _cell(row: Row, results: Results, engine: str) -> str:
    values, digits = row.values.get(engine), row.unit.digits
    if not values:
        remark = results.remarks.get((row.workload, engine), "")
        return "no such" if remark.startswith("not supported") else "failed"
    median = row.median(engine)
    if min(values) == max(values):
        return f"{median:,.{digits}f}"
    return f"{median:,.{digits}f} ({min(values):,.{digits}f} to {max(values):,.{digits}f})"


def _table(title: str, first: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first, no_wrap=True)
    return table
