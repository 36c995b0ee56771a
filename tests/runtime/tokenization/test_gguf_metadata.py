"""Reading the key-value section of a GGUF file, whole, damaged and hostile."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from palmette.errors import ModelFileError
from palmette.runtime.tokenization.gguf_metadata import read_gguf_metadata
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
    metadata = read_gguf_metadata(written(tmp_path, tiny.gguf_bytes(VALUES)), with_arrays=True)
    assert set(metadata.keys()) == set(VALUES)
    for key, value in VALUES.items():
        assert (metadata.array if isinstance(value, list) else metadata.get)(key) == value
    assert metadata.get("a.missing") is None
    assert metadata.array("a.missing") is None


def test_arrays_are_skipped_unless_asked_for(tmp_path):
    path = written(tmp_path, tiny.gguf_bytes(VALUES | {"z.last": "after the arrays"}))
    metadata = read_gguf_metadata(path)
    assert metadata.array("a.words") is None
    assert metadata.get("z.last") == "after the arrays"
    assert metadata.digest == read_gguf_metadata(path, with_arrays=True).digest


def test_the_digest_changes_with_any_entry_and_not_with_the_tensors(tmp_path):
    content = tiny.gguf_bytes(VALUES)
    digest = read_gguf_metadata(written(tmp_path, content)).digest
    assert read_gguf_metadata(written(tmp_path, content + b"tensors")).digest == digest
    changed = tiny.gguf_bytes(VALUES | {"a.words": ["one", "zwölf", "x"]})
    assert read_gguf_metadata(written(tmp_path, changed)).digest != digest


def test_a_value_of_another_type_than_expected_is_refused(tmp_path):
    metadata = read_gguf_metadata(written(tmp_path, tiny.gguf_bytes(VALUES)))
    with pytest.raises(ModelFileError, match=r"a\.count should be a string, is 7"):
        metadata.text("a.count")
    with pytest.raises(ModelFileError, match=r"a\.flag should be an integer, is True"):
        metadata.integer("a.flag")


@pytest.mark.parametrize("with_arrays", [False, True])
def test_a_file_cut_anywhere_is_refused(tmp_path, with_arrays):
    content = tiny.gguf_bytes(VALUES)
    for length in range(len(content)):
        with pytest.raises(ModelFileError, match="GGUF"):
            read_gguf_metadata(written(tmp_path, content[:length]), with_arrays=with_arrays)


def header(*, version=3, num_pairs=1):
    return b"GGUF" + struct.pack("<IQQ", version, 0, num_pairs)


HUGE = 2**63
KEY = tiny.gguf_string("key")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "not a GGUF file"),
        (b"PK\x03\x04" * 20, "does not begin with GGUF"),
        (header(version=1), "GGUF version 1"),
        (header(num_pairs=HUGE), "ends at byte"),
        (header() + struct.pack("<Q", HUGE), "ends at byte"),
        (header() + KEY + struct.pack("<IQ", 8, HUGE), "ends at byte"),
        (header() + KEY + struct.pack("<IIQ", 9, 8, HUGE), "longer than the file"),
        (header() + KEY + struct.pack("<IIQ", 9, 5, HUGE), "ends at byte"),
        (header() + KEY + struct.pack("<IIQ", 9, 9, HUGE), "ends at byte"),
        (header() + KEY + struct.pack("<IIQ", 9, 8, 1) + struct.pack("<Q", HUGE), "ends at byte"),
        (header() + KEY + struct.pack("<IIQ", 9, 77, 1), "unknown array type 77"),
        (header() + KEY + struct.pack("<I", 77), "unknown value type 77"),
        (header() + KEY + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 9, "array type 9"),
        (header(num_pairs=2) + (KEY + struct.pack("<I?", 7, True)) * 2, "'key' comes twice"),
        (header() + struct.pack("<Q", 1) + b"\xff", "not UTF-8"),
    ],
)
@pytest.mark.parametrize("with_arrays", [False, True])
def test_a_hostile_file_is_refused_before_anything_large_is_made(
    tmp_path, content, words, with_arrays
):
    with pytest.raises(ModelFileError, match=words):
        read_gguf_metadata(written(tmp_path, content), with_arrays=with_arrays)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ModelFileError, match=r"nowhere.gguf: cannot be read: No such file"):
        read_gguf_metadata(tmp_path / "nowhere.gguf")


@given(position=st.integers(4), byte=st.integers(0, 255))
def test_a_flipped_byte_is_read_or_refused(tmp_path_factory, position, byte):
    content = bytearray(tiny.gguf_bytes(VALUES))
    content[4 + position % (len(content) - 4)] = byte
    path = tmp_path_factory.getbasetemp() / "flipped.gguf"
    path.write_bytes(content)
    with contextlib.suppress(ModelFileError):
        assert len(read_gguf_metadata(path, with_arrays=True).keys()) <= len(VALUES)
