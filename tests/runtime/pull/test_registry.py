"""Names, files and folders of models."""

from __future__ import annotations

from pathlib import Path

import pytest

from palmette.errors import ModelNotFound, ModelNotPulled
from palmette.runtime.loading.registry import (
    KnownModel,
    known_models,
    list_models,
    model_path,
    palmette_home,
    resolve_model,
)


def tiny() -> dict[str, KnownModel]:
    model = KnownModel(
        name="tiny",
        description="",
        family="llama",
        licence="",
        file="tiny.gguf",
        sha256="0" * 64,
        size=4,
        parts=(),
    )
    return {"tiny": model}


def test_home_is_taken_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("PALMETTE_HOME", str(tmp_path))
    assert palmette_home() == tmp_path
    monkeypatch.delenv("PALMETTE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert palmette_home() == tmp_path / ".cache" / "palmette"


def test_the_parts_of_every_known_model_make_up_its_file():
    for name, model in known_models().items():
        assert model.name == name
        assert sum(part.size for part in model.parts) == model.size
        assert len(bytes.fromhex(model.sha256)) == 32
        assert "/" not in model.file
        assert model.licence
        assert model.description
    assert {"smollm2-135m", "gemma3-270m"} <= set(known_models())


def test_a_known_name_that_was_pulled_is_its_file(tmp_path):
    models = tiny()
    path = model_path(models["tiny"], home=tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")
    assert resolve_model("tiny", home=tmp_path, models=models) == path


def test_a_known_name_that_was_not_pulled_says_how_to(tmp_path):
    with pytest.raises(ModelNotPulled, match="run `palmette pull tiny` once") as caught:
        resolve_model("tiny", home=tmp_path, models=tiny())
    assert isinstance(caught.value, ModelNotFound)
    assert caught.value.name == "tiny"


def test_an_incomplete_file_does_not_count_as_pulled(tmp_path):
    models = tiny()
    path = model_path(models["tiny"], home=tmp_path)
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GG")
    with pytest.raises(ModelNotPulled):
        resolve_model("tiny", home=tmp_path, models=models)


def test_a_file_and_a_folder_are_themselves(tmp_path):
    file = tmp_path / "some.gguf"
    file.touch()
    assert resolve_model(file) == file
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["smollm", "", "/no/such/file.gguf"])
def test_anything_else_is_refused_with_the_known_names(name):
    with pytest.raises(ModelNotFound, match=r"neither a file or folder.*smollm2-135m"):
        resolve_model(name)


def test_a_known_name_wins_over_a_file_of_that_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("tiny").touch()
    with pytest.raises(ModelNotPulled):
        resolve_model("tiny", home=tmp_path, models=tiny())
    assert resolve_model("./tiny", home=tmp_path, models=tiny()) == Path("tiny")


def test_the_list_says_which_models_are_here(tmp_path):
    listed = list_models(home=tmp_path)
    assert [entry.model.name for entry in listed] == sorted(known_models())
    assert all(entry.path is None for entry in listed)
