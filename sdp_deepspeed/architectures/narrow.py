"""A copy of a large model with a narrow residual stream, on which its branches are proven.

No unit cuts the residual stream, so that proofs do not depend on its width. The copy is what the model's class makes of
the model's config with a smaller `hidden_size`, and with fewer neurons where that is possible. It stands for the model
only if the class makes the model itself of the unchanged config, and if both run the same operations.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from sdp_deepspeed.architectures.branch import Branch
from sdp_deepspeed.architectures.derive import derive
from sdp_deepspeed.architectures.examples import Example
from sdp_deepspeed.architectures.likeness import likeness
from sdp_deepspeed.architectures.trace import Node, Trace, is_of_a_host, trace_pass

_LARGE = 2**24  # elements of a layer
_WIDTHS = (0, 8, 16, 32, 64)  # of a head, where that is the stream's width by the number of heads
_SMALLEST = 24  # width of a stream that is independent of the heads
_DIVISORS = (8, 1)  # of other large sizes, such as the number of neurons
_LARGE_SIZE = 512
_MIN_WIDTH = 8  # of anything that becomes narrower
_TABLES = ("_parameters", "_buffers", "_modules")
_IGNORED = frozenset({*_TABLES, "training", "generation_config"})


class NotAlike(ValueError):
    """A copy that does not stand for the model."""


def narrow_pass(
    model: nn.Module, example: Example, traced: Trace, branches: Mapping[str, list[Branch]]
) -> tuple[Trace, Mapping[str, list[Branch]]]:
    """The pass of a narrow copy, with its branches; or the model's own if none is needed, or none stands for it."""
    is_large = any(sum(p.numel() for p in model.get_submodule(layer).parameters()) > _LARGE for layer in branches)
    if is_large and _parts_with_stream(getattr(model, "config", None)):
        for width_of_head, divisor in itertools.product(_WIDTHS, _DIVISORS):
            try:
                copied = _narrow_copy(model, width_of_head, divisor)
                with _without_logs():
                    narrow = trace_pass(copied, example)
            except Exception:  # of user code, on sizes that it may not allow
                continue
            if _is_same_graph(traced, narrow) and _is_described_alike(branches, found := derive(copied, narrow)[0]):
                return narrow, found
    return traced, branches


@contextmanager
def _without_logs() -> Iterator[None]:
    """Context in which fake tensors do not log errors that they raise."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def _narrow_copy(model: nn.Module, width_of_head: int, divisor: int) -> nn.Module:
    config = copy.deepcopy(model.config)
    narrow = copy.deepcopy(config)
    for part in _parts_with_stream(narrow):
        heads, width = getattr(part, "num_attention_heads", 1), part.hidden_size
        for key, size in vars(part).items():
            if type(size) is int and size >= _LARGE_SIZE:
                setattr(part, key, size // divisor)
        part.hidden_size = heads * width_of_head or _SMALLEST
        if vars(part).get("head_dim", 0) is None or (width_of_head and "head_dim" in vars(part)):
            part.head_dim = width_of_head or width // heads
    with torch.device("meta"):
        made, copied = type(model)(config), type(model)(narrow)
    named = zip(model.named_modules(), made.named_modules(), copied.named_modules(), strict=True)
    for (name, module), (of_made, same), (of_copy, other) in named:
        if name not in (of_made, of_copy) or not type(module) is type(same) is type(other):
            raise NotAlike(name)
        _take_over(module, same, other)
    return copied


def _parts_with_stream(config: Any) -> list[Any]:
    """A config, and those inside it, that have a width of the stream."""
    return [part for part in (config, *getattr(config, "__dict__", {}).values()) if hasattr(part, "hidden_size")]


def _take_over(module: nn.Module, made: nn.Module, copied: nn.Module) -> None:
    """Give a module of the narrow copy what was changed in the model after its class had made it.

    Raises:
        NotAlike: the change has to do with the module itself, such as another forward.
    """
    for table in _TABLES:
        ours, theirs, narrow = (getattr(part, table) for part in (module, made, copied))
        shapes = [[getattr(value, "shape", None) for value in values.values()] for values in (ours, theirs)]
        if not [*ours] == [*theirs] == [*narrow] or shapes[0] != shapes[1]:
            raise NotAlike(table)
    for parameters in (module._parameters, module._buffers):
        for key, tensor in parameters.items():
            other = getattr(copied, key)
            if tensor is not None and not isinstance(tensor, nn.Parameter) and tensor.shape == other.shape:
                copied._buffers[key] = tensor
            elif tensor is not None:
                other.data = other.data.to(tensor.dtype)
    for key in vars(module).keys() | vars(made).keys():
        ours, theirs = vars(module).get(key), vars(made).get(key)
        if key in _IGNORED or "state_dict" in key or ours is theirs or likeness(ours) == likeness(theirs):
            continue
        if key in ("forward", "config") or key not in vars(module) or any(map(_is_of_modules, tree_leaves(ours))):
            raise NotAlike(key)
        setattr(copied, key, ours)


def _is_of_modules(value: Any) -> bool:
    is_plain = not isinstance(value, nn.Module | torch.Tensor) and not inspect.ismethod(value)
    return not is_plain and not is_of_a_host(value)  # hooks of hosts are not copied


def _is_same_graph(first: Trace, second: Trace) -> bool:
    """Whether two passes run the same operations, of which no size or number becomes, or ceases to be, a special
    one."""
    if len(first.nodes) != len(second.nodes):
        return False
    for a, b in zip(first.nodes, second.nodes, strict=True):
        if _described(a) != _described(b) or not all(map(_may_stand_for, a.shape, b.shape)):
            return False
        if len(a.constants) != len(b.constants) or not all(map(_may_stand_for, a.constants, b.constants)):
            return False
    return True


def _is_described_alike(first: Mapping[str, list[Branch]], second: Mapping[str, list[Branch]]) -> bool:
    """Whether branches are the same but for the sizes of zeros."""

    def without_sizes(branch: Branch) -> Branch:
        zeros = [replace(zero, size=None if zero.size is None else 0) for zero in branch.zeros]
        return replace(branch, zeros=tuple(zeros))

    return [*first] == [*second] and all(
        [*map(without_sizes, first[layer])] == [*map(without_sizes, second[layer])] for layer in first
    )


def _described(node: Node) -> tuple[Any, ...]:
    inputs = [(source.operation, source.module, source.order) for source in node.inputs]
    return node.operation, node.module, inputs, [*node.parameters], node.operators, len(node.shape)


def _may_stand_for(value: Any, narrow: Any) -> bool:
    if value == narrow:
        return True
    if isinstance(value, str) or type(value) is not type(narrow):
        return False
    if isinstance(value, int):
        return min(value, narrow) >= _MIN_WIDTH
    return not {value, narrow} & {0.0, 1.0, -1.0}
