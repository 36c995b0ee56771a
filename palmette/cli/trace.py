"""`palmette trace`: look at a trace that a program has saved."""

from __future__ import annotations

import argparse
import json
import tempfile
import webbrowser
from pathlib import Path
from typing import TYPE_CHECKING, Any

from palmette.errors import InvalidRequest

if TYPE_CHECKING:
    from palmette.lang.tracing import Trace


def add_to(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser(
        "trace",
        help="look at what a program did",
        description="Look at a trace, which a program writes with state.trace().save(FILE).",
    )
    actions = parser.add_subparsers(title="actions", metavar="ACTION", required=True)
    view = actions.add_parser(
        "view",
        help="as a page in a browser",
        description="Write one HTML file that shows the trace and needs no network, and open it.",
    )
    _add_file(view)
    view.add_argument(
        "-o", "--output", metavar="PAGE", help="where to write the page (default: a new file)"
    )
    view.add_argument("--no-browser", action="store_true", help="write the page and do not open it")
    view.set_defaults(command=run_view)
    show = actions.add_parser("show", help="as a tree on the terminal")
    _add_file(show)
    show.add_argument("--all", action="store_true", help="constants, too")
    show.set_defaults(command=run_show)
    export = actions.add_parser("export", help="as spans of OpenTelemetry")
    _add_file(export)
    export.add_argument(
        "--otlp", metavar="PATH", required=True, help="write the body of an OTLP/JSON request here"
    )
    export.add_argument(
        "--contents", action="store_true", help="with texts and arguments, which are left out"
    )
    export.set_defaults(command=run_export)


def run_view(arguments: argparse.Namespace) -> int:
    """Write the page and say where; open it unless that is not wanted."""
    page = _load(arguments.file).html()
    if arguments.output is None:
        # Not deleted: the browser reads it after this command has ended.
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", prefix="palmette-trace-", suffix=".html", delete=False
        ) as file:
            file.write(page)
        path = Path(file.name)
    else:
        path = Path(arguments.output)
        _write(path, page)
    print(path)
    if not arguments.no_browser and not webbrowser.open(path.resolve().as_uri()):
        print("no browser could be opened: open the file yourself")
    return 0


def run_show(arguments: argparse.Namespace) -> int:
    """Print the tree."""
    _load(arguments.file).print(all_events=arguments.all)
    return 0


def run_export(arguments: argparse.Namespace) -> int:
    """Write the spans."""
    told = _load(arguments.file).to_otlp(contents=arguments.contents)
    _write(Path(arguments.otlp), json.dumps(told))
    return 0


def _add_file(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE", help="what Trace.save has written")


def _load(path: str) -> Trace:
    from palmette.lang.tracing import Trace

    try:
        return Trace.load(path)
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be read: {error.strerror}", param="file") from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{path}: cannot be written: {error.strerror}") from error
