"""`palmette run`: run a program of the language."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from palmette.cli.options import add_engine_options, add_thaw_option, given_engine_options
from palmette.errors import InvalidRequest, ProgramError

if TYPE_CHECKING:
    from palmette.lang.function import Function
    from palmette.protocol import TokenBackend


def add_to(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser(
        "run",
        help="run a program",
        description="Run a program, print its text as it comes, and then, on standard error, what "
        "each of its primitives cost in tokens and time.",
    )
    parser.add_argument(
        "program",
        metavar="FILE.py[:FUNCTION]",
        help="a file and a @palmette.function in it, which may be left out if it is the only one",
    )
    parser.add_argument(
        "--arg",
        metavar="NAME=TEXT",
        action="append",
        default=[],
        dest="args",
        help="an argument of the program; NAME:=JSON for one that is not text",
    )
    parser.add_argument(
        "--model",
        metavar="MODEL",
        help="a known name, a GGUF file, or a folder (default: the backend that the file sets)",
    )
    parser.add_argument("--temperature", type=float, metavar="T", help="0 is greedy")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="for each gen that says none")
    parser.add_argument("--seed", type=int, metavar="N", help="makes sampling repeatable")
    parser.add_argument("--no-figures", action="store_true", help="print the text only")
    add_thaw_option(parser)
    add_engine_options(parser)
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Run the program and print what came of it."""
    program = find_program(arguments.program)
    given = given_arguments(program, arguments.args)
    _check_complete(program, given)
    for name in ("temperature", "max_tokens", "seed"):
        if getattr(arguments, name) is not None and name not in program.arg_names:
            given[name] = getattr(arguments, name)
    with _backend(arguments) as backend:
        state = program.stream(backend=backend, **given)
        try:
            with state:
                for piece in state.text_iter():
                    print(piece, end="", flush=True)
        finally:
            print()
        if not arguments.no_figures:
            state.print_figures(sys.stderr)
    return 0


def find_program(place: str) -> Function:
    """The program named by ``FILE.py:FUNCTION``. Raises ProgramError if it is not there."""
    from palmette.lang.function import Function

    file, _, name = place.partition(":") if ".py:" in place else (place, "", "")
    module = _load(Path(file))
    programs = {k: v for k, v in vars(module).items() if isinstance(v, Function)}
    known = ", ".join(programs) or "none"
    if name:
        if name not in programs:
            raise ProgramError(f"{file} has no program named {name!r}; its programs: {known}")
        return programs[name]
    if len(programs) != 1:
        raise ProgramError(f"say which program of {file} to run; its programs: {known}")
    return next(iter(programs.values()))


def _load(path: Path) -> ModuleType:
    """The module of a file, with the file's folder importable, as when Python runs it."""
    if not path.is_file():
        raise ProgramError(f"there is no file {path}")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ProgramError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


def _argument(text: str) -> tuple[str, Any]:
    """``name=text`` or ``name:=json``."""
    name, equals, value = text.partition("=")
    if not equals or not name.rstrip(":"):
        raise InvalidRequest(f"--arg takes NAME=TEXT or NAME:=JSON, got {text!r}", param="arg")
    if not name.endswith(":"):
        return name, value
    try:
        return name[:-1], json.loads(value)
    except ValueError as error:
        raise InvalidRequest(f"--arg {name[:-1]} is not JSON: {error}", param="arg") from error


def given_arguments(program: Function, texts: Sequence[str]) -> dict[str, Any]:
    """What --arg says, by name. Raises InvalidRequest if the program has no such argument."""
    given = dict(_argument(text) for text in texts)
    for name in given:
        if name not in program.arg_names:
            raise InvalidRequest(
                f"{program.func.__name__} has no argument named {name!r}; it takes: "
                f"{', '.join(program.arg_names) or 'none'}",
                param="arg",
            )
    return given


def _check_complete(program: Function, given: dict[str, Any]) -> None:
    parameters = inspect.signature(program.func).parameters
    missing = [
        name
        for name in program.arg_names
        if name not in given and parameters[name].default is inspect.Parameter.empty
    ]
    if missing:
        raise InvalidRequest(
            f"{program.func.__name__} needs --arg for {', '.join(missing)}; it takes: "
            f"{', '.join(program.arg_names)}",
            param="arg",
        )


@contextlib.contextmanager
def _backend(arguments: argparse.Namespace) -> Iterator[TokenBackend | None]:
    """The engine asked for; None for the backend that the file has set."""
    options = given_engine_options(arguments)
    if arguments.model is None:
        given = [*options, *(["thaw"] if arguments.thaw else [])]
        if given:
            raise InvalidRequest(f"{', '.join(given)}: engine options need --model", param="model")
        yield None
        return
    from palmette.runtime import AsyncEngine

    with AsyncEngine(arguments.model, **options) as engine:
        for path in arguments.thaw:
            engine.thaw(path)
        yield engine
