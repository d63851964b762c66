"""Synchronized batch norms (`torch.nn.SyncBatchNorm`): each over the ranks that run it in training.

The group that PyTorch takes by default is all ranks, of which those that lack the unit would not come. With the
holders as the group no rank waits in vain. A rank issues a norm's collectives when it runs the norm, forward, and when
it differentiates it, backward. The model's own order of its modules is one for all ranks, lacking units only leave
modules out, and autograd goes back the same way; so all ranks issue subsequences of one sequence. Of all collectives
that are not over, the first one in it can be: each of its ranks has issued what comes before. Nothing else of ours is
issued between them, at stages 0 and 1, where gradients travel in the step. At stage 2 they leave in backward, and a
rank may wait there for another's, which that one has only after a norm that waits for the first: refused. (FSDP2's own
collectives of a unit are of the same ranks, and in the same order: fsdp/collective_order.py.)

Backward a norm asks others for its input's gradient, so its input needs one on all of its ranks or on none. That is so
where something that all ranks train comes before, as a stem does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

from sdp_deepspeed.architectures import LocatedBranch, branches_of_units
from sdp_deepspeed.config import KEY
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.masking.mixins import Mixin, mix_in
from sdp_deepspeed.messages import quoted
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.units import Unit

Holders = tuple[int, ...]


class _OverHolders(Mixin):
    """Copies of it are over the same ranks; a process group itself cannot be copied."""

    process_group: Any

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Module:
        memo[id(self.process_group)] = self.process_group
        return super().__deepcopy__(memo)

    def _sdp_finish(self, copied: nn.Module) -> None:
        super()._sdp_finish(copied)
        mix_in(_OverHolders, copied)


def synchronized_over(
    module: nn.Module, model: RankModel, branches: Sequence[LocatedBranch], *, stage: int = 1
) -> dict[str, Holders]:
    """The synchronized norms that not every rank runs, by dense name, each with the data-parallel ranks that do.

    Args:
        module: whole.
        model: the plan, and the module's tensors.
        stage: ZeRO's.

    Raises:
        ValueError: by name, those for which no group would do.
    """
    plan = model.plan
    norms = {name: inner for name, inner in module.named_modules() if isinstance(inner, nn.SyncBatchNorm)}
    if plan.is_whole or not norms:
        return {}
    lines = [*_cut(norms, plan, branches), *_without_tensors(norms, branches)]
    lines += _without_equal_gradients(norms, model)
    if stage == 2:
        lines.append(
            f"{quoted(norms)} is a SyncBatchNorm, at stage 2: gradients leave in backward, where ranks that run other "
            "units would wait for each other; use stage 1"
        )
    found = {} if plan.regime == "backward" else dict(_of_units(norms, plan))
    lines += [
        f"{quoted([name])} is a SyncBatchNorm of a unit, with a process group of its own: it is synchronized over the "
        "unit's holders; convert the model without one"
        for name in found
        if norms[name].process_group is not None
    ]
    if lines:
        raise ValueError("\n".join(f"{KEY}: {line}" for line in lines))
    return found


def synchronize(module: nn.Module, over: Mapping[str, Holders], groups: Mapping[Holders, Any]) -> None:
    """Give norms their groups.

    Args:
        module: masked.
        over: as `synchronized_over`.
        groups: process groups by their ranks, those that this rank is in; the norms of others never run here, but in
            evaluation mode, where nothing is synchronized.
    """
    for name, holders in over.items():
        norm: Any = module.get_submodule(name)
        if holders in groups:
            norm.process_group = groups[holders]
            mix_in(_OverHolders, norm)


def _cut(norms: Mapping[str, nn.SyncBatchNorm], plan: Plan, branches: Sequence[LocatedBranch]) -> Iterator[str]:
    names = branches_of_units(plan.units, branches)
    cut = {name for index, name in enumerate(names) if plan.coverage_of(index) < 1}
    bodies = tuple(f"{body}." for branch in branches if branch.name in cut for body in branch.bodies)
    if inside := [name for name in norms if name.startswith(bodies)]:
        yield (
            f"{quoted(inside)} is a SyncBatchNorm in a branch whose neurons are cut, so that its channels have holders "
            'of their own; use BatchNorm, or the strategy "block"'
        )


def _without_tensors(norms: Mapping[str, nn.SyncBatchNorm], branches: Sequence[LocatedBranch]) -> Iterator[str]:
    inside = tuple(f"{name}." for branch in branches for name in branch.modules)
    if nameless := [name for name, norm in norms.items() if f"{name}.".startswith(inside) and not norm.state_dict()]:
        yield (
            f"{quoted(nameless)} is a SyncBatchNorm in a branch, without weights and running statistics, so that no "
            "plan says who holds it; give it one of both, or use BatchNorm"
        )


def _of_units(norms: Mapping[str, nn.SyncBatchNorm], plan: Plan) -> Iterator[tuple[str, Holders]]:
    for index, unit in enumerate(plan.units):
        if plan.coverage_of(index) < 1:
            modules = _modules(unit)
            yield from ((name, plan.ranks_of(index)) for name in norms if name in modules)


def _modules(unit: Unit) -> set[str]:
    return {piece.parameter.rpartition(".")[0] for piece in unit.pieces}


def _without_equal_gradients(norms: Mapping[str, nn.SyncBatchNorm], model: RankModel) -> Iterator[str]:
    """Whether the first one may have an input that needs a gradient on some of its ranks only."""
    lacked = {
        piece.parameter
        for index, unit in enumerate(model.plan.units)
        if model.plan.coverage_of(index) < 1
        for piece in unit.pieces
    }
    for info in model.tensors:
        name = info.name.rpartition(".")[0]
        if info.trainable and info.name not in lacked:
            return
        if name in norms and info.name in lacked:
            yield (
                f"{quoted([name])} is a SyncBatchNorm of a unit, and nothing that all ranks train comes before it, so "
                "that its input may need a gradient on some ranks only; train what comes before, or use BatchNorm"
            )
            return
