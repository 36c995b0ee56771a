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


def names_imported(code: str) -> set[str]:
    """Top-level names of the modules that `code` brings into a new process."""
    code = (
        f"import sys; before = set(sys.modules); {code}; "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(run.stdout.split())


def test_importing_it_pulls_in_neither_torch_nor_numpy() -> None:
    names = names_imported("import palmette.radix_cache")
    assert "palmette" in names
    assert not names & {"torch", "numpy"}


def test_it_needs_nothing_but_the_standard_library() -> None:
    # An empty parent package, so that only the cache's own imports count.
    names = names_imported(
        "import types; parent = types.ModuleType('palmette'); "
        f"parent.__path__ = [{str(FOLDER.parent)!r}]; sys.modules['palmette'] = parent; "
        "import palmette.radix_cache"
    )
    assert "palmette" in names
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
