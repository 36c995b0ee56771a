"""The models Palmette knows by name, and where their files are kept."""

from __future__ import annotations

from palmette.runtime.home import palmette_home

__all__ = ["palmette_home"]
