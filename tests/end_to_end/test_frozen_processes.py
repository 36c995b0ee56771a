"""Frozen prefixes from one process to another, by the command line alone, on a model in a file."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.runtime.loading.files import write_gguf
from tests.runtime.models.tiny import oracle
from tests.runtime.tokenization.tiny import byte_level_gguf

CONSTANT = "The keeper of the lantern writes down every ship that passes. Ship "
PROGRAM = f"""
import palmette as pm

@pm.function
def log(s, ship):
    s += {CONSTANT!r}
    s += f"{{ship}}: " + pm.gen("entry", max_tokens=8, temperature=0, ignore_eos=True)
"""
PREFIX_TOKENS = len(CONSTANT) - CONSTANT.count("hi")  # its only token of two letters


class Commands:
    """`palmette` in processes of their own, in a folder with a program and models."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "log.py").write_text(PROGRAM, encoding="utf-8")
        keys = {k: v for k, v in byte_level_gguf().items() if k.startswith("tokenizer.")}
        for seed, name in enumerate(("model.gguf", "other.gguf")):
            model = oracle(seed=seed, vocab_size=259, max_position_embeddings=256)
            write_gguf(folder / name, model, keys=keys)

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "PALMETTE_HOME": str(self.folder / "home")}
        return subprocess.run(
            [sys.executable, "-m", "palmette", *arguments],
            cwd=self.folder,
            env=environment,
            capture_output=True,
            encoding="utf-8",
            timeout=120,
        )

    def run(self, model: str, *more: str) -> subprocess.CompletedProcess[str]:
        options = ["--model", model, "--dtype", "float32", "--arg", "ship=Ada"]
        return self("run", "log.py", *options, *more)


@pytest.fixture(scope="module")
def palmette(tmp_path_factory: pytest.TempPathFactory) -> Commands:
    """Commands, and a prefix that one of them froze."""
    commands = Commands(tmp_path_factory.mktemp("frozen"))
    made = commands(
        "freeze", "model.gguf", "--dtype", "float32", "--program", "log.py", "-o", "prefix"
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout.startswith(f"prefix: {PREFIX_TOKENS} tokens")
    return commands


def cached_tokens(stderr: str) -> int:
    """Of the generation, from the table of figures."""
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in stderr.splitlines()]
    (row,) = [row for row in rows if row and row[0] == "entry"]
    return int(row[2])


def test_a_later_process_goes_on_from_the_prefix_with_the_same_text(palmette: Commands) -> None:
    cold, warm = palmette.run("model.gguf"), palmette.run("model.gguf", "--thaw", "prefix")
    assert (cold.returncode, warm.returncode) == (0, 0), warm.stderr
    assert warm.stdout == cold.stdout
    assert cached_tokens(cold.stderr) == 0
    assert cached_tokens(warm.stderr) == PREFIX_TOKENS


def test_a_process_with_other_weights_refuses_it(palmette: Commands) -> None:
    refused = palmette.run("other.gguf", "--thaw", "prefix")
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert "prefix: was frozen with other weights" in refused.stderr


def test_a_process_refuses_a_file_with_one_flipped_byte(palmette: Commands) -> None:
    damaged = bytearray((palmette.folder / "prefix").read_bytes())
    damaged[-40] ^= 1  # among the values
    (palmette.folder / "damaged").write_bytes(damaged)
    refused = palmette.run("model.gguf", "--thaw", "damaged")
    assert refused.returncode == 1
    assert refused.stdout == ""
    assert "its checksum does not fit its contents" in refused.stderr
