"""Block units as FSDP2 takes them: the modules of each, and what a rank holds of their parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from sdp_deepspeed.architectures import LocatedBranch, branches_of_units
from sdp_deepspeed.config import KEY
from sdp_deepspeed.fsdp.pieces import HeldTensor, ShardedUnit
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.masking.mask import members_of


def block_units(module: nn.Module, model: RankModel, branches: Sequence[LocatedBranch]) -> Iterator[ShardedUnit]:
    """The block units of a plan in the order of the model, the same on every rank.

    Args:
        module: masked or not; not sharded yet.
        branches: its residual branches, in the order in which they run.

    Raises:
        ValueError: a module has parameters of its own of which some are shared and some are the unit's.
    """
    plan, order = model.plan, {branch.name: number for number, branch in enumerate(branches)}
    names = branches_of_units(plan.units, branches)
    blocks = {index: members_of(unit, branches) for index, unit in enumerate(plan.units) if names[index] is None}
    for index, members in sorted(blocks.items(), key=lambda item: order[item[1][0].name]):
        unit, holders = plan.units[index], plan.ranks_of(index)
        paths = [name for branch in members for name in branch.modules]
        own = {piece.parameter for piece in unit.pieces if piece.kind == "parameter"}
        outers = [path for branch in members for path in _outer_modules(module, branch, own)]
        inner = [path for outer in dict.fromkeys(outers) for path in _whole_modules(module, outer, own)]
        is_held = model.rank in holders and bool(inner)
        yield ShardedUnit(
            unit.name,
            holders,
            tuple(module.get_submodule(path) for path in inner) if is_held else (),
            tuple(HeldTensor(name, name, None, (), holders) for name in sorted(own)) if is_held else (),
            (paths[0], paths[-1]),
        )


def shared_tensors(
    module: nn.Module, units: Sequence[ShardedUnit], *, not_shared: set[str], everyone: tuple[int, ...]
) -> list[HeldTensor]:
    """Parameters in no unit.

    Args:
        not_shared: names of those that have no storage, or that FSDP2 is to ignore.
        everyone: all ranks of the mesh.
    """
    others = {tensor.name for unit in units for tensor in unit.tensors} | not_shared
    return [HeldTensor(name, name, None, (), everyone) for name, _ in module.named_parameters() if name not in others]


def _outer_modules(module: nn.Module, branch: LocatedBranch, own: set[str]) -> Sequence[str]:
    """Modules that have all of a branch's parameters: its own, or the layer, if a parameter is the layer's."""
    if not branch.parameters:
        return branch.modules
    layer = module.get_submodule(branch.layer)
    if others := {f"{branch.layer}.{name}" for name, _ in layer.named_parameters()} - own:
        raise ValueError(
            f"{KEY}: {branch.parameters[0]!r} is a parameter of a layer that has others beside its unit's "
            f"({min(others)!r}), which FSDP2 cannot gather apart: match its unit's name in `shared`, or put it into a "
            "module of its own"
        )
    return (branch.layer,)


def _whole_modules(module: nn.Module, path: str, own: set[str]) -> Iterator[str]:
    """The outermost modules with parameters of the unit alone, such as the projections of an attention body that
    keeps a shared table beside them."""
    inner = module.get_submodule(path)
    names = {f"{path}.{name}" for name, _ in inner.named_parameters()}
    if not names & own:
        return
    if names <= own:
        yield path
        return
    direct = {f"{path}.{name}" for name, _ in inner.named_parameters(recurse=False)}
    if direct & own:
        raise ValueError(
            f"{KEY}: {path!r} has parameters of its own beside shared ones ({min(names - own)!r}), which FSDP2 cannot "
            "gather apart: match its unit's name in `shared`, or put them into a module of their own"
        )
    for name, _ in inner.named_children():
        yield from _whole_modules(module, f"{path}.{name}", own)
