"""Small tokenizers and GGUF files, written out in view."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

from palmette.grammar.pieces import SPACE_MARK, byte_of_character
from palmette.runtime.tokenization.prepared import prepare
from palmette.runtime.tokenization.tokenizer import LoadedTokenizer


def added(token_id: int, text: str, **flags: bool) -> dict[str, Any]:
    """An entry of `added_tokens`; special unless said otherwise."""
    token = {"id": token_id, "content": text, "single_word": False, "lstrip": False}
    return token | {"rstrip": False, "normalized": False, "special": True} | flags


def bpe(vocab: list[str], merges: list[tuple[str, str]], **options: Any) -> dict[str, Any]:
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None}
    model |= {"end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False}
    model |= {"vocab": {piece: index for index, piece in enumerate(vocab)}}
    return model | {"merges": [list(pair) for pair in merges]} | options


def tokenizer_json(model: dict[str, Any], **parts: Any) -> dict[str, Any]:
    empty = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": []}
    empty |= {"normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": None}
    return empty | {"model": model} | parts


def byte_level(
    special: tuple[str, ...] = ("<|begin|>", "<|end|>"),
    merges: tuple[tuple[str, str], ...] = (("h", "i"), ("Ġ", "hi")),
    **parts: Any,
) -> dict[str, Any]:
    """Byte-level BPE: ids 0-255 are the bytes' characters, then merges, then `special`."""
    characters = sorted(byte_of_character(), key=byte_of_character().__getitem__)
    vocab = [*characters, *(left + right for left, right in merges)]
    # As many published files have it: a space is put before the text.
    pre_tokenizer = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
    pre_tokenizer |= {"use_regex": True}
    tokens = [added(len(vocab) + index, text) for index, text in enumerate(special)]
    given = {"pre_tokenizer": pre_tokenizer, "decoder": pre_tokenizer, "added_tokens": tokens}
    return tokenizer_json(bpe(vocab, list(merges)), **(given | parts))


def sentencepiece(
    words: tuple[str, ...] = (),
    merges: tuple[tuple[str, str], ...] = (),
    special: tuple[str, ...] = ("<turn>",),
    dummy_prefix: str = "normalizer",
    byte_pieces: bool = True,
    **parts: Any,
) -> dict[str, Any]:
    """SentencePiece BPE with byte pieces: <unk>, <s>, </s>, 256 bytes, letters, merges, special.

    The space before the text comes from a normaliser or a Metaspace, as older and newer files
    have it.
    """
    letters = [SPACE_MARK, *"ABCabcdefghijklmnopqrstuvwxyz:.</>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)] if byte_pieces else []
    vocab = ["<unk>", "<s>", "</s>", *bytes_, *letters]
    vocab += [left + right for left, right in merges if left + right not in vocab]
    vocab += words
    tokens = [added(index, text) for index, text in enumerate(("<unk>", "<s>", "</s>"))]
    tokens += [added(len(vocab) + index, text) for index, text in enumerate(special)]
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE_MARK}
    prepend = {"type": "Prepend", "prepend": SPACE_MARK}
    metaspace = {"type": "Metaspace", "replacement": SPACE_MARK, "prepend_scheme": "always"}
    given: dict[str, Any] = {"added_tokens": tokens}
    if dummy_prefix == "normalizer":
        given["normalizer"] = {"type": "Sequence", "normalizers": [prepend, replace]}
    else:
        given["pre_tokenizer"] = metaspace | {"split": False}
    options = {"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": byte_pieces}
    return tokenizer_json(bpe(vocab, list(merges), **options), **(given | parts))


def loaded(tokenizer: dict[str, Any], **options: Any) -> LoadedTokenizer:
    return LoadedTokenizer(prepare(Path("tokenizer.json"), tokenizer), **options)


def write_folder(folder: Path, tokenizer: dict[str, Any], **files: Any) -> Path:
    """A model's folder: tokenizer.json, and the other JSON files under their names."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in {"tokenizer": tokenizer, **files}.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return folder


def gguf_string(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def gguf_value(value: Any) -> bytes:
    """The type and the bytes of a value; lists hold strings, or integers as i32."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<Ii" if value < 0 else "<II", 5 if value < 0 else 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + gguf_string(value)
    if value and isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(gguf_string, value))
    return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)


def gguf_bytes(values: dict[str, Any]) -> bytes:
    """A GGUF file with these keys and no tensors."""
    body = b"".join(gguf_string(key) + gguf_value(value) for key, value in values.items())
    return b"GGUF" + struct.pack("<IQQ", 3, 0, len(values)) + body


def byte_level_gguf(**more: Any) -> dict[str, Any]:
    """The keys of a GGUF file with a byte-level vocabulary of 256 bytes and three more tokens."""
    characters = sorted(byte_of_character(), key=byte_of_character().__getitem__)
    tokens = [*characters, "hi", "<|begin|>", "<|end|>"]
    values: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": 1,
        "llama.context_length": 64,
        "llama.embedding_length": 8,
        "llama.feed_forward_length": 8,
        "llama.attention.head_count": 1,
        "llama.attention.head_count_kv": 1,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.vocab_size": len(tokens),
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 257 + [3, 3],
        "tokenizer.ggml.merges": ["h i"],
        "tokenizer.ggml.bos_token_id": 257,
        "tokenizer.ggml.eos_token_id": 258,
    }
    values |= {key.replace("__", "."): value for key, value in more.items()}
    return {key: value for key, value in values.items() if value is not None}
