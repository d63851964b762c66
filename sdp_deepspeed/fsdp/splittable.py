"""Which branches can be split into pieces for FSDP2, and why others cannot; nothing is changed here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import nn

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.architectures.active_experts import has_experts
from sdp_deepspeed.architectures.branch import BATCH_NORMS, CONVOLUTIONS, InnerLayers
from sdp_deepspeed.config import KEY
from sdp_deepspeed.fsdp.narrow_copies import has_tensors, stores_in_out
from sdp_deepspeed.masking.compiled import check_forward, replaced_modules

PIECES = "pieces"  # name of a child of a body that is split
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


def check_splittable(model: nn.Module, branches: Iterable[LocatedBranch]) -> None:
    """Refuse what cannot be split.

    Args:
        model: whole.
        branches: of which some ranks lack neurons or heads.

    Raises:
        ValueError: a branch is a mixture of experts, several modules do its work, it has convolutions, or a
            layer has parameters besides those of its neurons or heads that cannot be added to a sum.
    """
    for branch in branches:
        if reason := _reason(model, branch):
            raise ValueError(
                f"{KEY}.strategy: FSDP2 cannot hold neurons or heads of {branch.name!r}, as {reason}; use "
                f'"block" for the part {branch.description.name!r}, or DeepSpeed'
            )
        check_forward(model, replaced_modules(model, branch, twice=True))


def _reason(model: nn.Module, branch: LocatedBranch) -> str:
    description = branch.description
    if description.experts is not None and has_experts(model.get_submodule(branch.layer), description):
        return "it is a mixture of experts"
    if len(branch.bodies) > 1:
        return f"several modules do its work ({', '.join(description.bodies)})"
    body = model.get_submodule(branch.root)
    if hasattr(body, PIECES):
        return f"its body has an attribute {PIECES!r}, which is the name of what it is split into"
    layers = _layers(branch)
    for name in layers:
        if isinstance(layer := body.get_submodule(name), (*CONVOLUTIONS, *BATCH_NORMS)):
            return f"its {name} ({type(layer).__name__}) is of channels, which only DeepSpeed's host divides"
    reasons = [*(_besides(body, branch, name) for name in layers), _in_containers(body, layers, description.inner)]
    return next(filter(None, reasons), "")


def _layers(branch: LocatedBranch) -> list[str]:
    """Paths in the body of the layers that are cut."""
    paths = (tensor.parameter[len(branch.root) + 1 :].rpartition(".")[0] for tensor in branch.cut_tensors)
    return [path for path in dict.fromkeys(paths) if path]


def _besides(body: nn.Module, branch: LocatedBranch, path: str) -> str:
    """Why what a layer has besides what is cut is not a bias of an output that can be added to a sum; else empty."""
    cut = {tensor.parameter[len(branch.root) + 1 :] for tensor in branch.cut_tensors}
    layer = body.get_submodule(path)
    besides = [name for name, _ in layer.named_parameters() if f"{path}.{name}" not in cut]
    if not besides:
        return ""
    outputs = {tensor.cut.module for tensor in branch.cut_tensors if tensor.cut.is_output}
    is_linear = isinstance(layer, nn.Linear) or stores_in_out(layer)
    if besides == ["bias"] and path in outputs and is_linear:
        return ""
    return f"its {path} ({type(layer).__name__}) has {besides[0]!r}, which cannot be added to the sum of its pieces"


def _in_containers(body: nn.Module, layers: Sequence[str], inner: InnerLayers | None) -> str:
    """A container runs its children, and a piece has none that it shares with others."""
    different = {*layers, *(inner.tail if inner else ())}

    def leads_to_one(path: str) -> bool:
        return any(f"{layer}.".startswith(f"{path}.") for layer in different)

    for path, module in body.named_modules():
        if not isinstance(module, _CONTAINERS) or (path and not leads_to_one(path)):
            continue
        for name, child in module.named_children():
            inside = f"{path}.{name}" if path else name
            if has_tensors(child) and not leads_to_one(inside):
                return f"its {inside} ({type(child).__name__}), which is shared, runs between layers that are cut"
    return ""
