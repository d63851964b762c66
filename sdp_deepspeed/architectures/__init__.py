"""Where a model's residual branches are: one small description per layer class.

A user's own model takes three lines:

    from sdp_deepspeed import architectures
    architectures.register("my_package.model.MyBlock", architectures.Branch("attention", norm="ln1", body="attn"),
                           architectures.Branch("mlp", norm="ln2", body="ff"))

The described layer must compute `x + body(norm(x))` for each branch, in any order or in parallel; whatever
lies between `body` and the addition (dropout) is named in `after`.
"""

from .branch import Branch
from .decoders import DECODERS
from .registry import branches_of, register
from .sites import Site, find_sites, unit_costs, units_of_sites

for _layer_class, _branches in DECODERS.items():
    register(_layer_class, *_branches)

__all__ = ["Branch", "Site", "branches_of", "find_sites", "register", "unit_costs", "units_of_sites"]
