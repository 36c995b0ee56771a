"""`palmette pull`: fetch a model."""

from __future__ import annotations

import argparse
from typing import Any


def add_to(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser(
        "pull", help="fetch a model", description="Fetch a known model and verify it."
    )
    parser.add_argument("name", metavar="NAME", help="one of the names `palmette models` lists")
    parser.add_argument("-q", "--quiet", action="store_true", help="show no progress")
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Fetch the model, if it is not there, and print where it is."""
    from palmette.runtime.loading.pull import pull

    print(pull(arguments.name, progress=not arguments.quiet))
    return 0
