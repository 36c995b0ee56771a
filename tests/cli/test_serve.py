"""`palmette serve` from start to end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from palmette.cli import main
from palmette.runtime.server.serve import bind


def test_a_port_in_use_is_known_before_the_model_is_loaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with bind("127.0.0.1", 0) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "no-such-model", "--port", str(port)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"palmette: port {port} on 127.0.0.1 is in use")
    assert err.count("\n") == 1


def test_the_real_model_is_served_until_a_signal(smollm2: Path) -> None:
    with subprocess.Popen(
        [
            *(sys.executable, "-W", "error", "-m", "palmette", "serve", "smollm2-135m"),
            *("--port", "0", "--name", "small", "--num-pages", "64", "--api-key", "k"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdout is not None
            lines = [process.stdout.readline() for _ in range(3)]
            assert lines[0] == "Loading smollm2-135m ...\n"
            assert lines[1].startswith("Loaded smollm2-135m in ")
            assert lines[2].startswith("Palmette is ready at http://127.0.0.1:")
            url = lines[2].split()[-1]
            body = {
                "model": "small",
                "messages": [{"role": "user", "content": "What is the capital of France?"}],
                "temperature": 0,
                "json_schema": {"enum": ["Paris", "Rome"]},
            }
            headers = {"authorization": "Bearer k"}
            response = httpx.post(f"{url}/chat/completions", json=body, headers=headers, timeout=60)
            content = response.json()["choices"][0]["message"]["content"]
            assert json.loads(content) == "Paris"
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
        finally:
            process.kill()
    assert (process.returncode, out, err) == (0, "", "")
