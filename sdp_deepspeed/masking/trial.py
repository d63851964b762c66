"""A layer outside of its model, with inputs that it takes: a copy on which a description can be tried out.

The copy has weights of its own, drawn at random, because those of a new model often hide mistakes (an output
projection that begins with zeros). So a model without storage will do, whose layers are called with noise in place of
what it would compute. The model's weights, gradients, buffers, modes and random numbers stay as they are.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.masking.mixins import settle_forward

SHAPE = (2, 8)  # batch and length of the inputs
_SEED = 0
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_WEIGHTS = "torch.nn.utils."


class Alone(nn.Module):
    """A layer that is all of its model."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer


@dataclass(frozen=True)
class Trial:
    """A layer that runs alone.

    Args:
        alone: a copy of the layer in evaluation mode; each run takes a copy of it.
        args, kwargs: of its forward; each run takes a copy of them.
        stream: which of their tensors is the residual stream.
        size: of what the layer adds to it.
        outside: what a copy does not copy, as `deepcopy` takes it: the modules that are not of the layer.
    """

    alone: Alone
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    stream: torch.Tensor
    size: float = 1.0
    outside: Mapping[int, Any] = field(default_factory=dict)

    @torch.no_grad()
    def run(self, prepare: Callable[[Alone], object] = lambda _: None) -> torch.Tensor:
        """The layer's output, of a copy that `prepare` has changed."""
        alone = deepcopy(self.alone, dict(self.outside))
        prepare(alone)
        args, kwargs = deepcopy((self.args, dict(self.kwargs)), dict(self.outside))
        output = next(leaf for leaf in tree_leaves(alone.layer(*args, **kwargs)) if isinstance(leaf, torch.Tensor))
        return output.float()

    def difference(self, found: torch.Tensor, expected: torch.Tensor) -> float:
        """Relative to what the whole layer adds to the residual stream."""
        return float((found - expected).norm()) / self.size


def trial_of(model: nn.Module, name: str, branch: LocatedBranch, device: torch.device) -> Trial:
    """Of a layer of a model.

    Args:
        model: on `device`, or without storage.
        name: of the layer.
        branch: one of its branches.
        device: where to try it out.

    Raises:
        Exception: of the layer's or the model's, where nothing is found that it takes.
    """
    layer = model.get_submodule(name)
    problem: Exception | None = None
    inside = {*layer.modules()}
    outside = {id(module): module for module in model.modules() if module not in inside}
    for dtype in dict.fromkeys((torch.float32, next(layer.parameters()).dtype)):
        alone = Alone(randomized(deepcopy(layer, outside | _hooks(layer) | _storage(layer, device)), dtype))
        for inputs in (_one_tensor, _of_model):
            try:
                trial = Trial(alone, *_replaced(*inputs(model, name, branch), dtype, device), outside=outside)
                output = trial.run()
                added = output - trial.stream.float() if output.shape == trial.stream.shape else output
                if added.isfinite().all() and added.any():
                    return replace(trial, size=float(added.norm()))
            except Exception as raised:  # whatever the user's code raises
                problem = raised
    raise problem or ValueError("it adds nothing, or what is not finite")


def _hooks(layer: nn.Module) -> dict[int, Any]:
    """What a copy has instead of a layer's hooks, as `deepcopy` takes it: those that PyTorch computes weights with."""
    registries = [getattr(module, name) for module in layer.modules() for name in _HOOKS]
    return {id(hooks): OrderedDict(filter(_is_of_weights, hooks.items())) for hooks in registries}


def _is_of_weights(item: tuple[int, Any]) -> bool:
    return type(item[1]).__module__.startswith(_OF_WEIGHTS)


def _storage(layer: nn.Module, device: torch.device) -> dict[int, Any]:
    """What a copy has instead of a layer's tensors without storage, as `deepcopy` takes it."""
    parameters = {
        id(p): nn.Parameter(_with_values(p, device), requires_grad=False) for p in layer.parameters() if p.is_meta
    }
    return parameters | {id(buffer): _with_values(buffer, device) for buffer in layer.buffers() if buffer.is_meta}


def _with_values(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A tensor, or one like it that has storage: noise, zeros, or what masks nothing."""
    if not tensor.is_meta:
        return tensor
    if tensor.is_floating_point():
        return torch.randn(tensor.shape, device=device, dtype=torch.float32).to(tensor.dtype)
    return torch.full(tensor.shape, tensor.dtype == torch.bool, device=device, dtype=tensor.dtype)


@contextmanager
def forked_random_numbers(device: torch.device) -> Iterator[None]:
    """The same random numbers inside on every rank, and outside as if nothing had been drawn."""
    devices = [] if device.type == "cpu" else [device]  # the CPU's are forked anyway
    with torch.random.fork_rng(devices, device_type=device.type):
        torch.manual_seed(_SEED)
        yield


@torch.no_grad()
def randomized(layer: nn.Module, dtype: torch.dtype) -> nn.Module:
    """The same layer in evaluation mode, with other weights: matrices that keep the size of their input."""
    layer.to(dtype).eval().requires_grad_(False)
    for module in layer.modules():
        settle_forward(module)
    for parameter in layer.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=max(parameter.shape[-2:]) ** -0.5)
        else:
            parameter.normal_(1.0, 0.3)
    return layer


def _one_tensor(model: nn.Module, name: str, branch: LocatedBranch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What most own layers take."""
    layer = model.get_submodule(name)
    first = layer.get_submodule(branch.description.modules[0])
    width = next(len(parameter) for parameter in first.parameters() if parameter.dim() == 1)
    return (torch.empty(*SHAPE, width, device="meta", dtype=torch.float32),), {}


class _CapturedError(BaseException):
    """Ends a forward pass once the arguments of a layer are known; no `except Exception` in the model stops it."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__()
        self.arguments = args, kwargs


def _of_model(model: nn.Module, name: str, branch: LocatedBranch) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What the layer is called with when the model runs on a few tokens: nothing after the layer runs."""

    def capture(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        raise _CapturedError(args, kwargs)

    modes = {module: module.training for module in model.modules()}
    buffers = {buffer: buffer.detach().clone() for buffer in model.buffers()}
    hook = model.get_submodule(name).register_forward_pre_hook(capture, with_kwargs=True)
    device = next(model.get_submodule(name).parameters()).device
    tokens = torch.arange(SHAPE[0] * SHAPE[1], device=device, dtype=torch.long).view(SHAPE) % 4
    try:
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            model.eval()(tokens)
    except _CapturedError as captured:
        return captured.arguments
    finally:
        hook.remove()
        for module, mode in modes.items():
            module.training = mode
        for buffer, value in buffers.items():
            buffer.copy_(value)
    raise RuntimeError(f"{name!r} does not run in the forward pass of its model")


def _replaced(
    args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> tuple[tuple[Any, ...], dict[str, Any], torch.Tensor]:
    """Arguments in another dtype, with noise for the first tensor of floats, the residual stream."""
    streams: list[torch.Tensor] = []

    def replaced(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if not value.is_floating_point():
            return _with_values(value, device)
        if streams:
            return _with_values(value.detach(), device).to(dtype)
        streams.append(torch.randn(value.shape, device=device, dtype=torch.float32).to(dtype))
        return streams[0]

    args, kwargs = tree_map(replaced, (args, kwargs))
    return args, kwargs, streams[0]
