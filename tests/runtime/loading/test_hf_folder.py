"""Hugging Face folders: one file or shards, complete or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from palmette.errors import InvalidRequest, ModelFileError
from palmette.runtime.attention import TorchAttention
from palmette.runtime.kernels.cpu import extension
from palmette.runtime.loading import load_model
from tests.runtime.loading.files import write_folder
from tests.runtime.models.tiny import expected_logits, make_batch, make_pool, oracle, random_ids

INDEX = "model.safetensors.index.json"


def logits_of(path: Path) -> torch.Tensor:
    loaded = load_model(path, dtype="float32")
    batch = make_batch([(random_ids(20, 61), 0, list(range(5)))], every_row=True)
    return loaded.model.forward(batch, make_pool(loaded.config))


def assert_loads_as(path: Path, reference: Any) -> None:
    expected = expected_logits(reference, random_ids(20, 61))
    torch.testing.assert_close(logits_of(path), expected, atol=1e-4, rtol=0)


def edit(path: Path, **changes: torch.Tensor | None) -> None:
    """Changes tensors of a safetensors file; None removes one. Dots in names are spelled `__`."""
    tensors = load_file(path)
    for name, tensor in changes.items():
        tensors.pop(name.replace("__", "."), None)
        if tensor is not None:
            tensors[name.replace("__", ".")] = tensor
    save_file(tensors, path, {"format": "pt"})


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    path = write_folder(tmp_path / "sharded", oracle(), max_shard_size="20KB")
    assert len(list(path.glob("model-*.safetensors"))) >= 3
    return path


def test_one_file_and_shards_give_the_same_logits(tmp_path: Path, sharded: Path) -> None:
    reference = oracle()
    assert_loads_as(write_folder(tmp_path / "one", reference), reference)
    assert_loads_as(sharded, reference)


def test_a_mistral_folder_loads(tmp_path: Path) -> None:
    reference = oracle("MistralForCausalLM", sliding_window=None)
    assert_loads_as(write_folder(tmp_path / "m", reference), reference)


def test_half_precision_weights_are_widened_exactly(tmp_path: Path) -> None:
    reference = oracle()
    path = write_folder(tmp_path / "m", reference)
    halves = {name: weight.bfloat16() for name, weight in reference.state_dict().items()}
    save_file(halves, path / "model.safetensors", {"format": "pt"})
    reference.load_state_dict({name: half.float() for name, half in halves.items()})
    assert_loads_as(path, reference)


def test_generation_defaults_and_stop_ids_come_from_both_files(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "m", oracle())
    (path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 9], "temperature": 0.6, "top_k": 0})
    )
    config = load_model(path, dtype="float32").config
    assert config.stop_token_ids == (2, 9)
    assert config.generation_defaults == {"temperature": 0.6, "top_k": -1}


def test_a_missing_shard_is_named(sharded: Path) -> None:
    second = sorted(sharded.glob("model-*.safetensors"))[1]
    second.unlink()
    with pytest.raises(ModelFileError, match=f"{second.name}: is missing"):
        load_model(sharded)


def test_a_shard_cut_to_half_is_named(sharded: Path) -> None:
    second = sorted(sharded.glob("model-*.safetensors"))[1]
    second.write_bytes(second.read_bytes()[: second.stat().st_size // 2])
    with pytest.raises(ModelFileError, match=f"{second.name}: is damaged or truncated"):
        load_model(sharded)


def test_a_tensor_that_its_shard_lacks_is_named_with_the_shard(sharded: Path) -> None:
    shard = sharded / json.loads((sharded / INDEX).read_text())["weight_map"]["model.norm.weight"]
    edit(shard, model__norm__weight=None)
    with pytest.raises(ModelFileError, match=f"{shard.name}: tensor model.norm.weight is missing"):
        load_model(sharded)


def test_a_tensor_in_a_shard_that_the_index_does_not_list_is_refused(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[0]
    edit(shard, stray=torch.ones(2))
    with pytest.raises(ModelFileError, match=r"has tensor stray, which .* does not place here"):
        load_model(sharded)


def test_a_tensor_that_nothing_lists_is_missing(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "m", oracle())
    edit(path / "model.safetensors", model__layers__1__mlp__up_proj__weight=None)
    with pytest.raises(
        ModelFileError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight is missing"
    ):
        load_model(path)


def test_an_unknown_tensor_is_refused_and_rotary_buffers_are_not(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "m", oracle())
    buffer = {"model__layers__0__self_attn__rotary_emb__inv_freq": torch.ones(4)}
    edit(path / "model.safetensors", **buffer)
    assert_loads_as(path, oracle())
    edit(path / "model.safetensors", model__layers__0__self_attn__q_norm__weight=torch.ones(8))
    with pytest.raises(ModelFileError, match=r"does not use: model\.layers\.0\.self_attn\.q_norm"):
        load_model(path)


def test_a_tied_head_may_be_in_the_file_if_it_equals_the_embedding(tmp_path: Path) -> None:
    reference = oracle(tie_word_embeddings=True)
    path = write_folder(tmp_path / "m", reference)
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    assert_loads_as(path, reference)
    embedding = reference.state_dict()["model.embed_tokens.weight"]
    edit(path / "model.safetensors", lm_head__weight=embedding.clone())
    assert_loads_as(path, reference)
    edit(path / "model.safetensors", lm_head__weight=embedding + 1)
    with pytest.raises(ModelFileError, match=r"lm_head\.weight differs"):
        load_model(path)


def test_an_untied_head_is_used_and_its_absence_refused(tmp_path: Path) -> None:
    reference = oracle(tie_word_embeddings=False)
    path = write_folder(tmp_path / "m", reference)
    assert_loads_as(path, reference)
    edit(path / "model.safetensors", lm_head__weight=None)
    with pytest.raises(ModelFileError, match=r"tensor lm_head\.weight is missing"):
        load_model(path)


def test_the_nested_text_config_decides_about_the_head(tmp_path: Path) -> None:
    reference = oracle(tie_word_embeddings=False)
    path = write_folder(tmp_path / "m", reference)
    config = json.loads((path / "config.json").read_text())
    del config["tie_word_embeddings"]
    config["text_config"] = {"tie_word_embeddings": False}
    (path / "config.json").write_text(json.dumps(config))
    assert_loads_as(path, reference)


def test_a_tensor_of_integers_is_refused(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "m", oracle())
    edit(path / "model.safetensors", model__norm__weight=torch.ones(32, dtype=torch.int8))
    with pytest.raises(ModelFileError, match=r"tensor model\.norm\.weight is of type I8"):
        load_model(path)


def test_a_folder_of_pickles_is_refused_by_name(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "m", oracle())
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    with pytest.raises(ModelFileError, match=r"pytorch_model\.bin.*never loaded"):
        load_model(path)
    (path / "pytorch_model.bin").unlink()
    with pytest.raises(ModelFileError, match=r"has neither model\.safetensors nor"):
        load_model(path)


@pytest.mark.parametrize("file", ["../outside.safetensors", "/etc/passwd", "..", 7])
def test_an_index_cannot_point_out_of_its_folder(sharded: Path, file: Any) -> None:
    edit_json(sharded / INDEX, weight_map={"model.norm.weight": file})
    with pytest.raises(ModelFileError, match="which is not a file name"):
        load_model(sharded)


@pytest.mark.parametrize(
    ("content", "message"),
    [("{", "is not JSON"), ("[1]", "is not a JSON object"), ("[" * 100_000, "is not JSON")],
)
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = write_folder(tmp_path / "m", oracle())
    (path / "config.json").write_text(content)
    with pytest.raises(ModelFileError, match=f"config.json: {message}"):
        load_model(path)


def test_a_folder_without_a_config_and_a_file_of_another_kind_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFileError, match=r"has no config\.json"):
        load_model(tmp_path)
    other = tmp_path / "model.pth"
    other.write_bytes(b"x")
    with pytest.raises(ModelFileError, match=r"is neither a \.gguf file nor a folder"):
        load_model(other)
    with pytest.raises(ModelFileError, match="there is no such file or folder"):
        load_model(tmp_path / "absent.gguf")


def test_an_unknown_number_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidRequest, match="auto, float32, bfloat16, got 'int3'"):
        load_model(tmp_path, dtype="int3")


def test_kernels_that_are_unknown_or_cannot_compute_the_model_are_refused(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "m", oracle())  # of a vocabulary of 61
    with pytest.raises(InvalidRequest, match="kernels must be one of auto, cpu, torch, got 'gpu'"):
        load_model(path, kernels="gpu")  # type: ignore[arg-type]
    with pytest.raises(InvalidRequest, match="kernels='cpu' cannot be used: ") as refused:
        load_model(path, kernels="cpu")
    assert refused.value.param == "kernels"
    chosen = load_model(path, kernels="auto")
    assert chosen.kernels == "torch"
    assert chosen.kernels_reason != "asked for"
    assert load_model(path).kernels_reason == chosen.kernels_reason
    assert load_model(path, kernels="torch").kernels_reason == "torch was asked for"


@pytest.mark.skipif(extension() is None, reason="the extension was not built")
def test_kernels_of_our_own_compute_a_folder(tmp_path: Path) -> None:
    model = oracle(vocab_size=64, hidden_size=64, intermediate_size=96)
    path = write_folder(tmp_path / "m", model)
    own, torchs = (
        load_model(path, dtype="float32", kernels=kernels) for kernels in ("auto", "torch")
    )
    assert own.kernels in extension().available()
    batch = make_batch([([1, 5, 9, 13, 4], 0, [0, 1])], every_row=True)
    expected = torchs.model.forward(batch, make_pool(torchs.config))
    assert torch.allclose(own.model.forward(batch, make_pool(own.config)), expected, atol=1e-4)
    asked = load_model(path, kernels="cpu")
    assert asked.kernels_reason == "asked for"
    assert "bfloat16" in asked.dtype_reason
    with pytest.raises(InvalidRequest, match="attention or linear maps of torch were asked for"):
        load_model(path, kernels="cpu", attention=TorchAttention())


@pytest.mark.parametrize("device", ["abacus", "meta", "cuda:99", ""])
def test_a_device_that_is_not_here_is_refused_by_name(tmp_path: Path, device: str) -> None:
    path = write_folder(tmp_path / "m", oracle())
    with pytest.raises(InvalidRequest, match=f"^the device '{device}' cannot be used") as refused:
        load_model(path, device=device)
    assert refused.value.param == "device"


def test_the_choice_of_the_number_type_is_explained(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "m", oracle())
    asked = load_model(path, dtype="bfloat16")
    assert (asked.dtype, asked.dtype_reason) == (torch.bfloat16, "asked for")
    assert asked.num_weight_bytes == 2 * asked.config.num_parameters
    chosen = load_model(path, dtype="auto")
    assert chosen.dtype in (torch.bfloat16, torch.float32)
    assert "bfloat16" in chosen.dtype_reason
    assert chosen.model.dtype == chosen.dtype
