"""A model's `tokenizer.json`, changed so that encoding inserts, cuts and drops nothing."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from palmette.errors import ModelFileError
from palmette.grammar.pieces import SPACE_MARK, components

FORMAT = 1  # of the cache entries below and of what `prepare` does; raise it when either changes

Kind = Literal["byte_level", "sentencepiece"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedTokenizer:
    """A tokenizer ready for `tokenizers.Tokenizer.from_str`, and what its text no longer says.

    `kind` is how its pieces spell bytes; `adds_bos` whether the original put a token before every
    text; `normalizes` whether it rewrites text (such as to NFC) before cutting it into pieces;
    `special` are its control tokens, id and spelling.
    """

    tokenizer: str
    kind: Kind
    adds_bos: bool
    normalizes: bool
    special: dict[int, str]


def prepare(
    path: Path, tokenizer: dict[str, Any], special: Collection[str] = ()
) -> PreparedTokenizer:
    """The tokenizer without templates, truncation, padding and space put before the text.

    The spellings in `special` are control tokens whatever the file says of them. Raises
    ModelFileError for a vocabulary whose pieces do not spell bytes (WordPiece and the like).
    """
    model = tokenizer.get("model")
    if not isinstance(model, dict) or not isinstance(tokenizer.get("added_tokens", []), list):
        raise ModelFileError(path, "the tokenizer has no model")
    kind = _kind(path, tokenizer, model)
    adds_bos = _adds_bos(tokenizer.get("post_processor"))
    for part in components(tokenizer):
        if part.get("type") == "Metaspace":
            part["prepend_scheme"] = "never"
            part.pop("add_prefix_space", None)
        elif part.get("type") == "ByteLevel":
            part["add_prefix_space"] = False
    normalizer = _without_prepend(tokenizer.get("normalizer"))
    added = _added_tokens(tokenizer.get("added_tokens", []), model, special)
    tokenizer = {
        **tokenizer,
        "normalizer": normalizer,
        "added_tokens": added,
        "truncation": None,
        "padding": None,
        "post_processor": None,
        "decoder": None,
    }
    return PreparedTokenizer(
        tokenizer=json.dumps(tokenizer, ensure_ascii=False),
        kind=kind,
        adds_bos=adds_bos,
        normalizes=normalizer is not None and not _only_marks_spaces(normalizer),
        special={token["id"]: token["content"] for token in added if token.get("special")},
    )


def _kind(path: Path, tokenizer: dict[str, Any], model: dict[str, Any]) -> Kind:
    if model.get("continuing_subword_prefix") or model.get("end_of_word_suffix"):
        raise ModelFileError(path, "tokenizers that mark the parts of words are not read")
    parts = list(components(tokenizer))
    if any(part.get("type") == "ByteLevel" for part in parts):
        return "byte_level"
    if any(part.get("type") == "Metaspace" or _marks_spaces(part) for part in parts):
        return "sentencepiece"
    raise ModelFileError(
        path,
        f"the tokenizer is neither byte-level BPE nor SentencePiece (its model is "
        f"{model.get('type')!r}); no other kind is read",
    )


def _marks_spaces(part: dict[str, Any]) -> bool:
    return (
        part.get("type") == "Replace"
        and part.get("pattern") == {"String": " "}
        and part.get("content") == SPACE_MARK
    )


def _only_marks_spaces(normalizer: dict[str, Any]) -> bool:
    if normalizer.get("type") == "Sequence":
        return all(_marks_spaces(part) for part in normalizer.get("normalizers", []))
    return _marks_spaces(normalizer)


def _without_prepend(normalizer: Any) -> dict[str, Any] | None:
    """The normaliser without the parts that put a space before the text or cut space off it."""
    if not isinstance(normalizer, dict) or normalizer.get("type") in ("Prepend", "Strip"):
        return None
    if normalizer.get("type") == "Sequence":
        kept = [
            part
            for part in map(_without_prepend, normalizer.get("normalizers", []))
            if part is not None
        ]
        return {**normalizer, "normalizers": kept} if kept else None
    return normalizer


def _adds_bos(post_processor: Any) -> bool:
    """Whether a template puts a control token before the text."""
    if not isinstance(post_processor, dict):
        return False
    if post_processor.get("type") == "Sequence":
        return any(map(_adds_bos, post_processor.get("processors", [])))
    single = post_processor.get("single")
    if post_processor.get("type") != "TemplateProcessing" or not isinstance(single, list):
        return False
    return bool(single) and "SpecialToken" in single[0]


def _added_tokens(
    added: list[dict[str, Any]], model: dict[str, Any], special: Collection[str]
) -> list[dict[str, Any]]:
    """The added tokens, with `special` among them. Only control tokens may swallow space."""
    tokens = {token["content"]: dict(token) for token in added}
    vocabulary = model.get("vocab")
    ids = vocabulary if isinstance(vocabulary, dict) else _ids_of_pairs(vocabulary)
    for text in special:
        if text not in tokens and text in ids:
            tokens[text] = {"id": ids[text], "content": text, "single_word": False}
            tokens[text] |= {"lstrip": False, "rstrip": False, "normalized": False}
        if text in tokens:
            tokens[text]["special"] = True
    for token in tokens.values():
        if not token.get("special"):
            token["lstrip"] = token["rstrip"] = False
    return sorted(tokens.values(), key=lambda token: int(token["id"]))


def _ids_of_pairs(vocabulary: Any) -> dict[str, int]:
    """A unigram vocabulary is a list of pairs of piece and score."""
    return {pair[0]: index for index, pair in enumerate(vocabulary or [])}


class PreparedCache:
    """Prepared tokenizers on disk, each under a key that says what it was made from.

    An entry is the SHA-256 of its body and the body; one that is damaged, cut short or of another
    format counts as absent and is made anew.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def get(self, key: str, make: Callable[[], PreparedTokenizer]) -> PreparedTokenizer:
        """The entry under `key`, made and stored if it is not there."""
        path = self._folder / f"{hashlib.sha256(f'{FORMAT} {key}'.encode()).hexdigest()}.json"
        found = self._read(path)
        if found is None:
            found = make()
            self._write(path, found)
        return found

    def _read(self, path: Path) -> PreparedTokenizer | None:
        try:
            digest, _, body = path.read_bytes().partition(b"\n")
            if hashlib.sha256(body).hexdigest().encode() != digest:
                return None
            entry = json.loads(body)
            entry["special"] = {int(key): text for key, text in entry["special"].items()}
            return PreparedTokenizer(**entry)
        except (OSError, ValueError, TypeError, LookupError, AttributeError):
            return None

    def _write(self, path: Path, prepared: PreparedTokenizer) -> None:
        """Put the entry in place whole. A folder that cannot be written only costs time later."""
        body = json.dumps(asdict(prepared), ensure_ascii=False).encode("utf-8", "surrogatepass")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self._folder, prefix=".writing-")
            try:
                with os.fdopen(handle, "wb") as file:
                    file.write(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
                os.replace(name, path)
            except BaseException:
                os.unlink(name)
                raise
        except OSError:
            pass
