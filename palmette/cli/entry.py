"""From arguments to an exit status."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from palmette.cli import chat, freeze, models, pull, run, serve, trace
from palmette.errors import PalmetteError

_DESCRIPTION = "Write, run and serve structured-generation programs."
_EPILOG = "Set PALMETTE_DEBUG=1 to see where an error came from."

_COMMANDS = (pull, models, run, chat, serve, freeze, trace)

# As a shell reports a command that ended by that signal.
_INTERRUPTED = 130
_BROKEN_PIPE = 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status.

    0 is success, 1 an error that is told in one sentence on standard error, 2 wrong usage, 130 an
    interrupt.
    """
    try:
        arguments = _parser().parse_args(argv)
    except SystemExit as usage:  # of --help and --version too
        return usage.code if isinstance(usage.code, int) else 2
    try:
        status: int = arguments.command(arguments)
        sys.stdout.flush()
        return status
    except PalmetteError as error:
        if os.environ.get("PALMETTE_DEBUG") == "1":
            raise
        print(f"palmette: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # Who read the output has left. What is still buffered must not be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _BROKEN_PIPE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="palmette", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--version", action=_Version)
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in _COMMANDS:
        command.add_to(commands)
    return parser


class _Version(argparse.Action):
    """Prints the version, which is looked up only then."""

    def __init__(self, option_strings: list[str], dest: str) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, help="print the version")

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import palmette

        print(f"palmette {palmette.__version__}")
        parser.exit()
