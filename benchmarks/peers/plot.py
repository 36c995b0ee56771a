"""The figures of one or several runs as bars side by side.

    python -m benchmarks.peers.plot peers.json docs/plots/peers.svg

Of a figure that several of the files have, each engine's is that of the first which has it.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.peers.workloads import ONLY_SHOWN, UNITS
from benchmarks.plotting import svg_figure

_COLUMNS = 4


def plot(runs: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A panel for each figure of the `runs`, which are as `--json` writes them: medians, and lines
    from the least to the most.
    """
    panels: dict[tuple[str, str], dict[str, list[float]]] = {}
    units: dict[tuple[str, str], str] = {}
    for run in runs:
        for row in run["figures"]:
            if row["unit"] in {unit.name for unit in ONLY_SHOWN}:
                continue
            key = row["workload"], row["figure"]
            units[key] = row["unit"]
            panel = panels.setdefault(key, {})
            for engine, values in row["values"].items():
                panel.setdefault(engine, values)
    engines = list(dict.fromkeys(engine for run in runs for engine in run["engines"]))
    num_rows = -(-len(panels) // _COLUMNS)
    with svg_figure(path, num_rows, _COLUMNS, (12, 0.7 + 0.2 * len(engines) * num_rows)) as grid:
        for axes, (key, panel) in zip(grid.flat, panels.items(), strict=False):
            there = [engine for engine in engines if panel.get(engine)]
            medians = [statistics.median(panel[engine]) for engine in there]
            errors = [
                [
                    median - min(panel[engine])
                    for engine, median in zip(there, medians, strict=True)
                ],
                [
                    max(panel[engine]) - median
                    for engine, median in zip(there, medians, strict=True)
                ],
            ]
            colors = [f"C{engines.index(engine)}" for engine in there]
            axes.barh(there, medians, xerr=errors, color=colors, ecolor="black", capsize=2)
            axes.invert_yaxis()
            unit = UNITS[units[key]]
            better = "more" if unit.more_is_better else "less"
            axes.set_title(f"{key[0]}: {key[1]}", fontsize=8)
            axes.set_xlabel(f"{unit.name} ({better} is better)", fontsize=7)
        for axes in grid.flat[len(panels) :]:
            axes.set_visible(False)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.plot",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("figures", nargs="+", type=Path, help="what --json wrote")
    parser.add_argument("plot", type=Path, help="where to write the plot, an .svg file")
    args = parser.parse_args(argv)
    plot([json.loads(path.read_text()) for path in args.figures], args.plot)


if __name__ == "__main__":
    main()
