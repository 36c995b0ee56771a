"""The command line: `palmette pull`, `models`, `run`, `chat`, `serve`."""

from palmette.cli.entry import main

__all__ = ["main"]
