"""The JSON files that the project ships are accepted, and those that are generated are what the table says."""

from __future__ import annotations

import inspect
import json
import re
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from configs import make
from configs.recipes import NUM_WORKERS, SIZES, Recipe, recipes
from sdp_deepspeed.config import KEY, MODES, parse
from sdp_deepspeed.support.refusals import refuse_unsupported, without_effect
from sdp_deepspeed.training.forecast import Forecast
from sdp_deepspeed.training.forecast_settings import micro_steps
from tests.helpers.repository import ROOT

RECIPES = {recipe.name: recipe for recipe in recipes()}
SHIPPED = ("benchmarks", "configs", "launch", "sdp_deepspeed", "tests")
NAMED = re.compile(r"configs/[\w./-]+\.json\b")
DOCUMENTS = [ROOT / "README.md", *(path for name in SHIPPED for path in (ROOT / name).rglob("README.md"))]
READERS = sorted(
    path
    for path in [*(ROOT / "launch").rglob("*"), *DOCUMENTS]
    if path.is_file() and path.suffix != ".pyc" and NAMED.search(path.read_text(encoding="utf-8"))
)


def read(name: str) -> Any:
    return json.loads((ROOT / "configs" / name).read_text())


def test_the_quickstart_is_accepted() -> None:
    config = read("quickstart.json")
    block = parse(config)
    assert block is not None
    refuse_unsupported(block, config)


def test_both_runs_of_the_quickstart_cost_as_many_flops() -> None:
    """By forecast, within 2%: phase by phase, on the worker that computes most."""
    from sdp_deepspeed.training.forecast import forecast

    script = (ROOT / "launch/quickstart.sh").read_text(encoding="utf-8")
    found = re.search(r"workers=(\d+) steps=(\d+) plain_steps=(\d+) ", script)
    assert found is not None
    workers, steps, plain_steps = map(int, found.groups())
    config, data, model = read("quickstart.json"), read("data/quickstart.json"), read("models/tiny.json")
    del config["scheduler"]  # --steps is its length
    schedule = config.pop(KEY)["schedule"]

    def flops(block: dict[str, Any]) -> int:
        length = data["sequence_length"]
        return forecast(model, config | block, num_ranks=workers, sequence_length=length).flops

    ends = [int(phase.get("until", 1) * steps) for phase in schedule]
    parts = zip(schedule, ends, [0, *ends], strict=False)
    ours = sum(flops({KEY: {"coverage": phase["coverage"]}}) * (end - begin) for phase, end, begin in parts)
    assert schedule[-1] == {"coverage": 1.0}, "it ends dense"
    assert ours / (flops({}) * plain_steps) == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("path", sorted((ROOT / "configs" / "data").glob("*.json")), ids=lambda path: path.stem)
def test_data_files_are_accepted(path: Path) -> None:
    from sdp_deepspeed.data import DataConfig

    assert DataConfig.from_dict(json.loads(path.read_text()))


@pytest.mark.parametrize("path", READERS, ids=lambda path: str(path.relative_to(ROOT)))
def test_configs_that_are_named_exist(path: Path) -> None:
    names = NAMED.findall(path.read_text(encoding="utf-8"))
    assert [name for name in names if not (ROOT / name).is_file()] == []


def test_recipes_are_what_the_table_says(capsys: pytest.CaptureFixture[str]) -> None:
    assert make.main(["--check", "--files"]) == 0, capsys.readouterr().out


def test_a_file_that_differs_is_named_and_made_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    changed, lost, foreign = (tmp_path / f"{name}.json" for name in ("changed", "lost", "foreign"))
    changed.write_text("{}")
    foreign.write_text("{}")
    texts = {changed: "[]", lost: "[]"}
    assert make.settle(texts, tmp_path, check=True) == 1
    said = capsys.readouterr().out
    assert all(str(path) in said for path in (changed, lost, foreign))
    assert make.settle(texts, tmp_path, check=False) == 0
    assert {path: path.read_text() for path in tmp_path.iterdir()} == texts
    assert make.settle(texts, tmp_path, check=True) == 0


def test_each_mode_at_each_coverage_a_twin_and_one_to_begin_with() -> None:
    assert len(RECIPES) == len(SIZES) * (1 + 1 + len(MODES) * 4)
    for size in SIZES:
        twin = Recipe(size).config()
        for recipe in RECIPES.values():
            if recipe.size == size:
                assert {key: value for key, value in recipe.config().items() if key != KEY} == twin, recipe.name


@cache
def branches_and_model(size: str) -> tuple[Any, Any]:
    """A model without storage: planning needs its shapes alone."""
    import torch

    from sdp_deepspeed.architectures import locate_branches
    from sdp_deepspeed.training.model import build_model

    with torch.device("meta"):
        model = build_model(read(f"models/{size}.json"), seed=0, dtype=torch.bfloat16)
    return locate_branches(model), model


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_plans_what_its_name_says(name: str) -> None:
    """Regime, strategy and p from the file's own name; exact coverage, balance, and nothing without effect."""
    from sdp_deepspeed.architectures import unit_costs
    from sdp_deepspeed.plan.planner import plan_model

    config = read(f"recipes/{name}.json")
    check_what_deepspeed_reads(config)
    micro, accumulation = micro_steps(config, NUM_WORKERS)
    assert micro * accumulation * NUM_WORKERS == config["train_batch_size"]
    size, *words = name.split("-")
    block = parse(config)
    if words == ["zero1"]:
        assert block is None
        return
    assert block is not None
    refuse_unsupported(block, config)
    assert without_effect(block, config) == []
    branches, model = branches_and_model(size)
    plan, warnings = plan_model(model, block, NUM_WORKERS, branches=branches)
    assert warnings == []
    regime, strategy, holders, *ends = words
    assert (plan.regime, plan.strategy) == (regime, strategy)
    num_layers, num_holders = model.config.num_hidden_layers, int(holders[0])
    for unit, ranks in zip(plan.units, plan.holders, strict=True):
        is_end = bool(ends) and any(f".{layer}." in unit.name for layer in (0, num_layers - 1))
        assert len(ranks) == (NUM_WORKERS if is_end else num_holders), unit.name
    if not ends:
        assert Fraction(plan.coverage) == Fraction(*map(int, holders.split("of")))
    flops = [cost.flops for cost in unit_costs(model, plan.units)]
    work = [sum(flops[unit] for unit in plan.units_of(worker)) for worker in range(NUM_WORKERS)]
    assert max(work) <= 1.05 * sum(work) / NUM_WORKERS, work


def check_what_deepspeed_reads(config: dict[str, Any]) -> None:
    """DeepSpeed ignores top-level keys that it does not know; schedulers and optimizers fail on theirs when they are
    built, which a test of a JSON file never sees."""
    import torch
    from deepspeed.runtime.lr_schedules import WarmupCosineLR

    from tests.unit.test_config import HOST_KEYS

    assert config.keys() <= {*HOST_KEYS, KEY}
    own = {"torch_adam"}  # DeepSpeed's own, about which Adam to take
    assert config["optimizer"]["params"].keys() - own <= inspect.signature(torch.optim.AdamW).parameters.keys()
    assert config["scheduler"]["params"].keys() <= inspect.signature(WarmupCosineLR).parameters.keys()


def example_forecast(recipe: Recipe) -> Forecast:
    """Round figures that a person can check."""
    from sdp_deepspeed.estimate.per_rank import RankEstimate

    gib = 2**30
    rank = RankEstimate(gib, gib, gib, 0, 5 * gib, 0, 0, 2_000_000, buffers=gib)
    flops = 1.248e14 * 3600 if recipe.mode is None else 1.248e14 * 1800  # an hour, and half of one, at 40% of 312e12
    return Forecast(1_000_000, 100_000, rank, 4 * gib, int(flops))


def test_the_tables_of_the_readme() -> None:
    text = make.readme(f"before\n{make.BEGIN}\nstale\n{make.END}\nafter\n", example_forecast)
    assert text.startswith(f"before\n{make.BEGIN}\n### 134M\n")
    assert text.endswith(f"{make.END}\nafter\n")
    assert "stale" not in text
    assert "1M parameters, 200 steps of 100000 tokens: 0.0B tokens" in text
    assert "--steps 200" in text
    assert "| `134M-zero1` | - | 3.00 | 4.00 | 9.00 | 2 | 200.0 | 200 |" in text
    assert "| `1B-backward-neuron-3of8` | 0.375 | 3.00 | 4.00 | 9.00 | 2 | 100.0 | 400 |" in text


SAMPLE = ("134M-zero1", *(f"134M-{mode.regime}-{mode.strategy}-3of8" for mode in MODES))


def test_the_figures_of_the_readme(pytestconfig: pytest.Config) -> None:
    """The plain twin and each mode of the smallest size, as each forecast takes a second or more; all with
    `--full-grid`."""
    chosen = [recipe for name, recipe in RECIPES.items() if name in SAMPLE or pytestconfig.getoption("--full-grid")]
    figures = {recipe.name: make.forecast_recipe(recipe) for recipe in chosen}
    text = make.README.read_text(encoding="utf-8")
    rows = [make.row(recipe, figures[recipe.name], figures[f"{recipe.size.name}-zero1"]) for recipe in chosen]
    assert [row for row in rows if row not in text.splitlines()] == [], "run python configs/make.py"
    assert [name for name in RECIPES if f"| `{name}` |" not in text] == []
