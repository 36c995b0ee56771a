"""The decorator that makes a program of a function, and the ways to run one."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import (
    AsyncIterator,
    Callable,
    Coroutine,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from concurrent import futures
from pathlib import Path
from typing import Any, Literal, overload

from palmette.errors import InvalidRequest, ProgramError, UnsupportedFeature
from palmette.lang import batch
from palmette.lang.backend import (
    Freezes,
    Speculates,
    compute_prefix,
    get_default_backend,
    resolve_backend,
)
from palmette.lang.call import Call
from palmette.lang.constants import constant_token_ids
from palmette.lang.executor import LoopThread, ThreadPools
from palmette.lang.options import RUN_OPTION_NAMES, RunOptions
from palmette.lang.planning.outline import Outline
from palmette.lang.planning.plan import BatchPlan, plan_of
from palmette.lang.planning.sharing import sharing_on
from palmette.lang.planning.tracer import MAX_SECONDS, MAX_STEPS, current_tracer, outline_of
from palmette.lang.run import Run
from palmette.lang.signals import INTERRUPT_SECONDS
from palmette.lang.state import State
from palmette.protocol import TokenBackend

# Programs that are streamed or awaited although they are plain functions hold a thread each while
# they run; more than this wait their turn, but for those that such a program itself begins.
_MAX_PROGRAM_THREADS = 128

# How many runs of a batch are under way at a time where the caller does not say. A plain function
# holds a thread (some 100 KiB) while it waits for a variable, an async one does not.
_MAX_BATCH_THREADS = 96
_MAX_ASYNC_RUNS = 1024

_THREADS = ThreadPools(_MAX_PROGRAM_THREADS, "palmette-program")
_PROGRAMS = LoopThread("palmette-programs")


class Function:
    """A program: a function (or ``async def``) whose first parameter is the state it appends to.

    Its own parameters are passed to `run` and its kin by position or name. Every other keyword is
    an option that the program's `gen`s use where they do not say otherwise (`temperature`,
    `max_tokens`, `stop`, `seed`, ...); where a parameter has the name of an option, it is meant.
    """

    def __init__(
        self,
        func: Callable[..., Any],
        *,
        bound: Mapping[str, Any] | None = None,
        num_api_spec_tokens: int | None = None,
    ) -> None:
        if not inspect.isroutine(func):
            raise TypeError(
                f"a program is made of a function or a method, got {func!r}; arguments are given "
                "ahead with bind()"
            )
        functools.update_wrapper(self, func)
        self.func = func
        self.is_async = inspect.iscoroutinefunction(func)
        if inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
            raise TypeError(f"{func.__name__} is a generator: a program does not yield")
        self._bound = dict(bound or {})
        self.num_api_spec_tokens = num_api_spec_tokens
        self._signature = inspect.signature(func)
        parameters = list(self._signature.parameters.values())
        if not parameters or parameters[0].kind not in (
            inspect.Parameter.POSITIONAL_ONLY,
            inspect.Parameter.POSITIONAL_OR_KEYWORD,
        ):
            raise TypeError(f"{func.__name__} needs a first parameter: the state it appends to")
        self._parameters = parameters[1:]
        self._names = {parameter.name for parameter in self._parameters}

    @property
    def arg_names(self) -> list[str]:
        """The program's own parameters."""
        return [parameter.name for parameter in self._parameters]

    def __repr__(self) -> str:
        return f"<palmette function {self.func.__name__}{self._signature}>"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `run`; with a state as first argument, the program's body, appending to that state."""
        if args and isinstance(args[0], State):
            return self.func(*args, **{**self._bound, **kwargs})
        return self.run(*args, **kwargs)

    def bind(self, **arguments: Any) -> Function:
        """The program with some of its arguments given. Raises TypeError for unknown ones."""
        for name in arguments:
            if name not in self._names:
                raise TypeError(f"{self.func.__name__} has no parameter named {name!r}")
        return Function(
            self.func,
            bound={**self._bound, **arguments},
            num_api_spec_tokens=self.num_api_spec_tokens,
        )

    def run(
        self,
        *args: Any,
        backend: TokenBackend | None = None,
        stream: bool = False,
        **kwargs: Any,
    ) -> State:
        """Run the program and wait for all it has started.

        Raises what the program raises, and the first failure of a primitive that it has not come to
        see. Ctrl-C aborts what runs. With `stream`, returns at once, as `stream()` does. Options of
        `gen` are the run's defaults; ``explain=True`` asks why each prompt was cached or not, and
        ``trace=True`` records that and log-probabilities for ``state.trace()``.

        `timeout` is how many seconds the run may take, `max_total_tokens` how many tokens all its
        `gen`s may make together; beyond them ProgramTimeout and TokenBudgetExceeded are raised.
        """
        if stream:
            return self.stream(*args, backend=backend, **kwargs)
        call = self._call(args, kwargs, backend)
        if self.is_async:
            if _PROGRAMS.is_current():
                raise ProgramError(
                    f"{self.func.__name__} is async: an async program awaits its run_async()"
                )
            future = _PROGRAMS.spawn(call.run_async())
            try:
                while not futures.wait([future], timeout=INTERRUPT_SECONDS).done:
                    pass
                future.result()
            except BaseException:
                call.cancel()
                raise
        else:
            call.run()
        return call.state

    async def run_async(
        self, *args: Any, backend: TokenBackend | None = None, **kwargs: Any
    ) -> State:
        """As `run`, without blocking the event loop. An ``async def`` runs on this loop, a plain
        function on a thread. Cancelling aborts what runs.
        """
        call = self._call(args, kwargs, backend)
        await self._awaited(call)
        return call.state

    def stream(self, *args: Any, backend: TokenBackend | None = None, **kwargs: Any) -> State:
        """Start the program and return its state at once, to be read as it comes."""
        call = self._call(args, kwargs, backend)
        if self.is_async:
            _PROGRAMS.spawn(call.run_quietly_async())
        else:
            _THREADS.submit(call.run_quietly)
        return call.state

    def stream_async(self, *args: Any, backend: TokenBackend | None = None, **kwargs: Any) -> State:
        """As `stream`, with an ``async def`` on the running loop: ``async for chunk in ...``."""
        call = self._call(args, kwargs, backend)
        if self.is_async:
            call.start_on(asyncio.get_running_loop())
        else:
            _THREADS.submit(call.run_quietly)
        return call.state

    @overload
    def run_batch(
        self,
        batch_kwargs: Sequence[Any],
        *,
        generator_style: Literal[False] = False,
        **options: Any,
    ) -> list[Any]: ...
    @overload
    def run_batch(
        self, batch_kwargs: Sequence[Any], *, generator_style: Literal[True], **options: Any
    ) -> Iterator[Any]: ...
    def run_batch(
        self,
        batch_kwargs: Sequence[Any],
        *,
        generator_style: bool = False,
        backend: TokenBackend | None = None,
        num_threads: int | Literal["auto"] = "auto",
        progress: bool = False,
        progress_bar: bool = False,
        on_error: Literal["raise", "return"] = "raise",
        plan: BatchPlan | Literal["auto", False] = "auto",
        **options: Any,
    ) -> list[Any] | Iterator[Any]:
        """The states of one run for each item, in order.

        An item is a dict of arguments, or a list of them by position, or the one argument itself.
        At most `num_threads` programs run at a time. `progress` shows a bar on standard error. A
        program that fails cancels the others and is raised; with ``on_error="return"``, its
        exception stands in its place. `generator_style` yields the states in order as they come.

        Requests of the batch that are equal and greedy, and equal `select`s, are asked once on a
        backend that answers equal requests alike, as an engine does; ``plan=False`` asks for each.
        `plan` may also be what `Function.plan` has made for the same items: the programs then begin
        in its order. Results are those without it, in the order of the items.

        Ctrl-C stops the batch and raises BatchInterrupted, whose `results` has what was done; with
        ``on_error="return"`` that is returned, ProgramCancelled in the place of what was not.
        """
        if generator_style and isinstance(plan, BatchPlan):
            raise UnsupportedFeature(
                "plan with generator_style",
                "programs that begin in another order do not end in that of the items",
                param="plan",
            )
        made = self._batch(
            batch_kwargs, options, backend, num_threads, progress or progress_bar, on_error, plan
        )
        if generator_style:
            return batch.without_index(batch.run_plan(made, in_order=True))
        return batch.run_all(made)

    def run_batch_iter(
        self,
        batch_kwargs: Sequence[Any],
        *,
        backend: TokenBackend | None = None,
        num_threads: int | Literal["auto"] = "auto",
        progress: bool = False,
        on_error: Literal["raise", "return"] = "raise",
        plan: BatchPlan | Literal["auto", False] = "auto",
        **options: Any,
    ) -> Generator[tuple[int, Any], None, None]:
        """As `run_batch`, but yields (index, state) as each program finishes.

        No more than `num_threads` programs are started and not yet yielded. Closing the iterator
        cancels what runs.
        """
        made = self._batch(batch_kwargs, options, backend, num_threads, progress, on_error, plan)
        return batch.run_plan(made)

    async def run_batch_async(
        self,
        batch_kwargs: Sequence[Any],
        *,
        backend: TokenBackend | None = None,
        num_threads: int | Literal["auto"] = "auto",
        progress: bool = False,
        on_error: Literal["raise", "return"] = "raise",
        plan: BatchPlan | Literal["auto", False] = "auto",
        **options: Any,
    ) -> list[Any]:
        """As `run_batch`, without blocking the event loop. When cancelled, it keeps nothing."""
        made = self._batch(batch_kwargs, options, backend, num_threads, progress, on_error, plan)
        found: list[Any] = [None] * len(made.makers)
        async for index, result in batch.run_plan_async(made):
            found[index] = result
        return found

    def run_batch_iter_async(
        self,
        batch_kwargs: Sequence[Any],
        *,
        backend: TokenBackend | None = None,
        num_threads: int | Literal["auto"] = "auto",
        progress: bool = False,
        on_error: Literal["raise", "return"] = "raise",
        plan: BatchPlan | Literal["auto", False] = "auto",
        **options: Any,
    ) -> AsyncIterator[tuple[int, Any]]:
        """As `run_batch_iter`, without blocking the event loop."""
        made = self._batch(batch_kwargs, options, backend, num_threads, progress, on_error, plan)
        return batch.run_plan_async(made)

    def constant_prefix(
        self, *, backend: TokenBackend | None = None, **arguments: Any
    ) -> tuple[int, ...]:
        """The token ids that every run of the program with these arguments begins with: those of
        what it appends before its first primitive and before anything that depends on an argument
        without a value. Empty if it begins with such.

        An argument has a value if it is given here, bound, or has a default. The program's body is
        run twice, up to a primitive at most. Where it compares text made of an argument without a
        value (``str(x) == "yes"``), they are taken to differ.
        """
        given = self.bind(**arguments)._bound
        return constant_token_ids(self.func, given, resolve_backend(backend), self._run_coroutine)

    def trace(
        self,
        *,
        backend: TokenBackend | None = None,
        max_steps: int = MAX_STEPS,
        max_seconds: float = MAX_SECONDS,
        **arguments: Any,
    ) -> Outline:
        """The shape of the program, found without a model: what it appends, asks and forks, and
        where that is no longer known.

        Stand-ins take the place of what the model writes and of arguments without a value (not
        given here, not bound, without a default). Where the program goes by the value of one, the
        outline ends, and says at which line and why. It ends as well after `max_steps` steps or
        `max_seconds`; the program's own code is not interrupted. Options of `run` count as there.

        The body is run twice, with all it does beside appending. With a backend, given or set as
        the default, prompts that are known have their token ids; nothing is asked of it.
        """
        given, of_run = self._split(arguments)
        return outline_of(
            self.func,
            self.bind(**given)._bound,
            RunOptions.of(of_run),
            get_default_backend() if backend is None else resolve_backend(backend),
            self._run_coroutine,
            max_steps=max_steps,
            max_seconds=max_seconds,
        )

    def plan(
        self,
        batch_kwargs: Sequence[Any],
        *,
        backend: TokenBackend | None = None,
        max_seconds: float = MAX_SECONDS,
        **options: Any,
    ) -> BatchPlan:
        """What a batch of these items will cost, the order in which it costs least, and what to
        consider; takes what `run_batch` takes. Nothing is asked of the backend.

        The body is run for each item as `trace` does, once, and a few times more for what is to be
        seen from that; items for which no time is left in `max_seconds` are not looked at.
        """
        shared, of_run = self._split(options)
        run_options, resolved = RunOptions.of(of_run), resolve_backend(backend)
        arguments = [
            self._named({**shared}, item, index)
            for index, item in enumerate(_checked_items(batch_kwargs))
        ]

        def outline(given: Mapping[str, Any], is_checked: bool) -> Outline:
            return outline_of(
                self.func,
                given,
                run_options,
                resolved,
                self._run_coroutine,
                max_seconds=max_seconds,
                is_checked=is_checked,
            )

        return plan_of(self.func.__name__, arguments, resolved, outline, max_seconds=max_seconds)

    def _named(self, shared: Mapping[str, Any], item: Any, index: int) -> dict[str, Any]:
        """All arguments of an item by name. Raises TypeError if they do not fit the program."""
        args, arguments = _arguments_of(item)
        try:
            merged = self._checked(args, {**shared, **arguments})
        except TypeError as error:
            raise TypeError(f"item {index} of the batch: {error}") from None
        names = [parameter.name for parameter in self._parameters]
        return {**dict(zip(names, args, strict=False)), **merged}

    def cache(self, backend: TokenBackend | None = None, **arguments: Any) -> int:
        """Have the backend compute the `constant_prefix` now, so that runs find it in its cache;
        how many tokens it has, 0 if there is none.
        """
        resolved = resolve_backend(backend)
        token_ids = self.constant_prefix(backend=resolved, **arguments)
        if token_ids:
            self._run_coroutine(compute_prefix(resolved, token_ids))
        return len(token_ids)

    def freeze(
        self, path: str | Path, /, *, backend: TokenBackend | None = None, **arguments: Any
    ) -> int:
        """Save the keys and values of the `constant_prefix` to a file, for ``Engine.thaw`` in a
        later process; how many tokens it has.

        Raises ProgramError if the program has no constant prefix, UnsupportedFeature if the backend
        has no keys and values to save.
        """
        resolved = resolve_backend(backend)
        if not isinstance(resolved, Freezes):
            raise UnsupportedFeature(
                f"freeze on {resolved.model_name}", "it keeps no keys and values", param="backend"
            )
        token_ids = self.constant_prefix(backend=resolved, **arguments)
        if not token_ids:
            raise ProgramError(
                f"{self.func.__name__} has no constant prefix: it begins with a primitive, or with "
                "an argument that has no value; give it one"
            )
        resolved.freeze(token_ids, path)
        return len(token_ids)

    def _run_coroutine(self, body: Coroutine[Any, Any, None]) -> None:
        """Wait for a coroutine, of an async program or of a backend."""
        if _PROGRAMS.is_current():
            body.close()
            raise ProgramError(
                f"{self.func.__name__}: an async program can neither cache nor freeze a prefix, "
                "nor trace another one that is async"
            )
        _PROGRAMS.spawn(body).result()

    def _call(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], backend: TokenBackend | None
    ) -> Call:
        """The call, its arguments checked against the program's parameters."""
        arguments, of_run = self._split(kwargs)
        options = RunOptions.of(of_run)
        return self._make_call(args, arguments, self._backend(backend), options)

    def _backend(self, backend: TokenBackend | None) -> TokenBackend:
        """The backend of a run; that of the trace that the caller is a part of, if there is one."""
        tracer = current_tracer()
        return resolve_backend(backend) if tracer is None else tracer.backend

    def _make_call(
        self,
        args: Sequence[Any],
        arguments: Mapping[str, Any],
        backend: TokenBackend,
        options: RunOptions,
    ) -> Call:
        tracer = current_tracer()
        if tracer is not None:
            run = tracer.run(self.func.__name__, options.defaults, is_async=self.is_async)
            return Call(self.func, args, self._checked(args, arguments), run)
        if self.num_api_spec_tokens is not None and isinstance(backend, Speculates):
            backend = backend.speculating(self.num_api_spec_tokens)
        return Call(
            self.func,
            args,
            self._checked(args, arguments),
            Run(
                backend,
                options.defaults,
                is_async=self.is_async,
                explains=options.explains,
                traces=options.traces,
                limits=options.limits,
            ),
        )

    def _checked(self, args: Sequence[Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
        """All keyword arguments. Raises TypeError if they do not fit the program."""
        for name in arguments:
            if name in self._bound:
                raise TypeError(f"argument {name!r} of {self.func.__name__} is bound already")
        merged = {**self._bound, **arguments}
        try:
            self._signature.bind(None, *args, **merged)
        except TypeError as error:
            raise TypeError(f"{self.func.__name__}: {error}") from None
        return merged

    def _split(self, kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """What is for the program, and what are options of the run."""
        options = {
            name: value
            for name, value in kwargs.items()
            if name in RUN_OPTION_NAMES and name not in self._names
        }
        return {n: v for n, v in kwargs.items() if n not in options}, options

    def _batch(
        self,
        items: Sequence[Any],
        options: Mapping[str, Any],
        backend: TokenBackend | None,
        num_threads: int | Literal["auto"],
        shows_progress: bool,
        on_error: str,
        plan: BatchPlan | Literal["auto", False],
    ) -> batch.Plan:
        if on_error not in ("raise", "return"):
            raise ValueError(f"on_error must be 'raise' or 'return', got {on_error!r}")
        if num_threads == "auto":
            num_threads = _MAX_ASYNC_RUNS if self.is_async else _MAX_BATCH_THREADS
        if not isinstance(num_threads, int) or num_threads < 1:
            raise ValueError(f"num_threads must be 'auto' or at least 1, got {num_threads!r}")
        if current_tracer() is not None:
            num_threads = 1  # one after the other, so that an outline has an order
        shared, of_run = self._split(options)
        run_options, resolved = RunOptions.of(of_run), self._backend(backend)
        sharing = None
        if plan is not False and current_tracer() is None:
            sharing = sharing_on(resolved)
        asked = resolved if sharing is None else sharing
        makers: list[Callable[[], Call]] = []
        for index, item in enumerate(_checked_items(items)):
            args, arguments = _arguments_of(item)
            self._named(shared, item, index)
            makers.append(
                functools.partial(
                    self._make_call, args, {**shared, **arguments}, asked, run_options
                )
            )
        indexes = self._order(plan, len(makers))
        return batch.Plan(
            makers=[makers[index] for index in indexes],
            indexes=indexes,
            max_running=num_threads,
            returns_errors=on_error == "return",
            shows_progress=shows_progress,
            spawn=(lambda call: _PROGRAMS.spawn(call.run_async())) if self.is_async else None,
            awaited=self._awaited,
            forget=(lambda: None) if sharing is None else sharing.forget,
        )

    def _order(self, plan: BatchPlan | Literal["auto", False], num_items: int) -> Sequence[int]:
        """In which the items begin."""
        if isinstance(plan, BatchPlan):
            if plan.name != self.func.__name__ or len(plan.order) != num_items:
                raise InvalidRequest(
                    f"the plan is for {len(plan.order)} runs of {plan.name}, the batch has "
                    f"{num_items} of {self.func.__name__}",
                    param="plan",
                )
            return plan.order
        if plan not in ("auto", False):
            raise ValueError(f"plan must be 'auto', False or a BatchPlan, got {plan!r}")
        return range(num_items)

    async def _awaited(self, call: Call) -> None:
        if self.is_async:
            await call.run_async()
            return
        try:
            await _THREADS.call(call.run)
        except asyncio.CancelledError:
            call.cancel()
            raise


def _checked_items(items: Sequence[Any]) -> Sequence[Any]:
    """Those of a batch. Raises TypeError for what is one item, whose parts would become items."""
    if isinstance(items, (str, bytes, Mapping)):
        raise TypeError(
            f"a batch is a list of items, got one {type(items).__name__}: put it in a list"
        )
    return items


def _arguments_of(item: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Positional and keyword arguments of one item of a batch."""
    if isinstance(item, Mapping):
        return (), dict(item)
    return (tuple(item), {}) if isinstance(item, (list, tuple)) else ((item,), {})


@overload
def function(func: Callable[..., Any]) -> Function: ...
@overload
def function(
    func: None = None, num_api_spec_tokens: int | None = None
) -> Callable[[Callable[..., Any]], Function]: ...
def function(
    func: Callable[..., Any] | None = None, num_api_spec_tokens: int | None = None
) -> Function | Callable[[Callable[..., Any]], Function]:
    """Make a program of a function; with or without parentheses.

    `num_api_spec_tokens`: behind an API, a call may write so many tokens, from which later `gen`s
    of the branch are answered as far as the program goes on as the model did. An engine shares
    prefixes instead, so that there it changes nothing. Raises InvalidRequest if it is below 1.
    """
    if num_api_spec_tokens is not None and num_api_spec_tokens < 1:
        raise InvalidRequest(
            f"num_api_spec_tokens must be at least 1, got {num_api_spec_tokens}",
            param="num_api_spec_tokens",
        )
    if func is None:
        return lambda each: Function(each, num_api_spec_tokens=num_api_spec_tokens)
    return Function(func, num_api_spec_tokens=num_api_spec_tokens)
