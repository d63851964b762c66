"""How evenly do plans of vision models divide FLOPs, and could any plan do better?

    python benchmarks/balance.py --output benchmarks/results/balance.json

Nothing is trained and no weights are made: plans come from models without storage. Beside each is the best balance that
any table could have, by a search that leaves nothing out (`common/best_balance.py`), and what a plan would have had
that takes every weight to run at as many positions of an image as every other.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository's root
from benchmarks.common.best_balance import best_maximum
from benchmarks.common.provenance import write_result
from sdp_deepspeed.architectures import constrained_branches, locate_branches, unit_costs
from sdp_deepspeed.architectures.image_flops import flops_per_element
from sdp_deepspeed.config import KEY, SubnetworkConfig, parse
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.planner import make_plan, plan_model

_RESNET_18 = {"layer_type": "basic", "depths": [2, 2, 2, 2]}
_SWIN_T = {"depths": [2, 2, 6, 2], "num_heads": [3, 6, 12, 24], "embed_dim": 96}
_HEADS_WHOLE = {"attention": "block", "mlp": "neuron"}
MODELS: dict[str, dict[str, Any]] = {
    "ResNet-18": {"model_type": "resnet", **_RESNET_18, "hidden_sizes": [64, 128, 256, 512]},
    "WideResNet-18, twice as wide": {"model_type": "resnet", **_RESNET_18, "hidden_sizes": [128, 256, 512, 1024]},
    "ResNet-50": {"model_type": "resnet"},
    "Swin-T": {"model_type": "swin", **_SWIN_T},
    "Swin-T, images of 32": {"model_type": "swin", **_SWIN_T, "image_size": 32, "patch_size": 1, "window_size": 4},
}
STRATEGIES: dict[str, dict[str, Any]] = {
    "block": {"strategy": "block"},
    "neuron": {"strategy": "neuron"},
    "blocks of attention, neurons": {"strategy": _HEADS_WHOLE},
}
COVERAGES = (0.25, 0.5, 0.75)


def build(shape: dict[str, Any]) -> nn.Module:
    """Without storage."""
    config = transformers.AutoConfig.for_model(**shape)
    with torch.device("meta"):
        model: nn.Module = transformers.AutoModelForImageClassification.from_config(config)
    return model


def records(k: int) -> Iterator[dict[str, Any]]:
    for name, shape in MODELS.items():
        model = build(shape)
        parts = {branch.description.name for branch in locate_branches(model)}
        for strategy, choice in STRATEGIES.items():
            if isinstance(choice["strategy"], dict) and not parts >= choice["strategy"].keys():
                continue
            for coverage in COVERAGES:
                said = {"model": name, "strategy": strategy, "subnetworks": k, "coverage": coverage}
                yield said | measure(model, choice | {"coverage": coverage}, k)


def measure(model: nn.Module, choice: dict[str, Any], k: int) -> dict[str, Any]:
    """Of one plan: max / mean over subnetworks of FLOPs and bytes, and what bounds them."""
    block = parse({KEY: choice | {"subnetworks": k}})
    assert block is not None
    try:
        plan, _ = plan_model(model, block, k)
    except ValueError as refusal:
        return {"refused": f"{refusal}"}
    costs = unit_costs(model, plan.units)
    flops = [cost.flops for cost in costs]
    total, p = image_flops(model), len(plan.holders[0])
    most, mean, shared = max(load_of(plan, flops)), sum(flops) * p / k, total - sum(flops)
    best = best_maximum(flops, k, p)
    num_bytes = [cost.num_bytes for cost in costs]
    return {
        "units": len(plan.units),
        "hash": plan.hash,
        "shared": shared / total,
        "flops": most / mean,
        "best": max(1.0, max(flops) / mean) if best is None else best / mean,
        "proof": "no unit is smaller, nor the mean" if best is None else "search",
        "flops_with_shared": (most + shared) / (mean + shared),
        "flops_by_weights_alone": max(load_of(plan_by_weights(model, plan, block), flops)) / mean,
        "bytes": max(load_of(plan, num_bytes)) * k / (sum(num_bytes) * p),
        "bytes_bound": max(1.0, max(num_bytes) * k / (sum(num_bytes) * p)),
    }


def load_of(plan: Plan, amounts: Sequence[int]) -> list[int]:
    """Of each subnetwork."""
    return [sum(amounts[unit] for unit in plan.units_of(one)) for one in range(plan.num_subnetworks)]


def image_flops(model: nn.Module) -> int:
    """Of all weights for one image, shared ones included."""
    per_element = flops_per_element(model)
    assert per_element is not None
    return int(sum(per_element[name] * parameter.numel() for name, parameter in model.named_parameters()))


def plan_by_weights(model: nn.Module, plan: Plan, block: SubnetworkConfig) -> Plan:
    """The plan that takes all weights of matrices and kernels to cost the same."""
    matrices = {name: parameter.shape for name, parameter in model.named_parameters() if parameter.dim() > 1}
    costs = unit_costs(model, plan.units)
    alike = [
        replace(
            cost, flops=sum(2 * p.num_elements(matrices[p.parameter]) for p in unit.pieces if p.parameter in matrices)
        )
        for unit, cost in zip(plan.units, costs, strict=True)
    ]
    branches, k = constrained_branches(plan.units, locate_branches(model)), plan.num_subnetworks
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that it is not connected, which the other plan's warning says
        return make_plan(plan.units, alike, [*map(len, plan.holders)], block, k, k, branches)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0], allow_abbrev=False)
    parser.add_argument("--output", type=Path, required=True, help="where the raw figures go")
    parser.add_argument("--subnetworks", type=int, nargs="+", default=[4, 8], help="k (default 4 8)")
    options = parser.parse_args(arguments)
    found = []
    for k in options.subnetworks:
        for record in records(k):
            said = (record.get(key, "refused") for key in ("model", "strategy", "subnetworks", "coverage", "flops"))
            print(*said, sep=", ", file=sys.stderr)
            found.append(record)
    asked: dict[str, object] = {"subnetworks": options.subnetworks}
    write_result(str(options.output), {"what": "balance", "models": MODELS, "arguments": asked, "records": found})


if __name__ == "__main__":
    main()
