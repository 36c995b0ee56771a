"""Plots as files that are the same for the same figures."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def svg_figure(
    path: Path, num_rows: int, num_columns: int, size: tuple[float, float]
) -> Iterator[Any]:
    """A grid of axes [num_rows, num_columns], `size` in inches; written to `path` at the end."""
    import matplotlib as mpl

    mpl.use("svg")
    from matplotlib import pyplot as plt

    with mpl.rc_context({"svg.hashsalt": "palmette", "svg.fonttype": "none", "font.size": 8}):
        figure, grid = plt.subplots(num_rows, num_columns, figsize=size, squeeze=False)
        try:
            yield grid
            figure.tight_layout()
            path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(path, format="svg", metadata={"Date": None})
        finally:
            plt.close(figure)
