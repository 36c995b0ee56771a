"""A Llama-family model in a Hugging Face folder: config.json and safetensors files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from palmette.errors import ModelFileError
from palmette.runtime.kernels.cpu import Blocks
from palmette.runtime.loading.source import read_json
from palmette.runtime.models.config import ModelConfig, config_from_json

_MAX_CONFIG_BYTES = 16 << 20
_MAX_INDEX_BYTES = 64 << 20
_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_FLOATS = {"F64", "F32", "F16", "BF16"}
_HEAD = "lm_head.weight"
_EMBEDDING = "model.embed_tokens.weight"


class HFFolder:
    """The config and tensors of a folder with one model.safetensors or a sharded index.

    Files are memory-mapped. Nothing is ever unpickled: a folder with only .bin files is refused.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        config_path = self.path / "config.json"
        if not config_path.is_file():
            raise ModelFileError(self.path, "has no config.json")
        generation_path = self.path / "generation_config.json"
        generation: dict[str, Any] = {}
        if generation_path.is_file():
            generation = read_json(generation_path, _MAX_CONFIG_BYTES)
        self.config: ModelConfig = config_from_json(
            read_json(config_path, _MAX_CONFIG_BYTES), generation, path=config_path
        )
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._handles: dict[str, Any] = {}  # by tensor name
        self._open_files()
        self._drop_derived()

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    def stored_name(self, name: str) -> str:
        return name

    def read(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._handles[name].get_tensor(name)
        return tensor

    def blocks(self, name: str) -> Blocks | None:
        return None

    def close(self) -> None:
        self._handles.clear()

    def _open_files(self) -> None:
        if (self.path / _SINGLE).is_file():
            self._open(_SINGLE, None)
            return
        if not (self.path / _INDEX).is_file():
            pickled = sorted(p.name for p in self.path.glob("*.bin"))[:3]
            what = f"has only pickled weights ({', '.join(pickled)}), which" if pickled else ""
            raise ModelFileError(
                self.path,
                f"{what} are never loaded: convert them to {_SINGLE}"
                if pickled
                else f"has neither {_SINGLE} nor {_INDEX}",
            )
        index = read_json(self.path / _INDEX, _MAX_INDEX_BYTES)
        weight_map = index.get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ModelFileError(self.path / _INDEX, "has no weight_map")
        by_file: dict[str, set[str]] = {}
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file or file in (".", ".."):
                raise ModelFileError(
                    self.path / _INDEX, f"places {name} in {file!r}, which is not a file name"
                )
            by_file.setdefault(file, set()).add(name)
        for file in sorted(by_file):
            self._open(file, by_file[file])

    def _open(self, file: str, listed: set[str] | None) -> None:
        """Adds the tensors of a file, which must be those `listed` for it, if given."""
        path = self.path / file
        if not path.is_file():
            raise ModelFileError(path, f"is missing; {_INDEX} names it")
        try:
            # safe_open checks the header against the file's size before anything is read.
            handle: Any = safe_open(path, framework="pt")
            names = set(handle.keys())
            for name in sorted((listed or names) - names):
                raise ModelFileError(path, f"tensor {name} is missing; {_INDEX} places it here")
            for name in sorted(names - (listed or names)):
                raise ModelFileError(path, f"has tensor {name}, which {_INDEX} does not place here")
            for name in names:
                described = handle.get_slice(name)
                if described.get_dtype() not in _FLOATS:
                    raise ModelFileError(
                        path,
                        f"tensor {name} is of type {described.get_dtype()}; "
                        f"supported: {', '.join(sorted(_FLOATS))}",
                    )
                self._shapes[name] = tuple(described.get_shape())
                self._handles[name] = handle
        except (SafetensorError, OSError) as error:
            raise ModelFileError(path, f"is damaged or truncated: {error}") from error

    def _drop_derived(self) -> None:
        """Leaves out what other tensors determine: rotary buffers, and a head tied to the
        embedding, which must equal it.
        """
        for name in list(self._shapes):
            if name.endswith(".rotary_emb.inv_freq"):
                del self._shapes[name]
        if not self.config.tie_word_embeddings or _HEAD not in self._shapes:
            return
        if _EMBEDDING in self._shapes and not torch.equal(self.read(_HEAD), self.read(_EMBEDDING)):
            raise ModelFileError(
                self.path,
                f"tie_word_embeddings is true, but {_HEAD} differs from {_EMBEDDING}",
            )
        del self._shapes[_HEAD]
