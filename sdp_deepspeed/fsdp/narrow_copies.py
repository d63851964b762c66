"""A body once more, with the neurons or heads of one set of holders: narrower layers, and nothing else of its own.

What is not cut (norms of each head, activation functions, numbers) the copy reads from the body at the moment when it
runs, so that it is there once: FSDP2 shards it once, and what somebody changes in the body later holds for all copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from sdp_deepspeed.masking.halves import of_heads
from sdp_deepspeed.masking.mixins import mixed_in
from sdp_deepspeed.masking.outputs import Outputs
from sdp_deepspeed.masking.own_forward import settle_forward


class NarrowCopy(nn.Module):
    """Mixed in before the class of a copy of a module: what the copy has not, the module has."""

    _sdp_original: nn.Module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_sdp_original" not in vars(self):  # not there yet: it is being made
                raise
            return getattr(self._sdp_original, name)


@dataclass(frozen=True)
class Heads:
    """What a copy does with arguments and outputs that are of the model's heads.

    Args:
        arguments: keyword arguments with the model's heads along dim 1.
        cells: indices of the copy's key/value heads.
        num_cells: of the dense body.
        outputs: of the body.
    """

    arguments: tuple[str, ...]
    cells: tuple[int, ...]
    num_cells: int
    outputs: Outputs


class PieceModule(NarrowCopy):
    """Mixed in before the class of a copy of a body: it gets the body's arguments, and returns its addend."""

    _sdp_heads: Heads

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        heads = self._sdp_heads
        kwargs = of_heads(kwargs, heads.arguments, heads.cells, heads.num_cells)
        output = super().forward(*args, **kwargs)
        return heads.outputs.around(output[0] if heads.outputs.count > 1 else output, {})


class _WithoutBias(nn.Module):
    """Mixed in before the class of an output projection that stores [in, out] and cannot do without a bias."""

    weight: nn.Parameter

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return functional.linear(hidden_states, self.weight.t())


@dataclass(frozen=True)
class Changes:
    """What is different in a copy of a module. All names are paths inside of the module.

    Args:
        parameters: narrower ones; None where the copy has none, and must not take the module's.
        stand_ins: modules in the place of others.
        with_numbers: modules that get numbers of their own later; "" for the module itself.
    """

    parameters: Mapping[str, nn.Parameter | None]
    stand_ins: Mapping[str, nn.Module]
    with_numbers: Sequence[str] = ()

    def inside(self, child: str) -> Changes:
        """The same, for a child."""

        def below(path: str) -> bool:
            return path.startswith(f"{child}.")

        length = len(child) + 1
        return Changes(
            {path[length:]: value for path, value in self.parameters.items() if below(path)},
            {path[length:]: value for path, value in self.stand_ins.items() if below(path)},
            [path[length:] for path in self.with_numbers if below(f"{path}.")],
        )

    @property
    def children(self) -> list[str]:
        """Names of children that are not as they are in the module, in no order."""
        paths = [*self.parameters, *self.stand_ins, *(f"{path}." for path in self.with_numbers if path)]
        return list(dict.fromkeys(path.partition(".")[0] for path in paths if "." in path))


def narrow_copy(module: nn.Module, changes: Changes, *, shares_hooks: bool = True) -> nn.Module:
    """A copy of `module` and of those of its modules that are different in it.

    Args:
        shares_hooks: whether hooks of the module run for the copy too; those of its modules do.
    """
    settle_forward(module)
    copied = module.__class__.__new__(mixed_in(NarrowCopy, type(module)))
    nn.Module.__init__(copied)
    copied.training = module.training
    if shares_hooks:
        vars(copied).update({name: value for name, value in vars(module).items() if _is_of_a_run(name)})
    object.__setattr__(copied, "_sdp_original", module)  # no child
    for name, parameter in changes.parameters.items():
        if "." not in name:
            copied._parameters[name] = parameter  # `register_parameter` takes the module's for the copy's
    different = changes.children
    for name, child in module.named_children():
        if name in changes.stand_ins:
            copied._modules[name] = changes.stand_ins[name]
        elif name in different:
            copied._modules[name] = narrow_copy(child, changes.inside(name))
        elif not has_tensors(child):  # in its place, since a container runs its children one after the other
            copied._modules[name] = child
    _do_without_bias(copied)
    return copied


def make_piece(body: nn.Module, changes: Changes, heads: Heads) -> nn.Module:
    """The copy of a body that computes the addend of some neurons or heads."""
    piece = narrow_copy(body, changes, shares_hooks=False)  # they run for the sum
    piece.__class__ = mixed_in(PieceModule, type(body))
    object.__setattr__(piece, "_sdp_heads", heads)
    return piece


def has_tensors(module: nn.Module) -> bool:
    """Whether a module has parameters or buffers, also in its modules."""
    return any(True for _ in (*module.parameters(), *module.buffers()))


def _is_of_a_run(name: str) -> bool:
    """Whether an attribute is a table of hooks, other than those of state dicts."""
    return "_hook" in name and "state_dict" not in name


def stores_in_out(layer: nn.Module) -> bool:
    """Whether it is one of Transformers' Conv1D."""
    return hasattr(layer, "nf") and hasattr(layer, "nx")


def _do_without_bias(copied: nn.Module) -> None:
    if copied._parameters.get("bias", ...) is None and stores_in_out(copied):
        copied.__class__ = mixed_in(_WithoutBias, type(copied))
