"""A tokenizer with its chat template as JSON text: made alike elsewhere, it encodes alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from palmette.errors import InvalidRequest, UnsupportedFeature
from palmette.protocol import Tokenizer
from palmette.runtime.tokenization.byte import ByteTokenizer
from palmette.runtime.tokenization.prepared import prepare
from palmette.runtime.tokenization.tokenizer import LoadedTokenizer

FORMAT = 1


def to_portable(tokenizer: Tokenizer) -> str:
    """The tokenizer as text. Raises UnsupportedFeature for one that is no model's own."""
    if isinstance(tokenizer, ByteTokenizer):
        told: dict[str, Any] = {"bytes": {"add_bos": bool(tokenizer.prefix_ids)}}
    elif isinstance(tokenizer, LoadedTokenizer):
        told = {"loaded": tokenizer.parts()}
    else:
        raise UnsupportedFeature(
            f"handing out a {type(tokenizer).__name__}", "it is no tokenizer of a model's files"
        )
    return json.dumps({"format": FORMAT, **told}, ensure_ascii=False)


def from_portable(text: str) -> LoadedTokenizer | ByteTokenizer:
    """The tokenizer that `to_portable` wrote. Raises InvalidRequest for any other text."""
    try:
        told = json.loads(text)
        if told.pop("format") != FORMAT or len(told) != 1:
            raise ValueError("it is of another format")
        if "bytes" in told:
            return ByteTokenizer(add_bos=bool(told["bytes"]["add_bos"]))
        return LoadedTokenizer.of_parts(told["loaded"])
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise InvalidRequest(f"the tokenizer cannot be read: {error}", param="tokenizer") from error


def from_library(text: str) -> LoadedTokenizer:
    """From what a tokenizer of the tokenizers library writes. Raises ModelFileError for one that is
    of a kind that is not read.
    """
    prepared = prepare(Path("tokenizer"), json.loads(text))
    return LoadedTokenizer(prepared)
