"""From a model file or folder to a model in memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from palmette.runtime.loading.loader import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]


def __getattr__(name: str) -> Any:
    # Lazily, so that models can be listed and pulled without torch.
    if name in __all__:
        from palmette.runtime.loading import loader

        return getattr(loader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
