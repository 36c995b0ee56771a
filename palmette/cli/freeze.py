"""`palmette freeze`: compute the beginning of prompts once, for processes to come."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palmette.cli.options import add_engine_options, given_engine_options
from palmette.cli.run import find_program, given_arguments
from palmette.errors import InvalidRequest

if TYPE_CHECKING:
    from palmette.lang.function import Function
    from palmette.lang.state import State


def add_to(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser(
        "freeze",
        help="save the keys and values of a prefix to a file",
        description="Compute what prompts begin with once and save its keys and values to a file. "
        "A later run, chat or serve that is given the file with --thaw does not compute it again.",
    )
    parser.add_argument("model", metavar="MODEL", help="a known name, a GGUF file, or a folder")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--system", metavar="TEXT", help="a system message")
    source.add_argument(
        "--prompt",
        metavar="FILE",
        help="a file with text, taken as it is, for use without chat",
    )
    source.add_argument(
        "--program",
        metavar="FILE.py[:FUNCTION]",
        help="what this program appends before its first primitive and before anything that "
        "depends on an argument without a value",
    )
    parser.add_argument(
        "--arg",
        metavar="NAME=TEXT",
        action="append",
        default=[],
        dest="args",
        help="an argument of the program; NAME:=JSON for one that is not text",
    )
    parser.add_argument("-o", "--output", metavar="PATH", required=True, help="the file to write")
    add_engine_options(parser)
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Write the file and say how large it is."""
    program = _program(arguments)
    from palmette.runtime import AsyncEngine

    with AsyncEngine(arguments.model, **given_engine_options(arguments)) as engine:
        num_tokens = program.freeze(arguments.output, backend=engine)
    size = Path(arguments.output).stat().st_size
    print(f"{arguments.output}: {num_tokens} tokens, {size / 1e6:.1f} MB")
    return 0


def _program(arguments: argparse.Namespace) -> Function:
    """A program whose constant prefix is what was asked for."""
    from palmette.lang.builders import system
    from palmette.lang.function import Function

    if arguments.program is not None:
        program = find_program(arguments.program)
        return program.bind(**given_arguments(program, arguments.args))
    if arguments.args:
        raise InvalidRequest("--arg is for a --program", param="arg")
    text = arguments.system if arguments.prompt is None else _read(Path(arguments.prompt))

    def prompt(state: State) -> None:
        state += system(text) if arguments.prompt is None else text

    return Function(prompt)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be read: {error.strerror}", param="prompt") from error
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"{path}: is not UTF-8: {error}", param="prompt") from error
