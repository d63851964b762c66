"""Where a model's residual branches are: one small description per layer class.

A user's own model takes three lines:

    from sdp_deepspeed import architectures
    architectures.register("my_package.model.MyBlock", architectures.Branch("attention", norm="ln1", body="attn"),
                           architectures.Branch("mlp", norm="ln2", body="ff"))

The described layer must compute `x + body(norm(x))` for each branch, in any order or in parallel; whatever
lies between `body` and the addition (dropout) is named in `after`. For the neuron strategy a branch also names the
layers that its neurons or heads run through:

    inner=architectures.InnerLayers((architectures.Cut("up", dim=0), architectures.Cut("down", dim=1, is_output=True)))
"""

from sdp_deepspeed.architectures.branch import Branch, Cut, Experts, InnerLayers
from sdp_deepspeed.architectures.families import FAMILIES, is_of_package
from sdp_deepspeed.architectures.located_branch import LocatedBranch, locate_branches
from sdp_deepspeed.architectures.registry import branches_of, register
from sdp_deepspeed.architectures.strategies import (
    branches_of_units,
    constrained_branches,
    layers_of_units,
    unit_costs,
    units_of_branches,
)

for _layer_class, _description in FAMILIES.items():
    register(_layer_class, *_description)

__all__ = [
    "Branch",
    "Cut",
    "Experts",
    "InnerLayers",
    "LocatedBranch",
    "branches_of",
    "branches_of_units",
    "constrained_branches",
    "is_of_package",
    "layers_of_units",
    "locate_branches",
    "register",
    "unit_costs",
    "units_of_branches",
]
