"""Share of the experts that a token uses, to count FLOPs of mixtures of experts."""

from __future__ import annotations

from fractions import Fraction

from torch import nn

from sdp_deepspeed.architectures.branch import Branch, attribute
from sdp_deepspeed.architectures.registry import branches_of


def active_shares(model: nn.Module) -> dict[str, Fraction]:
    """Share of the elements of each tensor of experts that a token uses, by dense name."""
    shares: dict[str, Fraction] = {}
    for name, layer in model.named_modules():
        for branch in _mixtures(layer):
            assert branch.experts is not None
            body = layer.get_submodule(branch.root)
            num_active = int(attribute(body, branch.experts.num_active))
            prefix = ".".join(filter(None, (name, branch.root, branch.experts.module)))
            shares |= _shares(prefix, body.get_submodule(branch.experts.module), num_active)
    return shares


def _shares(name: str, experts: nn.Module, num_active: int) -> dict[str, Fraction]:
    """Shares for experts that are stacked in one tensor, or are modules in a list."""
    tensors = dict(experts.named_parameters(name))
    if isinstance(experts, nn.ModuleList):
        return {key: Fraction(num_active * (tensor.dim() > 1), len(experts)) for key, tensor in tensors.items()}
    if all(tensor.dim() < 3 for tensor in tensors.values()):
        raise ValueError(
            f"{name!r}: Experts: no parameter has shape [experts, ., .]; name a ModuleList of experts, or a module "
            "that stacks them, or leave Experts out"
        )
    return {key: Fraction(num_active * (tensor.dim() > 2), tensor.shape[0]) for key, tensor in tensors.items()}


def _mixtures(layer: nn.Module) -> list[Branch]:
    """Branches of a layer that are mixtures."""
    return [branch for branch in branches_of(type(layer)) or () if branch.is_in(layer) and has_experts(layer, branch)]


def has_experts(layer: nn.Module, branch: Branch) -> bool:
    """Whether a branch of a layer is a mixture; this may differ between layers of a class."""
    if branch.experts is None:
        return False
    try:
        layer.get_submodule(branch.root).get_submodule(branch.experts.module)
    except AttributeError:
        return False
    return True
