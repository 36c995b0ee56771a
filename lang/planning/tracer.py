"""Runs a program without a model and notes what it does, with stand-ins for what a model writes.

Everything is carried out at once where the program appends it, so a trace uses no thread of its own
and asks no backend for anything but its tokenizer and its chat template. The body is run twice. In
the second run arguments and what the model writes are other texts: where the two go different ways,
the program has computed with a value unseen, and from there on the shape is not known.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import sys
import sysconfig
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from palmette.lang.backends.scripted import ByteTokenizer, ScriptedBackend
from palmette.lang.branch import Branch
from palmette.lang.choices import encode_options, method_name
from palmette.lang.constants import CONSTANT, PrefixEnds, common_pieces, completed, quietly, run_now
from palmette.lang.limits import Budget, Stop
from palmette.lang.logprobs import logprobs_meta
from palmette.lang.operations import (
    AppendBranches,
    AppendText,
    BeginRole,
    BeginScope,
    Choose,
    EndRole,
    EndScope,
    Fork,
    Generate,
    Operation,
    usage_figures,
)
from palmette.lang.planning.outline import (
    Appends,
    Cancels,
    Closes,
    Forks,
    Generates,
    Joins,
    Opens,
    Outline,
    Part,
    Read,
    Runs,
    Selects,
    Sets,
    Step,
    nested,
)
from palmette.lang.planning.unknown import MARK, OTHER, Unknown, cut_at_marks, fits, mark_of
from palmette.lang.run import Run
from palmette.lang.signals import Signal
from palmette.lang.state import State
from palmette.lang.transcript import Transcript
from palmette.lang.variables import Slot
from palmette.protocol import ChatTemplate, Message, Piece, TokenBackend, Usage

if TYPE_CHECKING:
    from palmette.lang.options import RunOptions

T = TypeVar("T")

MAX_STEPS = 10_000
MAX_SECONDS = 10.0

_FIGURES = tuple(usage_figures(Usage()))
_SELECT_NAMES = ("method", "finish_reason", *_FIGURES)
_OF_EACH_CHOICE = ("probabilities", "log_likelihoods", "scores", "token_ids", "token_logprobs")

# An id that no token has: the place of tokens that are not known.
_UNKNOWN_ID = -1

_MAX_FORK_DEPTH = 100  # forks within forks: outlines are walked by functions that call themselves

_KINDS: dict[str, type] = {"int": int, "float": float, "bool": bool, "str": str}

_LIBRARIES = tuple(
    str(Path(sysconfig.get_path(name))) for name in ("stdlib", "platstdlib", "purelib", "platlib")
)

_current: contextvars.ContextVar[Tracer | None] = contextvars.ContextVar("tracer", default=None)


def current_tracer() -> Tracer | None:
    """The trace that the calling code is a part of."""
    return _current.get()


@dataclass(frozen=True, slots=True)
class Ending:
    """Where the shape ceases to be known, and why."""

    where: str
    why: str
    error: Exception | None = None


class Tracer:
    """Notes what a program does. `is_other` makes it the second run, with other texts."""

    def __init__(
        self,
        backend: TokenBackend | None,
        *,
        max_steps: int = MAX_STEPS,
        max_seconds: float = MAX_SECONDS,
        is_other: bool = False,
    ) -> None:
        self.has_tokens = backend is not None
        self.backend: TokenBackend = _NoModel() if backend is None else backend
        self.is_other = is_other
        self.ending: Ending | None = None
        self.prefix: tuple[tuple[int, ...], tuple[Piece, ...]] | None = None
        self.max_seconds = max_seconds
        self.has_unknown = False
        self.events: list[tuple[int, Step]] = []
        self.reads: list[Read] = []
        self.notes: list[str] = []
        self.varies_at: list[str] = []
        self.kinds: dict[Slot, str] = {}
        self._max_steps = max_steps
        self._deadline = time.monotonic() + max_seconds
        self.num_steps = 0
        self._num_runs = 0
        self._tick = 0

    # What a stand-in asks

    def text_of(self, source: str) -> str:
        """Of an argument that is not given, or of what is made of something unknown."""
        self.has_unknown = True
        return OTHER if self.is_other else mark_of(source)

    def needs(self, source: str, what: str) -> NoReturn:
        """The program goes by a value that is not known."""
        self.end(f"what comes next depends on {source}: {what}")

    # What is noted

    def run(self, name: str, defaults: Mapping[str, Any], *, is_async: bool) -> Run:
        """A run of a program that is traced; of one that another runs, if it is not the first."""
        number, self._num_runs = self._num_runs, self._num_runs + 1
        if number:
            self.note(0, Runs(where=_caller(), name=name, number=number))
        run = Run(self.backend, defaults, is_async=is_async)
        run.root = _TracedBranch(run, self, number)
        return run

    def note(self, number: int, step: Step) -> None:
        """A step of the run `number` is done."""
        self.check()
        self.spend(1)
        self._tick += 1
        self.events.append((number, replace(step, tick=self._tick)))

    def note_read(self, path: tuple[int, ...]) -> None:
        """The program waits for the branch at `path`."""
        self.check()
        self.spend(1)
        self._tick += 1
        self.reads.append(Read(where=_caller(), path=path, tick=self._tick))

    def assume(self, note: str) -> None:
        """Something is taken to be so that is not known."""
        if note not in self.notes:
            self.notes.append(note)

    def spend(self, count: int) -> None:
        """Raises PrefixEnds if the program does more than it may, or for longer."""
        self.num_steps += count
        if self.num_steps > self._max_steps:
            self.end(f"it does more than {self._max_steps} things: it may never end")
        if self.is_late:
            self.give_up(_caller())
            raise PrefixEnds

    @property
    def is_late(self) -> bool:
        return time.monotonic() > self._deadline

    def give_up(self, where: str) -> None:
        """There is no time for more."""
        if self.ending is None:
            self.ending = Ending(where, f"it took longer than {self.max_seconds:g} s to trace")

    def take_prefix(self, transcript: Transcript) -> None:
        """Whatever is appended from here on may differ between runs."""
        if self.prefix is None:
            self.prefix = transcript.prompt_ids, transcript.pending

    def check(self) -> None:
        """Raises PrefixEnds if the trace has ended, even if the program goes on."""
        if self.ending is not None:
            raise PrefixEnds

    def end(self, why: str, *, where: str | None = None) -> NoReturn:
        """From here on nothing is known."""
        if self.ending is None:
            self.ending = Ending(where or _caller(), why)
        raise PrefixEnds

    def unknown(self, source: str, kind: type | None) -> Any:
        """A stand-in for a value that the model makes; a likely one in the second run."""
        self.has_unknown = True
        if self.is_other and kind in (str, int, float):
            return kind(OTHER)
        return Unknown(source, self, kind=kind)


@contextmanager
def traced(tracer: Tracer) -> Iterator[None]:
    """Programs that are run meanwhile are traced."""
    token = _current.set(tracer)
    try:
        yield
    finally:
        _current.reset(token)


def trace_once(
    tracer: Tracer,
    func: Callable[..., Any],
    arguments: Mapping[str, Any],
    options: RunOptions,
    run_coroutine: Callable[[Coroutine[Any, Any, None]], None],
) -> Run:
    """Call `func` under `tracer`; `run_coroutine` waits for that of an async one.

    An error of the body is raised if nothing in it was unknown; otherwise it may come of that, and
    ends the trace.
    """
    is_async = inspect.iscoroutinefunction(func)
    run = tracer.run(func.__name__, options.defaults, is_async=is_async)
    args, kwargs, _ = completed(func, arguments, tracer)
    with traced(tracer):
        try:
            result = func(State(run.root), *args, **kwargs)
            if inspect.iscoroutine(result):
                run_coroutine(quietly(asyncio.wait_for(result, tracer.max_seconds)))
        except PrefixEnds:
            pass
        except Exception as error:
            if tracer.is_late and isinstance(error, TimeoutError):
                tracer.give_up(_raised_at(error))
            elif not tracer.has_unknown:
                raise
            if tracer.ending is None:
                why = f"it raises {type(error).__name__}: {' '.join(str(error).split())[:200]}"
                tracer.ending = Ending(_raised_at(error), why, error)
        finally:
            tracer.take_prefix(run.root.transcript)
            run.finish()
    return run


def outline_of(
    func: Callable[..., Any],
    arguments: Mapping[str, Any],
    options: RunOptions,
    backend: TokenBackend | None,
    run_coroutine: Callable[[Coroutine[Any, Any, None]], None],
    *,
    max_steps: int = MAX_STEPS,
    max_seconds: float = MAX_SECONDS,
    is_checked: bool = True,
) -> Outline:
    """The outline of a program with `arguments`; without `is_checked`, from a single run."""
    tracer = Tracer(backend, max_steps=max_steps, max_seconds=max_seconds)
    run = trace_once(tracer, func, arguments, options, run_coroutine)
    prefix = None if tracer.prefix is None else _known_pieces(tracer.prefix[1])[0]
    if is_checked:
        other = Tracer(
            backend,
            max_steps=min(max_steps, tracer.num_steps + 1),
            max_seconds=max_seconds,
            is_other=True,
        )
        try:
            trace_once(other, func, arguments, options, run_coroutine)
        except Exception:
            tracer.assume("a second run of it raises an error that the first did not")
        _compare(tracer, other)
        if tracer.prefix is not None and other.prefix is not None:
            prefix = common_pieces(tracer.prefix[1], other.prefix[1])
    outline = _outline(func.__name__, tracer, run)
    return _with_prefix(outline, tracer, prefix or [])


def _with_prefix(outline: Outline, tracer: Tracer, pieces: Sequence[Piece]) -> Outline:
    text = "".join(piece.text for piece in pieces)
    if not tracer.has_tokens:
        return replace(outline, prefix_text=text)
    assert tracer.prefix is not None
    begun = tracer.prefix[0] if pieces else ()
    ids = (*begun, *tracer.backend.tokenizer.encode(pieces))
    return replace(outline, prefix_text=text, prefix_ids=ids)


def _compare(tracer: Tracer, other: Tracer) -> None:
    """Cut what `tracer` has noted where `other` did something else."""
    for place, (mine, theirs) in enumerate(zip(tracer.events, other.events, strict=False)):
        step = mine[1]
        if (mine[0], step.path, _signature(step)) != (
            theirs[0],
            theirs[1].path,
            _signature(theirs[1]),
        ):
            del tracer.events[place:]
            tracer.ending = Ending(step.where, "what comes next depends on a value in a way unseen")
            return
        if isinstance(step, Appends) and isinstance(theirs[1], Appends):
            marked = "".join(
                part.text if part.source is None else mark_of(part.source) for part in step.parts
            )
            if not fits(marked, theirs[1].text):
                parts = _common(step.parts, theirs[1].text)
                tracer.events[place] = (mine[0], replace(step, parts=parts))
                tracer.varies_at.append(step.where)
                _forget_prompts(tracer, place)


def _forget_prompts(tracer: Tracer, place: int) -> None:
    """Prompts from there on begin with something that is not the same in the next run."""
    for index in range(place, len(tracer.events)):
        number, step = tracer.events[index]
        if isinstance(step, Generates):
            tracer.events[index] = (number, replace(step, prompt_ids=None))
        elif isinstance(step, Selects):
            tracer.events[index] = (number, replace(step, prompt_ids=None, continuations=()))


def _common(parts: tuple[Part, ...], other: str) -> tuple[Part, ...]:
    """The constants with which both begin; what comes then is unknown."""
    kept: list[Part] = []
    position = 0
    for part in parts:
        if part.source is not None:
            break
        length = 0
        for mine, theirs in zip(part.text, other[position:], strict=False):
            if mine != theirs:
                break
            length += 1
        if length:
            kept.append(Part(part.text[:length]))
        position += length
        if length < len(part.text):
            break
    return (*kept, Part("?", "something that differs from run to run"))


def _signature(step: Step) -> tuple[object, ...]:
    if isinstance(step, Appends):
        return (type(step), step.where)
    if isinstance(step, (Generates, Selects)):
        step = replace(step, prompt_ids=None)
    return (type(step), step.where, step.describe())


def _outline(name: str, tracer: Tracer, run: Run) -> Outline:
    ending = tracer.ending
    variables = {
        name: _kind_of(slot, tracer) for name, slot in run.root.slots.items() if name is not None
    }
    return Outline(
        name=name,
        steps=nested(tracer.events),
        is_complete=ending is None,
        where=None if ending is None else ending.where,
        why=None if ending is None else ending.why,
        error=None if ending is None else ending.error,
        variables=variables,
        notes=tuple(tracer.notes),
        reads=tuple(tracer.reads),
        varies_at=tuple(dict.fromkeys(tracer.varies_at)),
    )


def _kind_of(slot: Slot, tracer: Tracer) -> str:
    if slot.parts is None:
        return tracer.kinds.get(slot, "value")
    kinds = dict.fromkeys(_kind_of(part, tracer) for part in slot.parts)
    return f"list of {len(slot.parts)}" + (f": {', '.join(kinds)}" if kinds else "")


class _TracedBranch(Branch):
    """Carries out at once what is appended, and leaves out what only a model can do."""

    def __init__(self, run: Run, tracer: Tracer, number: int, **options: Any) -> None:
        super().__init__(run, **options)
        self.tracer = tracer
        self.number = number  # of the run in the trace
        self.transcript = _TracedTranscript(run.backend.tokenizer)
        self.changed = _TracedSignal(self)
        self.text_changed = _TracedSignal(self, is_stream=True)
        self._joined: int | None = None

    def submit(self, operations: Sequence[Operation], slots: dict[str, Slot]) -> None:
        self.tracer.check()
        with self.run.lock:
            if operations or not self.run.is_finished:
                self._check_open(operations[0] if operations else None)
            self.slots.update(slots)
        if not operations:
            self._note_set(slots)
        for operation in operations:
            if self.number == 0 and not self.path and not isinstance(operation, CONSTANT):
                self.tracer.take_prefix(self.transcript)
            self._carry_out(operation)
            self.num_submitted += 1
            self.num_done += 1

    def children(self, count: int, budget: Budget | None = None) -> list[Branch]:
        with self.run.lock:
            self._check_open(None)
        self.tracer.check()
        self.tracer.spend(count)
        if len(self.path) // 2 >= _MAX_FORK_DEPTH:
            self.tracer.end(f"it forks more than {_MAX_FORK_DEPTH} deep: it may never end")
        fork, self.num_forks = self.num_forks, self.num_forks + 1
        made: list[Branch] = []
        for index in range(count):
            child = _TracedBranch(
                self.run,
                self.tracer,
                self.number,
                path=(*self.path, fork, index),
                parent=self,
                budget=budget,
            )
            child.slots = dict(self.slots)
            child.inherited = dict(self.slots)
            child.role = self.role
            made.append(child)
        return made

    def be_born(self, transcript: Transcript) -> None:
        self.transcript = transcript.copy()
        self.chunks.append(transcript.text)

    def close_later(self, other: Branch) -> None:
        self._joined = other.path[-2]

    def stop(self, stop: Stop) -> None:
        if self.stopped is not None or self.run.is_finished:
            return
        self.stopped = stop
        if stop.seen.was_raised and self.tracer.ending is None:  # the program itself did it
            self._note(Cancels(where=_caller(), path=self.path))
            self.tracer.assume("branches are taken to end in order, so that the first ones win")

    def _note(self, step: Step) -> None:
        self.tracer.note(self.number, step)

    def _note_set(self, slots: Mapping[str, Slot]) -> None:
        where = _caller()
        if self._joined is not None:
            index, self._joined = self._joined, None
            names = tuple(slots)
            self._note(
                Joins(where=where, path=self.path, index=index, mode="gather_variable", names=names)
            )
            return
        for name in slots:
            self._note(Sets(where=where, path=self.path, name=name))

    def _carry_out(self, operation: Operation) -> None:
        place: dict[str, Any] = {"where": operation.where, "path": self.path}
        if isinstance(operation, AppendText):
            parts = tuple(
                Part(source if source is not None else text, source)
                for text, source in cut_at_marks(operation.text)
            )
            self._note(Appends(**place, parts=parts, role=self.transcript.open_role))
            run_now(operation.run(self))
        elif isinstance(operation, BeginRole):
            self._note(Opens(**place, role=operation.role))
            run_now(operation.run(self))
        elif isinstance(operation, EndRole):
            role = self.transcript.open_role or ""
            self._note(Closes(**place, role=role))
            run_now(operation.run(self))
        elif isinstance(operation, BeginScope):
            run_now(operation.run(self))
        elif isinstance(operation, EndScope):
            self._end_scope(operation, place)
        elif isinstance(operation, Fork):
            width = len(operation.children)
            self._note(Forks(**place, index=operation.children[0].path[-2], width=width))
            run_now(operation.run(self))
        elif isinstance(operation, AppendBranches):
            index = operation.branches[0].path[-2] if operation.branches else 0
            self._note(Joins(**place, index=index, mode="concate_and_append"))
            run_now(operation.run(self))
            self._joined = None
        elif isinstance(operation, Generate):
            self._generate(operation, place)
        elif isinstance(operation, Choose):
            self._choose(operation, place)
        else:
            raise AssertionError(f"{operation.name} cannot be traced")

    def _end_scope(self, operation: EndScope, place: Mapping[str, Any]) -> None:
        slot = operation.slot
        assert slot is not None
        self._note(Sets(**place, name=slot.name, is_scope=True))
        run_now(operation.run(self))
        text = slot.text
        self.tracer.kinds[slot] = "text"
        if MARK in text:
            sources = {source for _, source in cut_at_marks(text) if source is not None}
            value = Unknown(", ".join(sorted(sources)), self.tracer, text=text, kind=str)
            slot.stand_in(value, text)

    def _generate(self, operation: Generate, place: Mapping[str, Any]) -> None:
        slot, sampling, report = operation.slot, operation.sampling, operation.report
        assert slot is not None
        kind = "text" if slot.reader is None else slot.reader.wanted
        prompt = self._known_prompt()
        self._note(
            Generates(
                **place,
                name=slot.name or None,
                prompt_ids=prompt,
                max_tokens=sampling.max_tokens,
                is_bounded=operation.is_bounded,
                kind=kind,
                constraint=None if operation.constraint is None else operation.constraint.kind,
                num_samples=report.n,
                temperature=sampling.temperature,
                options=(replace(sampling, seed=None), operation.constraint),
                is_shareable=sampling.temperature == 0,
                scored_from=report.logprob_start_len,
            )
        )
        source = f"s[{slot.name!r}]" if slot.name else "a gen without a name"
        python = str if slot.reader is None else _KINDS.get(slot.reader.wanted)
        for each in (slot, *operation.further):
            value = self.tracer.unknown(source, python)
            each.stand_in(value, str(value))
            each.meta = self._figures(source, _gen_names(operation))
            self.tracer.kinds[each] = kind
        self._extend(str(slot.value()))

    def _choose(self, operation: Choose, place: Mapping[str, Any]) -> None:
        slot, select = operation.slot, operation.select
        assert slot is not None
        transcript = self.transcript
        choices = select.choices
        before = (transcript.prompt_ids, transcript.pending)
        prompt: tuple[int, ...] | None = None
        continuations: tuple[tuple[int, ...], ...] = ()
        if len(choices) > 1 and self.tracer.has_tokens and _is_known(*before):
            encoded = encode_options(self.run.backend.tokenizer, *before, choices)
            prompt, continuations = encoded.prompt_ids, encoded.continuations
        step = Selects(
            **place,
            name=slot.name or None,
            choices=choices,
            method=method_name(select.method),
            prompt_ids=prompt,
            continuations=continuations,
            is_shareable=True,
        )
        self._note(step)
        self.tracer.kinds[slot] = "choice"
        if len(choices) == 1:
            slot.stand_in(choices[0], choices[0])
            self.add_text(transcript.append_option(choices[0]))
            return
        source = f"s[{slot.name!r}]" if slot.name else "a select without a name"
        value = self.tracer.unknown(source, str)
        slot.stand_in(value, str(value))
        slot.meta = self._figures(source, _SELECT_NAMES)
        for name in _OF_EACH_CHOICE:
            slot.meta[name] = self._figures(f"{name} of {source}", choices)
        transcript.commit()
        self._extend(str(value))

    def _known_prompt(self) -> tuple[int, ...] | None:
        ids = self.transcript.commit()
        return ids if self.tracer.has_tokens and _UNKNOWN_ID not in ids else None

    def _extend(self, text: str) -> None:
        """What a model writes here."""
        self.transcript.extend((_UNKNOWN_ID,), text)
        self.add_text(text)
        branch: Branch | None = self
        while branch is not None:
            branch.usage = _unknown_usage(self.tracer)
            branch = branch.parent

    def _figures(self, source: str, names: Sequence[str]) -> dict[str, object]:
        return {name: Unknown(f"the {name} of {source}", self.tracer) for name in names}


class _TracedTranscript(Transcript):
    """One in which some of the tokens are not known."""

    def commit(self) -> tuple[int, ...]:
        known, is_known = _known_pieces(self._pending)
        if is_known:
            return super().commit()
        self._pending = known
        super().commit()
        self._token_ids.append(_UNKNOWN_ID)
        return tuple(self._token_ids)

    def peek(self) -> tuple[int, ...]:
        ids = super().peek()
        tracer = _current.get()
        if _UNKNOWN_ID in ids and tracer is not None:
            ids = Unknown("the token ids", tracer)  # type: ignore[assignment]
        return ids


class _TracedSignal(Signal):
    """Tells the tracer of everybody who waits for the branch."""

    def __init__(self, branch: _TracedBranch, *, is_stream: bool = False) -> None:
        super().__init__(branch.run.lock)
        self._tracer, self._path = branch.tracer, branch.path
        self._is_stream = is_stream

    def poll(self, check: Callable[[], T | None]) -> T | None:
        self._note(check)
        return super().poll(check)

    def wait(self, check: Callable[[], T | None]) -> T:
        self._note(check)
        return super().wait(check)

    async def wait_async(self, check: Callable[[], T | None]) -> T:
        self._note(check)
        return await super().wait_async(check)

    def _note(self, check: object) -> None:
        if self._is_stream:
            self._tracer.assume("a text that is streamed is taken to come in one piece")
        if not isinstance(check, partial):  # that looks for the variable, and does not wait
            self._tracer.note_read(self._path)


class _NoTemplate:
    """Messages without anything around them."""

    def render(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> list[Piece]:
        return [Piece(message["content"]) for message in messages]

    def begin(self, history: Sequence[Message], role: str) -> list[Piece]:
        return []

    def end(self, history: Sequence[Message]) -> list[Piece]:
        return []


class _AnyTokenizer(ByteTokenizer):
    """One that knows every control token there might be."""

    def token_bytes(self, token_id: int) -> bytes:
        return b""


class _NoModel(ScriptedBackend):
    """What a program is traced on where no backend is known."""

    def __init__(self) -> None:
        super().__init__(tokenizer=_AnyTokenizer(), model_name="no model")

    @property
    def chat_template(self) -> ChatTemplate:
        return _NoTemplate()


def _known_pieces(pieces: Sequence[Piece]) -> tuple[list[Piece], bool]:
    """The pieces up to the first mark, and whether that is all of them."""
    known: list[Piece] = []
    for piece in pieces:
        before, mark, _ = piece.text.partition(MARK)
        if before:
            known.append(replace(piece, text=before))
        if mark:
            return known, False
    return known, True


def _is_known(ids: Sequence[int], pending: Sequence[Piece]) -> bool:
    return _UNKNOWN_ID not in ids and _known_pieces(pending)[1]


def _gen_names(operation: Generate) -> tuple[str, ...]:
    """The names that the meta data of a `gen` has."""
    names = ("finish_reason", "stop_reason", "token_ids", *_FIGURES)
    sampling, report = operation.sampling, operation.report
    if sampling.logprobs is None:
        return names
    scored = None if report.logprob_start_len is None else ()
    return (*names, *logprobs_meta((), scored, decode=None, has_top=bool(sampling.logprobs)))


def _unknown_usage(tracer: Tracer) -> Usage:
    return Unknown("the usage", tracer)  # type: ignore[return-value]


def _caller() -> str:
    """File and line of the program itself: not of the language, nor of a library."""
    frame = sys._getframe(1)
    while frame.f_back is not None and not _is_program(
        frame.f_code.co_filename, frame.f_globals.get("__name__", "")
    ):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _is_program(file: str, module: str) -> bool:
    return not (module.startswith("palmette.lang") or file.startswith((*_LIBRARIES, "<")))


def _raised_at(error: Exception) -> str:
    """The innermost line of the program that the error went through."""
    place = "?:0"
    step = error.__traceback__
    while step is not None:
        frame = step.tb_frame
        if _is_program(frame.f_code.co_filename, frame.f_globals.get("__name__", "")):
            place = f"{frame.f_code.co_filename}:{step.tb_lineno}"
        step = step.tb_next
    return place
