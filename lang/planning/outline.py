"""The shape of a program: what it appends, asks and forks, as far as that is known beforehand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePath
from typing import IO, ClassVar

_MAX_TEXT_CHARS = 60  # of a constant, where an outline is shown
_MAX_LINES = 400  # of an outline that is printed


@dataclass(frozen=True, slots=True)
class Part:
    """A constant; or, in the place of a value that is not known, what that is made of."""

    text: str
    source: str | None = None

    def __str__(self) -> str:
        return self.text if self.source is None else f"⟨{self.source}⟩"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Something that a branch does; `where` is file and line, `path` that of the branch.

    `tick` counts all that the program does, reading included.
    """

    where: str
    path: tuple[int, ...] = ()
    tick: int = 0
    is_request: ClassVar[bool] = False

    def describe(self) -> str:
        """The step in one line."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class Appends(Step):
    """Text; `role` is that of the message it stands in."""

    parts: tuple[Part, ...]
    role: str | None = None

    @property
    def text(self) -> str:
        """The text, as far as it is known."""
        return "".join(map(str, self.parts))

    @property
    def sources(self) -> tuple[str, ...]:
        """What the text depends on: arguments, variables."""
        return tuple(dict.fromkeys(part.source for part in self.parts if part.source is not None))

    def describe(self) -> str:
        text = self.text
        if len(text) > _MAX_TEXT_CHARS:
            return f"text {text[: _MAX_TEXT_CHARS // 2]!r} ... ({len(text)} characters)"
        return f"text {text!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Opens(Step):
    """A message of `role` begins."""

    role: str

    def describe(self) -> str:
        return f"message of {self.role}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Closes(Step):
    """The open message ends."""

    role: str

    def describe(self) -> str:
        return f"end of the message of {self.role}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asks(Step):
    """What a primitive asks of the backend.

    `prompt_ids` is its whole prompt, if that is known; `is_shareable` says that equal ones have
    equal answers, so that one is enough.
    """

    name: str | None
    prompt_ids: tuple[int, ...] | None = None
    is_shareable: bool = False
    is_request: ClassVar[bool] = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Generates(Asks):
    """A `gen`; `kind` is the type of its variable, `constraint` the kind of its constraint."""

    max_tokens: int
    is_bounded: bool  # the program or the run said how long
    kind: str = "text"
    constraint: str | None = None
    num_samples: int = 1
    temperature: float = 1.0
    options: object = None  # all that tells its answer from those of other requests
    # What of the prompt is scored as well, by log-probabilities of the prompt.
    scored_from: int | None = None

    def describe(self) -> str:
        told = [repr(self.name)] if self.name else []
        if self.kind != "text":
            told.append(self.kind)
        if self.constraint is not None:
            told.append(f"by {self.constraint}")
        told.append(f"max_tokens={self.max_tokens}" + ("" if self.is_bounded else " by default"))
        if self.num_samples > 1:
            told.append(f"n={self.num_samples}")
        return f"gen({', '.join(told)}){_prompt(self.prompt_ids)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selects(Asks):
    """A `select`; with one choice nothing is asked. `continuations` are the choices' tokens."""

    choices: tuple[str, ...]
    method: str = "probability"
    continuations: tuple[tuple[int, ...], ...] = ()

    def describe(self) -> str:
        name = f"{self.name!r}, " if self.name else ""
        return f"select({name}{len(self.choices)} choices){_prompt(self.prompt_ids)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Forks(Step):
    """Branches begin; `index` counts the forks of the branch, `branches` has the steps of each."""

    index: int
    width: int
    branches: tuple[tuple[Step, ...], ...] = ()

    def describe(self) -> str:
        return f"fork({self.width})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Joins(Step):
    """Branches of the fork numbered `index` come together; `names` are the lists they make."""

    index: int
    mode: str
    names: tuple[str, ...] = ()

    def describe(self) -> str:
        if self.mode != "gather_variable":
            return f"join({self.mode!r})"
        return f"join: lists {', '.join(self.names)}" if self.names else "join"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sets(Step):
    """A variable gets a value: by the program, or the text of a scope."""

    name: str
    is_scope: bool = False

    def describe(self) -> str:
        return f"variable {self.name!r}: " + ("the text of its scope" if self.is_scope else "set")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancels(Step):
    """The branch is cancelled by the program."""

    def describe(self) -> str:
        return "cancelled"


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs(Step):
    """Another program is run from this one."""

    name: str
    number: int
    steps: tuple[Step, ...] = ()

    def describe(self) -> str:
        return f"run of {self.name}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Read:
    """The program waits for what the branch at `path` has done so far."""

    where: str
    path: tuple[int, ...]
    tick: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Outline:
    """What a program does before anything is known of what the model writes.

    `steps` are those of its state, the branches of a fork within the `Forks` step. If it is not
    `is_complete`, `where` is the line from which on the shape is not known, `why` the reason, and
    `error` what the program raised there, if it did. `variables` has the type of each variable of
    the state by then. `prefix_text` is what every run begins with; `prefix_ids` are its token ids,
    if a backend was given or set. `notes` tell what was assumed; texts appended at the lines in
    `varies_at` differ from run to run.
    """

    name: str
    steps: tuple[Step, ...]
    is_complete: bool
    where: str | None = None
    why: str | None = None
    error: Exception | None = None
    variables: Mapping[str, str] = field(default_factory=dict)
    prefix_text: str = ""
    prefix_ids: tuple[int, ...] | None = None
    notes: tuple[str, ...] = ()
    reads: tuple[Read, ...] = ()
    varies_at: tuple[str, ...] = ()

    def walk(self) -> Iterator[Step]:
        """All steps, each before those within it."""
        yield from _walk(self.steps)

    @property
    def requests(self) -> list[Asks]:
        """What is asked of the backend, as far as it is known, branch by branch."""
        return [step for step in self.walk() if isinstance(step, Asks)]

    @property
    def fork_widths(self) -> list[int]:
        """The width of each fork."""
        return [step.width for step in self.walk() if isinstance(step, Forks)]

    def depends_on(self, source: str) -> list[Appends]:
        """The texts with something made of `source`: an argument, or a variable as ``s["x"]``."""
        found = (step for step in self.walk() if isinstance(step, Appends))
        return [step for step in found if source in step.sources]

    def __str__(self) -> str:
        lines = [self._title(), *map(str, _rows(self.steps, 1))]
        if len(lines) > _MAX_LINES:
            lines = [*lines[:_MAX_LINES], f"  ... {len(lines) - _MAX_LINES} lines more"]
        return "\n".join([*lines, *self._ending()])

    def show(self, file: IO[str] | None = None) -> None:
        """Print the outline as a tree on `file`, by default standard output."""
        from rich.console import Console
        from rich.text import Text
        from rich.tree import Tree

        tree = Tree(Text(self._title(), style="bold"))
        nodes = [tree]
        for row in _rows(self.steps)[:_MAX_LINES]:
            label = Text(row.text)
            if row.where is not None:
                label.append(f"  {shown(row.where)}", style="dim")
            del nodes[row.depth + 1 :]
            nodes.append(nodes[-1].add(label))
        console = Console(file=file)
        console.print(tree)
        for line in self._ending():
            console.print(Text(line.strip(), style="" if self.is_complete else "yellow"))

    def _title(self) -> str:
        known = "" if self.prefix_ids is None else f"{len(self.prefix_ids)} tokens, "
        return f"{self.name}: constant prefix of {known}{len(self.prefix_text)} characters"

    def _ending(self) -> list[str]:
        lines = [] if self.is_complete else [f"  not known from {shown(self.where)} on: {self.why}"]
        lines += [f"  differs from run to run: {shown(where)}" for where in self.varies_at]
        return [*lines, *(f"  note: {note}" for note in self.notes)]


def _walk(steps: tuple[Step, ...]) -> Iterator[Step]:
    stack: list[Iterator[Step]] = [iter(steps)]
    while stack:
        step = next(stack[-1], None)
        if step is None:
            stack.pop()
            continue
        yield step
        if isinstance(step, Forks):
            stack += [iter(branch) for branch in reversed(step.branches)]
        elif isinstance(step, Runs):
            stack.append(iter(step.steps))


@dataclass(frozen=True, slots=True)
class _Row:
    """A line of an outline that is shown; a title of branches has no place of its own."""

    depth: int
    text: str
    where: str | None = None

    def __str__(self) -> str:
        place = "" if self.where is None else f"  [{shown(self.where)}]"
        return "  " * self.depth + self.text + place


def _rows(steps: tuple[Step, ...], depth: int = 0) -> list[_Row]:
    """Branches that are alike are one."""
    rows: list[_Row] = []
    for step in steps:
        rows.append(_Row(depth, step.describe(), step.where))
        if isinstance(step, Runs):
            rows += _rows(step.steps, depth + 1)
        elif isinstance(step, Forks):
            groups: dict[tuple[tuple[int, str], ...], list[int]] = {}
            below = [_rows(branch, depth + 2) for branch in step.branches]
            for index, branch in enumerate(below):
                groups.setdefault(tuple((row.depth, row.text) for row in branch), []).append(index)
            for indexes in groups.values():
                rows += [_Row(depth + 1, _numbered(indexes)), *below[indexes[0]]]
    return rows


def _numbered(indexes: list[int]) -> str:
    """The branches as people count them in."""
    if len(indexes) == 1:
        return f"branch {indexes[0]}"
    if indexes == list(range(indexes[0], indexes[-1] + 1)):
        return f"branches {indexes[0]} to {indexes[-1]}, all alike"
    return f"{len(indexes)} branches, all alike: {', '.join(map(str, indexes[:8]))}" + (
        ", ..." if len(indexes) > 8 else ""
    )


def shown(where: str | None) -> str:
    """File and line, without the folder."""
    file, _, line = (where or "?").rpartition(":")
    return f"{PurePath(file).name}:{line}"


def _prompt(prompt_ids: tuple[int, ...] | None) -> str:
    return "" if prompt_ids is None else f" after {len(prompt_ids)} tokens"


def nested(events: list[tuple[int, Step]], number: int = 0) -> tuple[Step, ...]:
    """The steps of the run `number`, those of branches and of other runs put into their places.

    Every step comes with the number of its run, in the order in which they were done.
    """
    lists: dict[tuple[int, tuple[int, ...]], list[Step]] = {}
    for run, step in events:
        lists.setdefault((run, step.path), []).append(step)

    def steps_of(run: int, path: tuple[int, ...]) -> tuple[Step, ...]:
        return tuple(filled(run, step) for step in lists.get((run, path), ()))

    def filled(run: int, step: Step) -> Step:
        if isinstance(step, Forks):
            paths = ((*step.path, step.index, branch) for branch in range(step.width))
            return replace(step, branches=tuple(steps_of(run, path) for path in paths))
        if isinstance(step, Runs):
            return replace(step, steps=steps_of(step.number, ()))
        return step

    return steps_of(number, ())
