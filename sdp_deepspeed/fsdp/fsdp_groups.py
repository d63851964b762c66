"""FSDP2 groups: modules whose parameters have the same holders, in forward order. FSDP2 gathers, averages and frees a
group together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from torch import nn

from sdp_deepspeed.architectures import CROSS_ATTENTION, LocatedBranch
from sdp_deepspeed.fsdp.parts import Part, split_branch
from sdp_deepspeed.masking import Mask
from sdp_deepspeed.messages import KEY
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.strategies import blocks_of_units
from sdp_deepspeed.plan.tensors import TensorInfo, pieces_by_tensor
from sdp_deepspeed.units import Holders

_SLACK = 1.05  # since numbers of heads and neurons are rounded


@dataclass(frozen=True)
class BranchModules:
    """Modules of one branch, or of all branches of a unit that is a layer; the same on all ranks.

    Args:
        branch: the branch, or the first one of the unit.
        holders: data-parallel indices; None for neurons or heads, which have several holder sets.
        paths: paths of the modules, in forward order.
    """

    branch: LocatedBranch
    holders: Holders | None
    paths: tuple[str, ...]


class FsdpGroup(NamedTuple):
    """One FSDP2 group of this rank."""

    holders: Holders
    modules: tuple[nn.Module, ...]


def modules_by_branch(mask: Mask) -> Iterator[BranchModules]:
    """Yield the modules of all branches in forward order. Branches outside any unit are held by all ranks.

    Args:
        mask: not applied yet.

    Raises:
        ValueError: a module has both shared parameters and parameters of a unit, or a branch cannot be split.
    """
    blocks = blocks_of_units(mask.plan, mask.branches)
    _check_encoder_is_reached(mask, blocks)
    first_of = {members[0].name: index for index, members in blocks.items()}
    of_blocks = {branch.name for members in blocks.values() for branch in members}
    cut = {name for name, pieces in mask.pieces.items() if pieces[0][0].dim is not None}
    for branch in mask.branches:
        if branch.name in first_of:
            index = first_of[branch.name]
            if branch.description.extra_outputs and mask.plan.coverage_of(index) < 1:
                raise ValueError(
                    f"{KEY}.strategy: with FSDP2 every rank must hold {branch.name!r}, which passes tensors to later "
                    f'layers; use "neuron" for {branch.description.name!r}, or DeepSpeed'
                )
            names = {piece.parameter for piece in mask.plan.units[index].pieces if piece.kind == "parameter"}
            outer: dict[str, None] = {}
            for member in blocks[index]:
                outer |= dict.fromkeys(_outer(mask, member, names))
            paths = tuple(path for module in outer for path in _whole_modules(mask.model, module, names))
            yield BranchModules(branch, mask.plan.ranks_of(index), paths)
        elif any(tensor.parameter in cut for tensor in branch.cut_tensors):
            if len(branch.bodies) > 1:
                raise ValueError(
                    f"{KEY}.strategy: FSDP2 cannot split {branch.name!r}, which consists of several modules "
                    f'({", ".join(branch.description.bodies)}); use "block" for {branch.description.name!r}, or '
                    "DeepSpeed"
                )
            yield BranchModules(branch, None, branch.bodies)
        elif branch.name not in of_blocks:
            names = {piece.parameter for piece in branch.pieces}
            paths = tuple(path for body in branch.bodies for path in _whole_modules(mask.model, body, names))
            yield BranchModules(branch, mask.plan.all_ranks, paths)


def _check_encoder_is_reached(mask: Mask, blocks: Mapping[int, Sequence[LocatedBranch]]) -> None:
    """Raise ValueError if a rank holds no cross-attention: its loss does not reach the encoder, whose gradients would
    then be reduced in another order than on the other ranks."""
    holders = {branch.name: mask.plan.ranks_of(index) for index, members in blocks.items() for branch in members}
    crossing = [branch.name for branch in mask.branches if branch.description.name == CROSS_ATTENTION]
    reached = {rank for name in crossing for rank in holders.get(name, mask.plan.all_ranks)}
    absent = [rank for rank in mask.plan.all_ranks if crossing and rank not in reached]
    if absent:
        raise ValueError(
            f"{KEY}: rank {absent[0]} holds no cross-attention, so its loss does not reach the encoder; share some "
            "(`shared`), try another `seed`, or use DeepSpeed"
        )


def split_and_group(
    mask: Mask, branches: Iterable[BranchModules], parts: Mapping[str, Sequence[Part]], together: Mapping[str, str]
) -> list[FsdpGroup]:
    """FSDP2 groups of this rank, at the positions of their last branches. Branches with neurons or heads of several
    holder sets are split (parts.py).

    Args:
        mask: applied.
        together: from `gathered_together`.
    """
    groups: dict[tuple[str, Holders], tuple[nn.Module, ...]] = {}  # by name of the gathered branches, and holders
    for of_branch in branches:
        held: dict[Holders, tuple[nn.Module, ...]] = {}
        if of_branch.holders is None:
            for holders, part in split_branch(mask, of_branch.branch, parts).items():
                held[holders] = (part,)
        elif mask.rank in of_branch.holders and of_branch.paths:
            held[of_branch.holders] = tuple(mask.model.get_submodule(path) for path in of_branch.paths)
        for holders, modules in held.items():
            key = (together[of_branch.branch.name], holders)
            groups[key] = (*groups.pop(key, ()), *modules)
    return [FsdpGroup(holders, modules) for (_, holders), modules in groups.items()]


def gathered_together(plan: Plan, tensors: Sequence[TensorInfo], branches: Sequence[LocatedBranch]) -> dict[str, str]:
    """For each branch a name. Modules of branches with the same name and the same holders are one FSDP2 group.

    These are adjacent layers of one stack and dtype, of which no rank holds more than about one whole layer: at C = 1/2
    with neurons, two. So no more is gathered than with plain FSDP2, with fewer collectives. Cross-attention is a group
    of its own, since a decoder without an encoder skips it, and FSDP2 frees a group when all of its modules have run.

    Args:
        plan: plan in coordinates of the dense model.
        branches: in forward order.
    """
    layer_of = {piece.parameter: branch.layer for branch in branches for piece in branch.pieces}
    held: dict[str, Counter[int]] = {branch.layer: Counter() for branch in branches}  # elements on each rank
    whole: Counter[str] = Counter()
    dtypes: dict[str, set[Any]] = {layer: set() for layer in held}
    parameters = [info for info in tensors if info.kind == "parameter" and info.name in layer_of]
    for info, pieces in zip(parameters, pieces_by_tensor(parameters, plan).values(), strict=True):
        for piece, holders in pieces:
            size = piece.num_elements(info.shape)
            whole[layer_of[info.name]] += size
            held[layer_of[info.name]].update(dict.fromkeys(holders, size))
        dtypes[layer_of[info.name]].add(info.dtype)
    first: dict[str, str] = {}  # the first layer of each layer's range
    start = next(iter(held), "")
    so_far = Counter[int]()
    for layer, of_ranks in held.items():
        so_far = so_far + of_ranks
        fits = start.rpartition(".")[0] == layer.rpartition(".")[0] and dtypes[start] == dtypes[layer]
        if not fits or max(so_far.values(), default=0) > _SLACK * max(whole[start], whole[layer]):
            start, so_far = layer, of_ranks
        first[layer] = start
    is_alone = {branch.name for branch in branches if branch.description.name == CROSS_ATTENTION}
    return {branch.name: branch.name if branch.name in is_alone else first[branch.layer] for branch in branches}


def without_own_parameters(branches: Sequence[LocatedBranch]) -> list[LocatedBranch]:
    """Share the layer's own parameters where a layer has several branches: FSDP2 shards those of one module together.
    Described branches are refused in `_outer` instead."""
    number = Counter(branch.layer for branch in branches)
    result = []
    for branch in branches:
        if branch.is_derived and branch.parameters and number[branch.layer] > 1:
            pieces = tuple(piece for piece in branch.pieces if piece.parameter not in branch.parameters)
            branch = replace(branch, description=replace(branch.description, parameters=()), pieces=pieces)
        result.append(branch)
    return result


def _outer(mask: Mask, branch: LocatedBranch, of_unit: set[str]) -> Sequence[str]:
    """Paths of a branch's modules; of its layer, if the branch has a parameter of the layer itself."""
    if not branch.parameters:
        return branch.modules
    names = {f"{branch.layer}.{name}" for name, _ in mask.model.get_submodule(branch.layer).named_parameters()}
    if others := names - of_unit:
        raise ValueError(
            f"{KEY}: the layer of {branch.parameters[0]!r} has parameters of other units ({min(others)!r}); match its "
            "unit in `shared`, or move it to a separate module"
        )
    return (branch.layer,)


def _whole_modules(model: nn.Module, path: str, of_unit: set[str]) -> Iterator[str]:
    """Yield the outermost modules that have only parameters of `of_unit`, such as the projections of an attention body
    that also has a shared table."""
    module = model.get_submodule(path)
    names = {f"{path}.{name}" for name, _ in module.named_parameters()}
    if not names & of_unit:
        return
    if names <= of_unit:
        yield path
        return
    if {f"{path}.{name}" for name, _ in module.named_parameters(recurse=False)} & of_unit:
        raise ValueError(
            f"{KEY}: {path!r} has parameters of a unit and shared ones ({min(names - of_unit)!r}); match its unit in "
            "`shared`, or move them to separate modules"
        )
    for name, _ in module.named_children():
        yield from _whole_modules(model, f"{path}.{name}", of_unit)
