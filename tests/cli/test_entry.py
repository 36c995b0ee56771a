"""The command as a whole: statuses, sentences, speed."""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from palmette.cli import main
from palmette.cli.options import HELP, add_engine_options, engine_options, size
from palmette.lang.tracing.requests import RequestTraces
from palmette.runtime.config import EngineConfig, EngineOptions

COMMANDS = ("pull", "models", "run", "chat", "serve", "freeze")


def palmette(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-m", "palmette", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload]


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    shown = capsys.readouterr().out
    for command in COMMANDS:
        assert f"    {command} " in shown


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--help"]) == 0
    assert f"palmette {command}" in capsys.readouterr().out


def test_the_version_is_that_of_the_package() -> None:
    done = palmette("--version")
    assert (done.returncode, done.stdout) == (0, f"palmette {version('palmette')}\n")


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["serve", "--help"], ["run", "--help"], ["freeze", "--help"], ["models"]],
)
def test_what_needs_no_engine_loads_no_large_library(arguments: list[str]) -> None:
    code = (
        "import sys; from palmette.cli import main; status = main(sys.argv[1:])\n"
        "large = {'torch', 'transformers', 'fastapi', 'uvicorn', 'numpy'} & set(sys.modules)\n"
        "print(large or '', file=sys.stderr); sys.exit(status)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "\n")


@pytest.mark.parametrize(
    "arguments", [[], ["frobnicate"], ["serve"], ["serve", "m", "--port", "x"], ["pull"]]
)
def test_wrong_usage_is_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert "usage: palmette" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["pull", "serve", "chat"])
def test_an_unknown_model_is_one_sentence_and_status_1(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    port = ["--port", "0"] if command == "serve" else []
    assert main([command, "no-such-model", *port]) == 1
    error = capsys.readouterr().err
    assert error.startswith("palmette: no model named 'no-such-model'")
    assert error.count("\n") == 1


def test_a_truncated_model_file_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00")
    done = palmette("serve", str(path), "--port", "0")
    assert done.returncode == 1
    assert done.stderr.startswith(f"palmette: {path}: ")
    assert done.stderr.count("\n") == 1


def test_where_an_error_came_from_is_shown_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    from palmette.errors import ModelNotFound

    monkeypatch.setenv("PALMETTE_DEBUG", "1")
    with pytest.raises(ModelNotFound):
        main(["pull", "no-such-model"])


def test_a_reader_that_leaves_is_no_error() -> None:
    command = f"{sys.executable} -m palmette models | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() in ("0", "1", "141")  # as soon or late as it notices
    assert done.stderr == ""


def test_every_engine_option_is_there_under_its_own_name() -> None:
    names = {option.name for option in engine_options()}
    assert names == set(EngineOptions.__annotations__)
    assert names == set(HELP)


def test_the_help_of_an_option_tells_its_default_as_it_would_be_written() -> None:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    told = " ".join(parser.format_help().split())
    for option, default in (
        ("--page-size N", "16"),
        ("--max-think SECONDS", "1.0"),
        ("--max-step-seconds SECONDS", "0.2"),
        ("--host-memory SIZE", "off"),
        ("--jump-forward, --no-jump-forward", "on"),
    ):
        _, _, after = told.rpartition(option)
        assert after.partition(" (default: ")[2].partition(")")[0] == default, option


def test_engine_options_reach_the_engine_as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from palmette.runtime import server

    seen: dict[str, object] = {}
    monkeypatch.setattr(server, "serve", lambda model, **options: seen.update(options, model=model))
    given = [
        ["--dtype", "float32", "--device", "cpu", "--max-context", "99", "--num-threads", "1"],
        ["--kernels", "cpu"],
        ["--chat-template", "{{ x }}", "--page-size", "8", "--num-pages", "7"],
        ["--kv-memory", "1.5GiB", "--prefix-cache", "--max-batch-tokens", "33"],
        ["--host-memory", "2GiB", "--host-directory", "/somewhere"],
        ["--max-running", "3", "--no-jump-forward", "--policy", "lpm", "--max-wait", "2.5"],
        ["--max-think", "0.5", "--jump-mode", "canonical", "--max-guesses", "5"],
        ["--max-step-seconds", "0.05"],
    ]
    assert main(["serve", "m", *sum(given, [])]) == 0  # noqa: RUF017
    expected = {
        "dtype": "float32",
        "device": "cpu",
        "kernels": "cpu",
        "max_context": 99,
        "num_threads": 1,
        "chat_template": "{{ x }}",
        "page_size": 8,
        "num_pages": 7,
        "kv_memory": 3 << 29,
        "prefix_cache": True,
        "host_memory": 2 << 30,
        "host_directory": "/somewhere",
        "max_batch_tokens": 33,
        "max_step_seconds": 0.05,
        "max_running": 3,
        "jump_forward": False,
        "jump_mode": "canonical",
        "max_guesses": 5,
        "policy": "lpm",
        "max_wait": 2.5,
        "max_think": 0.5,
    }
    assert set(expected) == set(HELP)
    assert {name: seen[name] for name in expected} == expected
    EngineConfig.of(expected)  # type: ignore[arg-type]


def test_a_switch_that_is_on_can_be_put_off(monkeypatch: pytest.MonkeyPatch) -> None:
    from palmette.runtime import server

    seen: dict[str, object] = {}
    monkeypatch.setattr(server, "serve", lambda model, **options: seen.update(options))
    assert main(["serve", "m", "--no-prefix-cache"]) == 0
    assert seen["prefix_cache"] is False


def test_engine_options_that_are_not_given_are_left_to_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from palmette.runtime import server

    seen: dict[str, object] = {}
    monkeypatch.setenv("PALMETTE_API_KEY", "from the environment")
    monkeypatch.setattr(server, "serve", lambda model, **options: seen.update(options, model=model))
    assert main(["serve", "m", "--host", "::", "--port", "1", "--cors-origin", "http://a"]) == 0
    assert seen == {
        "model": "m",
        "host": "::",
        "port": 1,
        "model_name": None,
        "api_key": "from the environment",
        "cors_origins": ["http://a"],
        "grace": 5.0,
        "access_log": False,
        "thaw": [],
        "traces": None,
    }
    assert main(["serve", "m", "--trace", "5"]) == 0
    assert isinstance(seen["traces"], RequestTraces)
    assert main(["serve", "m", "--trace", "-1"]) == 1


@pytest.mark.parametrize(
    ("text", "number"),
    [("4096", 4096), ("1k", 1024), ("512MiB", 512 << 20), ("2GB", 2 << 30), ("0.5 g", 1 << 29)],
)
def test_sizes_are_read(text: str, number: int) -> None:
    assert size(text) == number


@pytest.mark.parametrize("text", ["", "x", "-1", "1x", "MiB", "1e9"])
def test_what_is_no_size_is_wrong_usage(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "m", f"--kv-memory={text}"]) == 2
    assert "not a size such as 512MiB" in capsys.readouterr().err


def test_the_models_are_listed_with_the_place_of_what_was_pulled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PALMETTE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["models"]) == 0
    shown = capsys.readouterr().out
    for name in ("smollm2-135m", "gemma3-270m"):
        (line,) = (line for line in shown.splitlines() if f" {name} " in line)
        assert " no " in line
