"""What the wrapped optimizer steps on this rank: views of fp32 weights, or a flat fp32 master.

An elementwise optimizer does not care how elements are cut, so a rank hands it only the fragments that
it owns (stage 1) or holds (stage 0).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from .exchange import read, write
from .segments import Fragment


def can_view(fragment: Fragment, parameter: torch.Tensor) -> bool:
    """Whether the fragment is a view of its fp32 parameter, so that no master copy is needed."""
    view = fragment.piece.narrow(parameter)
    whole = fragment.start == 0 and fragment.stop == view.numel()
    return parameter.dtype == torch.float32 and (whole or view.is_contiguous())


def view_of(fragment: Fragment, tensor: torch.Tensor) -> torch.Tensor:
    """The fragment as a view of `tensor`: flat where contiguous, else the whole piece."""
    view = fragment.piece.narrow(tensor)
    if view.is_contiguous():
        return view.view(-1).narrow(0, fragment.start, fragment.stop - fragment.start)
    return view


class SteppedGroup:
    """One optimizer param group on this rank.

    fp32 weights are stepped in place: no second copy exists. Lower precision, and column slices whose
    shards are ragged, keep one flat fp32 master.

    Args:
        fragments: what this rank steps, in the order of its flat gradient.
        parameters: the module's parameters by dense name.
    """

    def __init__(self, fragments: Sequence[Fragment], parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.fragments = list(fragments)
        self.sizes = [fragment.stop - fragment.start for fragment in self.fragments]
        self.num_elements = sum(self.sizes)
        self._parameters = parameters
        self.in_place = all(can_view(f, parameters[f.piece.parameter]) for f in self.fragments)
        self.tensors = self._make_tensors()

    def _make_tensors(self) -> list[torch.nn.Parameter]:
        if not self.fragments:
            return []
        if self.in_place:
            return [torch.nn.Parameter(self._view(fragment)) for fragment in self.fragments]
        device = self._parameters[self.fragments[0].piece.parameter].device
        master = torch.empty(self.num_elements, dtype=torch.float32, device=device)
        torch._foreach_copy_(list(master.split(self.sizes)), read(self._weights(), self.fragments))
        return [torch.nn.Parameter(master)]

    def _weights(self) -> dict[str, torch.Tensor | None]:
        return {f.piece.parameter: self._parameters[f.piece.parameter].data for f in self.fragments}

    def _view(self, fragment: Fragment) -> torch.Tensor:
        return view_of(fragment, self._parameters[fragment.piece.parameter].data)

    def set_flat_gradient(self, flat: torch.Tensor) -> None:
        """Give the optimizer `flat` (fp32, [num_elements]) as the gradient, without a copy."""
        if not self.in_place:
            self.tensors[0].grad = flat
            return
        for tensor, stretch in zip(self.tensors, flat.split(self.sizes), strict=True):
            tensor.grad = stretch.view(tensor.shape)

    def set_gradients(self, gradients: Mapping[str, torch.Tensor]) -> None:
        """Give the optimizer whole averaged gradients by dense name (stage 0)."""
        if self.in_place:
            for tensor, fragment in zip(self.tensors, self.fragments, strict=True):
                tensor.grad = view_of(fragment, gradients[fragment.piece.parameter])
            return
        flat = torch.empty_like(self.tensors[0])
        torch._foreach_copy_(list(flat.split(self.sizes)), read(gradients, self.fragments))
        self.tensors[0].grad = flat

    def link(self) -> None:
        """Point views at the weights' present storage: others replace `param.data` behind us."""
        if self.in_place:
            for tensor, fragment in zip(self.tensors, self.fragments, strict=True):
                tensor.data = self._view(fragment)

    def write_back(self) -> None:
        """Round the stepped master into the weights and drop the gradients."""
        for tensor in self.tensors:
            tensor.grad = None
        if self.fragments and not self.in_place:
            write(self._weights(), self.fragments, self.tensors[0].detach().split(self.sizes))

    def reload_master(self) -> None:
        """Take the master from the weights again, after weights were loaded from outside."""
        if self.fragments and not self.in_place:
            master = self.tensors[0].detach()
            torch._foreach_copy_(list(master.split(self.sizes)), read(self._weights(), self.fragments))


def repoint(optimizer: torch.optim.Optimizer, groups: Sequence[SteppedGroup]) -> None:
    """Make `optimizer` step what this rank steps instead of the model's parameters, options untouched.

    Adagrad creates its state in its constructor, so it is constructed again; all others create theirs at
    the first step.
    """
    needs_state = bool(optimizer.state)
    optimizer.state.clear()
    for options, group in zip(optimizer.param_groups, groups, strict=True):
        options["params"] = group.tensors
    if needs_state:
        kind: Any = type(optimizer)
        optimizer.state = kind([dict(options) for options in optimizer.param_groups], **optimizer.defaults).state


def check_fresh(optimizer: torch.optim.Optimizer) -> None:
    """ValueError if the optimizer already has state for its parameters (it was stepped before)."""
    started = [state for state in optimizer.state.values() if _was_stepped(state)]
    if started:
        raise ValueError(
            f"the optimizer already holds state for {len(started)} parameters; give subnetwork_data_parallel a fresh "
            "optimizer and load a checkpoint afterwards"
        )


def _was_stepped(state: Mapping[str, Any]) -> bool:
    return bool(state) and float(state.get("step", 1)) > 0
