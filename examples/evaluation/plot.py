"""Accuracy with its intervals, and how well confidence agrees with it, in one picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes

from evaluation.report import accuracy, by_category
from evaluation.results import Answer
from evaluation.statistics import calibration, calibration_error, wilson_interval

_STYLE: dict[Any, Any] = {
    "font.size": 8,
    "svg.fonttype": "none",
    "svg.hashsalt": "evaluation",  # the same figures give the same file
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def draw(answers: Sequence[Answer], path: Path) -> None:
    """Write the plot of what was answered; the name's ending says in which format.

    Raises ValueError for an ending that matplotlib does not know, and OSError.
    """
    mpl.use("Agg")  # a file, whether there is a screen or not
    from matplotlib import pyplot as plt

    answered = [answer for answer in answers if not answer.has_failed]
    with mpl.rc_context(_STYLE):
        figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3.5), layout="constrained")
        try:
            draw_accuracy(answered, left)
            draw_calibration(answered, right)
            path.parent.mkdir(parents=True, exist_ok=True)
            metadata = {"Date": None} if path.suffix == ".svg" else None
            figure.savefig(path, dpi=120, metadata=metadata)
        finally:
            plt.close(figure)


def draw_accuracy(answers: Sequence[Answer], axes: Axes) -> None:
    """A point and its interval for each category and for all, and what guessing would get."""
    groups = by_category(answers)
    rows = [*(groups.items() if len(groups) > 1 else ()), ("all", answers)]
    for place, (name, group) in enumerate(rows):
        share, low, high = accuracy(group)
        axes.plot([low, high], [place] * 2, color="tab:blue", linewidth=4 if name == "all" else 2)
        axes.plot(share, place, "o", color="tab:blue", markersize=8 if name == "all" else 5)
    chance = sum(1 / len(answer.question.options) for answer in answers) / len(answers)
    axes.axvline(chance, color="grey", linestyle="--", linewidth=0.8)
    axes.text(chance, len(rows) - 0.5, " guessing", color="grey", va="bottom")
    axes.set_yticks(range(len(rows)), [f"{name} ({len(group)})" for name, group in rows])
    axes.set(xlim=(0, 1), ylim=(len(rows) - 0.5, -0.5))  # the first category on top
    axes.set(xlabel="accuracy, 95 % interval", title="Accuracy by category")


def draw_calibration(answers: Sequence[Answer], axes: Axes) -> None:
    """The reliability diagram: on the diagonal, answers are right as often as they are sure."""
    bins = calibration([(answer.confidence, answer.is_right) for answer in answers])
    for each in bins:
        low, high = wilson_interval(each.num_right, each.num_answers)
        axes.plot([each.confidence] * 2, [low, high], color="tab:orange", linewidth=1)
    axes.scatter(
        [each.confidence for each in bins],
        [each.accuracy for each in bins],
        s=[10 + 200 * each.num_answers / len(answers) for each in bins],
        color="tab:orange",
        zorder=3,
    )
    axes.plot([0, 1], [0, 1], color="grey", linestyle="--", linewidth=0.8)
    axes.set(
        xlim=(0, 1.02),
        ylim=(0, 1.02),
        xlabel="probability of the chosen option",
        ylabel="share that is right",
        title=f"Calibration (error {calibration_error(bins):.1%})",
    )
