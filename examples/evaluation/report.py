"""What came out, as tables and sentences."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from evaluation.results import Answer, Results, ResultsError, Run
from evaluation.statistics import calibration, calibration_error, compare, wilson_interval


def by_category(answers: Sequence[Answer]) -> dict[str, list[Answer]]:
    """The answers of each category, in the order in which these come first."""
    groups: dict[str, list[Answer]] = {}
    for answer in answers:
        groups.setdefault(answer.question.category, []).append(answer)
    return groups


def accuracy(answers: Sequence[Answer]) -> tuple[float, float, float]:
    """The share that is right, and its 95 % interval."""
    num_right = sum(answer.is_right for answer in answers)
    return (num_right / len(answers), *wilson_interval(num_right, len(answers)))


def print_report(run: Run, answers: Sequence[Answer]) -> None:
    """Accuracy by category, calibration, and what the prompts cost. Failures do not count."""
    answered = [answer for answer in answers if not answer.has_failed]
    failed = [answer for answer in answers if answer.has_failed]
    console = Console()
    if answered:
        console.print(accuracy_table(run, answered))
        bins = calibration([(answer.confidence, answer.is_right) for answer in answered])
        console.print(
            f"calibration error: {calibration_error(bins):.1%} "
            f"(mean confidence {sum(a.confidence for a in answered) / len(answered):.1%})"
        )
        num_tokens = sum(answer.prompt_tokens for answer in answered)
        num_cached = sum(answer.cached_tokens for answer in answered)
        console.print(
            f"prompts: {num_tokens} tokens, {num_tokens - num_cached} of them prefilled and "
            f"{num_cached} cached (hit rate {num_cached / max(1, num_tokens):.1%})"
        )
    for answer in failed[:3]:
        console.print(f"failed: {escape(answer.question.text)} {escape(answer.error)}")
    if failed:
        console.print(f"{len(failed)} failed and do not count; ask them again with --retry-failed")


def accuracy_table(run: Run, answers: Sequence[Answer]) -> Table:
    table = Table("category", title=f"run {run.id[:8]}")
    for column in ("right", "of", "accuracy", "95 % interval"):
        table.add_column(column, justify="right")
    groups = by_category(answers)
    for category, group in groups.items() if len(groups) > 1 else ():
        table.add_row(*accuracy_row(category, group))
    table.add_section()
    table.add_row(*accuracy_row("all", answers))
    return table


def accuracy_row(name: str, answers: Sequence[Answer]) -> tuple[str, ...]:
    share, low, high = accuracy(answers)
    num_right = sum(answer.is_right for answer in answers)
    interval = f"{low:.1%} to {high:.1%}"
    return escape(name), f"{num_right}", f"{len(answers)}", f"{share:.1%}", interval


def print_runs(results: Results) -> None:
    """Every run that has answers, and its settings."""
    table = Table("run", "answers", "accuracy", "settings")
    for run in results.runs():
        answers = [answer for answer in results.answers(run).values() if not answer.has_failed]
        share = f"{accuracy(answers)[0]:.1%}" if answers else ""
        named = ((name, value) for name, value in run.settings.items() if value is not None)
        settings = ", ".join(f"{name}={value}" for name, value in named)
        table.add_row(run.id[:8], f"{len(answers)}", share, escape(settings))
    Console().print(table)


def print_comparison(results: Results, first: Run, second: Run) -> None:
    """Both accuracies on the questions that both have answered, and whether they differ.

    Raises ResultsError if there is no such question.
    """
    ours, theirs = (results.answers(run) for run in (first, second))
    pairs = [
        (answer, theirs[key])
        for key, answer in ours.items()
        if key in theirs and not answer.has_failed and not theirs[key].has_failed
    ]
    if not pairs:
        raise ResultsError(f"{results.path}: the two runs have answered no question in common")
    table = Table("run", "where they differ", title=f"{len(pairs)} questions that both answered")
    for column in ("accuracy", "95 % interval"):
        table.add_column(column, justify="right")
    for run, other, answers in (
        (first, second, [ours for ours, _ in pairs]),
        (second, first, [theirs for _, theirs in pairs]),
    ):
        table.add_row(run.id[:8], escape(differing(run, other)), *accuracy_row("", answers)[3:])
    Console().print(table)
    counts = compare([ours.is_right for ours, _ in pairs], [each.is_right for _, each in pairs])
    low, high = counts.difference_interval()
    num_changed = sum(ours.chosen != theirs.chosen for ours, theirs in pairs)
    print(f"difference: {counts.difference:+.1%} (95 % interval: {low:+.1%} to {high:+.1%})")
    print(f"right in {first.id[:8]} alone: {counts.only_first}", end=", ")
    print(f"in {second.id[:8]} alone: {counts.only_second}, p = {counts.p_value:.2g} (McNemar)")
    print(f"another option was chosen: {num_changed} times")


def differing(run: Run, other: Run) -> str:
    """The settings that the other run has not."""
    return ", ".join(
        f"{name}={value}"
        for name, value in run.settings.items()
        if other.settings.get(name) != value
    )
