"""Units as FSDP2 takes them: modules whose parameters have the same holders, in the order in which they run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import nn

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.config import KEY
from sdp_deepspeed.fsdp.parts import Holders, Part, split_branch
from sdp_deepspeed.masking import Mask
from sdp_deepspeed.masking.check import blocks_of_units


@dataclass(frozen=True)
class Unit:
    """What has the same holders, on all ranks alike.

    Args:
        branch: the first one of it.
        holders: data-parallel indices; None for neurons or heads, which have several holder sets.
        paths: of its modules, in the order in which they run.
    """

    branch: LocatedBranch
    holders: Holders | None
    paths: tuple[str, ...]


class HeldUnit(NamedTuple):
    """One group of FSDP2's."""

    holders: Holders
    modules: tuple[nn.Module, ...]


def units_of(mask: Mask) -> Iterator[Unit]:
    """Units in the order in which they run; a branch that every rank has whole is a unit of all ranks.

    Args:
        mask: not applied.

    Raises:
        ValueError: by name: a module with parameters of its own of which some are shared and some are a unit's, or a
            branch that cannot be divided among holders.
    """
    everyone = tuple(range(len(mask.plan.subnetwork_of_rank)))
    blocks = blocks_of_units(mask.plan, mask.branches)
    first_of = {members[0].name: index for index, members in blocks.items()}
    of_blocks = {branch.name for members in blocks.values() for branch in members}
    cut = {name for name, pieces in mask.pieces.items() if pieces[0][0].dim is not None}
    for branch in mask.branches:
        if branch.name in first_of:
            index = first_of[branch.name]
            if branch.description.handed_on and mask.plan.coverage_of(index) < 1:
                raise ValueError(
                    f"{KEY}.strategy: FSDP2 cannot lack {branch.name!r}, which hands tensors on to later layers; use "
                    f'"neuron" for {branch.description.name!r}, or DeepSpeed'
                )
            own = {piece.parameter for piece in mask.plan.units[index].pieces if piece.kind == "parameter"}
            outer = dict.fromkeys(path for member in blocks[index] for path in _outer(mask, member, own))
            paths = tuple(path for name in outer for path in _whole_modules(mask.model, name, own))
            yield Unit(branch, mask.plan.ranks_of(index), paths)
        elif any(tensor.parameter in cut for tensor in branch.cut_tensors):
            if len(branch.bodies) > 1:
                raise ValueError(
                    f"{KEY}.strategy: FSDP2 cannot hold neurons of {branch.name!r}, which is several modules "
                    f'({", ".join(branch.description.bodies)}); use "block" for {branch.description.name!r}, or '
                    "DeepSpeed"
                )
            yield Unit(branch, None, branch.bodies)
        elif branch.name not in of_blocks:
            own = {piece.parameter for piece in branch.pieces}
            paths = tuple(path for body in branch.bodies for path in _whole_modules(mask.model, body, own))
            yield Unit(branch, everyone, paths)


def held_units(mask: Mask, units: Iterable[Unit], parts: Mapping[str, Sequence[Part]]) -> list[HeldUnit]:
    """What this rank holds, neurons and heads divided among their holders (parts.py).

    Args:
        mask: applied.
        parts: by dense name.
    """
    found = []
    for unit in units:
        if unit.holders is None:
            divided = split_branch(mask, unit.branch, parts)
            found += [HeldUnit(holders, (module,)) for holders, module in divided.items()]
        elif mask.rank in unit.holders and unit.paths:
            found.append(HeldUnit(unit.holders, tuple(mask.model.get_submodule(path) for path in unit.paths)))
    return found


def _outer(mask: Mask, branch: LocatedBranch, own: set[str]) -> Sequence[str]:
    """A branch's modules; its layer, if a parameter of the branch is the layer's."""
    if not branch.parameters:
        return branch.modules
    names = {f"{branch.layer}.{name}" for name, _ in mask.model.get_submodule(branch.layer).named_parameters()}
    if others := names - own:
        raise ValueError(
            f"{KEY}: {branch.parameters[0]!r} is a parameter of a layer that has others beside its unit's "
            f"({min(others)!r}); match its unit's name in `shared`, or put it into a module of its own"
        )
    return (branch.layer,)


def _whole_modules(model: nn.Module, path: str, own: set[str]) -> Iterator[str]:
    """The outermost modules with parameters of `own` alone, such as the projections of an attention body that keeps a
    shared table beside them."""
    module = model.get_submodule(path)
    names = {f"{path}.{name}" for name, _ in module.named_parameters()}
    if not names & own:
        return
    if names <= own:
        yield path
        return
    if {f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)} & own:
        raise ValueError(
            f"{KEY}: {path!r} has parameters of its own beside shared ones ({min(names - own)!r}), which FSDP2 cannot "
            "gather apart: match its unit's name in `shared`, or put them into a module of their own"
        )
    for name, _ in module.named_children():
        yield from _whole_modules(model, f"{path}.{name}", own)
