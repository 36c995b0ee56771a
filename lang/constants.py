"""What a program appends whatever comes of its primitives and of the arguments it is not given.

The body is run up to its first primitive, with an `Unknown` for each argument that is not given. In
text an Unknown stands for itself as a mark, at which the text is cut; to compute with it (compare,
measure, take apart) ends the run. What escapes both, such as the length of a text with the mark, or
the mark in an escaped form, shows in a second run with other text in its place: what both runs have
in common is the prefix.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from palmette.lang.branch import Branch
from palmette.lang.limits import Budget
from palmette.lang.operations import (
    AppendText,
    BeginRole,
    BeginScope,
    EndRole,
    EndScope,
    Operation,
)
from palmette.lang.planning.unknown import MARK, OTHER, Unknown, Watcher
from palmette.lang.run import Run
from palmette.lang.state import State
from palmette.lang.variables import Slot
from palmette.protocol import Piece, TokenBackend

CONSTANT = (AppendText, BeginRole, EndRole, BeginScope, EndScope)


class PrefixEnds(BaseException):
    """What comes next depends on a primitive or on an argument that is not given.

    No Exception, so that a program's own handlers do not catch it.
    """


def constant_token_ids(
    func: Callable[..., Any],
    arguments: Mapping[str, Any],
    backend: TokenBackend,
    run_coroutine: Callable[[Coroutine[Any, Any, None]], None],
) -> tuple[int, ...]:
    """The token ids of a program's constant prefix; `arguments` are those that are given.

    Runs the body twice, up to its first primitive; `run_coroutine` waits for that of an async one.
    An error of the body is raised if it was given all its arguments; otherwise it may come of the
    one that is missing, and ends the prefix.
    """
    (begun, one), (begun_too, other) = (
        _trace(func, arguments, backend, mark, run_coroutine) for mark in (MARK, OTHER)
    )
    common = common_pieces(one, other) if begun == begun_too else []
    if not common:
        return ()
    return (*begun, *backend.tokenizer.encode(common))


@dataclass(frozen=True, slots=True)
class _Ending:
    """Every argument that is not given stands as `mark` in text; what needs one ends the prefix."""

    mark: str

    def text_of(self, source: str) -> str:
        return self.mark

    def needs(self, source: str, what: str) -> NoReturn:
        raise PrefixEnds


class _TracingBranch(Branch):
    """Carries out constants at once, and ends the run at anything else."""

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self.has_ended = False

    def submit(self, operations: Sequence[Operation], slots: dict[str, Slot]) -> None:
        if self.has_ended:
            raise PrefixEnds
        with self.run.lock:
            self.run.check_open()
            self.slots.update(slots)
        for operation in operations:
            self._carry_out(operation)
            self.num_submitted += 1
            self.num_done += 1

    def children(self, count: int, budget: Budget | None = None) -> list[Branch]:
        self.end()

    def end(self) -> NoReturn:
        """Nothing is constant from here on, even if the program were to go on."""
        self.has_ended = True
        raise PrefixEnds

    def _carry_out(self, operation: Operation) -> None:
        if not isinstance(operation, CONSTANT):
            self.end()
        if not isinstance(operation, AppendText):
            run_now(operation.run(self))
            return
        constant, mark, _ = operation.text.partition(MARK)
        run_now(replace(operation, text=constant).run(self))
        if mark:
            self.end()


def _trace(
    func: Callable[..., Any],
    arguments: Mapping[str, Any],
    backend: TokenBackend,
    mark: str,
    run_coroutine: Callable[[Coroutine[Any, Any, None]], None],
) -> tuple[tuple[int, ...], tuple[Piece, ...]]:
    """The ids that a run begins with, and the constants that follow."""
    run = Run(backend, {}, is_async=inspect.iscoroutinefunction(func))
    branch = run.root = _TracingBranch(run)
    args, kwargs, has_unknown = completed(func, arguments, _Ending(mark))
    try:
        result = func(State(branch), *args, **kwargs)
        if inspect.iscoroutine(result):
            run_coroutine(quietly(result))
    except PrefixEnds:
        pass
    except Exception:
        if not has_unknown:
            raise
    finally:
        run.finish()
    return branch.transcript.prompt_ids, branch.transcript.pending


def completed(
    func: Callable[..., Any], arguments: Mapping[str, Any], watcher: Watcher
) -> tuple[list[Any], dict[str, Any], bool]:
    """Arguments by position and by name, and whether one is unknown: there is neither a value for
    it nor a default.
    """
    args: list[Any] = []
    kwargs = dict(arguments)
    has_unknown = False
    for parameter in list(inspect.signature(func).parameters.values())[1:]:
        is_needed = parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if not is_needed or parameter.name in kwargs:
            continue
        has_unknown = True
        if parameter.kind is parameter.POSITIONAL_ONLY:
            args.append(Unknown(parameter.name, watcher))
        else:
            kwargs[parameter.name] = Unknown(parameter.name, watcher)
    return args, kwargs, has_unknown


async def quietly(body: Coroutine[Any, Any, Any]) -> None:
    """A task must not end with what is no Exception."""
    try:
        await body
    except PrefixEnds:
        return


def run_now(body: Coroutine[Any, Any, None]) -> None:
    """Run what never waits."""
    try:
        body.send(None)
    except StopIteration:
        return
    raise AssertionError("a constant waited for something")


def common_pieces(one: Sequence[Piece], other: Sequence[Piece]) -> list[Piece]:
    """The constants with which both begin, the last of them cut where the texts part."""
    common: list[Piece] = []
    for left, right in zip(one, other, strict=False):
        if left.special != right.special:
            break
        length = _shared_length(left.text, right.text)
        if length:
            common.append(replace(left, text=left.text[:length]))
        if length < max(len(left.text), len(right.text)):
            break
    return common


def _shared_length(left: str, right: str) -> int:
    for place, (mine, theirs) in enumerate(zip(left, right, strict=False)):
        if mine != theirs:
            return place
    return min(len(left), len(right))
