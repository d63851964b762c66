"""All ranks issue the collectives of a step in one global order, whatever units each of them holds.

FSDP2 gathers ahead in backward what it ran before: another unit on each rank. Two ranks that share two units could then
issue two collectives in opposite orders and wait for each other forever. So nothing is gathered ahead in backward
(forward overlaps all the same: the next gather is issued while the kernels of this unit run). Let units be numbered as
they run, the parts of a branch with neurons one after the other.

- Forward: a unit is gathered when it begins, so all ranks issue subsequences of AG(0), AG(1), ...
- Backward: a unit is gathered when the gradient of its output is there and reduced when that of its input is. Autograd
  runs what was recorded last first, and a unit that a rank lacks takes nodes out of its graph and adds none: all ranks
  issue subsequences of one sequence, which is ..., AG(j), RS(j), AG(j-1), RS(j-1), ... where units run one after the
  other, and AG(j), AG(j-1), RS(j), RS(j-1) where one runs inside of the other (parts of a branch).
- The root, with all that is in no unit, is gathered first and reduced when backward is over.
- Activation checkpointing runs units again in backward, upwards, from another one on each rank. So before the first of
  them all that backward has yet to come to, down to that one, are gathered downwards.
- A unit whose input needs no gradient would be passed by on ranks where nothing before it trains: `_need_gradient`.

Of all collectives that are not over the first in that sequence can be: each of its ranks has issued what comes before.
Under tensor parallelism the ranks of one tensor-parallel group hold the same units, so they run one program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

_HANDED_ON = "layers that hand tensors on to later ones (T5) cannot checkpoint activations with FSDP2; switch it off"


class CollectiveOrder:
    """Hooks on a sharded model.

    Args:
        root: the model.
        units: modules of the units that this rank holds, as they run; each list is one group of FSDP2's.
        can_run_again: whether activations may be checkpointed. Not where branches hand tensors on to later layers (T5's
            position bias): their gradient is complete in another unit on each rank.
    """

    def __init__(self, root: Any, units: Sequence[Sequence[nn.Module]], *, can_run_again: bool = True) -> None:
        self._can_run_again = can_run_again
        self._units: list[Any] = [modules[0] for modules in units]
        self._reached = len(units)  # number of the lowest unit that backward has come to
        self._pass = (-1, -1)  # backward pass, and forward pass that it goes through
        self._num_passes = 0
        self._anchor = torch.zeros(0, dtype=torch.float32, device="cpu", requires_grad=True)
        for fsdp in (root, *self._units):
            fsdp.set_modules_to_backward_prefetch([fsdp])  # itself, which is there: an empty list means FSDP2's own
        for number, modules in enumerate(units):
            for module in modules:  # `prepend`: before FSDP2's own hooks
                before = _eager(lambda _, args, kwargs, n=number: self._before(n, args, kwargs))
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            after = _eager(lambda _, args, output, n=number: self._after(n, output))
            modules[-1].register_forward_hook(after, prepend=True)
        root.register_forward_hook(_eager(lambda _, args, output: self._end(output)))
        if not can_run_again:
            root.register_forward_pre_hook(_eager(lambda module, _: _refuse_checkpointing(module)), prepend=True)

    def _before(self, number: int, args: Any, kwargs: Any) -> Any:
        """A module of a unit is about to run."""
        if _is_in_backward() and not self._can_run_again:
            raise RuntimeError(_HANDED_ON)
        if _is_in_backward() and number < self._reached:
            for other in reversed(self._units[number : self._reached]):
                other.unshard(async_op=True)
            self._reached = number
        return self._need_gradient(args, kwargs)

    def _after(self, number: int, output: Any) -> Any:
        """A unit has run: know when backward comes to it. FSDP2's own hook on the output would be lost if the model
        writes to it and it is a view."""
        if not torch.is_grad_enabled():
            return None
        copied = tree_map_only(torch.Tensor, _copied_if_view, output)
        if not _is_in_backward():
            for tensor in (t for t in tree_leaves(copied) if isinstance(t, torch.Tensor) and t.requires_grad):
                tensor.register_hook(lambda _: self._reach(number))
        return copied

    def _reach(self, number: int) -> None:
        self._reached = min(self._reached, number)

    def _end(self, output: Any) -> None:
        """A forward pass is over; of several, backward goes through the last one first, all of it."""
        self._num_passes += 1
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _, number=self._num_passes: self._restart(number))

    def _restart(self, number: int) -> None:
        if self._pass != (now := (torch._C._current_graph_task_id(), number)):
            self._pass, self._reached = now, len(self._units)

    def _need_gradient(self, args: Any, kwargs: Any) -> Any:
        leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if not torch.is_grad_enabled() or any(leaf.requires_grad for leaf in leaves):
            return None
        first = next((leaf for leaf in leaves if leaf.is_floating_point()), None)
        if first is None:
            return None
        anchored = _Anchored.apply(first, self._anchor)
        return tree_map(lambda leaf: anchored if leaf is first else leaf, (args, kwargs))


def _refuse_checkpointing(model: nn.Module) -> None:
    """Transformers' own; on all ranks, before anybody waits for others."""
    if model.training and any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise RuntimeError(_HANDED_ON)


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


def _eager(hook: Any) -> Any:
    """Compilers leave it out of their graphs, as FSDP2's own hooks."""
    return torch.compiler.disable(hook)
