"""Neuron strategy: layers whose parameters are divided into portions.

- Backward regime: each rank runs the whole model and propagates the exact activation gradient, but computes weight
  gradients of its own neurons, heads and channels only. The parameter of a split layer consists of the held slices,
  concatenated in dense order; the other slices are a frozen tensor.
- FSDP2: the slices of each holder set are one parameter, which is sharded over them.

The layer runs its own forward with each portion, and combines the results:

- cut along outputs (`q_proj`, `up_proj`): outputs are concatenated;
- cut along inputs (`o_proj`, `down_proj`): each portion reads its inputs; outputs are added, and the bias once;
- experts, cut inside: each portion reads the whole input; outputs are added;
- other modules (batch norms, depthwise convolutions, attention sinks, position tables): run once with concatenated
  parameters, which are small. The parent of a depthwise convolution may read its weight (gated delta nets), and runs
  with it, too.

Activations have the dense model's order everywhere. So operations between two split layers (products of gates and ups,
fused projections, positions of heads) are unaffected, and a body runs once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.architectures.branch import BATCH_NORMS, CONVOLUTIONS, is_inside
from sdp_deepspeed.masking.forwards import ReplacedForward, replace_forward, run_with

# DeepSpeed's AutoTP: layers with an all-reduce inside, and weights like those of nn.Linear.
_TENSOR_PARALLEL = ("LinearLayer", "LinearAllreduce")


@dataclass(frozen=True)
class Ranges:
    """Division of the indices of a cut dimension into portions.

    Args:
        lengths: lengths of runs of indices, in dense order.
    """

    lengths: tuple[int, ...]
    portions: tuple[int, ...]

    def split(self, x: torch.Tensor, dim: int) -> list[torch.Tensor]:
        """Split `x` into portions, each in dense order."""
        runs: list[list[torch.Tensor]] = [[] for _ in range(max(self.portions) + 1)]
        for run, portion in zip(x.split(self.lengths, dim), self.portions, strict=True):
            runs[portion].append(run)
        return [of_portion[0] if len(of_portion) == 1 else torch.cat(of_portion, dim) for of_portion in runs]

    def join(self, portions: Sequence[torch.Tensor], dim: int) -> torch.Tensor:
        """Inverse of `split`."""
        lengths: list[list[int]] = [[] for _ in portions]
        for length, portion in zip(self.lengths, self.portions, strict=True):
            lengths[portion].append(length)
        runs = [iter(values.split(of_portion, dim)) for values, of_portion in zip(portions, lengths, strict=True)]
        return torch.cat([next(runs[portion]) for portion in self.portions], dim)

    def merged(self) -> Ranges:
        """Merge adjacent runs of the same portion."""
        lengths: list[int] = []
        portions: list[int] = []
        for length, portion in zip(self.lengths, self.portions, strict=True):
            if portions and portions[-1] == portion:
                lengths[-1] += length
            else:
                lengths.append(length)
                portions.append(portion)
        return Ranges(tuple(lengths), tuple(portions))


@dataclass(frozen=True)
class ParameterSplit:
    """How a parameter is divided into portions: along `dim`, in `ranges`."""

    dim: int
    ranges: Ranges


@dataclass(frozen=True)
class SplitState:
    """State of a split layer's forward.

    Args:
        portions: parameters of each portion, by name; empty for the one that consists of the layer's own parameters.
            Read at each call, since FSDP2 replaces gathered parameters.
        dim: dimension of the activations that contains neurons, heads or channels.
        bias: name of a parameter that is not cut, and added by the first portion only; empty if there is none.
        compact: whether to copy the first portion's inputs, so that autograd does not keep those of others alive.
    """

    portions: Sequence[Mapping[str, Any]]
    cuts: Mapping[str, ParameterSplit]
    sizes: Sequence[Mapping[str, int]]
    dim: int
    bias: str
    compact: bool


def split_layer(
    layer: Any,
    portions: Sequence[Mapping[str, Any]],
    cuts: Mapping[str, ParameterSplit],
    *,
    output_bias: str,
    is_sum: bool,
    compact: bool = False,
    parent: nn.Module | None = None,
) -> nn.Module:
    """Make a layer run with each portion of its parameters, and combine the outputs.

    Args:
        portions, cuts, compact: see `SplitState`. A layer with own parameters has the size of these.
        output_bias: name of the parameter that is added to the output once; empty if there is none.
        is_sum: whether the layer's output is a sum over neurons (experts).
        parent: module in whose forward the layer runs, if that is in the branch.

    Returns:
        The module whose forward was replaced.
    """
    cut = cuts.get("weight")
    inputs = input_dim(layer)
    is_depthwise = isinstance(layer, CONVOLUTIONS) and layer.groups > 1
    dim = -1
    sizes = [dict[str, int]() for _ in portions]
    if is_sum:
        function: Callable[..., Any] = _add_experts
    elif cut is None or inputs is None or is_depthwise:
        function = _join_parameters
    else:
        dim = -max(1, layer.weight.dim() - 1)
        function = _add_outputs if cut.dim == inputs else _join_outputs
        sizes = [sizes_of(layer, portion["weight"]) if portion else {} for portion in portions]
        set_sizes(layer)
    changed: nn.Module = parent if is_depthwise and parent is not None else layer
    replace_forward(changed, function, SplitState(portions, cuts, sizes, dim, output_bias, compact), of=layer)
    return changed


def parent_in_branch(model: nn.Module, branch: LocatedBranch, path: str) -> nn.Module | None:
    """The parent of a module by its dense name, if that is in a body of the branch and runs."""
    parent = path.rpartition(".")[0]
    module = model.get_submodule(parent)
    is_in_body = any(is_inside(parent, body) for body in branch.bodies)
    return module if is_in_body and not isinstance(module, nn.ModuleList | nn.ModuleDict) else None


def input_dim(module: Any) -> int | None:
    """Input dimension of the weight of a linear layer or convolution; None for other modules."""
    if is_conv1d(module):
        return 0
    is_linear = isinstance(module, (nn.Linear, *CONVOLUTIONS)) or type(module).__name__ in _TENSOR_PARALLEL
    return 1 if is_linear else None


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is Transformers' Conv1D, a linear layer that stores [in, out]."""
    return type(module).__name__ == "Conv1D" and hasattr(module, "nf")


def _join_outputs(forward: ReplacedForward, x: torch.Tensor) -> torch.Tensor:
    """Forward of a layer that is cut along its outputs, such as `up_proj`."""
    state: SplitState = forward.state
    outputs = [_run_portion(forward, number, x) for number in range(len(state.portions))]
    return state.cuts["weight"].ranges.join(outputs, state.dim)


def _add_outputs(forward: ReplacedForward, x: torch.Tensor) -> torch.Tensor:
    """Forward of a layer that is cut along its inputs, such as `down_proj`."""
    state: SplitState = forward.state
    inputs = state.cuts["weight"].ranges.split(x, state.dim)
    if state.compact:
        inputs[0] = inputs[0].contiguous()
    return reduce(add, [_run_portion(forward, number, values) for number, values in enumerate(inputs)])


def _add_experts(forward: ReplacedForward, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Forward of experts, cut inside: every portion reads the whole input."""
    outputs = [_run_portion(forward, number, *args, **kwargs) for number in range(len(forward.state.portions))]
    return reduce(add, outputs)


def _join_parameters(forward: ReplacedForward, *args: Any, **kwargs: Any) -> Any:
    """Forward of a module with small parameters: it runs once with concatenated ones."""
    state, joined = forward.state, {}  # not dict[str, Any](), which compilers cannot trace
    for name, cut in state.cuts.items():
        values = [portion[name] if portion else getattr(forward.module, name) for portion in state.portions]
        joined[name] = cut.ranges.join(values, cut.dim)
    return run_with(forward, joined, *args, **kwargs)


def _run_portion(forward: ReplacedForward, number: int, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run a layer's own forward with one portion of its parameters."""
    state: SplitState = forward.state
    values = {**state.portions[number], **state.sizes[number]}
    bias = getattr(forward.module, state.bias, None) if number and state.bias else None
    if bias is not None:
        values[state.bias] = bias.new_zeros(()).expand_as(bias)
    result: torch.Tensor = run_with(forward, values, *args, **kwargs)
    return result


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
    if weight is not None:
        for name, size in sizes_of(layer, weight).items():
            setattr(layer, name, size)
