"""The engine: scheduling, paged KV, models, sampling, serving."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

# GNU OpenMP, which torch's CPU build uses, lets a waiting thread spin for about a millisecond. On a
# machine that is not ours alone that is the time the other thread needs: decoding fell to a
# tenth and below with another process on two cores. Read when torch is first imported.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

# oneDNN, which multiplies in bfloat16, keeps a compiled product for each shape it has seen, by
# default 1,024 of them: 100 MB, mostly for batches that never come again. Fewer were no slower.
os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "256")

if TYPE_CHECKING:
    from palmette.runtime.async_engine import AsyncEngine
    from palmette.runtime.config import EngineConfig
    from palmette.runtime.engine import Engine, ScoreEvent
    from palmette.runtime.metrics import EngineStats

__all__ = ["AsyncEngine", "Engine", "EngineConfig", "EngineStats", "ScoreEvent"]

_HOMES = {
    "AsyncEngine": "palmette.runtime.async_engine",
    "Engine": "palmette.runtime.engine",
    "EngineConfig": "palmette.runtime.config",
    "EngineStats": "palmette.runtime.metrics",
    "ScoreEvent": "palmette.runtime.engine",
}


def __getattr__(name: str) -> Any:
    # Lazily, so that the parts that need no torch can be used without it.
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
