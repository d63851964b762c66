"""What users get wrong with neurons and heads: each message names the place, the value and a way out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sdp_deepspeed.masking.mask import Mask
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer

from sdp_deepspeed import architectures
from sdp_deepspeed.architectures import Branch, locate_branches, registry
from sdp_deepspeed.config import KEY, parse
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.planner import plan_model
from tests.helpers import models
from tests.helpers.masked_modules import infos
from tests.helpers.more_models import ALL_SPECIMENS
from tests.helpers.rank_models import mask_of


def start(model: nn.Module, size: int = 2, **block: Any) -> Mask:
    """What the engine does with rank 0's module."""
    config = parse({KEY: {"holders": 1} | block})
    assert config is not None
    plan, _ = plan_model(model, config, size)
    return mask_of(model, locate_branches(model), infos(model), plan, 0, scales=config.dense_branch_scale == "coverage")


def test_too_few_holders_for_the_heads() -> None:
    """2 key/value heads with one holder each do not reach 3 workers; twice as many holders do."""
    with pytest.raises(ValueError, match=r"layers\.0\.attention'.*2 units with 1 holders.*3.*2 or more holders.*block"):
        start(models.llama(), 3, strategy="neuron")
    start(models.llama(), 3, strategy="neuron", holders=2)
    start(models.llama(), 3, strategy={"attention": "block", "mlp": "neuron"})


def test_unknown_parts_and_strategies() -> None:
    with pytest.raises(ValueError, match=r"strategy: 'mpl' is no part of this model.*'attention', 'mlp'"):
        start(models.llama(), strategy={"attention": "neuron", "mpl": "neuron"})
    with pytest.raises(ValueError, match=r"strategy: got .*neurons.*expected .*\"neuron\""):
        start(models.llama(), strategy={"attention": "neurons"})


class Own(nn.Module):
    """Two layers of a user."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.ff = nn.LayerNorm(4), nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.ff(self.norm(x))

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(self.Layer(), self.Layer())


def test_a_branch_whose_neurons_are_not_described(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_DESCRIPTIONS", dict(registry._DESCRIPTIONS))
    architectures.register(Own.Layer, Branch("mlp", norm="norm", body="ff"))
    with pytest.raises(ValueError, match=r"strategy.*'layers\.0\.mlp' cannot.*no neurons or heads.*InnerLayers.*block"):
        start(Own(), strategy="neuron")
    with pytest.raises(ValueError, match=r"dense_branch_scale.*'mlp' names no output projection.*InnerLayers"):
        start(Own(), dense_branch_scale="coverage")
    cuts = (architectures.Cut("0", 0), architectures.Cut("2", 1, is_output=True))
    architectures.register(Own.Layer, Branch("mlp", norm="norm", body="ff", inner=architectures.InnerLayers(cuts)))
    for strategy in ("neuron", "block"):
        start(Own(), strategy=strategy, dense_branch_scale="coverage")


MLPS_ONLY = [{"units": "mlp", "holders": 1}]


@pytest.mark.parametrize("strategy", ["neuron", "block"])
def test_a_scale_before_a_norm_is_refused_where_it_is_one(monkeypatch: pytest.MonkeyPatch, strategy: str) -> None:
    """Gemma 2 norms what a branch adds. What every worker holds is scaled by 1."""
    options: dict[str, Any] = {"strategy": strategy, "dense_branch_scale": "coverage"}
    words = r"dense_branch_scale: .*post_{}_layernorm .*normalizes what 'model\.layers\.0\.{}'"
    with pytest.raises(ValueError, match=words.format("attention", "attention")):
        start(ALL_SPECIMENS["gemma2"].build(), **options)
    with pytest.raises(ValueError, match=words.format("feedforward", "mlp")):
        start(ALL_SPECIMENS["gemma2"].build(), holders=MLPS_ONLY, **options)
    assert start(ALL_SPECIMENS["gemma2"].build(), **options | {"holders": 2}).parts == []
    monkeypatch.setattr(registry, "_DESCRIPTIONS", dict(registry._DESCRIPTIONS))
    attention, mlp = architectures.branches_of(Gemma2DecoderLayer) or ()
    architectures.register(Gemma2DecoderLayer, attention, replace(mlp, after=()))
    start(ALL_SPECIMENS["gemma2"].build(), holders=MLPS_ONLY, **options)


def mutilated(folder: Path, model: nn.Module, change: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """The config keys for a plan of two workers that was changed by hand; the hash is removed, as it says."""
    config = parse({KEY: {"holders": 1, "strategy": "neuron"}})
    assert config is not None
    data = plan_model(model, config, 2)[0].to_json()
    del data["hash"]
    change(data)
    path = folder / "plan.json"
    path.write_text(json.dumps(data))
    Plan.load(path)  # by itself it is a plan
    return {"strategy": "neuron", "assignment": str(path)}


def drop(suffix: str, start: int | None = None) -> Callable[[dict[str, Any]], None]:
    """Take one tensor's pieces, or the one that begins at `start`, out of the first unit."""

    def change(data: dict[str, Any]) -> None:
        unit = data["units"][0]
        kept = [
            piece
            for piece in unit["pieces"]
            if not (piece["parameter"].endswith(suffix) and start in (None, piece["start"]))
        ]
        assert len(kept) < len(unit["pieces"])
        unit["pieces"] = kept

    return change


def shift(data: dict[str, Any]) -> None:
    """Queries that begin in the middle of a head, in all units, so that nothing overlaps."""
    for unit in data["units"]:
        for piece in unit["pieces"]:
            if piece["parameter"].endswith("q_proj.weight"):
                piece["length"] -= 1


def swap(data: dict[str, Any]) -> None:
    """One head's queries with another head's output."""
    one, other = data["units"][0]["pieces"], data["units"][1]["pieces"]
    assert one[0]["parameter"] == other[0]["parameter"]
    one[0], other[0] = other[0], one[0]


def span(data: dict[str, Any]) -> None:
    """A unit of heads of two layers."""
    other = next(unit for unit in data["units"] if "layers.1.attention" in unit["name"])
    data["units"][0]["pieces"] += other["pieces"]
    data["units"].remove(other)


def other_dim(data: dict[str, Any]) -> None:
    """Queries cut along the residual stream."""
    for unit in data["units"]:
        for piece in unit["pieces"]:
            if piece["parameter"].endswith("q_proj.weight"):
                piece["dim"] = 1


@pytest.mark.parametrize(
    ("family", "change", "strange"),
    [
        ("llama", drop("o_proj.weight"), "q_proj"),
        ("llama", drop("k_proj.weight"), "k_proj"),
        ("qwen2", drop("v_proj.bias"), "v_proj.bias"),
        ("gpt2", drop("c_attn.weight", 0), "c_attn.weight"),
        ("gpt2", drop("c_attn.bias"), "c_attn.bias"),
        ("llama", shift, "q_proj"),
        ("llama", swap, "q_proj"),
        ("llama", span, "layers.1"),
        ("llama", other_dim, "q_proj"),
    ],
)
def test_plans_whose_units_are_not_whole_heads(
    tmp_path: Path, family: str, change: Callable[[dict[str, Any]], None], strange: str
) -> None:
    model = models.family(family)
    with pytest.raises(ValueError, match=rf"unit '.*attention\.head_\d' does not take the same.*{strange}"):
        start(model, **mutilated(tmp_path, model, change))


def test_plans_in_which_a_worker_has_no_head(tmp_path: Path) -> None:
    def all_heads_to_worker_1(data: dict[str, Any]) -> None:
        for unit in data["units"]:
            if "layers.0.attention" in unit["name"]:
                unit["holders"] = [1]

    model = models.llama()
    with pytest.raises(ValueError, match=r"subnetwork 0 has no unit of 'model\.layers\.0\.attention'.*at least one"):
        start(model, **mutilated(tmp_path, model, all_heads_to_worker_1))


def test_plans_of_another_model(tmp_path: Path) -> None:
    """Fewer heads: pieces out of range; another family: unknown tensors."""
    block = mutilated(tmp_path, models.SPECIMENS["llama"].build(), lambda data: None)
    with pytest.raises(ValueError, match=r"head_\d.*takes \[16, 24\) of dim 0, but the tensor's shape is \(16, 16\)"):
        start(models.llama(), **block)
    with pytest.raises(ValueError, match=r"has no parameter named 'model\.layers\.0"):
        start(models.family("gpt2"), **block)


def test_plans_that_leave_heads_shared_are_accepted(tmp_path: Path) -> None:
    def share_a_head(data: dict[str, Any]) -> None:
        data["units"] = [unit for unit in data["units"] if not unit["name"].endswith("layers.0.attention.head_2")]

    model = models.SPECIMENS["llama"].build()
    mask = start(model, **mutilated(tmp_path, model, share_a_head))
    assert model.get_parameter("model.layers.0.self_attn.k_proj.weight").shape[0] > 2 * 4 - 1
    assert len(mask.parts) == 4
