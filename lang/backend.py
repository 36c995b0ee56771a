"""Which backend a program runs on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

from palmette.errors import BackendNotSet
from palmette.protocol import TokenBackend


@runtime_checkable
class Freezes(Protocol):
    """A backend that can save the keys and values of a prefix to a file."""

    def freeze(self, token_ids: Sequence[int], path: str | Path) -> None: ...


@runtime_checkable
class Speculates(Protocol):
    """A backend that pays for the whole prompt with each call, and can answer several `gen`s of a
    run from one.
    """

    def speculating(self, num_tokens: int) -> TokenBackend:
        """The backend for one run, whose calls write so many tokens at most."""
        ...


_default: TokenBackend | None = None


def set_default_backend(backend: TokenBackend | None) -> None:
    """Programs run without `backend=` run on this one from now on; None takes it back."""
    global _default
    _default = None if backend is None else checked(backend)


def get_default_backend() -> TokenBackend | None:
    """What `set_default_backend` was last called with."""
    return _default


def resolve_backend(backend: TokenBackend | None) -> TokenBackend:
    """`backend`, or the default. Raises BackendNotSet if there is neither."""
    if backend is not None:
        return checked(backend)
    if _default is None:
        raise BackendNotSet
    return _default


def flush_cache(backend: TokenBackend | None = None) -> None:
    """Drop every cached prefix of the backend (the default one) that no running request holds."""
    resolve_backend(backend).flush_cache()


def checked(backend: TokenBackend) -> TokenBackend:
    """`backend`, if it is one. Raises TypeError otherwise."""
    for method in ("generate", "score"):
        if isinstance(backend, type) or not callable(getattr(backend, method, None)):
            raise TypeError(
                f"a backend is an object such as palmette.Engine('smollm2-135m'), got {backend!r}"
            )
    return backend
