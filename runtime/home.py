"""Where Palmette keeps what it fetched or converted."""

from __future__ import annotations

import os
from pathlib import Path


def palmette_home() -> Path:
    """The folder for everything Palmette keeps: $PALMETTE_HOME, or ~/.cache/palmette."""
    given = os.environ.get("PALMETTE_HOME")
    return Path(given).expanduser() if given else Path.home() / ".cache" / "palmette"
