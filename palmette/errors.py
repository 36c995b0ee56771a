"""What can go wrong, as a caller meets it.

::

    PalmetteError
    ├── InvalidRequest (also ValueError)     the caller can mend it; `param` names the field
    │   ├── PromptTooLong                    num_tokens, limit
    │   ├── RequestTooLarge                  num_pages_needed, num_pages
    │   ├── UnsupportedFeature               feature: known, but not honoured here; never ignored
    │   └── ConstraintError                  a regex, schema or grammar cannot be used; `pointer`
    │       ├── InvalidConstraint            malformed
    │       ├── UnsupportedConstraint        well-formed, but cannot be enforced exactly; `feature`
    │       ├── UnsatisfiableConstraint      nothing matches it
    │       └── ConstraintTooComplex         a limit of time or size was reached
    ├── ModelError
    │   ├── ModelNotFound                    name, known
    │   │   └── ModelNotPulled               a known name whose file is not on this machine yet
    │   ├── ModelFileError                   path: damaged, truncated, or of a kind we do not load
    │   ├── FrozenPrefixError                path: damaged, or frozen with another model
    │   └── DownloadError                    what was fetched, and why it failed
    ├── EngineError
    │   ├── EngineStopped                    the engine was shut down, or its thread died
    │   ├── RemoteError                      status: an API failed, or answered what cannot be used
    │   ├── CacheFull                        num_pages_needed, num_pages_left: no room is left
    │   └── RequestAborted                   aborted by the caller, a client's death, or a deadline
    └── ProgramError                         a program misused the language, or came to a limit
        ├── PrimitiveFailed                  primitive, where, path; `__cause__` is the original
        ├── ProgramStopped                   primitive, where, path: what was not done by then
        │   ├── ProgramCancelled (also RequestAborted)
        │   └── ProgramTimeout (also TimeoutError)   seconds
        ├── TokenBudgetExceeded              limit, num_used, primitive, where, path
        ├── InvalidOutput                    name, text: a variable cannot be read as its type
        ├── VariableNotSet (also KeyError)   name
        └── BackendNotSet

A Ctrl-C is no error of Palmette's: what `run_batch` had done by then is in `BatchInterrupted`, a
KeyboardInterrupt.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any


class PalmetteError(Exception):
    """The root of everything Palmette raises on purpose."""


class InvalidRequest(PalmetteError, ValueError):
    """The request cannot be served as it is; `param` names the argument at fault, if one is."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class PromptTooLong(InvalidRequest):
    """The prompt leaves no room in the model's context."""

    def __init__(self, num_tokens: int, limit: int) -> None:
        super().__init__(
            f"prompt has {num_tokens} tokens, the model takes at most {limit} "
            "and needs room for one more",
            param="prompt",
        )
        self.num_tokens = num_tokens
        self.limit = limit


class RequestTooLarge(InvalidRequest):
    """The request could not finish even with the whole KV pool to itself."""

    def __init__(
        self, num_pages_needed: int, num_pages: int, page_size: int, *, num_pinned: int = 0
    ) -> None:
        pinned = f", {num_pinned} of them pinned for other prompts" if num_pinned else ""
        super().__init__(
            f"the request needs {num_pages_needed} pages of {page_size} tokens, "
            f"the KV pool has {num_pages}{pinned}: shorten the prompt or enlarge the pool",
            param="prompt",
        )
        self.num_pages_needed = num_pages_needed
        self.num_pages = num_pages


class UnsupportedFeature(InvalidRequest):
    """A feature that exists elsewhere but is not honoured here. Nothing is ignored in silence."""

    def __init__(self, feature: str, why: str, *, param: str | None = None) -> None:
        super().__init__(f"{feature} is not supported: {why}", param=param)
        self.feature = feature


class ConstraintError(InvalidRequest):
    """A constraint cannot be used; `pointer` is the JSON pointer or position at fault, if known."""

    def __init__(
        self, message: str, *, param: str | None = None, pointer: str | None = None
    ) -> None:
        super().__init__(message, param=param)
        self.pointer = pointer


class InvalidConstraint(ConstraintError):
    """The regex, schema or grammar is malformed."""


class UnsupportedConstraint(ConstraintError):
    """It is well-formed, but cannot be enforced exactly, so it is refused."""


class UnsatisfiableConstraint(ConstraintError):
    """No text satisfies it."""


class ConstraintTooComplex(ConstraintError):
    """Compiling it would pass a limit of time, states or memory."""


class ModelError(PalmetteError):
    """A model cannot be had or loaded."""


class ModelNotFound(ModelError):
    """No such name in the registry and no such file or folder."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(
            f"no model named {name!r}: it is neither a file or folder nor one of the known models "
            f"({', '.join(sorted(known))})"
        )
        self.name = name
        self.known = tuple(known)


class ModelNotPulled(ModelNotFound):
    """A known model whose file is not on this machine yet."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        ModelError.__init__(
            self, f"the model {name!r} is not on this machine yet: run `palmette pull {name}` once"
        )
        self.name = name
        self.known = tuple(known)


class ModelFileError(ModelError):
    """A model file is damaged, truncated, or of a kind that is not loaded."""

    def __init__(self, path: str | Path, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = Path(path)


class FrozenPrefixError(ModelError):
    """A frozen prefix cannot be written or read, is damaged, or was made with another model."""

    def __init__(self, path: str | Path, why: str) -> None:
        super().__init__(f"{path}: {why}")
        self.path = Path(path)


class DownloadError(ModelError):
    """A model could not be fetched."""


class EngineError(PalmetteError):
    """The engine cannot answer."""


class EngineStopped(EngineError):
    """The engine was shut down, or its thread ended with an error (see `__cause__`)."""


class RemoteError(EngineError):
    """A server could not be reached, or gave an error; `status` is its HTTP status, if it did."""

    def __init__(self, message: str, *, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status


class CacheFull(EngineError):
    """The KV pool, or what of it may be pinned, has no room for a prefix that is to be kept, or,
    since one was pinned meanwhile, none for a request any more.
    """

    def __init__(self, message: str, *, num_pages_needed: int, num_pages_left: int) -> None:
        super().__init__(message)
        self.num_pages_needed = num_pages_needed
        self.num_pages_left = num_pages_left


class RequestAborted(EngineError):
    """The request was aborted before it finished."""


class ProgramError(PalmetteError):
    """A program misused the language."""


class PrimitiveFailed(ProgramError):
    """A primitive of the program failed; `__cause__` is what it failed with.

    `where` is the file and line that appended it, `path` the branch in the fork tree.
    """

    def __init__(
        self, primitive: str, cause: BaseException, *, where: str, path: tuple[int, ...] = ()
    ) -> None:
        why = (str(cause) or type(cause).__name__) if isinstance(cause, Exception) else repr(cause)
        super().__init__(f"{primitive} at {where} failed: {why}")
        self.primitive = primitive
        self.where = where
        self.path = path
        self.__cause__ = cause


class ProgramStopped(ProgramError):
    """A run or branch ended before its time; `primitive` at `where` is what was not done then.

    Both are empty where nothing was left to do. `path` is the branch in the fork tree.
    """

    def __init__(
        self, why: str, *, primitive: str = "", where: str = "", path: tuple[int, ...] = ()
    ) -> None:
        super().__init__(f"{why} before {primitive} at {where} was done" if primitive else why)
        self.primitive = primitive
        self.where = where
        self.path = path


class ProgramCancelled(ProgramStopped, RequestAborted):
    """The run or branch was cancelled."""


class ProgramTimeout(ProgramStopped, TimeoutError):
    """The `timeout` of a run or fork, in seconds, has passed."""

    def __init__(
        self,
        seconds: float,
        of: str,
        *,
        primitive: str = "",
        where: str = "",
        path: tuple[int, ...] = (),
    ) -> None:
        why = f"timeout={seconds:g} of {of} passed"
        super().__init__(why, primitive=primitive, where=where, path=path)
        self.seconds = seconds


class TokenBudgetExceeded(ProgramError):
    """Too little was left of `max_total_tokens` of a run or fork for a `gen` to begin."""

    def __init__(
        self,
        limit: int,
        num_used: int,
        of: str,
        *,
        min_tokens: int,
        primitive: str,
        where: str,
        path: tuple[int, ...] = (),
    ) -> None:
        wanted = f"min_tokens={min_tokens}" if min_tokens > 1 else "a token"
        super().__init__(
            f"max_total_tokens={limit} of {of} has {limit - num_used} tokens left "
            f"({num_used} used): no room for {wanted} of {primitive} at {where}"
        )
        self.limit = limit
        self.num_used = num_used
        self.primitive = primitive
        self.where = where
        self.path = path


class BatchInterrupted(KeyboardInterrupt):
    """Ctrl-C in `run_batch`. `results` has the states that were done by then, in the order of the
    items; in place of a program that was not done it has a ProgramCancelled.
    """

    def __init__(self, results: Sequence[Any]) -> None:
        num_done = sum(not isinstance(result, BaseException) for result in results)
        super().__init__(f"interrupted when {num_done} of {len(results)} programs were done")
        self.results = list(results)


class InvalidOutput(ProgramError):
    """The text of a variable cannot be read as the type that was asked for."""

    def __init__(self, name: str, text: str, wanted: str, why: str) -> None:
        shown = text if len(text) <= 80 else text[:77] + "..."
        super().__init__(
            f"variable {name!r} cannot be read as {wanted}: {why}; its text: {shown!r}"
        )
        self.name = name
        self.text = text


class VariableNotSet(ProgramError, KeyError):
    """A variable was read that no primitive of the program has set."""

    def __init__(self, name: str, known: Sequence[str]) -> None:
        super().__init__(
            f"no variable named {name!r} was set; set so far: {', '.join(known) or 'none'}"
        )
        self.name = name

    def __str__(self) -> str:  # KeyError would show the repr of the message
        return str(self.args[0])


class BackendNotSet(ProgramError):
    """No backend was given and no default is set."""

    def __init__(self) -> None:
        super().__init__(
            "no backend: call palmette.set_default_backend(palmette.Engine('smollm2-135m')) "
            "or pass backend=..."
        )
