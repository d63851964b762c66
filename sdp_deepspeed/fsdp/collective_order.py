"""All ranks issue the collectives of a step in one global order, whatever units each holds.

FSDP2 lets each rank gather ahead, in backward, what it ran before: another unit on each rank. Two ranks that share two
units could then issue two collectives in opposite orders, and wait for each other for ever. So here a rank gathers
ahead only what is next in the model itself.

Let units 0..U-1 be numbered as they run, AG and RS stand for all-gather and reduce-scatter. Say that a unit is *apart*
if every other one had ended before it began, or began after it had ended, as all do in models whose branches run one
after the other.

Proof that all ranks issue subsequences of one sequence (so that of all collectives that are not over the first one in
it can be: each of its ranks has issued what comes before, and nothing that it waits for comes after).

- Forward: a unit is gathered when it begins, on every rank: AG(0), AG(1), ..., AG(U-1), the root's before them all.
- Backward without gathering ahead: AG(j) when the gradient of j's output is there, RS(j) when that of its input is.
  Autograd runs what was recorded last first, and a lacking unit only takes nodes out, so these too come in one order on
  all ranks; for units that are apart AG(j), RS(j), AG(j-1), RS(j-1), ...
- Gathering ahead: at AG(j) a rank that holds j-1 as well issues AG(j-1) next, if j and j-1 are both apart. The sequence

      ..., AG(j), RS(j+1), AG(j-1), RS(j), AG(j-2), RS(j-1), ...

  holds it: a rank that holds j and j-1 issues AG(j), AG(j-1), RS(j); one that lacks j-1 issues AG(j), RS(j), and what
  comes next for it is AG(i) or RS(i) with i < j-1, which are later; one that lacks j issues AG(j-1) when it gets there,
  after RS(j+1) and all that is earlier. Where j or j-1 is not apart, nothing moves.
- The root's: what of it was freed after forward is gathered first of all in backward, then the rank's last unit; it is
  reduced when backward is over.
- Frozen parameters: backward would not come to a frozen unit on ranks that lack all units before it that train, and
  would reduce one whose input needs no gradient late, with the root's: `_need_gradient` has it come to every held unit,
  in time, on every rank.
- Activation checkpointing runs units again in backward, upwards: in the opposite order, and from another unit on each
  rank. So before the first of them is gathered, all held units between it and the lowest one that backward has reached
  are gathered downwards (`_gather_downwards`): AG(b), ..., AG(a) of a stretch [a, b] that is run again, then RS(b),
  ..., RS(a). Without it ranks that hold units 0 and 1 of a stretch that ends in a sum would cross: one that holds 3 as
  well runs the stretch again for it, AG(3), AG(0), AG(1); one that holds 2 has gathered 1 ahead with it, AG(2), AG(1),
  AG(0). Every rank that holds two units of a stretch issues both AGs before both RSs, and the sequence above holds
  that with the AGs of a stretch moved before its first RS.
- Several forward passes before one backward: autograd goes through the last one first, all of it, so the sequence is
  theirs one after the other, and how far backward has come counts anew for each (`_restart`).

Under tensor parallelism the sequence above is that of each tensor-parallel rank's groups, and the ranks of one
tensor-parallel group hold the same units, so they run one program. Their own collectives, of unit j, lie between AG(j)
and what follows of j+1 in forward, and right before RS(j) in backward, where each of these ranks issues them.

Where a unit runs twice in one forward pass, or where ranks run other units than the first forward pass did, nothing is
known of the order; then nothing is gathered ahead, or FSDP2's own rules hold: ranks must run the same program.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.hooks import RemovableHandle

from sdp_deepspeed.fsdp.pieces import ShardedUnit
from sdp_deepspeed.fsdp.sharded_model import ShardedModel


def order_collectives(sharded: ShardedModel) -> None:
    """Have the ranks of a sharded model issue their collectives in one order; called once, before it runs.

    Until the first forward pass has told in which order units run, nothing is gathered ahead.
    """
    root: Any = sharded.module
    for unit in sharded.held_units:
        unit.fsdp.set_modules_to_backward_prefetch([unit.fsdp])  # itself, which is there: an empty list means FSDP2's
    root.set_modules_to_backward_prefetch([root])
    CollectiveOrder(sharded.module, sharded.units).install()


def gathered_ahead(spans: Sequence[tuple[int, int]]) -> list[bool]:
    """For each unit whether the one before it may be gathered ahead of it.

    Args:
        spans: when each unit begins and ends, as numbers of events; in the order in which they begin.
    """
    starts, ends = zip(*spans, strict=True) if spans else ((), ())
    before = [max(ends[:index], default=-1) < starts[index] for index in range(len(spans))]
    after = [*before[1:], True][: len(before)]
    apart = [one and other for one, other in zip(before, after, strict=True)]
    return [index > 0 and apart[index] and apart[index - 1] for index in range(len(spans))]


class CollectiveOrder:
    """
    Args:
        module: sharded.
        units: all, also those that this rank lacks.
    """

    def __init__(self, module: nn.Module, units: Sequence[ShardedUnit]) -> None:
        self._module = module
        self._units = list(units)
        self._events: list[tuple[int, bool]] = []  # of units, True where one begins
        self._recorders: list[RemovableHandle] = []
        self._eager = ExitStack()
        self._positions: dict[int, int] = {}  # of units, once it is known in which order they run
        self._reached = len(self._units)  # lowest position that backward has come to
        self._graph_task = (-1, -1)  # the backward pass that it is of, and the forward pass
        self._num_passes = 0
        self._anchor = torch.zeros(0, dtype=torch.float32, device="cpu", requires_grad=True)

    def install(self) -> None:
        """Hook the units. Hooks that are registered with `prepend` run before FSDP2's."""
        module = self._module
        for index, unit in enumerate(self._units):
            first, last = (module.get_submodule(name) for name in unit.ends)
            self._recorders += [
                first.register_forward_pre_hook(_uncompiled(lambda *_, i=index: self._events.append((i, True)))),
                last.register_forward_hook(_uncompiled(lambda *_, i=index: self._events.append((i, False)))),
            ]
            for inner in unit.modules:
                hook = _uncompiled(lambda _, args, kwargs, i=index: self._before(i, args, kwargs))
                inner.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)
            if unit.is_held:
                after = _uncompiled(lambda _, args, output, i=index: self._after(i, output))
                unit.modules[-1].register_forward_hook(after, prepend=True)
        module.register_forward_pre_hook(_uncompiled(lambda *_: self._begin()), prepend=True)
        module.register_forward_hook(_uncompiled(lambda _, args, output: self._end(output)), always_call=True)

    def _begin(self) -> None:
        if self._recorders:  # compilers would see hooks of lacking units that are gone afterwards
            self._events.clear()
            self._eager.enter_context(torch.compiler.set_stance("force_eager"))

    def _end(self, output: Any) -> None:
        """A forward pass is over; of several, backward may come later, and in another order."""
        if self._recorders:
            self._eager.close()
            if torch.is_grad_enabled() and output is not None:  # else it is the dense model's, or failed
                self._learn()
        self._num_passes += 1
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _, number=self._num_passes: self._restart(number))

    def _restart(self, number: int) -> None:
        """Backward begins with the first of the model's outputs that it comes to."""
        if self._graph_task != (task := (torch._C._current_graph_task_id(), number)):
            self._graph_task, self._reached = task, len(self._units)

    def _learn(self) -> None:
        """The first forward pass is over: gather ahead what is next."""
        for handle in self._recorders:
            handle.remove()
        self._recorders.clear()
        order = [index for index, begins in self._events if begins]
        if sorted(order) != list(range(len(self._units))):  # some did not run, or ran twice
            return
        self._positions = {index: position for position, index in enumerate(order)}
        starts = {index: number for number, (index, begins) in enumerate(self._events) if begins}
        ends = {index: number for number, (index, begins) in enumerate(self._events) if not begins}
        ahead = gathered_ahead([(starts[index], ends.get(index, len(self._events))) for index in order])
        units = [self._units[index] for index in order]
        for position in range(1, len(units)):
            unit, previous = units[position], units[position - 1]
            if ahead[position] and unit.is_held and previous.is_held:
                unit.fsdp.set_modules_to_backward_prefetch([previous.fsdp])

    def _before(self, index: int, args: Any, kwargs: Any) -> Any:
        """A module of a held unit is about to run."""
        if _is_in_backward():
            self._gather_downwards(index)
        return self._need_gradient(args, kwargs)

    def _gather_downwards(self, index: int) -> None:
        """Backward runs a unit again: gather it, and all held ones that backward has yet to come to, the last first."""
        position = self._positions.get(index)
        if position is None or position >= self._reached:
            return
        waiting = [other for other, place in self._positions.items() if position <= place < self._reached]
        for other in sorted(waiting, key=self._positions.__getitem__, reverse=True):
            if self._units[other].is_held:
                self._units[other].fsdp.unshard(async_op=True)
        self._reached = position

    def _after(self, index: int, output: Any) -> Any:
        """The last module of a held unit ran: know when backward comes to it.

        FSDP2's own hook on the output would be lost if the model wrote to it and it is a view; a copy is none.
        """
        if not torch.is_grad_enabled():
            return None
        copied = tree_map_only(torch.Tensor, _copied_if_view, output)
        for tensor in tree_leaves(copied):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad and not _is_in_backward():
                tensor.register_hook(lambda _, i=index: self._reach(i))
        return copied

    def _reach(self, index: int) -> None:
        self._reached = min(self._reached, self._positions.get(index, self._reached))

    def _need_gradient(self, args: Any, kwargs: Any) -> Any:
        """Have a unit's input require a gradient, so that backward comes to it on every holder, and FSDP2 sees when it
        has passed. Else it would come to a frozen one only where a unit before it trains."""
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not torch.is_grad_enabled() or any(leaf.requires_grad for leaf in leaves):
            return None
        first = next((leaf for leaf in leaves if leaf.is_floating_point()), None)
        if first is None:
            return None
        anchored = _Anchored.apply(first, self._anchor)
        return tree_map(lambda leaf: anchored if leaf is first else leaf, (args, kwargs))


class _Anchored(torch.autograd.Function):
    """A tensor as it is, as one that requires a gradient."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None]:
        return None, None


def _copied_if_view(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone() if tensor.requires_grad and tensor._base is not None else tensor


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _uncompiled(hook: Any) -> Any:
    """Compilers leave it out of their graphs, as FSDP2's own hooks."""
    return torch.compiler.disable(hook)
