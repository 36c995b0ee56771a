"""A trace as a tree on a terminal."""

from __future__ import annotations

from typing import IO, TYPE_CHECKING

from palmette.lang.tracing.model import Event, RunTrace
from palmette.lang.tracing.recording import Status

if TYPE_CHECKING:
    from rich.text import Text
    from rich.tree import Tree

    from palmette.lang.tracing.trace import Trace

_MAX_SHOWN = 60  # characters of a text
_MAX_DEPTH = 50  # forks below each other: a line takes the longer, the deeper it stands
_STYLES = {
    Status.OK: "green",
    Status.FAILED: "red",
    Status.TIMED_OUT: "red",
    Status.CANCELLED: "yellow",
    Status.NOT_DONE: "dim",
    Status.RUNNING: "cyan",
    Status.WAITING: "dim",
}
_CONSTANTS = ("text", "special", "role_begin", "role_end", "scope_begin", "scope_end")


def print_trace(
    trace: Trace, file: IO[str] | None = None, *, max_runs: int = 20, all_events: bool = False
) -> None:
    """Print the primitives as a tree on `file`, by default standard output; of the runs the first
    `max_runs`, and constants only with `all_events`.
    """
    from rich.console import Console
    from rich.text import Text
    from rich.tree import Tree

    console = Console(file=file, highlight=False)
    console.print(Text(trace.summary(), style="bold"))
    for run in trace.runs[:max_runs]:
        title = Text.assemble(
            (f"{run.program or 'program'} ", "bold"),
            (run.status.value, _STYLES[run.status]),
            f" {_span(run.start, run.end)}",
        )
        if run.error:
            title.append(f"  {_plain(run.error)}", "red")
        tree = Tree(title)
        if run.branches:
            _add_branch(tree, run, 0, all_events)
        if run.omitted_events:
            tree.add(Text(f"{run.omitted_events} more primitives were not kept", style="dim"))
        console.print(tree)
    if len(trace.runs) > max_runs:
        console.print(Text(f"{len(trace.runs) - max_runs} more runs", style="dim"))


def _add_branch(tree: Tree, run: RunTrace, index: int, all_events: bool) -> None:
    from rich.text import Text

    # By hand and not by recursion: forks may be nested deeper than calls.
    below: dict[tuple[int, int | None], list[int]] = {}
    for child, branch in enumerate(run.branches):
        if branch.parent is not None:
            below.setdefault((branch.parent, branch.forked_by), []).append(child)
    stack = [(tree, index, 0)]
    while stack:
        node, current, depth = stack.pop()
        for place, event in enumerate(run.branches[current].events):
            children = below.get((current, place), [])
            if event.kind in _CONSTANTS and event.status is Status.OK and not all_events:
                continue
            own = node.add(_line(event))
            if children and depth == _MAX_DEPTH:
                own.add(Text("branches below are not shown", style="dim"))
                continue
            for child in children:
                path = ".".join(map(str, run.branches[child].path))
                title = _title(f"branch {path}", run.branches[child].status)
                stack.append((own.add(title), child, depth + 1))


def _title(name: str, status: Status) -> Text:
    from rich.text import Text

    return Text.assemble((name, "bold"), " ", (status.value, _STYLES[status]))


def _line(event: Event) -> Text:
    from rich.text import Text

    line = Text.assemble((_plain(event.name), "bold"), " ")
    if event.status is not Status.OK:
        line.append(f"{event.status.value} ", _STYLES[event.status])
    line.append(_span(event.start, event.end))
    if event.prompt is not None:
        cached = "" if event.prompt.cached is None else f" ({event.prompt.cached} cached)"
        line.append(f"  prompt {event.prompt.tokens}{cached}")
    if event.usage is not None and event.usage.completion_tokens:
        forced = f" ({event.usage.forced_tokens} forced)" if event.usage.forced_tokens else ""
        line.append(f"  output {event.usage.completion_tokens}{forced}")
    if event.chosen is not None:
        probability = event.options[event.chosen].probability
        if probability is not None:
            line.append(f"  p={probability:.3f}")
    if event.text:
        cut = event.text if len(event.text) <= _MAX_SHOWN else event.text[:_MAX_SHOWN] + "..."
        line.append(f"  {_plain(repr(cut))}", "italic")
    if event.error:
        line.append(f"  {_plain(event.error)}", "red")
    line.append(f"  {_plain(event.where)}", "dim")
    return line


def _span(start: float | None, end: float | None) -> str:
    if start is None:
        return "not begun"
    return f"{start:.3f} s, still going" if end is None else f"{(end - start) * 1000:.1f} ms"


def _plain(text: str) -> str:
    """On one line, without what a terminal takes for a command."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)
