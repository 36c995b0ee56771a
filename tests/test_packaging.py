"""What a user installs holds every module and data file of the repository."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from importlib.metadata import requires
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("lang", "runtime", "radix_cache", "grammar")
SOURCES = ("pyproject.toml", "setup.py", "README.md", "LICENSE", "palmette", *FOLDERS)
CACHES = shutil.ignore_patterns("__pycache__", "*.pyc", ".*_cache", "*.so")
SOURCE_ONLY = (".md", ".cpp", ".hpp", ".inl")
EXTENSIONS = ("palmette/grammar/_native.cp", "palmette/runtime/_native.cp")


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a build reads, links kept as links: no build litters the repository."""
    copy = tmp_path_factory.mktemp("checkout")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, copy / name, symlinks=True, ignore=CACHES)
        else:
            shutil.copy(ROOT / name, copy / name)
    return copy


# What is made by whoever compiles, without compiling.
PRETENDER = """#!/bin/sh
echo "$@" >> "{log}"
while [ $# -gt 1 ]; do
    if [ "$1" = -o ]; then echo nothing > "$2"; fi
    shift
done
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The commands that a compiler was given to make `wheel`, one on each line."""
    return tmp_path_factory.mktemp("compiler") / "log"


@pytest.fixture(scope="module")
def wheel(checkout: Path, compiled: Path) -> zipfile.ZipFile:
    """With extensions by a compiler that only notes what it is asked: to compile takes half a
    minute, and whoever runs the tests has done so.
    """
    compiler = compiled.with_name("c++")
    compiler.write_text(PRETENDER.format(log=compiled), encoding="utf-8")
    compiler.chmod(0o755)
    return build_wheel(checkout, checkout / "dist", CC=str(compiler), CXX=str(compiler))


def build_wheel(source: Path, target: Path, **environment: str) -> zipfile.ZipFile:
    """The wheel that pip makes of `source`, without a network and in the tests' environment."""
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--wheel-dir"]
    command = [sys.executable, "-m", "pip", "wheel", *options, str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = target.glob("*.whl")
    return zipfile.ZipFile(path)


def packaged_files(checkout: Path) -> set[str]:
    """Every file below the facade and the four folders, as it should be called in a wheel."""
    facade = checkout / "palmette"
    files = {
        f"palmette/{path.relative_to(facade)}"
        for path in facade.rglob("*")
        if path.is_file() and path.relative_to(facade).parts[0] not in FOLDERS
    }
    for folder in FOLDERS:
        files |= {
            f"palmette/{path.relative_to(checkout)}"
            for path in (checkout / folder).rglob("*")
            if path.is_file() and path.suffix not in SOURCE_ONLY
        }
    return files


def metadata_of(wheel: zipfile.ZipFile) -> Message:
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode("utf-8"))


def test_every_module_and_data_file_is_in_the_wheel_and_nothing_else(
    checkout: Path, wheel: zipfile.ZipFile
) -> None:
    expected = packaged_files(checkout)
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    found = {name for name in names if not name.startswith(EXTENSIONS)}
    assert "palmette/py.typed" in expected
    assert {f"palmette/{folder}/__init__.py" for folder in FOLDERS} <= expected
    assert found == expected


def extensions_of(wheel: zipfile.ZipFile) -> list[str]:
    return sorted(name for name in wheel.namelist() if name.startswith(EXTENSIONS))


SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")
BUILT = [name.removesuffix(".cp") + SUFFIX for name in EXTENSIONS]


def test_the_wheel_holds_the_extensions_made_from_every_source(
    checkout: Path, wheel: zipfile.ZipFile, compiled: Path
) -> None:
    assert extensions_of(wheel) == BUILT
    words = compiled.read_text(encoding="utf-8").split()
    sources = [
        path.relative_to(checkout)
        for folder in FOLDERS
        for path in (checkout / folder).rglob("*.cpp")
    ]
    assert sources
    assert [words.count(str(source)) for source in sources] == [1] * len(sources)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which(os.environ.get("CXX", "c++")) is None, reason="no compiler")
def test_all_sources_compile(checkout: Path, tmp_path: Path) -> None:
    for name in ("build", "palmette.egg-info"):
        shutil.rmtree(checkout / name, ignore_errors=True)
    wheel = build_wheel(checkout, tmp_path, PALMETTE_BUILD_OPTIMISATION="-O0")
    assert extensions_of(wheel) == BUILT
    assert all(wheel.getinfo(name).file_size > 10_000 for name in BUILT)


def test_the_folders_reach_python_through_relative_links() -> None:
    for folder in FOLDERS:
        link = ROOT / "palmette" / folder
        assert link.is_symlink()
        assert str(link.readlink()) == f"../{folder}"


def test_every_folder_with_modules_is_a_package() -> None:
    folders = {path.parent for name in FOLDERS for path in (ROOT / name).rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_the_metadata_name_licence_readme_and_python(wheel: zipfile.ZipFile) -> None:
    metadata = metadata_of(wheel)
    assert metadata["Name"] == "palmette"
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert metadata["Description-Content-Type"] == "text/markdown"
    readme = (ROOT / "README.md").read_text(encoding="utf-8").strip()
    assert readme
    assert str(metadata.get_payload()).strip() == readme
    (licence,) = (name for name in wheel.namelist() if name.endswith("licenses/LICENSE"))
    assert wheel.read(licence) == (ROOT / "LICENSE").read_bytes()


def test_the_command_line_entry_point_names_a_function_that_is_there(
    wheel: zipfile.ZipFile,
) -> None:
    (name,) = (n for n in wheel.namelist() if n.endswith(".dist-info/entry_points.txt"))
    assert "palmette = palmette.cli:main" in wheel.read(name).decode().splitlines()
    from palmette.cli import main

    assert callable(main)


def test_a_source_distribution_builds_the_same_wheel_with_a_compiler_or_without(
    checkout: Path, wheel: zipfile.ZipFile, tmp_path: Path
) -> None:
    code = f"from setuptools import build_meta; build_meta.build_sdist({str(tmp_path)!r})"
    command = [sys.executable, "-W", "ignore", "-c", code]
    subprocess.run(command, cwd=checkout, check=True, capture_output=True)
    (archive,) = tmp_path.glob("*.tar.gz")
    # Python 3.11.4 came to know filters, and 3.12 warns where none is given.
    options: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
    shutil.unpack_archive(archive, tmp_path / "unpacked", **options)
    (source,) = (tmp_path / "unpacked").iterdir()
    for folder in ("grammar", "runtime"):
        native = {path.name for path in (checkout / folder / "native").iterdir()}
        assert native == {path.name for path in (source / folder / "native").iterdir()}
    # Without a compiler all else is the same.
    built = build_wheel(source, tmp_path, CC="false", CXX="false").namelist()
    assert sorted(built) == sorted(name for name in wheel.namelist() if "/_native.cp" not in name)


def test_the_tested_versions_cover_every_requirement_and_lie_in_its_range() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [Requirement(line) for line in lines if not line.startswith("#")]
    versions = {}
    for pin in pins:
        assert pin.url is None
        (specifier,) = pin.specifier
        assert specifier.operator == "=="
        assert "+" not in specifier.version
        versions[canonicalize_name(pin.name)] = specifier.version
    for text in requires("palmette") or []:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        # torch brings the triton it was built for; litellm wants other releases than those here.
        if name not in ("palmette", "triton", "litellm"):
            assert requirement.specifier.contains(versions[name]), f"{text}: {versions[name]}"
