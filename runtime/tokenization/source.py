"""Where a tokenizer comes from: a GGUF file or a Hugging Face folder, and what both say of it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from palmette.errors import InvalidRequest, ModelFileError
from palmette.runtime.home import palmette_home
from palmette.runtime.loading.gguf_metadata import GGUFMetadata
from palmette.runtime.tokenization.prepared import PreparedCache, PreparedTokenizer, prepare
from palmette.runtime.tokenization.tokenizer import ChatTemplateSource, LoadedTokenizer

_MAX_FILE = 512 * 1024 * 1024  # bytes; the largest tokenizer.json in use have about 35 MB
_CONTROL = 3  # tokenizer.ggml.token_type of a control token
_UNKNOWN = 2  # and of the unknown token
_ADDED = (_CONTROL, _UNKNOWN, 4)  # 4: added by hand, but ordinary text
_GGUF_BOS_BY_DEFAULT = frozenset({"llama3", "llama-v3", "llama-bpe"})  # as llama.cpp has it
_TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
# What a tokenizer without tokenizer.json may be made from.
_VOCABULARY_FILES = (
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "added_tokens.json",
    "special_tokens_map.json",
    "tokenizer_config.json",
    "config.json",
)


def load_tokenizer(
    path: str | Path, *, chat_template: str | Path | None = None, home: Path | None = None
) -> LoadedTokenizer:
    """The tokenizer of a model: a `.gguf` file, or a folder as Hugging Face lays it out.

    `chat_template` is the path of a Jinja file or the template's text; it wins over a
    `chat_template.jinja` in the folder, which wins over `tokenizer_config.json`. A GGUF file
    brings its own. A vocabulary that transformers has to convert is converted once and kept in
    `home` (by default `palmette_home()`), found again by its content.

    Raises ModelFileError if the files are damaged, absent, or of a kind that is not read.
    """
    path = Path(path)
    cache = PreparedCache((home or palmette_home()) / "tokenizers")
    given = None if chat_template is None else _given_template(chat_template)
    if path.is_dir():
        return _from_folder(path, cache, given)
    if path.is_file():
        return _from_gguf(path, cache, given)
    raise ModelFileError(path, "no such file or folder")


def _assembled(path: Path, prepared: PreparedTokenizer, **options: Any) -> LoadedTokenizer:
    try:
        return LoadedTokenizer(prepared, **options)
    except ValueError as error:
        raise ModelFileError(path, str(error)) from error


def _given_template(template: str | Path) -> str:
    if isinstance(template, str) and "{" in template:
        return template
    try:
        return Path(template).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise InvalidRequest(
            f"the chat template {str(template)!r} is neither a readable file nor Jinja text: "
            f"{error}",
            param="chat_template",
        ) from error


# GGUF


def _from_gguf(path: Path, cache: PreparedCache, template: str | None) -> LoadedTokenizer:
    with GGUFMetadata(path) as metadata:
        pass  # what is needed are scalars and strings
    model = metadata.text("tokenizer.ggml.model")
    if model is None:
        raise ModelFileError(path, "holds no tokenizer (no key tokenizer.ggml.model)")
    prepared = cache.get(f"gguf {metadata.digest} {_versions()}", lambda: _converted_gguf(path))
    tokens = _GgufTokens(metadata, prepared)
    add_bos = metadata.metadata.get("tokenizer.ggml.add_bos_token")
    if add_bos is None:
        add_bos = model == "llama" or metadata.text("tokenizer.ggml.pre") in _GGUF_BOS_BY_DEFAULT
    bos_id = tokens.id_of("bos")
    token_texts = tokens.texts()
    template = template or metadata.text("tokenizer.chat_template")
    return _assembled(
        path,
        prepared,
        bos_token_id=bos_id,
        add_bos=bool(add_bos),
        stop_token_ids=tokens.ids_of("eos", "eot", "eom"),
        unknown_token=token_texts.get("unk_token"),
        chat_template=None
        if template is None
        else ChatTemplateSource(
            template, token_texts, token_texts.get("bos_token", "") if add_bos else ""
        ),
    )


class _GgufTokens:
    """The tokens that a GGUF file names by id."""

    def __init__(self, metadata: GGUFMetadata, prepared: PreparedTokenizer) -> None:
        self._metadata = metadata
        self._prepared = prepared

    def id_of(self, name: str) -> int | None:
        return self._metadata.integer(f"tokenizer.ggml.{name}_token_id")

    def ids_of(self, *names: str) -> list[int]:
        return [token_id for name in names if (token_id := self.id_of(name)) is not None]

    def texts(self) -> dict[str, str]:
        """The spellings of the named tokens, under the names that chat templates use."""
        names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
        texts = {}
        for name, key in names.items():
            token_id = self.id_of(key)
            if token_id is not None and (text := self._prepared.special.get(token_id)) is not None:
                texts[f"{name}_token"] = text
        return texts


def _converted_gguf(path: Path) -> PreparedTokenizer:
    """The tokenizer as transformers reads it from the file, control tokens as the file has them."""
    with GGUFMetadata(path) as metadata:
        tokens = metadata.strings("tokenizer.ggml.tokens")
        types = metadata.array("tokenizer.ggml.token_type") or []
    named = _named_ids(metadata)
    kinds = {token_id: types[token_id] for token_id in range(min(len(tokens), len(types)))}
    kinds |= dict.fromkeys(named & kinds.keys(), _CONTROL)
    special = {tokens[i] for i, kind in kinds.items() if kind in (_CONTROL, _UNKNOWN)}
    # Alone in a folder, so that files beside it cannot change what it says.
    with tempfile.TemporaryDirectory(prefix="palmette-") as folder:
        os.symlink(path.resolve(), Path(folder) / "model.gguf")
        converted = json.loads(_through_transformers(path, folder, gguf_file="model.gguf"))
    # transformers adds an end and an unknown token where the file names none, and takes whatever
    # is named for padding for a control token: what the file says of its own tokens goes first.
    converted["added_tokens"] = [
        token
        for token in converted["added_tokens"]
        if token["id"] < len(tokens) and kinds.get(token["id"], _CONTROL) in _ADDED
    ]
    return prepare(path, converted, special)


def _named_ids(metadata: GGUFMetadata) -> set[int]:
    """The tokens that begin or end something. Padding may be named for want of a better one."""
    names = ("bos", "eos", "eot", "eom")
    ids = (metadata.integer(f"tokenizer.ggml.{name}_token_id") for name in names)
    return {token_id for token_id in ids if token_id is not None}


# Hugging Face


def _from_folder(path: Path, cache: PreparedCache, template: str | None) -> LoadedTokenizer:
    config = _json_object(path / "tokenizer_config.json")
    model_config = _json_object(path / "config.json")
    generation = _json_object(path / "generation_config.json")
    named = {**_json_object(path / "special_tokens_map.json"), **config}
    token_texts = {
        name: text for name in _TOKEN_NAMES if (text := _spelling(named.get(name))) is not None
    }
    special = {*token_texts.values(), *_further_special(named)}
    if (path / "tokenizer.json").is_file():
        tokenizer = _json_object(path / "tokenizer.json")
        prepared = prepare(path / "tokenizer.json", tokenizer, special)
    else:
        prepared = _converted_folder(path, cache, special)
    id_of = {text: token_id for token_id, text in prepared.special.items()}
    add_bos = config.get("add_bos_token")
    if add_bos is None:
        add_bos = prepared.adds_bos
    stop = [
        *_ids(path / "config.json", model_config, "eos_token_id"),
        *_ids(path / "config.json", model_config.get("text_config"), "eos_token_id"),
        *_ids(path / "generation_config.json", generation, "eos_token_id"),
    ]
    if (eos := token_texts.get("eos_token")) in id_of:
        stop.append(id_of[eos])
    bos = token_texts.get("bos_token", "")
    if template is None:
        template = _folder_template(path, config)
    return _assembled(
        path / "tokenizer.json",
        prepared,
        bos_token_id=id_of.get(bos),
        add_bos=bool(add_bos),
        stop_token_ids=stop,
        unknown_token=token_texts.get("unk_token"),
        chat_template=None
        if template is None
        else ChatTemplateSource(template, token_texts, bos if add_bos and bos in id_of else ""),
    )


def _converted_folder(
    path: Path, cache: PreparedCache, special: Iterable[str]
) -> PreparedTokenizer:
    """A tokenizer without tokenizer.json, as transformers makes it from the older files."""
    present = [name for name in _VOCABULARY_FILES if (path / name).is_file()]
    if not any(name in present for name in ("tokenizer.model", "vocab.json")):
        raise ModelFileError(
            path, "the folder has no tokenizer.json, tokenizer.model or vocab.json"
        )
    digest = hashlib.sha256()
    for name in present:
        content = _read(path / name)
        digest.update(f"{name} {len(content)} ".encode() + content)
    return cache.get(
        f"folder {digest.hexdigest()} {_versions()}",
        lambda: prepare(path, json.loads(_through_transformers(path, path)), list(special)),
    )


def _folder_template(path: Path, config: Mapping[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    if file.is_file():
        return _read(file).decode("utf-8", "replace")
    template = config.get("chat_template")
    if template is None or isinstance(template, str):
        return template
    by_name = {}
    if isinstance(template, list):
        by_name = {
            entry["name"]: entry["template"]
            for entry in template
            if isinstance(entry, dict)
            and isinstance(entry.get("name"), str)
            and isinstance(entry.get("template"), str)
        }
    if "default" in by_name:
        return str(by_name["default"])
    if len(by_name) == 1:
        return str(next(iter(by_name.values())))
    raise ModelFileError(
        path / "tokenizer_config.json",
        "chat_template is neither a text nor a list of {name, template} with one named 'default'",
    )


def _json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one if there is no file."""
    if not path.exists():
        return {}
    try:
        value = json.loads(_read(path))
    except (ValueError, RecursionError) as error:
        raise ModelFileError(path, f"is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise ModelFileError(path, f"should hold an object, holds a {type(value).__name__}")
    return value


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > _MAX_FILE:
            raise ModelFileError(path, f"is larger than {_MAX_FILE} bytes")
        return path.read_bytes()
    except OSError as error:
        raise ModelFileError(path, f"cannot be read: {error.strerror or error}") from error


def _spelling(token: Any) -> str | None:
    """A token is written as its text, or as an object with its `content`."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _further_special(named: Mapping[str, Any]) -> Iterable[str]:
    """Control tokens beyond those with a name of their own."""
    further = named.get("additional_special_tokens") or named.get("extra_special_tokens") or []
    if isinstance(further, dict):
        further = list(further.values())
    for token in further if isinstance(further, list) else []:
        if (text := _spelling(token)) is not None:
            yield text
    added = named.get("added_tokens_decoder")
    for token in added.values() if isinstance(added, dict) else []:
        if isinstance(token, dict) and token.get("special") and _spelling(token) is not None:
            yield str(token["content"])


def _ids(path: Path, config: Any, key: str) -> list[int]:
    """One id or a list of them under a key."""
    value = config.get(key) if isinstance(config, dict) else None
    listed = value if isinstance(value, list) else [] if value is None else [value]
    for token_id in listed:
        if not isinstance(token_id, int) or isinstance(token_id, bool):
            raise ModelFileError(path, f"{key} should be a token id or a list of them: {value!r}")
    return listed


# Conversion


def _through_transformers(path: Path, folder: str | Path, **options: str) -> str:
    """The `tokenizer.json` that transformers makes of the files."""
    from transformers import AutoTokenizer  # slow to import, needed only here

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **options)
        return str(tokenizer.backend_tokenizer.to_str())
    except Exception as error:  # transformers raises all kinds
        why = str(error).strip().splitlines() or [type(error).__name__]
        raise ModelFileError(path, f"the tokenizer cannot be converted: {why[0]}") from error


def _versions() -> str:
    return " ".join(
        f"{name}-{importlib.metadata.version(name)}" for name in ("transformers", "tokenizers")
    )
