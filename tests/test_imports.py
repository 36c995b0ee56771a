"""The import table holds: which folder may import what, and what is imported lazily."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import packages_distributions, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("lang", "runtime", "radix_cache", "grammar")
CONTRACTS = ("palmette.errors", "palmette.protocol", "palmette.wire")
# What the language may load where a server hands out its tokenizer: it needs no torch.
TOKENIZATION = "palmette.runtime.tokenization"

# Parts of `runtime/` that decide import no torch, parts that compute know no sequence.
DECIDES = ("sequence.py", "scheduler", "kv/manager.py", "constraints.py", "tokenization")
COMPUTES = ("models", "layers", "attention", "kernels", "sampling")
DECISIONS = (
    "palmette.runtime.sequence",
    "palmette.runtime.scheduler",
    "palmette.runtime.engine",
    "palmette.runtime.async_engine",
    "palmette.runtime.worker",
)
SERVER_LIBRARIES = ("fastapi", "starlette", "uvicorn")

# Named only where a user asks for them, and reported as missing where they are.
OPTIONAL = {"triton", "llguidance", "xgrammar", "openai", "anthropic", "litellm", "opentelemetry"}


@dataclass(frozen=True)
class Import:
    """One imported module; `lazy` inside a function, `typing_only` under TYPE_CHECKING."""

    module: str
    place: str
    lazy: bool = False
    typing_only: bool = False

    def is_of(self, *packages: str) -> bool:
        return any(f"{self.module}.".startswith(f"{package}.") for package in packages)

    @property
    def is_standard(self) -> bool:
        return self.module.partition(".")[0] in sys.stdlib_module_names


def imports_of(source: str, place: str) -> Iterator[Import]:
    """Every import of a module, with `from palmette.runtime import kv` as palmette.runtime.kv."""

    def visit(node: ast.AST, lazy: bool, typing_only: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(alias.name, f"{place}:{node.lineno}", lazy, typing_only)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            for alias in node.names:
                name = f"{base}.{alias.name}" if is_module(f"{base}.{alias.name}") else base
                yield Import(name, f"{place}:{node.lineno}", lazy, typing_only)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for statement in node.body:
                yield from visit(statement, lazy, True)
            for statement in node.orelse:
                yield from visit(statement, lazy, typing_only)
        else:
            inner = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
            for child in ast.iter_child_nodes(node):
                yield from visit(child, inner, typing_only)

    return visit(ast.parse(source), False, False)


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def modules_of(*parts: str) -> list[Path]:
    """The modules of a folder or file below the repository; parts that are not there have none."""
    path = ROOT.joinpath(*parts)
    if path.is_dir():
        return sorted(path.rglob("*.py"))
    return [path] if path.suffix == ".py" and path.is_file() else []


def imports_below(*parts: str) -> list[Import]:
    return [
        found
        for path in modules_of(*parts)
        for found in imports_of(path.read_text(encoding="utf-8"), str(path.relative_to(ROOT)))
    ]


def imports_of_the_facade() -> list[Import]:
    """Those of `palmette/` itself: the folders that are linked into it are not its own."""
    own = [path for path in (ROOT / "palmette").iterdir() if path.name not in FOLDERS]
    return [found for path in sorted(own) for found in imports_below("palmette", path.name)]


def everything() -> list[Import]:
    return imports_of_the_facade() + [i for folder in FOLDERS for i in imports_below(folder)]


def told(imports: list[Import]) -> list[str]:
    return [f"{found.place} imports {found.module}" for found in imports]


def test_the_prefix_cache_imports_the_standard_library_only() -> None:
    found = imports_below("radix_cache")
    assert found
    assert (
        told([i for i in found if not i.is_standard and not i.is_of("palmette.radix_cache")]) == []
    )


def test_the_grammar_engine_imports_numpy_and_no_other_library_but_in_its_backends() -> None:
    found = imports_below("grammar")
    assert found
    strangers = [
        i
        for i in found
        if not i.is_standard
        and not i.is_of("palmette.grammar", "numpy")
        and not (i.place.startswith("grammar/backends/") and not i.is_of("palmette", "torch"))
    ]
    assert told(strangers) == []


def test_the_contracts_import_the_standard_library_only() -> None:
    found = [
        i for name in CONTRACTS for i in imports_below("palmette", f"{name.rpartition('.')[2]}.py")
    ]
    assert found
    assert told([i for i in found if not i.is_standard and not i.is_of(*CONTRACTS)]) == []


def test_the_language_knows_the_contracts_alone_and_loads_libraries_when_they_are_used() -> None:
    found = imports_below("lang")
    assert found
    own = [i for i in found if i.is_of("palmette") and not (i.lazy and i.is_of(TOKENIZATION))]
    assert told([i for i in own if not i.is_of("palmette.lang", *CONTRACTS)]) == []
    libraries = [i for i in found if not i.is_standard and not i.is_of("palmette")]
    assert told([i for i in libraries if not (i.lazy or i.typing_only)]) == []
    assert told([i for i in libraries if i.is_of("torch")]) == []


def test_the_runtime_knows_no_program() -> None:
    found = imports_below("runtime")
    assert found
    allowed = ("palmette.runtime", "palmette.radix_cache", "palmette.grammar", *CONTRACTS)
    strangers = [i for i in found if i.is_of("palmette") and not i.is_of(*allowed)]
    assert told(strangers) == []


def test_web_libraries_are_imported_in_the_server_alone() -> None:
    found = [i for i in everything() if i.is_of(*SERVER_LIBRARIES)]
    assert told([i for i in found if not i.place.startswith("runtime/server/")]) == []


def test_what_decides_imports_no_torch_and_what_computes_knows_no_sequence() -> None:
    deciding = [i for part in DECIDES for i in imports_below("runtime", part)]
    computing = [i for part in COMPUTES for i in imports_below("runtime", part)]
    assert deciding
    assert computing
    assert told([i for i in deciding if i.is_of("torch") and not i.typing_only]) == []
    assert told([i for i in computing if i.is_of(*DECISIONS)]) == []


def test_the_facade_loads_the_runtime_only_when_it_is_used() -> None:
    found = [
        i
        for i in imports_of_the_facade()
        if not (i.lazy or i.typing_only or i.place.startswith("palmette/cli/"))
    ]
    assert found
    allowed = ("palmette.lang", "palmette.cli", *CONTRACTS)
    assert told([i for i in found if not i.is_standard and not i.is_of(*allowed)]) == []


def test_own_modules_are_imported_absolutely_under_the_name_of_the_project() -> None:
    strangers = (*FOLDERS, "tests", "examples", "benchmarks")
    found = everything()
    assert told([i for i in found if i.module.startswith(".") or i.is_of(*strangers)]) == []


def test_every_library_that_is_imported_is_declared() -> None:
    requirements = [Requirement(text) for text in requires("palmette") or []]
    declared = {canonicalize_name(r.name) for r in requirements if "extra" not in str(r.marker)}
    distributions = packages_distributions()
    undeclared = []
    for found in everything():
        top = found.module.partition(".")[0]
        if found.is_standard or top == "palmette" or top in OPTIONAL:
            continue
        names = {canonicalize_name(name) for name in distributions.get(top, [top])}
        if not names & declared and not names <= {"starlette"}:  # fastapi is made of starlette
            undeclared.append(found)
    assert told(undeclared) == []


def run_python(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr


def test_importing_palmette_brings_in_no_heavy_library() -> None:
    heavy = ("torch", "transformers", "numpy", "pydantic", "fastapi", "httpx", "rich", "jinja2")
    run_python(
        f"import sys, palmette; found = [n for n in {heavy!r} if n in sys.modules];"
        "assert not found, f'import palmette also imports {found}'"
    )


def dotted(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return "palmette." + ".".join(parts).removeprefix("palmette.").removesuffix(".__init__")


@pytest.mark.parametrize(
    ("blocked", "parts"),
    [
        (("torch", "transformers", "numpy"), ("radix_cache",)),
        (("torch", "transformers"), ("grammar",)),
        (("torch",), ("lang",)),
        (("torch",), ("palmette/cli",)),
        (("torch",), tuple(f"runtime/{part}" for part in DECIDES)),
    ],
    ids=["radix_cache", "grammar", "lang", "cli", "what decides in runtime"],
)
def test_every_module_imports_where_torch_is_not_installed(
    blocked: tuple[str, ...], parts: tuple[str, ...]
) -> None:
    names = [
        dotted(path)
        for part in parts
        for path in modules_of(part)
        if part != "grammar" or "backends" not in path.parts
    ]
    assert names
    # None in sys.modules is how Python itself marks a module that cannot be imported.
    run_python(
        f"import importlib, sys; sys.modules.update(dict.fromkeys({blocked!r}));"
        f"[importlib.import_module(name) for name in {names!r}]"
    )


def test_a_blocked_module_is_not_importable() -> None:
    run_python(
        "import sys; sys.modules['torch'] = None\n"
        "try: import palmette.runtime.sampling\n"
        "except ImportError: pass\n"
        "else: raise SystemExit('the sampler was imported without torch')"
    )


def test_the_reader_of_imports_sees_every_kind() -> None:
    source = """
import torch.nn as nn
from palmette.runtime import kv, forward_batch
from palmette.errors import InvalidRequest
from . import near
if TYPE_CHECKING:
    import rich
class A:
    import json
    async def f(self):
        import httpx
"""
    found = {(i.module, i.lazy, i.typing_only) for i in imports_of(source, "a.py")}
    assert found == {
        ("torch.nn", False, False),
        ("palmette.runtime.kv", False, False),
        ("palmette.runtime.forward_batch", False, False),
        ("palmette.errors", False, False),
        (".", False, False),
        ("rich", False, True),
        ("json", False, False),
        ("httpx", True, False),
    }
    assert Import("torch.nn", "a.py").is_of("torch")
    assert not Import("torchvision", "a.py").is_of("torch")
