"""`palmette models`: what can be run by name."""

from __future__ import annotations

import argparse
from typing import Any


def add_to(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser(
        "models",
        help="list the models known by name",
        description="List the models known by name, and where those that were pulled are kept.",
    )
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the table."""
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    from palmette.runtime.loading.registry import list_models

    table = Table("name", "what it is", "licence")
    table.add_column("size", justify="right")
    table.add_column("pulled", overflow="fold")
    for listed in list_models():
        model = listed.model
        place = "no" if listed.path is None else str(listed.path)
        table.add_row(model.name, model.description, model.licence, decimal(model.size), place)
    Console().print(table)
    return 0
