"""GGUF files: what is read from good ones, and how bad ones are refused."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from palmette.errors import ModelFileError
from palmette.runtime.loading import load_model
from palmette.runtime.loading.gguf_file import GGUFFile
from tests.runtime.loading.files import dequantized, write_gguf
from tests.runtime.models.tiny import expected_logits, make_batch, make_pool, oracle, random_ids

# Blocks of the quantised kinds are 32 or 256 entries long, so rows must be that long.
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96}
FLOATS = (Kind.F32, Kind.F16, Kind.BF16)
STRING, ARRAY = 8, 9


def assert_loads_as(path: Path, reference: Any, atol: float = 1e-4) -> None:
    loaded = load_model(path, dtype="float32")
    token_ids = random_ids(40, 61)
    logits = loaded.model.forward(
        make_batch([(token_ids, 0, list(range(10)))], every_row=True), make_pool(loaded.config)
    )
    torch.testing.assert_close(logits, expected_logits(reference, token_ids), atol=atol, rtol=0)


@pytest.mark.parametrize("kind", [*FLOATS, Kind.Q8_0, Kind.Q4_1, Kind.Q4_0, Kind.Q5_0, Kind.Q5_1])
def test_each_kind_of_tensor_gives_the_logits_of_its_rounded_weights(
    tmp_path: Path, kind: Kind
) -> None:
    reference = dequantized(oracle(**WIDE), kind)
    assert_loads_as(write_gguf(tmp_path / "m.gguf", reference, kind=kind), reference)


@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.Q5_K, Kind.Q6_K, Kind.Q3_K, Kind.IQ4_NL])
def test_kinds_that_the_package_only_decodes_are_decoded(tmp_path: Path, kind: Kind) -> None:
    block, block_bytes = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(0).integers(0, 60, (3, 2 * block_bytes), dtype=np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("blk.0.ffn_up.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = GGUFFile(tmp_path / "m.gguf")
    assert file.tensors["blk.0.ffn_up.weight"].shape == (3, 2 * block)
    decoded = file.read("blk.0.ffn_up.weight").numpy()
    assert np.array_equal(decoded, gguf.dequantize(raw, kind), equal_nan=True)


def test_biases_of_queries_and_keys_are_reordered_too(tmp_path: Path) -> None:
    reference = oracle(attention_bias=True, mlp_bias=True)
    assert_loads_as(write_gguf(tmp_path / "m.gguf", reference), reference)


def test_a_head_of_its_own_is_used_and_an_absent_one_is_tied(tmp_path: Path) -> None:
    for tied in (False, True):
        reference = oracle(tie_word_embeddings=tied)
        path = write_gguf(tmp_path / f"{tied}.gguf", reference)
        assert load_model(path, dtype="float32").config.tie_word_embeddings is tied
        assert_loads_as(path, reference)


def test_rope_freqs_stand_for_llama3_scaling(tmp_path: Path) -> None:
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    reference = oracle(rope_parameters=rope)
    rotary = reference.model.rotary_emb
    plain = 1 / 500.0 ** (torch.arange(0, 8, 2) / 8)

    def add(tensors: dict[str, np.ndarray[Any, Any]]) -> None:
        tensors["rope_freqs.weight"] = (plain / rotary.inv_freq).numpy()

    assert_loads_as(write_gguf(tmp_path / "m.gguf", reference, change=add), reference)


def test_linear_scaling_is_read(tmp_path: Path) -> None:
    reference = oracle(
        rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
    )
    keys = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    assert_loads_as(write_gguf(tmp_path / "m.gguf", reference, keys=keys), reference)


def test_the_config_comes_from_the_metadata(tmp_path: Path) -> None:
    keys = {
        "tokenizer.ggml.eot_token_id": 5,
        "general.sampling.temp": 0.5,
        "general.sampling.top_k": 0,
    }
    config = load_model(
        write_gguf(tmp_path / "m.gguf", oracle(), keys=keys), dtype="float32"
    ).config
    assert config.stop_token_ids == (2, 5)
    assert config.bos_token_id == 1
    assert config.generation_defaults == {"temperature": 0.5, "top_k": -1}
    assert (config.vocab_rows, config.max_context) == (61, 256)


def test_arrays_of_the_metadata_are_decoded_when_asked_for(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", oracle(), keys={"tokenizer.ggml.scores": [0.5, -1.0]})
    file = GGUFFile(path)
    assert file.array("tokenizer.ggml.tokens") == [f"token {i}" for i in range(61)]
    assert file.array("tokenizer.ggml.scores") == [0.5, -1.0]
    assert file.array("tokenizer.ggml.merges") is None
    assert file.metadata["general.architecture"] == "llama"


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"general.architecture": "gemma3"}, "architecture 'gemma3' is not supported; supported"),
        ({"llama.expert_count": 8}, "mixtures of experts"),
        ({"llama.attention.sliding_window": 64}, "sliding_window 64 is shorter"),
        ({"llama.rope.scaling.type": "yarn"}, "llama.rope.scaling.type 'yarn' is not supported"),
        ({"llama.rope.dimension_count": 4}, "llama.rope.dimension_count differs"),
        ({"llama.logit_scale": 2.0}, "llama.logit_scale = 2.0 is not supported"),
        ({"llama.block_count": None}, "llama.block_count is missing"),
        ({"llama.block_count": 3}, "tensor blk.2.attn_q.weight is missing"),
        ({"llama.block_count": 10**6}, "llama.block_count must be an integer from 1 to 4096"),
        ({"llama.attention.head_count": [4, 4]}, "head_count must be one number, got an array"),
        ({"llama.feed_forward_length": 64}, "ffn_gate.weight has shape [48, 32], expected [64"),
        ({"llama.vocab_size": 60}, "llama.vocab_size is 60, token_embd.weight has 61 rows"),
        ({"llama.attention.head_count_kv": 3}, "4 attention heads cannot share 3"),
    ],
)
def test_metadata_that_is_not_honoured_is_refused_by_name(
    tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", oracle(), keys=keys)
    with pytest.raises(ModelFileError) as caught:
        load_model(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_a_missing_a_misshapen_and_an_unknown_tensor_are_named(tmp_path: Path) -> None:
    def drop(tensors: dict[str, np.ndarray[Any, Any]]) -> None:
        del tensors["blk.1.ffn_up.weight"]

    def cut(tensors: dict[str, np.ndarray[Any, Any]]) -> None:
        tensors["blk.1.ffn_up.weight"] = tensors["blk.1.ffn_up.weight"][:-1]

    def add(tensors: dict[str, np.ndarray[Any, Any]]) -> None:
        tensors["blk.0.attn_q_norm.weight"] = np.ones(8, dtype=np.float32)

    def repeat(tensors: dict[str, np.ndarray[Any, Any]]) -> None:
        tensors["blk.01.ffn_up.weight"] = tensors["blk.1.ffn_up.weight"]

    for change, message in (
        (repeat, "has tensor blk.1.ffn_up.weight twice"),
        (drop, "tensor blk.1.ffn_up.weight is missing"),
        (cut, r"tensor blk.1.ffn_up.weight has shape \[47, 32\], expected \[48, 32\]"),
        (add, "does not use: blk.0.attn_q_norm.weight"),
    ):
        path = write_gguf(tmp_path / "m.gguf", oracle(), change=change)
        with pytest.raises(ModelFileError, match=message):
            load_model(path)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", oracle()).read_bytes()
    cut = tmp_path / "cut.gguf"
    for size in [*range(0, 2000, 53), len(whole) // 2, len(whole) - 40]:
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelFileError, match=r"cut\.gguf: is (empty|not a GGUF|truncated)"):
            load_model(cut)
    cut.write_bytes(whole[: len(whole) - 40])
    with pytest.raises(ModelFileError, match=r"is truncated: tensor [a-z0-9_.]+ ends at byte"):
        load_model(cut)


def header(num_tensors: int, num_keys: int, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_keys) + rest


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


HUGE = 2**62


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"PK\x03\x04 not a model at all", "is not a GGUF file"),
        (header(0, 0, version=1), "has GGUF version 1; supported: versions 2 and 3"),
        (header(0, 0, version=0x03000000), "is big-endian"),
        (header(0, HUGE), "truncated"),
        (header(HUGE, 0), "truncated"),
        (header(0, 1, struct.pack("<Q", HUGE)), "a name of"),
        (header(0, 1, text("k") + struct.pack("<IQ", STRING, HUGE)), "truncated"),
        (header(0, 1, text("k") + struct.pack("<IIQ", ARRAY, 4, HUGE)), "truncated"),
        (header(0, 1, text("k") + struct.pack("<IIQ", ARRAY, STRING, HUGE)), "truncated"),
        (header(0, 1, text("k") + struct.pack("<IIQ", ARRAY, ARRAY, HUGE)), "truncated"),
        (header(0, 1, text("k") + struct.pack("<IIQQ", ARRAY, STRING, 1, HUGE)), "inside k"),
        (header(0, 1, text("k") + struct.pack("<I", 77)), "k has the unknown type 77"),
        (
            header(0, 1, text("k") + struct.pack("<I", ARRAY) + struct.pack("<IQ", ARRAY, 1) * 40),
            "k nests arrays deeper than 4",
        ),
        (header(0, 2, (text("k") + struct.pack("<II", 4, 1)) * 2), "has the key k twice"),
        (
            header(2, 0, (text("t") + struct.pack("<IQIQ", 1, 8, 0, 0)) * 2 + b"\0" * 200),
            "has tensor t twice",
        ),
        (header(1, 0, text("t") + struct.pack("<I", 9)), "tensor t has 9 dimensions"),
        (
            header(1, 0, text("t") + struct.pack("<IQQIQ", 2, HUGE, HUGE, 0, 0)),
            "truncated: tensor t ends",
        ),
        (header(1, 0, text("t") + struct.pack("<IQIQ", 1, 33, 8, 0)), "is not whole blocks of 32"),
        (header(1, 0, text("t") + struct.pack("<IQIQ", 1, 0, 0, 0)), "is not whole blocks"),
        (header(1, 0, text("t") + struct.pack("<IQIQ", 1, 8, 999, 0)), "ggml type 999"),
        (
            header(0, 1, text("general.alignment") + struct.pack("<II", 4, 0)),
            "general.alignment is 0",
        ),
    ],
)
def test_hostile_counts_and_types_are_refused_at_once(
    tmp_path: Path, content: bytes, message: str
) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFileError) as caught:
        load_model(path)
    assert message in str(caught.value)


def test_random_damage_is_refused_or_read_but_never_crashes(tmp_path: Path) -> None:
    whole = write_gguf(tmp_path / "m.gguf", oracle()).read_bytes()
    path = tmp_path / "damaged.gguf"
    generator = np.random.default_rng(0)
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(int(generator.integers(1, 4))):
            damaged[int(generator.integers(0, 3000))] = int(generator.integers(0, 256))
        path.write_bytes(damaged)
        with contextlib.suppress(ModelFileError):  # anything else fails the test
            GGUFFile(path).close()
