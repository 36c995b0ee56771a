"""SGLang's `Runtime`: a server in a child process, for as long as this one needs it."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import json
import os
import subprocess
import sys
import threading
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from palmette.errors import EngineStopped, InvalidRequest, UnsupportedFeature
from palmette.lang.backends.endpoint import Endpoint
from palmette.lang.backends.http import HttpOptions, HttpServer, StatusError, bearer
from palmette.lang.backends.server import refusal
from palmette.protocol import Tokenizer

_KEPT_LINES = 30
_GRACE = 10.0  # seconds for the server to end by itself
_READY = "Palmette is ready at "
_MOST_BYTES = 1 << 30

# The server ends with its parent, however that ends: its standard input then closes, unless a fork
# of the parent holds the other end, and its parent is another.
_CHILD = """
import os, select, signal, sys, threading
from palmette.cli import main

parent = os.getppid()

def watch():
    while os.getppid() == parent and not (select.select([0], [], [], 1.0)[0] and not os.read(0, 1)):
        pass
    os.kill(os.getpid(), signal.SIGTERM)

threading.Thread(target=watch, daemon=True).start()
sys.exit(main(sys.argv[1:]))
"""

# SGLang's names of options, by ours.
_NAMES = {
    "context_length": "max_context",
    "max_running_requests": "max_running",
    "chunked_prefill_size": "max_batch_tokens",
    "served_model_name": "name",
}
_POLICIES = {"lpm": "lpm", "dfs-weight": "dfs", "fcfs": "fcfs"}

# Options of `palmette serve` that are taken as they are. A test holds them equal to those there.
SERVER_OPTIONS = frozenset({"host", "port", "name", "grace", "thaw"})
ENGINE_OPTIONS = frozenset(
    {
        *("dtype", "device", "kernels", "max_context", "chat_template", "num_threads"),
        *("page_size", "num_pages", "kv_memory", "prefix_cache", "host_memory", "host_directory"),
        *("max_batch_tokens", "max_step_seconds", "max_running", "jump_forward", "jump_mode"),
        *("max_guesses", "policy", "max_wait", "max_think"),
    }
)


class Runtime:
    """`palmette serve` in a child process on a free port, and an `endpoint` to it.

    `model_path` is a known name, a GGUF file or a folder. Options are those of `palmette serve`
    under their own names or SGLang's (`context_length`, `max_running_requests`,
    `chunked_prefill_size`, `schedule_policy`, `disable_radix_cache`, `served_model_name`,
    `api_key`); others are refused by name. What the server prints is shown with `log_level="info"`.

    The server ends with `shutdown`, with the `with` block, or when this process does. A backend
    itself: a program that is to run on it runs on its `endpoint`. Raises EngineStopped with the
    server's last lines if it ends before it is ready, or is not ready within `launch_timeout`
    seconds.
    """

    def __init__(
        self,
        model_path: str,
        *,
        log_level: str = "error",
        launch_timeout: float = 300.0,
        api_key: str | None = None,
        **options: Any,
    ) -> None:
        if log_level not in ("error", "info"):
            raise UnsupportedFeature(
                f"log_level {log_level!r}", "it is error or info", param="log_level"
            )
        arguments = _arguments(options)
        self._server: _Child | None = _Child(
            ["serve", str(model_path), *arguments], api_key, shows=log_level == "info"
        )
        try:
            self.url = self._server.wait_ready(launch_timeout)
            self._http = HttpServer(HttpOptions(base_url=self.url, headers=bearer(api_key)))
            self.endpoint = Endpoint(self.url, api_key=api_key, kind="palmette")
        except BaseException:
            self.shutdown()
            raise
        # Not the method itself, which would keep this from being collected.
        atexit.register(_call, weakref.WeakMethod(self.shutdown))

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, *raised: object) -> None:
        self.shutdown()

    def __repr__(self) -> str:
        return f"Runtime({self.url!r})"

    @property
    def generate_url(self) -> str:
        """Where SGLang's own requests go."""
        return f"{self.url}/generate"

    @property
    def pid(self) -> int | None:
        """The server's process; None once it was ended."""
        return None if self._server is None else self._server.pid

    def shutdown(self) -> None:
        """End the server, and wait until it has ended. Does nothing the second time."""
        server, self._server = self._server, None
        if server is not None:
            if hasattr(self, "endpoint"):
                self.endpoint.close()
                self._http.close()
            server.end()

    def get_tokenizer(self) -> Tokenizer:
        """That of the model."""
        return self.endpoint.tokenizer

    def cache_prefix(self, prefix: str) -> None:
        """Have the server compute a text, so that prompts which begin with it find it cached."""
        self._ask("/generate", {"text": prefix, "sampling_params": {"max_new_tokens": 0}})

    def generate(
        self,
        prompt: str | Sequence[str],
        sampling_params: dict[str, Any] | None = None,
        return_logprob: bool | None = False,
        logprob_start_len: int | None = None,
        top_logprobs_num: int | None = None,
        lora_path: Sequence[str | None] | None = None,
    ) -> str:
        """What ``/generate`` answers, as JSON text. Raises InvalidRequest if it refuses it."""
        body = {
            "text": prompt if isinstance(prompt, str) else list(prompt),
            "sampling_params": sampling_params,
            "return_logprob": return_logprob,
            "logprob_start_len": logprob_start_len,
            "top_logprobs_num": top_logprobs_num,
            "lora_path": None if lora_path is None else list(lora_path),
        }
        return json.dumps(json.loads(self._ask("/generate", body)))

    async def async_generate(
        self, prompt: str, sampling_params: dict[str, Any] | None = None
    ) -> AsyncGenerator[str, None]:
        """The pieces of the text as they come."""
        body = {
            "text": prompt,
            "sampling_params": sampling_params,
            "stream": True,
            "incremental_streaming_output": True,
        }
        try:
            events = self._http.events("/generate", body, most=1 << 30, most_bytes=_MOST_BYTES)
            async with aclosing(events):
                async for data in events:
                    if "error" in data:
                        raise refusal(StatusError("/generate", 400, data))
                    if data["text"]:
                        yield data["text"]
        except StatusError as error:
            raise refusal(error) from error

    add_request = async_generate

    def encode(self, prompt: Any) -> str:
        """Refused: the models here write text."""
        raise UnsupportedFeature("encode", "the models here write text and embed none")

    async def get_server_info(self) -> dict[str, Any]:
        """``/get_server_info``."""
        info: dict[str, Any] = await asyncio.to_thread(
            self._http.ask_json, "GET", "/get_server_info"
        )
        return info

    def _ask(self, path: str, body: Any) -> bytes:
        if self._server is None:
            raise EngineStopped("the server was shut down")
        try:
            return self._http.ask("POST", path, body)
        except StatusError as error:
            raise refusal(error) from error


class _Child:
    """The process of a server, which says where it is when it is ready."""

    def __init__(self, arguments: Sequence[str], api_key: str | None, *, shows: bool) -> None:
        environment = dict(os.environ)
        environment.pop("PALMETTE_API_KEY", None)
        if api_key is not None:
            environment["PALMETTE_API_KEY"] = api_key  # arguments are for all to see
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,  # a terminal's Ctrl-C is for the parent
        )
        self._lines: deque[str] = deque(maxlen=_KEPT_LINES)
        self._url: str | None = None
        self._is_decided = threading.Event()  # it is ready, or has ended
        self._reader = threading.Thread(
            target=self._read, args=(shows,), name="palmette-server-output", daemon=True
        )
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_ready(self, seconds: float) -> str:
        """The server's URL. Raises EngineStopped if it ends, or is not ready in time."""
        is_decided = self._is_decided.wait(seconds)
        if self._url is not None:
            return self._url
        if not is_decided:
            what = f"the server was not ready within launch_timeout={seconds:g} s"
        else:
            what = f"the server ended with status {self._process.wait(_GRACE)}"
        told = "\n".join(self._lines) or "(it said nothing)"
        raise EngineStopped(f"{what}; its last lines:\n{told}")

    def end(self) -> None:
        """Ask it to end, and end it if it does not."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(_GRACE)

    def _read(self, shows: bool) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as output:
            for raw in iter(lambda: output.readline(1 << 16), b""):
                line = raw.decode("utf-8", "replace").rstrip()
                self._lines.append(line)
                if shows:
                    print(line, file=sys.stderr, flush=True)
                if line.startswith(_READY) and self._url is None:
                    self._url = line.removeprefix(_READY).removesuffix("/v1")
                    self._is_decided.set()
        self._is_decided.set()


def _arguments(options: dict[str, Any]) -> list[str]:
    """Those of `palmette serve`. Raises UnsupportedFeature for an option that it does not have."""
    chosen: dict[str, Any] = {"port": 0, "grace": 1}
    for given, value in options.items():
        if value is None:
            continue
        name = _NAMES.get(given, given)
        if given == "schedule_policy":
            if value not in _POLICIES:
                raise UnsupportedFeature(
                    f"schedule_policy {value!r}",
                    f"it is one of {', '.join(_POLICIES)}",
                    param="schedule_policy",
                )
            name, value = "policy", _POLICIES[value]
        elif given == "disable_radix_cache":
            name, value = "prefix_cache", not value
        elif name not in SERVER_OPTIONS | ENGINE_OPTIONS:
            raise UnsupportedFeature(
                f"Runtime({given}=...)", "palmette serve has no such option", param=given
            )
        if name in chosen and name not in ("port", "grace"):
            raise InvalidRequest(f"{given} is given under two names", param=given)
        chosen[name] = value
    arguments = []
    for name, value in chosen.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            arguments.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, (list, tuple)):
            arguments += [f"--{flag}={each}" for each in value]
        else:
            arguments.append(f"--{flag}={value}")
    return arguments


def _call(reference: weakref.WeakMethod[Callable[[], None]]) -> None:
    method = reference()
    if method is not None:
        method()
