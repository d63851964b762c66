"""Residual branches of models, derived from a traced pass.

trace.py records a forward pass, streams.py finds what is added to residual streams, derive.py the modules that compute
it, and cells.py its neurons and heads; masking/proof.py proves them. located_branch.py has the branches of a model, and
refuses one without any, with instructions.

A layer whose forward pass cannot be traced is described:

    from sdp_deepspeed import architectures
    architectures.register("my_package.model.MyBlock", architectures.Branch("attention", norm="ln1", body="attn"),
                           architectures.Branch("mlp", norm="ln2", body="ff"))

The layer must compute `x + after(body(norm(x)))` for each branch, one after the other or in parallel. For the neuron
strategy, a branch also names the layers that its neurons or heads run through:

    inner=architectures.InnerLayers((architectures.Cut("up", dim=0), architectures.Cut("down", dim=1, is_output=True)))
"""

from sdp_deepspeed.architectures.branch import CROSS_ATTENTION, Branch, Cut, InnerLayers
from sdp_deepspeed.architectures.located_branch import LocatedBranch, locate_branches
from sdp_deepspeed.architectures.registry import branches_of, register

__all__ = [
    "CROSS_ATTENTION",
    "Branch",
    "Cut",
    "InnerLayers",
    "LocatedBranch",
    "branches_of",
    "locate_branches",
    "register",
]
