"""A server on a real socket: the unmodified OpenAI client, clients that go away, and the end."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

from palmette.errors import InvalidRequest
from palmette.lang.backends.scripted import Reply, ScriptedBackend
from palmette.runtime.server.serve import bind, url_of
from tests.runtime.server.harness import CHAT, COMPLETIONS, HI, live, wait_for

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def openai_client(url: str, **options: Any) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, **options)


def test_the_openai_client_gets_a_chat_answer_a_stream_and_json() -> None:
    backend = ScriptedBackend(
        {
            "Hi<|im_end|>\n<|im_start|>assistant\n": "Hello 🐈",
            "Who?<|im_end|>\n<|im_start|>assistant\n": '{"name": "Ada", "age": 36}',
        }
    )
    with live(backend) as url, openai_client(url) as client:
        assert [model.id for model in client.models.list()] == ["scripted"]
        assert client.models.retrieve("scripted").owned_by == "palmette"

        plain = client.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": "Hi"}], seed=1, temperature=0
        )
        assert plain.choices[0].message.content == "Hello 🐈"
        assert plain.choices[0].finish_reason == "stop"
        assert plain.usage is not None
        assert plain.usage.total_tokens == plain.usage.prompt_tokens + 11

        with client.chat.completions.create(
            model="scripted",
            messages=[{"role": "user", "content": "Hi"}],
            stream=True,
            stream_options={"include_usage": True},
        ) as stream:
            chunks = list(stream)
        assert chunks[0].choices[0].delta.role == "assistant"
        texts = [c.choices[0].delta.content or "" for c in chunks if c.choices]
        assert "".join(texts) == "Hello 🐈"
        assert chunks[-1].usage == plain.usage.model_copy(
            update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
        )

        strict = client.chat.completions.create(
            model="scripted",
            messages=[{"role": "user", "content": "Who?"}],
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "person", "schema": SCHEMA, "strict": True},
            },
        )
        assert json.loads(strict.choices[0].message.content or "") == {"name": "Ada", "age": 36}

        history: list[Any] = [
            {"role": "user", "content": "Hi"},
            plain.choices[0].message.model_dump(),
            {"role": "user", "content": "Hi"},
        ]
        again = client.chat.completions.create(model="scripted", messages=history)
        assert again.choices[0].message.content == "Hello 🐈"

        completion = client.completions.create(
            model="scripted", prompt="Hi<|im_end|>\n<|im_start|>assistant\n", logprobs=1
        )
        assert completion.choices[0].text == "Hello 🐈"
        assert completion.choices[0].logprobs is not None
        assert completion.choices[0].logprobs.text_offset == [0, 1, 2, 3, 4, 5, 6, 6, 6, 6]


def test_the_openai_client_raises_its_own_errors() -> None:
    with live(ScriptedBackend(), api_key="unused") as url, openai_client(url) as client:
        with pytest.raises(openai.NotFoundError, match="does not exist here"):
            client.chat.completions.create(
                model="other", messages=[{"role": "user", "content": "Hi"}]
            )
        with pytest.raises(
            openai.BadRequestError, match="temperature must be at least 0"
        ) as caught:
            client.chat.completions.create(
                model="scripted",
                messages=[{"role": "user", "content": "Hi"}],
                temperature=-1,
            )
        assert caught.value.param == "temperature"
        with (
            openai_client(url).with_options(api_key="wrong") as stranger,
            pytest.raises(openai.AuthenticationError),
        ):
            stranger.models.list()


def test_the_openai_client_raises_a_failure_in_a_stream() -> None:
    backend = ScriptedBackend(Reply(text="abc", fails_after=2))
    with live(backend) as url, openai_client(url) as client:
        stream = client.chat.completions.create(
            model="scripted", messages=[{"role": "user", "content": "Hi"}], stream=True
        )
        with stream, pytest.raises(openai.APIError, match="the engine failed"):
            for _ in stream:
                pass


SLOW = Reply(text="x" * 2000, token_delay=0.01)
WAITING = Reply(text="x", delay=60.0)


@pytest.mark.parametrize("reply", [SLOW, WAITING], ids=["generating", "waiting"])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("n", [1, 3])
def test_a_client_that_goes_away_ends_its_request(reply: Reply, is_stream: bool, n: int) -> None:
    backend = ScriptedBackend(lambda prompt, request: reply)
    body = {"messages": HI, "stream": is_stream, "max_tokens": 2000, "n": n}
    with live(backend) as url:
        hang_up(url, CHAT, body, when=lambda: backend.num_running == n)
        wait_for(lambda: backend.num_running == 0)
        assert len(backend.aborted) == n
        assert httpx.get(f"{url}/health").status_code == 200


def test_a_client_that_goes_away_while_its_prompt_is_scored_ends_that() -> None:
    class Scoring(ScriptedBackend):
        was_cancelled = False

        async def score(self, request: Any) -> Any:
            try:
                return await super().score(request)
            except BaseException:
                self.was_cancelled = True
                raise

    backend = Scoring("x", delay=60.0)
    body = {"prompt": "abc", "echo": True, "logprobs": 0}
    with live(backend) as url:
        hang_up(url, COMPLETIONS, body, when=lambda: len(backend.score_requests) == 1)
        wait_for(lambda: backend.was_cancelled)
        assert backend.requests == []


def hang_up(url: str, path: str, body: dict[str, Any], when: Any) -> None:
    """Send a request and close the connection as soon as `when` holds."""
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            f"POST {path} HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(content)}\r\n\r\n".encode()
            + content
        )
        wait_for(when)


def test_what_is_sent_on_a_connection_does_not_wait_for_what_was_sent_before() -> None:
    with (
        bind("127.0.0.1", 0) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as accepted,
    ):
        assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_port_in_use_is_one_clear_sentence() -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(InvalidRequest, match=f"port {port} on 127.0.0.1 is in use"):
            bind("127.0.0.1", port)


@pytest.mark.parametrize("port", [-1, 65536])
def test_a_port_that_is_none_is_refused(port: int) -> None:
    with pytest.raises(InvalidRequest, match="port must be from 0 to 65535"):
        bind("127.0.0.1", port)


def test_a_host_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="cannot listen on no such host"):
        bind("no such host", 0)


def test_the_url_is_one_a_browser_on_this_machine_can_open() -> None:
    with bind("0.0.0.0", 0) as listener:
        assert url_of(listener) == f"http://127.0.0.1:{listener.getsockname()[1]}"


PROGRAM = """
import sys
from palmette.lang.backends.scripted import Reply, ScriptedBackend
from palmette.runtime.server.serve import bind, serve_backend

backend = ScriptedBackend(
    {"slow": Reply(text="x" * 2000, token_delay=0.01), "soon": Reply(text="done", delay=0.5)}
)
with bind("127.0.0.1", 0) as listener:
    serve_backend(
        backend,
        listener,
        grace=float(sys.argv[1]),
        say=lambda line: print(line, flush=True),
    )
print("left", flush=True)
"""


class ServerProcess:
    """A scripted server in a process of its own."""

    def __init__(self, grace: float) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(PROGRAM), str(grace)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.ready = self.process.stdout.readline()
        self.url = self.ready.rpartition(" ")[2].strip().removesuffix("/v1")

    def ask(self, prompt: str) -> tuple[threading.Thread, list[httpx.Response]]:
        """Send a request from a thread, and wait until it is being served."""
        responses: list[httpx.Response] = []

        def send() -> None:
            body = {"prompt": prompt, "max_tokens": 2000}
            responses.append(httpx.post(f"{self.url}{COMPLETIONS}", json=body, timeout=30))

        thread = threading.Thread(target=send)
        thread.start()
        time.sleep(0.3)
        return thread, responses

    def finish(self) -> tuple[str, str]:
        """What it still wrote, once it has ended."""
        return self.process.communicate(timeout=30)


@pytest.fixture
def started() -> Iterator[Any]:
    processes = []

    def start(grace: float) -> ServerProcess:
        processes.append(ServerProcess(grace))
        return processes[-1]

    yield start
    for server in processes:
        if server.process.poll() is None:
            server.process.kill()
            server.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_lets_running_requests_finish_and_is_a_clean_end(
    started: Any, number: signal.Signals
) -> None:
    server = started(20)
    assert server.ready.startswith("Palmette is ready at http://127.0.0.1:")
    thread, responses = server.ask("soon")
    server.process.send_signal(number)
    thread.join()
    assert responses[0].json()["choices"][0]["text"] == "done"
    written = server.finish()
    assert written == ("left\n", "")
    assert server.process.returncode == 0


def test_after_the_grace_running_requests_are_told_that_the_server_leaves(started: Any) -> None:
    server = started(0.2)
    thread, responses = server.ask("slow")
    server.process.send_signal(signal.SIGTERM)
    thread.join()
    assert responses[0].status_code == 503
    assert server.finish() == ("left\n", "")
    assert server.process.returncode == 0


def test_a_second_signal_does_not_wait(started: Any) -> None:
    server = started(1000)
    thread, responses = server.ask("slow")
    server.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    server.process.send_signal(signal.SIGINT)
    thread.join()
    assert responses[0].status_code == 503
    assert server.finish() == ("left\n", "")
    assert server.process.returncode == 0
