"""`palmette serve`: the OpenAI API over a model."""

from __future__ import annotations

import argparse
import os
from typing import Any

from palmette.cli.options import add_engine_options, add_thaw_option, given_engine_options


def add_to(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model over HTTP as the OpenAI API does. Ctrl-C ends it: running "
        "requests may finish, a second Ctrl-C does not wait for them.",
    )
    parser.add_argument("model", metavar="MODEL", help="a known name, a GGUF file, or a folder")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s)"
    )
    parser.add_argument(
        "--port",
        type=int,
        default=8000,
        metavar="N",
        help="port to listen on, 0 for a free one (default: %(default)s)",
    )
    parser.add_argument(
        "--name", metavar="NAME", help="name to serve the model by (default: MODEL)"
    )
    parser.add_argument(
        "--api-key",
        metavar="KEY",
        default=os.environ.get("PALMETTE_API_KEY"),
        help="key that clients must send; better given as PALMETTE_API_KEY, which no other user "
        "of the machine can see",
    )
    parser.add_argument(
        "--cors-origin",
        metavar="ORIGIN",
        action="append",
        default=[],
        help="web page origin that may call from a browser; may be given several times",
    )
    parser.add_argument(
        "--grace",
        type=float,
        default=5.0,
        metavar="SECONDS",
        help="how long running requests may go on after Ctrl-C (default: %(default)s)",
    )
    parser.add_argument(
        "--trace",
        type=int,
        default=0,
        metavar="N",
        help="keep the last N requests in memory for GET /trace, which shows their prompts to "
        "whoever may ask the server (default: %(default)s, none)",
    )
    parser.add_argument("--access-log", action="store_true", help="print a line for each request")
    add_thaw_option(parser)
    add_engine_options(parser)
    parser.set_defaults(command=run)


def run(arguments: argparse.Namespace) -> int:
    """Serve until a signal."""
    from palmette.lang.tracing.requests import RequestTraces
    from palmette.runtime.server import serve

    serve(
        arguments.model,
        host=arguments.host,
        port=arguments.port,
        model_name=arguments.name,
        api_key=arguments.api_key,
        cors_origins=arguments.cors_origin,
        grace=arguments.grace,
        access_log=arguments.access_log,
        thaw=arguments.thaw,
        traces=RequestTraces(arguments.trace) if arguments.trace else None,
        **given_engine_options(arguments),
    )
    return 0
