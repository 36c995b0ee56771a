"""Which backend a program runs on."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from palmette.errors import BackendNotSet, UnsupportedFeature
from palmette.lang.choices import Choice, ChoiceRequest
from palmette.protocol import Request, SamplingParams, TokenBackend


@runtime_checkable
class HasEndpoint(Protocol):
    """What stands for the backend it has, as a `Runtime` does."""

    @property
    def endpoint(self) -> TokenBackend: ...


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


@runtime_checkable
class Chooses(Protocol):
    """A backend that can have the model name one of some texts where it cannot `score` them."""

    @property
    def chooses(self) -> bool:
        """Whether it is to be asked so."""
        ...

    async def choose(self, request: ChoiceRequest) -> Choice:
        """Raises UnsupportedFeature for a temperature where probabilities are not known."""
        ...


@runtime_checkable
class Counts(Protocol):
    """A backend that counts what it does."""

    def stats(self) -> Any:
        """A dataclass of figures."""
        ...


def explains_prompts(backend: TokenBackend) -> bool:
    """Whether it can tell why tokens of a prompt were cached and how likely generated ones were.

    One that cannot says so by ``explains_prompts = False``.
    """
    return bool(getattr(backend, "explains_prompts", True))


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


def flush_cache(backend: TokenBackend | None = None, empty_cache: bool | None = None) -> bool:
    """Drop every cached prefix of the backend (the default one) that no running request holds; True
    when it is done.

    Raises UnsupportedFeature for ``empty_cache=True``: the memory of the pages stays allocated.
    """
    if empty_cache:
        raise UnsupportedFeature(
            "empty_cache", "the memory of an engine's pages stays its own", param="empty_cache"
        )
    resolve_backend(backend).flush_cache()
    return True


def get_server_info(backend: TokenBackend | None = None) -> dict[str, Any]:
    """What there is to know of the backend (the default one): ``model_name``, ``max_context``,
    ``vocab_size``, ``default_sampling``, Palmette's ``version`` and, where the backend counts what
    it does, ``stats``.
    """
    from importlib.metadata import version  # takes long to load

    resolved = resolve_backend(backend)
    info: dict[str, Any] = {
        "model_name": resolved.model_name,
        "max_context": resolved.max_context,
        "vocab_size": resolved.tokenizer.vocab_size,
        "default_sampling": asdict(resolved.default_sampling),
        "version": version("palmette"),
    }
    if isinstance(resolved, Counts):
        info["stats"] = asdict(resolved.stats())
    return info


async def compute_prefix(backend: TokenBackend, token_ids: Sequence[int]) -> None:
    """Have the backend compute a prompt and generate nothing, so that it is cached."""
    request = Request(
        request_id=f"prefix-{uuid.uuid4().hex}",
        token_ids=tuple(token_ids),
        sampling=SamplingParams(max_tokens=0),
    )
    async for event in backend.generate(request):
        if event.error is not None:
            raise event.error


def checked(backend: TokenBackend) -> TokenBackend:
    """`backend`, if it is one, or the endpoint that it has. Raises TypeError otherwise."""
    if isinstance(backend, HasEndpoint) and not isinstance(backend, type):
        backend = backend.endpoint
    for method in ("generate", "score"):
        if isinstance(backend, type) or not callable(getattr(backend, method, None)):
            raise TypeError(
                f"a backend is an object such as palmette.Engine('smollm2-135m'), got {backend!r}"
            )
    return backend
