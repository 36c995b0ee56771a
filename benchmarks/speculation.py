"""Prompt tokens sent to an API by a program of three fields, one call each and all from one.

The official clients talk to servers in this process: stubs that write the fields as they are asked
for and count a token for each byte, in the formats of OpenAI's two APIs and of Anthropic's, and our
own server with a model. Counts only, as the servers report them; how long it takes says nothing.

    python -m benchmarks.speculation [--model smollm2-135m]
"""

from __future__ import annotations

import argparse
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from rich.console import Console
from rich.table import Table

import palmette as pm
from palmette.lang.state import State
from palmette.protocol import Request as TokenRequest
from palmette.runtime.server import create_app
from palmette.runtime.server.serve import Server, bind, url_of

GOAL_RATIO = 2.0
NUM_TOKENS = 64  # of one call

KNOWN = [
    ("the first to programme", "Ada Lovelace", "1815", "mathematics"),
    ("who found radium", "Marie Curie", "1867", "physics and chemistry"),
    ("who drew the origin of species", "Charles Darwin", "1809", "biology"),
]
ASKED = "who wrote of relativity"
FIELDS = ("Name", "Born", "Work")


def card(*values: str) -> str:
    return "\n".join(f"{field}: {value}" for field, value in zip(FIELDS, values, strict=True))


WRITTEN = card("Albert Einstein", "1879", "physics")


def fields(s: pm.State) -> None:
    """Each field ends with its line, and the program writes what stands before the next one."""
    for index, field in enumerate(FIELDS):
        s += ("\n" if index else "") + f"{field}:"  # a space is part of the next word's token
        s += pm.gen(field, stop="\n", max_tokens=24, temperature=0)


def plain(s: pm.State) -> None:
    for about, *values in KNOWN:
        s += f"A person {about}.\n{card(*values)}\n\n"
    s += f"A person {ASKED}.\n"
    fields(s)


def chat(s: pm.State) -> None:
    s += pm.system("You fill in cards about people.")
    for about, *values in KNOWN:
        s += pm.user(f"A person {about}.") + pm.assistant(card(*values))
    s += pm.user(f"A person {ASKED}.")
    with s.assistant():
        fields(s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Count:
    """What one run has sent."""

    num_requests: int
    prompt_tokens: int
    completion_tokens: int
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A program on one API, without speculation and with it."""

    api: str
    each: Count
    shared: Count

    @property
    def ratio(self) -> float:
        return self.each.prompt_tokens / self.shared.prompt_tokens


# -- Stubs -----------------------------------------------------------------------------------------


def behind(begun: str) -> str:
    """What of the card comes behind this beginning of it."""
    assert WRITTEN.startswith(begun)
    return WRITTEN[len(begun) :]


def filled(schema: Any) -> str:
    """A message that goes on with one that has begun."""
    (begun,) = schema["properties"]["text_so_far"]["enum"]
    return json.dumps({"text_so_far": begun, "continuation": behind(begun)})


def scripted() -> pm.ScriptedBackend:
    """Writes the card, or what is left of it."""

    def write(prompt: str, request: TokenRequest) -> str:
        if request.constraint is not None:
            return filled(json.loads(request.constraint.source))
        _, _, begun = prompt.rpartition(f"{ASKED}.\n")
        is_chat = begun.endswith("assistant\n") or not begun
        return WRITTEN if is_chat else behind(begun)

    return pm.ScriptedBackend(write)


def claude() -> FastAPI:
    """Writes the same as messages of Anthropic's API."""
    app = FastAPI()

    @app.post("/v1/messages")
    async def messages(request: Request) -> StreamingResponse:
        body = await request.json()
        config = body.get("output_config")
        text = WRITTEN if config is None else filled(config["format"]["schema"])
        contents = [body.get("system", ""), *(each["content"] for each in body["messages"])]
        counts = {"input_tokens": sum(map(len, contents)), "output_tokens": 0}
        message = {
            "id": "m",
            "type": "message",
            "role": "assistant",
            "model": body["model"],
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": counts,
        }
        delta = {"type": "text_delta", "text": text}
        ending = {"stop_reason": "end_turn", "stop_sequence": None}
        events: list[dict[str, Any]] = [
            {"type": "message_start", "message": message},
            {
                "type": "content_block_start",
                "index": 0,
                "content_block": {"type": "text", "text": ""},
            },
            {"type": "content_block_delta", "index": 0, "delta": delta},
            {"type": "content_block_stop", "index": 0},
            {"type": "message_delta", "delta": ending, "usage": {"output_tokens": len(text)}},
            {"type": "message_stop"},
        ]

        async def lines() -> AsyncIterator[str]:
            for event in events:
                yield f"event: {event['type']}\ndata: {json.dumps(event)}\n\n"

        return StreamingResponse(lines(), media_type="text/event-stream")

    return app


# -- Counting --------------------------------------------------------------------------------------


@contextmanager
def through(app: FastAPI, make: Callable[..., Any], **options: Any) -> Iterator[Any]:
    """A backend whose official client talks to the app, which answers on a thread."""
    ready = threading.Event()
    listener = bind("127.0.0.1", 0)
    server = Server(
        uvicorn.Config(app, log_level="warning", lifespan="off"),
        on_ready=ready.set,
        end_running=lambda: None,
        grace=0,
    )
    thread = threading.Thread(target=lambda: server.run(sockets=[listener]), daemon=True)
    thread.start()
    ready.wait()
    base_url = url_of(listener) + ("/v1" if make is pm.OpenAI else "")
    try:
        with make("m", base_url=base_url, api_key="k", **options) as backend:
            yield backend
    finally:
        server.should_exit = True
        thread.join()


def count(program: Callable[[State], None], backend: Any, num_tokens: int | None) -> Count:
    before = backend.stats()
    state = pm.function(num_api_spec_tokens=num_tokens)(program).run(backend=backend)
    after = backend.stats()
    return Count(
        num_requests=after.num_tries - before.num_tries,
        prompt_tokens=after.prompt_tokens - before.prompt_tokens,
        completion_tokens=after.completion_tokens - before.completion_tokens,
        values=tuple(state[field] for field in FIELDS),
    )


def measure(api: str, program: Callable[[State], None], backend: Any) -> Row:
    return Row(
        api=api, each=count(program, backend, None), shared=count(program, backend, NUM_TOKENS)
    )


def stub_rows() -> Iterator[Row]:
    app = create_app(scripted(), model_name="m")
    with through(app, pm.OpenAI, api="completions") as backend:
        yield measure("OpenAI completions, stub", plain, backend)
    with through(app, pm.OpenAI, emulate=True) as backend:
        yield measure("OpenAI chat, stub", chat, backend)
    with through(claude(), pm.Anthropic, emulate=True) as backend:
        yield measure("Anthropic, stub", chat, backend)


def model_rows(model: str) -> Iterator[Row]:
    with pm.Engine(model) as engine:
        app = create_app(engine, model_name="m")
        with through(app, pm.OpenAI, api="completions") as backend:
            yield measure(f"palmette serve {model}, completions", plain, backend)


def print_rows(rows: Sequence[Row], console: Console) -> None:
    table = Table("API", title=f"A program of {len(FIELDS)} fields")
    for column in ("requests", "prompt tokens", "completion tokens", "fewer prompt tokens"):
        table.add_column(column, justify="right")
    for row in rows:
        pairs = zip(
            (row.each.num_requests, row.each.prompt_tokens, row.each.completion_tokens),
            (row.shared.num_requests, row.shared.prompt_tokens, row.shared.completion_tokens),
            strict=True,
        )
        table.add_row(
            row.api, *(f"{each} → {shared}" for each, shared in pairs), f"{row.ratio:.2f}x"
        )
    console.print(table)
    for row in rows:
        if row.each.values != row.shared.values:
            console.print(f"{row.api}: {row.each.values} and {row.shared.values}")


def main(argv: Sequence[str] | None = None) -> list[Row]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", help="also our own server with this one: a name, or a path")
    args = parser.parse_args(argv)
    rows = list(stub_rows())
    if args.model:
        rows += model_rows(args.model)
    print_rows(rows, Console())
    return rows


if __name__ == "__main__":
    main()
