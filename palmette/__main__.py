"""``python -m palmette``."""

from __future__ import annotations

import sys

from palmette.cli import main

if __name__ == "__main__":
    sys.exit(main())
