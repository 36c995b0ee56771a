"""The cache is a library of its own, on the standard library alone."""

from __future__ import annotations

import ast
import doctest
import subprocess
import sys
from pathlib import Path

import palmette.radix_cache

FOLDER = Path(palmette.radix_cache.__file__).parent


def test_the_example_in_the_docstring_runs_as_it_is() -> None:
    result = doctest.testmod(palmette.radix_cache)
    assert result.attempted > 10
    assert result.failed == 0


def test_importing_it_pulls_in_the_standard_library_alone() -> None:
    code = (
        "import sys; before = set(sys.modules); import palmette.radix_cache; "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    names = set(run.stdout.split())
    assert "palmette" in names
    assert not names & {"torch", "numpy"}
    assert names <= sys.stdlib_module_names | {"palmette"}


def test_no_module_imports_more_than_the_standard_library_and_its_siblings() -> None:
    files = sorted(FOLDER.glob("*.py"))
    assert len(files) > 8
    for file in files:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, file
                names = [node.module or ""]
            else:
                continue
            for name in names:
                is_own = name == "palmette.radix_cache" or name.startswith("palmette.radix_cache.")
                assert is_own or name.partition(".")[0] in sys.stdlib_module_names, (file, name)
