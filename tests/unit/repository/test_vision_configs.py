"""The JSON files for images are accepted, plan what their names say, and fit the data that they are for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from configs import make
from configs.vision_recipes import FAMILIES, NUM_WORKERS, vision_recipes
from sdp_deepspeed.config import MODES, parse
from sdp_deepspeed.support.refusals import refuse_unsupported, without_effect
from sdp_deepspeed.training.forecast_settings import micro_steps
from sdp_deepspeed.vision.config import KNOWN
from sdp_deepspeed.vision.shapes import full_shape, model_without_storage, try_model
from tests.helpers.repository import ROOT

FOLDER = ROOT / "configs" / "vision"
DATA_OF = {"resnet50_imagenet": "imagenet", "digits": "digits"}
MODELS = sorted((FOLDER / "models").glob("*.json"))


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def test_recipes_are_what_the_table_says() -> None:
    texts = make.vision_files()
    assert {path: path.read_text() for path in (FOLDER / "recipes").glob("*.json")} == texts
    assert len(texts) == len(FAMILIES) * len(MODES)


@pytest.mark.parametrize(("name", "config"), [pytest.param(*recipe, id=recipe[0]) for recipe in vision_recipes()])
def test_a_recipe_is_what_its_name_says(name: str, config: dict[str, Any]) -> None:
    block = parse(config)
    assert block is not None
    refuse_unsupported(block, config)
    assert without_effect(block, config) == []
    _, regime, strategy, _ = name.split("-")
    assert (block.regime, block.strategy) == (regime, strategy)
    micro_batch, accumulation = micro_steps(config, NUM_WORKERS)
    assert micro_batch * accumulation * NUM_WORKERS == config["train_batch_size"]


@pytest.mark.parametrize("path", MODELS, ids=lambda path: path.stem)
def test_a_model_takes_the_images_that_it_is_for(path: Path) -> None:
    known = KNOWN[DATA_OF.get(path.stem, "cifar10")]
    try_model(full_shape(read(path), [str(number) for number in range(10)], known.image_size), known.image_size)


def test_sizes_are_those_of_the_literature() -> None:
    def count(name: str, classes: int, size: int) -> int:
        shape = full_shape(read(FOLDER / "models" / f"{name}.json"), [str(n) for n in range(classes)], size)
        return sum(parameter.numel() for parameter in model_without_storage(shape).parameters())

    assert count("resnet18", 10, 32) == 11_173_962
    assert count("resnet50_imagenet", 1000, 224) == 25_557_032
    assert count("wide_resnet18", 10, 32) == pytest.approx(4 * count("resnet18", 10, 32), rel=0.01)
    assert count("swin_tiny", 10, 32) == pytest.approx(27.5e6, rel=0.01), "without the 1000 classes of ImageNet"


def test_the_digits_run_is_accepted() -> None:
    config = read(FOLDER / "digits.json")
    block = parse(config)
    assert block is not None
    refuse_unsupported(block, config)
