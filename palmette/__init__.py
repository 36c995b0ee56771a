"""Palmette: write and run structured-generation programs."""

from __future__ import annotations

from palmette.lang.backends.scripted import Reply, ScriptedBackend

__all__ = ["Reply", "ScriptedBackend"]
