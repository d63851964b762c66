"""FLOPs of each weight of an image model: in convolutional and hierarchical models, stages run at different numbers of
positions.

A copy of the model without storage runs once on one image, and each product is attributed to its weight. Results are
integers and equal on every rank, since plans are compared by hash. Products without weights (attention scores) are
omitted.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from copy import deepcopy
from fractions import Fraction
from itertools import chain
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from sdp_deepspeed.architectures.examples import image_shape, takes_images
from sdp_deepspeed.messages import KEY

_COLLECTIVES = ("c10d", "_c10d_functional")


# Cached by model: when plans change, the model is masked and would run differently.
_KNOWN: WeakKeyDictionary[nn.Module, tuple[frozenset[str], Mapping[str, Fraction] | None]] = WeakKeyDictionary()


def flops_per_element(model: nn.Module) -> Mapping[str, Fraction] | None:
    """FLOPs per image and parameter element, by dense name: twice the number of positions where a matrix or kernel is
    applied.

    The image has the size in the model or its config (`image_size`), or 224 x 224. The model and random state are
    unchanged. Not collective; all ranks get the same result.

    Args:
        model: whole, on any device, including meta; may be masked if the result is cached.

    Returns:
        None for a model that does not take images, and, with a warning, for one that cannot be run like this.
    """
    if not takes_images(model):
        return None
    names = frozenset(name for name, _ in model.named_parameters())
    known = _KNOWN.get(model)
    if known is None or known[0] != names:
        known = _KNOWN[model] = names, _count_or_warn(model)
    return known[1]


def _count_or_warn(model: nn.Module) -> dict[str, Fraction] | None:
    try:
        return _count(model)
    except Exception as problem:  # user code may expect other inputs, or read values
        warnings.warn(
            f"FLOPs per layer could not be counted ({type(problem).__name__}: {problem}), so units are balanced by "
            f"weights; a plan of your own in {KEY}.assignment may be better",
            stacklevel=4,
        )
        return None


def _count(model: nn.Module) -> dict[str, Fraction]:
    stand_ins = {id(tensor): _without_storage(tensor) for tensor in chain(model.parameters(), model.buffers())}
    copy = deepcopy(model, dict[int, Any](stand_ins)).eval()
    for module in copy.modules():  # wrappers of hosts and compilers may run the original
        vars(module).pop("forward", None)
    parameters = list(copy.parameters())
    image = torch.empty(1, *image_shape(model), dtype=parameters[0].dtype, device="meta")
    with torch.no_grad(), torch.random.fork_rng(devices=[]), _Products(parameters) as products:
        if "pixel_values" in inspect.signature(copy.forward).parameters:
            copy(pixel_values=image)
        else:
            copy(image)
    names = model.named_parameters(remove_duplicate=False)
    return {name: Fraction(products.flops_of(stand_ins[id(p)]), max(1, p.numel())) for name, p in names}


def _without_storage(tensor: torch.Tensor) -> torch.Tensor:
    result = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
    return nn.Parameter(result, requires_grad=False) if isinstance(tensor, nn.Parameter) else result


class _Products(TorchDispatchMode):
    """Counts FLOPs of products by weight, even if it is transposed, cast, normalized or sliced."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._origin = {_storage(parameter): parameter for parameter in parameters}
        self._flops = {_storage(parameter): 0 for parameter in parameters if parameter.dim() > 1}
        self._made: list[torch.Tensor] = []  # kept alive, so that addresses are unique

    def flops_of(self, parameter: torch.Tensor) -> int:
        return self._flops.get(_storage(parameter), 0)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in _COLLECTIVES:
            raise RuntimeError("its forward is a collective")
        result = func(*args, **(kwargs or {}))
        origins = [self._origin.get(_storage(tensor)) for tensor in _tensors((args, kwargs))]
        known = [parameter for parameter in origins if parameter is not None]
        formula = flop_registry.get(func.overloadpacket)
        if formula is not None:
            for storage in {_storage(parameter) for parameter in known} & self._flops.keys():
                self._flops[storage] += int(formula(*args, **(kwargs or {}), out_val=result))
        elif known and len(known) == len(origins):  # a result of parameters alone is attributed to the largest
            self._follow(max(known, key=torch.Tensor.numel), result)
        return result

    def _follow(self, parameter: torch.Tensor, result: Any) -> None:
        for tensor in _tensors(result):
            self._made.append(tensor)
            self._origin.setdefault(_storage(tensor), parameter)


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


def _storage(tensor: torch.Tensor) -> int:
    return id(tensor.untyped_storage())  # the same object as long as the storage is alive
