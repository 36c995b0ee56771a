"""llama.cpp's own server, as its users have it: `llama-server` beside the interpreter.

Requests at once are as many connections; which of them share a slot, and what of a slot's cache is
kept, is the server's affair.
"""

from __future__ import annotations

import atexit
import http.client
import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.peers.workers.serving import Answer, Ids, Peer, serve

_SECONDS_TO_START = 120.0
_CONTEXT = 49_152  # ids of all slots together


class LlamaServer(Peer):
    weights = "packed"

    def __init__(self, options: Answer) -> None:
        program = Path(sys.executable).parent / "llama-server"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self._port: int = free.getsockname()[1]
        told = subprocess.run([program, "--version"], capture_output=True, text=True, check=True)
        self._version = (told.stdout + told.stderr).strip().splitlines()[0]
        command: list[str | Path] = [program, "--model", options["model"]]
        command += ["--host", "127.0.0.1", "--port", str(self._port)]
        command += ["--threads", str(options["threads"]), "--ctx-size", str(_CONTEXT)]
        self._process = subprocess.Popen(command, stdout=sys.stderr)
        atexit.register(self._process.kill)
        until = time.monotonic() + _SECONDS_TO_START
        while not self._is_ready():
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError("the server did not start")
            time.sleep(0.05)

    def about(self) -> dict[str, str]:
        return {"llama-server": self._version}

    def stream(self, prompt: Ids, num_tokens: int) -> tuple[list[int], float]:
        start = time.perf_counter()
        connection = self._asked(prompt, num_tokens, stream=True)
        ids: list[int] = []
        first = 0.0
        with connection.getresponse() as response:
            for line in response:
                if line.startswith(b"data: {"):
                    ids += json.loads(line[6:]).get("tokens", [])
                    first = first or time.perf_counter() - start
        connection.close()
        return ids, first

    def generate(self, prompts: Sequence[Ids], num_tokens: int) -> list[list[int]]:
        with ThreadPoolExecutor(len(prompts)) as pool:
            found = pool.map(lambda prompt: self._answer(prompt, num_tokens), prompts)
            return [each["tokens"] for each in found]

    def fill_in(self, prompts: Sequence[Ids], schema: Any, max_tokens: int) -> list[Answer]:
        def fill(prompt: Ids) -> Answer:
            found = self._answer(prompt, max_tokens, json_schema=schema, ignore_eos=False)
            return {"text": found["content"], "num_tokens": len(found["tokens"])}

        with ThreadPoolExecutor(len(prompts)) as pool:
            return list(pool.map(fill, prompts))

    def _answer(self, prompt: Ids, num_tokens: int, **further: Any) -> Answer:
        connection = self._asked(prompt, num_tokens, **further)
        with connection.getresponse() as response:
            found: Answer = json.load(response)
        connection.close()
        if "error" in found:
            raise RuntimeError(str(found["error"]))
        return found

    def _asked(self, prompt: Ids, num_tokens: int, **further: Any) -> http.client.HTTPConnection:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        asked = {
            "prompt": list(prompt),
            "n_predict": num_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_tokens": True,
            "cache_prompt": True,
            **further,
        }
        connection.request("POST", "/completion", json.dumps(asked))
        return connection

    def _is_ready(self) -> bool:
        connection = http.client.HTTPConnection("127.0.0.1", self._port)
        try:
            connection.request("GET", "/health")
            with connection.getresponse() as response:
                return response.status == 200
        except OSError:
            return False
        finally:
            connection.close()


if __name__ == "__main__":
    serve(LlamaServer)
