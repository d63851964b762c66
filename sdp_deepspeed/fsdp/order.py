"""Make all ranks issue the collectives of a step in one global order, whatever units each of them holds.

FSDP2's backward prefetch gathers the group that ran before, which differs between ranks. Two ranks with two common
groups could then issue two collectives in opposite orders and deadlock. So backward prefetch is disabled. Forward still
overlaps: the next gather is issued while the kernels of the current group run.

A group, as FSDP2 calls them, is a list of modules of adjacent layers, from a first to a last one, the same on all of
its ranks: the branches that one holder set has, and its parts of split branches, which are nested in those of the other
holder sets, in one order on all ranks. Groups are numbered by their last module, nested ones from the outside in.

- Forward: a group is gathered when its first module begins, and freed when its last one ends. Modules run in one order,
  nested ones from the outside in, so all ranks issue subsequences of one sequence.
- Backward: a group is gathered when the gradient of its last module's output is ready, and reduced when that of its
  first module's input is. Autograd runs in reverse order of recording, and an absent group removes nodes from the graph
  and adds none. So all ranks issue subsequences of one sequence: ..., AG(j), RS(j), AG(j-1), RS(j-1), ... for groups
  that run one after the other, and AG(j), AG(j-1), RS(j), RS(j-1) for nested ones. A group with modules in two branches
  is gathered with those that end in the second, and reduced with those that begin in the first.
- The root, with everything outside these groups, is gathered first and reduced at the end of backward.
- Activation checkpointing reruns groups upwards during backward, starting at a different group on each rank. So before
  the first of them, all groups of the pass that backward has not reached yet, down to that one, are gathered downwards.
- A group whose input needs no gradient would be skipped on ranks where nothing before it is trained: see
  `_need_gradient`.
- Nested groups are gathered in this order only if they return the same tensor. So the innermost one's output is copied
  and cast before FSDP2 adds its hooks: see `_after`.

Of all unfinished collectives, the first one in that sequence can finish: each of its ranks has issued everything before
it. With tensor parallelism, the ranks that train one copy of a subnetwork hold the same units, so they run the same
program.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from sdp_deepspeed.fsdp.dense_model import cast

_HANDED_ON = "layers that pass tensors to later ones (T5) cannot checkpoint activations with FSDP2; disable it"


class CollectiveOrder:
    """Installs the hooks on a sharded model.

    Args:
        groups: modules of the groups that this rank holds, ordered by the last one; each list is one FSDP2 group.
        can_run_again: whether activations may be checkpointed. False if branches pass tensors to later layers (T5's
            position bias): the gradient of such a tensor is complete in a different group on each rank.
    """

    def __init__(
        self,
        root: Any,
        groups: Sequence[Sequence[nn.Module]],
        *,
        can_run_again: bool = True,
        output_dtype: torch.dtype | None = None,
    ) -> None:
        self._can_run_again, self._output_dtype = can_run_again, output_dtype
        self._groups: list[Any] = [modules[0] for modules in groups]
        self._reached = len(groups)  # the lowest group that backward has reached
        self._pass = (-1, -1)  # the backward pass, and the forward pass that it traverses
        self._num_passes = 0
        self._running: set[int] = set()  # groups that have run in this forward pass
        self._ran: set[int] = set()  # groups that ran in the forward pass that backward traverses
        self._anchor = torch.zeros(0, dtype=torch.float32, device="cpu", requires_grad=True)
        for fsdp in (root, *self._groups):
            fsdp.set_modules_to_backward_prefetch([fsdp])  # it is gathered already; [] would mean the default
        for number, modules in enumerate(groups):
            for module in modules:  # `prepend`: run before FSDP2's hooks
                before = _eager(lambda _, args, kwargs, n=number: self._before(n, args, kwargs))
                module.register_forward_pre_hook(before, prepend=True, with_kwargs=True)
            after = _eager(lambda _, args, output, n=number: self._after(n, output))
            modules[-1].register_forward_hook(after, prepend=True)
        root.register_forward_pre_hook(_eager(lambda *_: self._running.clear()), prepend=True)
        root.register_forward_hook(_eager(lambda _, args, output: self._end(output)))
        if not can_run_again:
            root.register_forward_pre_hook(_eager(lambda module, _: _refuse_checkpointing(module)), prepend=True)

    def _before(self, number: int, args: Any, kwargs: Any) -> Any:
        """Called before a module of a group runs."""
        if _is_in_backward() and not self._can_run_again:
            raise RuntimeError(_HANDED_ON)
        if _is_in_backward() and number < self._reached:
            for other in reversed(range(number, self._reached)):
                if other in self._ran:
                    self._groups[other].unshard(async_op=True)
            self._reached = number
        if not _is_in_backward():
            self._running.add(number)
        return self._need_gradient(args, kwargs)

    def _after(self, number: int, output: Any) -> Any:
        """Called after a group has run: installs a hook for when backward reaches it. FSDP2's own hook on the output is
        lost if the model writes to an output that is a view, and would be on the output before the cast."""
        if not torch.is_grad_enabled():
            return None
        output = tree_map_only(torch.Tensor, _copied_if_view, cast(output, self._output_dtype))
        if not _is_in_backward():
            for tensor in (t for t in tree_leaves(output) if isinstance(t, torch.Tensor) and t.requires_grad):
                tensor.register_hook(lambda _: self._reach(number))
        return output

    def _reach(self, number: int) -> None:
        self._reached = min(self._reached, number)

    def _end(self, output: Any) -> None:
        """Called at the end of a forward pass. Of several passes, backward traverses the last one first."""
        self._num_passes += 1
        ran, self._running = self._running, set()
        for tensor in tree_leaves(output):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                tensor.register_hook(lambda _, number=self._num_passes: self._restart(number, ran))

    def _restart(self, number: int, ran: set[int]) -> None:
        if self._pass != (now := (torch._C._current_graph_task_id(), number)):
            self._pass, self._reached, self._ran = now, len(self._groups), ran

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
    """Raise RuntimeError for Transformers' checkpointing, on all ranks, before a collective."""
    if model.training and any(getattr(module, "gradient_checkpointing", False) for module in model.modules()):
        raise RuntimeError(_HANDED_ON)


class _Anchored(torch.autograd.Function):
    """Identity whose output requires a gradient."""

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
    """Exclude a hook from compiled graphs, like FSDP2's own hooks."""
    return torch.compiler.disable(hook)
