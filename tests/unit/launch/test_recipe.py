"""Recipes: what is read, what is overridden, and what is refused."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import TrainingArguments

from data import Data
from pretrain_fsdp2 import Training
from recipe import Recipe, model_config, read_recipe, section_of
from sdp_deepspeed.config import KEY
from tests.helpers.programs import error_of
from tests.helpers.repository import ROOT
from train_vision import Images

SECTIONS = ("model", "data", "training", "deepspeed")
MINIMAL: dict[str, Any] = {
    "model": {"model_type": "llama", "hidden_size": 64},
    "data": {"sources": [{"path": "standard_library"}], "sequence_length": 32},
    "training": {"output_dir": "run", "max_steps": 5},
    "deepspeed": {"zero_optimization": {"stage": 1}, KEY: {"coverage": 0.5}},
}

Read = Callable[..., Recipe]


@pytest.fixture
def read(tmp_path: Path) -> Read:
    def read_from(*overrides: str, **sections: Any) -> Recipe:
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump(MINIMAL | sections))
        return read_recipe("", SECTIONS, [str(path), *overrides])

    return read_from


def test_operators_are_compiled_in_a_folder_of_the_environment(
    read: Read, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", "given")
    read()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == "given"
    del os.environ["TORCH_EXTENSIONS_DIR"]
    read()
    assert os.environ["TORCH_EXTENSIONS_DIR"] == str(tmp_path / "torch_extensions")


def test_overrides_reach_every_section(read: Read) -> None:
    recipe = read(
        "training.learning_rate=3e-4", "deepspeed.zero_optimization.stage=2", "sdp.coverage=0.25", "model.x.y=1"
    )
    assert recipe.training["learning_rate"] == 3e-4
    assert recipe.deepspeed == {"zero_optimization": {"stage": 2}, KEY: {"coverage": 0.25}}
    assert recipe.model["x"] == {"y": 1}


@pytest.mark.parametrize(("word", "enabled"), [("off", False), ("on", True)])
def test_sdp_off_disables_the_block(read: Read, word: str, enabled: bool) -> None:
    assert read(f"sdp={word}").block == {"coverage": 0.5, "enabled": enabled}


def test_words_stay_words(read: Read) -> None:
    """YAML 1.1 would take `no` for a boolean."""
    recipe = read("training.eval_strategy=no", "training.bf16=true")
    assert (recipe.training["eval_strategy"], recipe.training["bf16"]) == ("no", True)


def test_the_launchers_local_rank_is_accepted(read: Read) -> None:
    assert read("--local_rank=1", "training.max_steps=7").training["max_steps"] == 7


def test_a_deepspeed_file_is_read_beside_the_recipe(read: Read, tmp_path: Path) -> None:
    (tmp_path / "ds.json").write_text(json.dumps({KEY: {"coverage": 0.75}}))
    assert read("sdp.seed=3", deepspeed="ds.json").block == {"coverage": 0.75, "seed": 3}


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["trainin.max_steps=1"], "did you mean 'training'"),
        (["training.max_steps"], "expected key=value"),
        (["sdp.coverige=0.5"], "coverage"),
        (["deepspeed=missing.json"], "missing.json"),
        (["training.max_steps.more=1"], "expected a mapping"),
        (["data.sources=[{path: x"], "data.sources"),
        (["deepspeed=null"], "section deepspeed: got None"),
    ],
)
def test_wrong_overrides_are_refused(
    read: Read, capsys: pytest.CaptureFixture[str], overrides: list[str], said: str
) -> None:
    assert said in error_of(capsys, lambda: read(*overrides))


def test_only_the_first_rank_says_why(
    read: Read, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setattr("recipe.time.sleep", lambda _: None)
    assert error_of(capsys, lambda: read("training.max_steps")) == ""


@pytest.mark.parametrize(
    ("kind", "values", "said"),
    [
        (TrainingArguments, {"max_stepz": 1}, "did you mean 'max_steps'"),
        (TrainingArguments, {"max_steps": "many"}, "training.max_steps"),
        (Data, {"sources": [], "sequence_length": 8}, "sources: empty"),
        (Data, {"sources": [{}], "sequence_length": "long"}, "sequence_length"),
        (Data, {"sources": [{"name": "x"}], "sequence_length": 8}, "each needs a path"),
        (Data, {"sources": [{"path": "x", "weight": 0}], "sequence_length": 8}, "a weight above 0"),
        (Data, {"sources": [{"path": "x"}], "sequence_length": 8, "validation_fraction": 1.5}, "between 0 and 1"),
    ],
)
def test_sections_are_checked(
    kind: type, values: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in error_of(capsys, lambda: section_of(kind, values, "training"))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ({"model_type": "lama"}, "did you mean 'llama'"),
        ({"model_type": "llama", "hiden_size": 8}, "did you mean 'hidden_size'"),
        ({"model_type": "llama", "hidden_size": "wide"}, "hidden_size"),
        ({"hidden_size": 8}, "expected model_type"),
    ],
)
def test_models_are_checked(read: Read, model: dict[str, Any], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert said in error_of(capsys, lambda: model_config(read(model=model)))


def test_a_model_may_have_the_name_of_a_config(read: Read, tmp_path: Path) -> None:
    model_config(read()).save_pretrained(tmp_path / "saved")
    found = model_config(read(model={"name": str(tmp_path / "saved"), "num_hidden_layers": 3}), vocab_size=11)
    assert (found.hidden_size, found.num_hidden_layers, found.vocab_size) == (64, 3, 11)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "recipes").glob("*.yaml")), ids=lambda path: path.stem)
def test_our_own_recipes_are_valid(path: Path) -> None:
    """Sections, the block, and the model with its sizes."""
    is_fsdp2 = KEY in yaml.safe_load(path.read_text())
    recipe = read_recipe("", [*SECTIONS[:3], KEY] if is_fsdp2 else SECTIONS, [str(path)])
    assert recipe.block
    if is_fsdp2:
        section_of(Training, recipe.training, "training")
    else:
        section_of(TrainingArguments, recipe.training | {"use_cpu": True}, "training")
    section_of(Data if "sources" in recipe.data else Images, recipe.data, "data")
    model_config(recipe)


def test_a_model_of_timm_is_transformers_wrapper(read: Read, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = read(model={"timm": "resnet18", "model_args": {"drop_path_rate": 0.1}})
    assert recipe.model == {
        "model_type": "timm_wrapper",
        "architecture": "resnet18",
        "model_args": {"drop_path_rate": 0.1},
    }
    monkeypatch.setattr("recipe.is_timm_available", lambda: False)
    with pytest.raises(SystemExit):
        model_config(recipe)
