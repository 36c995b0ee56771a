"""Reading the key-value section of a GGUF file, whole, damaged and hostile."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palmette.errors import ModelFileError
from palmette.runtime.loading.gguf_metadata import GGUFMetadata
from tests.runtime.tokenization import tiny

VALUES = {
    "general.architecture": "llama",
    "a.count": 7,
    "a.negative": -7,
    "a.flag": True,
    "a.float": 0.5,
    "a.words": ["one", "zwölf", ""],
    "a.numbers": [1, -2, 3],
}


def written(tmp_path, content):
    path = tmp_path / "some.gguf"
    path.write_bytes(content)
    return path


def test_values_are_read_as_they_were_written(tmp_path):
    with GGUFMetadata(written(tmp_path, tiny.gguf_bytes(VALUES))) as metadata:
        assert set(metadata.metadata) == set(VALUES)
        for key, value in VALUES.items():
            if isinstance(value, list):
                assert metadata.array(key) == value
            else:
                assert metadata.metadata[key] == value
        assert metadata.array("a.missing") is None
        assert metadata.strings("a.words") == VALUES["a.words"]
        assert metadata.strings("a.missing") == []
    assert metadata.text("general.architecture") == "llama"  # closed by now


def test_the_digest_changes_with_any_entry_and_not_with_the_tensors(tmp_path):
    def digest(content):
        with GGUFMetadata(written(tmp_path, content)) as metadata:
            return metadata.digest

    content = tiny.gguf_bytes(VALUES)
    assert digest(content + b"tensors") == digest(content)
    changed = tiny.gguf_bytes(VALUES | {"a.words": ["one", "zwölf", "x"]})
    assert digest(changed) != digest(content)


def test_a_value_of_another_type_than_expected_is_refused(tmp_path):
    with GGUFMetadata(written(tmp_path, tiny.gguf_bytes(VALUES))) as metadata:
        with pytest.raises(ModelFileError, match=r"a\.count should be a string, is 7"):
            metadata.text("a.count")
        with pytest.raises(ModelFileError, match=r"a\.flag should be an integer, is True"):
            metadata.integer("a.flag")
        with pytest.raises(ModelFileError, match=r"a\.numbers should be an array of strings"):
            metadata.strings("a.numbers")
        with pytest.raises(ModelFileError, match=r"a\.count is not an array"):
            metadata.array("a.count")


def test_a_string_that_is_not_utf_8_is_refused_where_text_is_wanted(tmp_path):
    content = tiny.gguf_bytes({"a.words": ["one", "zwölf"]}).replace("ö".encode(), b"\xff\xff")
    refused = pytest.raises(ModelFileError, match=r"a\.words has a string that is not UTF-8")
    with GGUFMetadata(written(tmp_path, content)) as metadata, refused:
        metadata.strings("a.words")


def test_a_file_cut_anywhere_is_refused(tmp_path):
    content = tiny.gguf_bytes(VALUES)
    for length in range(len(content)):
        with pytest.raises(ModelFileError, match=r"is (empty|not a GGUF file|truncated)"):
            GGUFMetadata(written(tmp_path, content[:length]))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ModelFileError, match=r"nowhere.gguf: cannot be read: No such file"):
        GGUFMetadata(tmp_path / "nowhere.gguf")


@given(position=st.integers(4), byte=st.integers(0, 255))
def test_a_flipped_byte_is_read_or_refused(tmp_path_factory, position, byte):
    content = bytearray(tiny.gguf_bytes(VALUES))
    content[4 + position % (len(content) - 4)] = byte
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    path.write_bytes(content)
    with contextlib.suppress(ModelFileError), GGUFMetadata(path) as metadata:
        assert len(metadata.metadata) <= len(VALUES)
        for key in ("a.words", "a.numbers"):
            metadata.array(key)
