"""Neuron strategy, backward regime: layers with a trained and a frozen part.

Each rank runs the whole model and propagates the exact activation gradient, but computes weight gradients of its own
neurons, heads and channels only. The parameter of a split layer consists of the held slices, concatenated in dense
order; the other slices are a frozen tensor. The layer runs its own forward with each of them, and combines the results:

- cut along outputs (`q_proj`, `up_proj`): outputs are concatenated;
- cut along inputs (`o_proj`, `down_proj`): each part reads its inputs; outputs are added, and the bias once;
- experts, cut inside: both parts read the whole input; outputs are added;
- other modules (batch norms, attention sinks, position tables): run once with concatenated parameters, which are small.

Activations have the dense model's order everywhere. So operations between two split layers (products of gates and ups,
fused projections, positions of heads) are unaffected, and a body runs once.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.architectures.branch import BATCH_NORMS, CONVOLUTIONS
from sdp_deepspeed.masking.forwards import replace_forward

# DeepSpeed's AutoTP: layers with an all-reduce inside, and weights like those of nn.Linear.
_TENSOR_PARALLEL = ("LinearLayer", "LinearAllreduce")


@dataclass(frozen=True)
class Ranges:
    """Division of the indices of a cut dimension into parts.

    Args:
        lengths: of runs of indices, in dense order.
        parts: part of each run. In the backward regime 0 is held, 1 is frozen.
    """

    lengths: tuple[int, ...]
    parts: tuple[int, ...]

    def split(self, x: torch.Tensor, dim: int) -> list[torch.Tensor]:
        """Split `x` into parts, each in dense order."""
        runs: list[list[torch.Tensor]] = [[] for _ in range(max(self.parts) + 1)]
        for run, part in zip(x.split(self.lengths, dim), self.parts, strict=True):
            runs[part].append(run)
        return [own[0] if len(own) == 1 else torch.cat(own, dim) for own in runs]

    def join(self, parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Inverse of `split`."""
        runs = [
            iter(own.split([n for n, part in zip(self.lengths, self.parts, strict=True) if part == number], dim))
            for number, own in enumerate(parts)
        ]
        return torch.cat([next(runs[part]) for part in self.parts], dim)

    def merged(self) -> Ranges:
        """Merge adjacent runs of the same part."""
        runs = [
            (part, sum(length for length, _ in group))
            for part, group in itertools.groupby(zip(self.lengths, self.parts, strict=True), key=lambda run: run[1])
        ]
        return Ranges(tuple(length for _, length in runs), tuple(part for part, _ in runs))


@dataclass(frozen=True)
class FrozenPart:
    """The frozen slices of one parameter.

    Args:
        tensor: the slices, concatenated along `dim` in dense order.
        dim: the cut dimension.
        ranges: of the dense parameter along `dim`.
    """

    tensor: torch.Tensor
    dim: int
    ranges: Ranges


@dataclass
class SplitState:
    """State of a split layer's forward.

    Args:
        dim: dimension of the activations that contains neurons, heads or channels.
        ranges: along `dim`.
        frozen: replacements of the parameters for the frozen part.
        sizes: size attributes for the frozen part.
        parts: frozen parts by parameter name, for layers that run once with concatenated parameters.
        compact: whether to copy the held inputs, so that autograd does not keep the frozen ones alive.
    """

    dim: int = -1
    ranges: Ranges | None = None
    frozen: dict[str, torch.Tensor] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    parts: dict[str, FrozenPart] = field(default_factory=dict)
    compact: bool = False


def split_layer(module: Any, parts: Mapping[str, FrozenPart], output_bias: str, *, sums: bool, compact: bool) -> None:
    """Split a module whose parameters consist of their held slices.

    Args:
        parts: frozen slices, by parameter name in the module.
        output_bias: name of a parameter that is not cut, and added once; empty if there is none.
        sums: whether the module's output is a sum over neurons (experts).
        compact: see `SplitState`.
    """
    frozen = {name: part.tensor for name, part in parts.items()}
    weight = parts.get("weight")
    if sums:
        replace_forward(module, _add_outputs, SplitState(frozen=frozen | _no_bias(module, output_bias)))
    elif weight is None or (inputs := input_dim(module)) is None:
        replace_forward(module, _join_parameters, SplitState(parts=dict(parts)))
    else:
        dim, sizes = -max(1, weight.tensor.dim() - 1), sizes_of(module, weight.tensor)
        set_sizes(module)
        if weight.dim == inputs and sizes.get("groups", 1) == 1:
            frozen |= _no_bias(module, output_bias)
            replace_forward(module, _split_inputs, SplitState(dim, weight.ranges, frozen, sizes, compact=compact))
        else:
            replace_forward(module, _join_outputs, SplitState(dim, weight.ranges, frozen, sizes))


def _no_bias(module: nn.Module, name: str) -> dict[str, torch.Tensor]:
    bias = module._parameters.get(name)
    return {} if bias is None else {name: bias.new_zeros(()).expand_as(bias)}


def input_dim(module: Any) -> int | None:
    """Input dimension of the weight of a linear layer or convolution; None for other modules."""
    if is_conv1d(module):
        return 0
    is_linear = isinstance(module, (nn.Linear, *CONVOLUTIONS)) or type(module).__name__ in _TENSOR_PARALLEL
    return 1 if is_linear else None


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is Transformers' Conv1D, a linear layer that stores [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _join_outputs(self: Any, x: torch.Tensor) -> torch.Tensor:
    state: SplitState = self._sdp_state
    assert state.ranges is not None
    inputs = state.ranges.split(x, state.dim) if state.sizes.get("groups", 1) > 1 else (x, x)
    held = self._sdp_forward(inputs[0])
    return state.ranges.join((held, _run_with(self, state.frozen, state.sizes, inputs[1])), state.dim)


def _split_inputs(self: Any, x: torch.Tensor) -> torch.Tensor:
    state: SplitState = self._sdp_state
    assert state.ranges is not None
    held, frozen = state.ranges.split(x, state.dim)
    if state.compact:
        held = held.contiguous()
    result: torch.Tensor = self._sdp_forward(held) + _run_with(self, state.frozen, state.sizes, frozen)
    return result


def _add_outputs(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    held: torch.Tensor = self._sdp_forward(*args, **kwargs)
    return held + _run_with(self, self._sdp_state.frozen, {}, *args, **kwargs)


def _join_parameters(self: Any, *args: Any, **kwargs: Any) -> Any:
    parts: dict[str, FrozenPart] = self._sdp_state.parts
    joined = {name: part.ranges.join((self._parameters[name], part.tensor), part.dim) for name, part in parts.items()}
    return _run_with(self, joined, {}, *args, **kwargs)


def _run_with(self: Any, tensors: Mapping[str, Any], sizes: Mapping[str, int], *args: Any, **kwargs: Any) -> Any:
    """Run a module's own forward with replaced parameters and size attributes."""
    parameters = {name: self._parameters[name] for name in tensors}
    own_sizes = {name: getattr(self, name) for name in sizes}
    self._parameters.update(tensors)
    for name, size in sizes.items():
        setattr(self, name, size)
    try:
        return self._sdp_forward(*args, **kwargs)
    finally:
        self._parameters.update(parameters)
        for name, size in own_sizes.items():
            setattr(self, name, size)


def sizes_of(layer: Any, weight: torch.Tensor) -> dict[str, int]:
    """Size attributes of a layer for a weight that may be narrower."""
    if isinstance(layer, BATCH_NORMS):
        return {"num_features": len(weight)}
    if isinstance(layer, CONVOLUTIONS):
        if layer.groups > 1:  # depthwise
            return dict.fromkeys(("out_channels", "in_channels", "groups"), len(weight))
        return {"out_channels": weight.shape[0], "in_channels": weight.shape[1]}
    if is_conv1d(layer):
        return {"nx": weight.shape[0], "nf": weight.shape[1]}
    if hasattr(layer, "out_features"):
        return {"out_features": weight.shape[0], "in_features": weight.shape[1]}
    return {}


def set_sizes(layer: Any) -> None:
    """Set the size attributes of a layer from its weight, or from the statistics of a batch norm without weight."""
    weight = getattr(layer, "weight", None)
    weight = getattr(layer, "running_mean", None) if weight is None else weight
    for name, size in sizes_of(layer, weight).items() if weight is not None else ():
        setattr(layer, name, size)
