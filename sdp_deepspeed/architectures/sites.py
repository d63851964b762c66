"""From a model to its units: each described branch (or layer) with the pieces that belong to it."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from ..units import Piece, Unit, UnitCost
from .branch import Branch
from .registry import branches_of, described


@dataclass(frozen=True)
class Site:
    """A residual branch in a live model.

    Args:
        layer: dense name of its layer, as in `named_modules()`.
        branch: the description.
        pieces: all of the branch's parameters and buffers, whole.
    """

    layer: str
    branch: Branch
    pieces: tuple[Piece, ...]

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.branch.name}"

    @property
    def modules(self) -> tuple[str, ...]:
        """Dense module names in the order in which they run."""
        return tuple(f"{self.layer}.{name}" for name in self.branch.modules)


def find_sites(model: nn.Module) -> list[Site]:
    """All residual branches of the described layers, in model order.

    Raises:
        ValueError: no layer is described, a described submodule is missing, or a branch shares a tensor with
            another part of the model.
    """
    sites = []
    for name, module in model.named_modules():
        for branch in branches_of(type(module)) or ():
            sites.append(Site(name, branch, _pieces(model, name, module, branch)))
    if not sites:
        raise ValueError(
            f"{type(model).__name__} has no layer whose residual branches are known; known are "
            f"{', '.join(described())}. Describe yours with sdp_deepspeed.architectures.register (see its docstring)"
        )
    _refuse_tied(model, sites)
    return sites


def _pieces(model: nn.Module, layer_name: str, layer: nn.Module, branch: Branch) -> tuple[Piece, ...]:
    pieces = []
    for path in branch.modules:
        try:
            module = layer.get_submodule(path)
        except AttributeError:
            raise ValueError(
                f"{layer_name} ({type(layer).__name__}) has no submodule {path!r}, which the description of its "
                f"branch {branch.name!r} names; its submodules are {[name for name, _ in layer.named_children()]}"
            ) from None
        prefix = f"{layer_name}.{path}"
        pieces += [Piece(name, None, 0, p.numel()) for name, p in module.named_parameters(prefix)]
        pieces += [Piece(name, None, 0, b.numel(), "buffer") for name, b in module.named_buffers(prefix)]
    return tuple(pieces)


def _refuse_tied(model: nn.Module, sites: Sequence[Site]) -> None:
    owners: dict[int, str] = {}
    inside = {piece.parameter: site.name for site in sites for piece in site.pieces}
    tensors: Iterable[tuple[str, torch.Tensor]] = itertools.chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    for name, tensor in tensors:
        place = inside.get(name, "the shared part")
        if owners.setdefault(id(tensor), place) != place:
            raise ValueError(
                f"{name!r} is the same tensor in {owners[id(tensor)]} and in {place}: a unit must not share "
                "tensors; untie them, or do not describe this layer"
            )


def units_of_sites(sites: Sequence[Site], *, granularity: str, shared: Iterable[str]) -> list[Unit]:
    """Units of the block strategy.

    Args:
        granularity: "sublayer" makes each branch a unit, "layer" all branches of one layer together.
        shared: regular expressions; a unit whose name or whose parameters they match stays shared.

    Raises:
        ValueError: a pattern that matches no unit's parameter, or only a part of a unit's parameters.
    """
    grouped: dict[str, list[Piece]] = {}
    for site in sites:
        grouped.setdefault(site.name if granularity == "sublayer" else site.layer, []).extend(site.pieces)
    units = [Unit(name, tuple(pieces)) for name, pieces in grouped.items()]
    patterns = {pattern: re.compile(pattern) for pattern in shared}
    for pattern, compiled in patterns.items():
        _check_pattern(pattern, compiled, units)
    return [unit for unit in units if not any(_matches(compiled, unit) for compiled in patterns.values())]


def _matches(pattern: re.Pattern[str], unit: Unit) -> bool:
    if pattern.search(unit.name):
        return True
    return any(pattern.search(piece.parameter) for piece in unit.pieces if piece.kind == "parameter")


def _check_pattern(pattern: str, compiled: re.Pattern[str], units: Sequence[Unit]) -> None:
    where = "subnetwork_data_parallel.shared"
    if not any(_matches(compiled, unit) for unit in units):
        raise ValueError(
            f"{where}: {pattern!r} matches no parameter of any unit; unit names are like {units[0].name!r}"
        )
    for unit in units:
        names = [piece.parameter for piece in unit.pieces if piece.kind == "parameter"]
        left = [name for name in names if not compiled.search(name)]
        if left and len(left) < len(names) and not compiled.search(unit.name):
            raise ValueError(
                f"{where}: {pattern!r} matches only a part of {unit.name!r}, not {left[0]!r}; a block is held as a "
                f"whole, so match its name, for example with {re.escape(unit.name)!r}"
            )


def unit_costs(model: nn.Module, units: Sequence[Unit]) -> list[UnitCost]:
    """Cost of each unit: weights of matrices count 2 FLOPs per token, attention scores are left out.

    Scores grow with the sequence length, which a model does not know; they shift all attention units alike.
    """
    tensors: dict[str, torch.Tensor] = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    return [_cost(unit, tensors) for unit in units]


def _cost(unit: Unit, tensors: dict[str, torch.Tensor]) -> UnitCost:
    num_parameters = num_bytes = flops = 0
    for piece in unit.pieces:
        tensor = tensors[piece.parameter]
        elements = piece.num_elements(tensor.shape)
        num_bytes += elements * tensor.element_size()
        if piece.kind == "parameter":
            num_parameters += elements
            flops += 2 * elements if tensor.dim() > 1 else 0
    return UnitCost(num_parameters, num_bytes, flops)
