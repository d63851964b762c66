"""Forward masking, block strategy: a lacking branch has no storage, runs nothing and adds nothing.

The layer around it is untouched, with its own forward, checkpointing wrapper and hooks. Only the branch's
own modules change class: the norm passes its input on, the body returns `NOTHING`, which any tensor can
be added to at no cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..architectures import Site
from ..plan import Plan
from ..units import Piece, Unit


class _Nothing:
    """The output of a lacking branch: the neutral element of addition, so that `x + NOTHING` is `x` itself."""

    def __add__(self, other: Any) -> Any:
        return other

    __radd__ = __add__

    def __repr__(self) -> str:
        return "NOTHING"


NOTHING = _Nothing()


class _LackingModule(nn.Module):
    """Mixed in before a module's own class; whole again while its unit is present (in the dense model)."""

    _sdp_unit: UnitModules
    _sdp_output: Any

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._sdp_unit.present:
            return super().forward(*args, **kwargs)
        passed_on = next(iter((*args, *kwargs.values())))
        return passed_on if self._sdp_output is None else self._sdp_output


_LACKING_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _lacking_class(base: type[nn.Module]) -> type[nn.Module]:
    if base not in _LACKING_CLASSES:
        made = type(base.__name__, (_LackingModule, base), {"__module__": base.__module__})
        _LACKING_CLASSES[base] = made
    return _LACKING_CLASSES[base]


@dataclass
class UnitModules:
    """A unit in the live module of one rank.

    Args:
        index: of the unit in the plan.
        unit: its pieces.
        held: whether this rank's subnetwork has it.
        modules: its modules in the order in which they run.
        present: whether its tensors have storage now.
    """

    index: int
    unit: Unit
    held: bool
    modules: list[nn.Module]
    present: bool = field(init=False)

    def __post_init__(self) -> None:
        self.present = self.held


class BlockMask:
    """Drops the units that a rank lacks from its module, for the whole run.

    Args:
        model: whole, on its final device, equal on all ranks.
        sites: its residual branches.
        plan: whose units are unions of whole sites.
        rank: in the data-parallel group.

    Raises:
        ValueError: a unit of the plan is not made of whole residual branches.
    """

    def __init__(self, model: nn.Module, sites: Sequence[Site], plan: Plan, rank: int) -> None:
        self.units = [
            UnitModules(index, unit, plan.holds_rank(index, rank), [model.get_submodule(n) for n in names])
            for index, (unit, names) in enumerate(_modules_of_units(plan.units, sites))
        ]
        outputs = {name: _output(site, name) for site in sites for name in site.modules}
        for state, (_, names) in zip(self.units, _modules_of_units(plan.units, sites), strict=True):
            if not state.held:
                for module, name in zip(state.modules, names, strict=True):
                    _make_lacking(module, state, outputs[name])
        self._tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        self.shapes = {name: tensor.shape for name, tensor in self._tensors.items()}
        for state in self.units:
            if not state.held:
                self.release(state)

    def release(self, state: UnitModules) -> None:
        """Give the storage of a lacking unit back."""
        assert not state.held, f"{state.unit.name} is held, its storage must stay"
        for piece in state.unit.pieces:
            tensor = self._tensors[piece.parameter]
            with torch.inference_mode(False):
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            tensor.requires_grad_(False)
        state.present = False

    def fill(self, state: UnitModules, values: Iterable[torch.Tensor]) -> None:
        """Make a lacking unit present: `values` are flat, one for each of its pieces, and are kept as storage."""
        for piece, value in zip(state.unit.pieces, values, strict=True):
            tensor = self._tensors[piece.parameter]
            tensor.data = value.view(self.shapes[piece.parameter])
        state.present = True

    def dtype_of(self, piece: Piece) -> torch.dtype:
        """Of the piece's tensor, present or not."""
        return self._tensors[piece.parameter].dtype

    def tensors_of(self, state: UnitModules) -> list[torch.Tensor]:
        """The unit's tensors, detached, in the order of its pieces."""
        return [self._tensors[piece.parameter].detach() for piece in state.unit.pieces]


def _make_lacking(module: nn.Module, state: UnitModules, output: Any) -> None:
    module.__class__ = _lacking_class(type(module))
    object.__setattr__(module, "_sdp_unit", state)
    object.__setattr__(module, "_sdp_output", output)


def _output(site: Site, module_name: str) -> Any:
    """What a lacking module returns; None stands for its own first argument."""
    if module_name != f"{site.layer}.{site.branch.body}":
        return None
    if site.branch.num_outputs == 1:
        return NOTHING
    return (NOTHING, *[None] * (site.branch.num_outputs - 1))


def _modules_of_units(units: Sequence[Unit], sites: Sequence[Site]) -> list[tuple[Unit, list[str]]]:
    result = []
    for unit in units:
        whole = {(piece.kind, piece.parameter) for piece in unit.pieces if piece.dim is None}
        members = [site for site in sites if whole.issuperset((piece.kind, piece.parameter) for piece in site.pieces)]
        covered = {piece.parameter for site in members for piece in site.pieces}
        strange = sorted({piece.parameter for piece in unit.pieces} - covered)[:5]
        if strange or not members:
            raise ValueError(
                f"plan: unit {unit.name!r} is not made of whole residual branches of this model (left over: "
                f'{strange}): the strategy "block" takes branches whole'
            )
        result.append((unit, [name for site in members for name in site.modules]))
    return result
