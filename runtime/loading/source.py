"""What a loader needs from a model's files, whatever their format, and the checks common to all."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from palmette.errors import ModelFileError
from palmette.runtime.kernels.cpu import Blocks
from palmette.runtime.models.config import ModelConfig


class WeightSource(Protocol):
    """The config and tensors of one model. Tensor names are those of Hugging Face's Llama."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> ModelConfig: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Every tensor that the files hold, checked to lie inside them."""
        ...

    def stored_name(self, name: str) -> str:
        """What a tensor is called in the files, for messages."""
        ...

    def read(self, name: str) -> torch.Tensor:
        """The tensor in a float type. It may be a view of the file, valid until `close`."""
        ...

    def blocks(self, name: str) -> Blocks | None:
        """The tensor as packed blocks in memory of its own, if it is kept so; its rows are those
        that `read` gives.
        """
        ...

    def close(self) -> None: ...


def check_tensors(source: WeightSource, expected: Mapping[str, tuple[int, ...]]) -> None:
    """Nothing, if the source holds exactly the expected tensors; else ModelFileError."""
    for name, shape in expected.items():
        found = source.shapes.get(name)
        if found is None:
            raise ModelFileError(source.path, f"tensor {source.stored_name(name)} is missing")
        if found != shape:
            raise ModelFileError(
                source.path,
                f"tensor {source.stored_name(name)} has shape {list(found)}, "
                f"expected {list(shape)}",
            )
    extra = sorted(source.stored_name(name) for name in set(source.shapes) - set(expected))
    if extra:
        listed = ", ".join(extra[:5]) + (f" and {len(extra) - 5} more" if len(extra) > 5 else "")
        raise ModelFileError(
            source.path, f"has tensors that {source.config.architecture} does not use: {listed}"
        )


def read_json(path: Path, max_bytes: int) -> dict[str, Any]:
    """The JSON object in a file; raises ModelFileError if it is not one or is too long."""
    try:
        size = path.stat().st_size
        if size > max_bytes:
            raise ModelFileError(path, f"has {size} bytes, at most {max_bytes} are read")
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelFileError(path, f"cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ModelFileError(path, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(path, "is not a JSON object")
    return value
