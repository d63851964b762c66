"""Split parameters by holder set, since FSDP2 shards whole parameters.

With neurons and heads, the layers of a branch are narrow (`masking`), and their weights have slices of several holder
sets. Each set gets a module with its part of all these weights, which FSDP2 shards over the holders:

    model.layers.0.sdp_parts.mlp_3f2a91c0.gate_proj.weight

The body runs once: each split layer runs with every part, and concatenates or adds the outputs.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.fsdp.state_dicts import PartsDict
from sdp_deepspeed.masking import Mask
from sdp_deepspeed.masking.forwards import set_data
from sdp_deepspeed.masking.split_layers import Ranges, input_dim, is_conv1d, set_sizes, sizes_of
from sdp_deepspeed.units import Piece

PARTS = "sdp_parts"  # child of a layer that contains the parts of its branches
Holders = tuple[int, ...]


class Box(NamedTuple):
    """A box of elements of a slice, in one rank's shard of a parameter.

    Args:
        piece: the slice of a dense tensor.
        offsets: index of the first element in the slice.
        inside: index of the box in the shard.
        shape: of the box.
    """

    piece: Piece
    offsets: tuple[int, ...]
    inside: tuple[slice, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Part:
    """Slices of a dense tensor with the same holders, concatenated: one parameter, sharded over them along dim 0.

    Args:
        name: dense.
        path: of the parameter in the model.
        holders: data-parallel indices, ascending.
        pieces: in dense order.
        dim: along which the pieces are slices; None for the whole tensor.
        shape: of the parameter.
    """

    name: str
    path: str
    holders: Holders
    pieces: tuple[Piece, ...]
    dim: int | None
    shape: tuple[int, ...]

    def rows(self, rank: int) -> tuple[int, int]:
        """Range along dim 0 of a holder's shard, as of `torch.chunk`."""
        return chunk(self.shape[0], self.holders.index(rank), len(self.holders))

    def boxes(self, rank: int) -> Iterator[Box]:
        """The boxes of each piece in a holder's shard."""
        start, stop = self.rows(rank)
        first, others = 0, self.shape[1:]
        for piece in self.pieces:
            columns = [(0, size) for size in others]
            low, high = start, stop
            if self.dim == 0:
                low, high = max(start, first), min(stop, first + piece.length)
            elif self.dim is not None:
                columns[self.dim - 1] = (first, first + piece.length)
            if low < high and all(a < b for a, b in columns):
                inside = (slice(low - start, high - start), *(slice(a, b) for a, b in columns))
                offsets = (low - first if self.dim == 0 else low, *(0 for _ in others))
                yield Box(piece, offsets, inside, (high - low, *(b - a for a, b in columns)))
            first += piece.length if self.dim is not None else 0


def chunk(length: int, position: int, number: int) -> tuple[int, int]:
    """Range of the chunk at a position of `torch.chunk(number)`; empty beyond the last chunk."""
    size = -(-length // number)
    return min(position * size, length), min((position + 1) * size, length)


def parts_of(mask: Mask) -> dict[str, list[Part]]:
    """Parts of each parameter on all ranks, by dense name, sorted by holders."""
    branch_of = {t.parameter: branch for branch in mask.branches for t in branch.cut_tensors}
    digests = {branch.name: _digests(mask, branch) for branch in mask.branches}
    found: dict[str, list[Part]] = {}
    for name, pieces in mask.pieces.items():
        shape, dim = list(mask.shapes[name]), pieces[0][0].dim
        if dim is None:
            found[name] = [Part(name, name, pieces[0][1], (pieces[0][0],), None, tuple(shape))]
            continue
        branch, by_holders = branch_of[name], dict[Holders, list[Piece]]()
        for piece, holders in pieces:
            by_holders.setdefault(holders, []).append(piece)
        found[name] = []
        for holders, own in sorted(by_holders.items()):
            shape[dim] = sum(piece.length for piece in own)
            key = f"{branch.description.name}_{digests[branch.name][holders]}"
            path = f"{branch.layer}.{PARTS}.{key}.{_inside(branch, name)}"
            found[name].append(Part(name, path, holders, tuple(own), dim, tuple(shape)))
    return found


def _digests(mask: Mask, branch: LocatedBranch) -> dict[Holders, str]:
    """A digest of each holder set's part of a branch, for its name: under another plan the name differs."""
    pieces: dict[Holders, list[Any]] = {}
    for name in (tensor.parameter for tensor in branch.cut_tensors if tensor.parameter in mask.pieces):
        for piece, holders in mask.pieces[name]:
            pieces.setdefault(holders, []).append((name, piece.dim, piece.start, piece.length))
    return {h: hashlib.sha256(json.dumps([h, own]).encode()).hexdigest()[:8] for h, own in pieces.items()}


def _inside(branch: LocatedBranch, name: str) -> str:
    """A dense name relative to the branch; parameters of the body itself are prefixed with "own."."""
    inside = name.removeprefix(f"{branch.root}.")
    return inside if "." in inside else f"own.{inside}"


# ---- splitting a branch ---------------------------------------------------------------------------------------------


class HolderPart(nn.Module):
    """One holder set's part of a branch, which FSDP2 gathers, averages and frees together.

    The parts of a branch are nested: each calls the next one, and the last one calls the body. So all of them are
    gathered before the body runs, and freed afterwards.
    """

    def forward(self, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return run(*args, **kwargs)

    def add(self, path: str, module: nn.Module) -> None:
        """Add a module at a path below this one."""
        *parents, last = path.split(".")
        owner: nn.Module = self
        for name in parents:
            if name not in owner._modules:
                owner.add_module(name, nn.Module())
            owner = owner.get_submodule(name)
        owner.add_module(last, module)


def split_branch(mask: Mask, branch: LocatedBranch, parts: Mapping[str, Sequence[Part]]) -> dict[Holders, HolderPart]:
    """Split the narrow layers of a branch among the holder sets of this rank.

    Args:
        mask: applied.
        parts: by dense name.

    Returns:
        The parts by holder set, in the order in which they are gathered; empty if the branch is not split.
    """
    owners: dict[str, dict[str, list[Part]]] = {}
    for name in (tensor.parameter for tensor in branch.cut_tensors):
        if name in parts and parts[name][0].dim is not None:
            owner, _, attribute = name.rpartition(".")
            held = [part for part in parts[name] if mask.rank in part.holders]
            owners.setdefault(owner, {})[attribute] = held
    if not owners:
        return {}
    layer, modules = mask.model.get_submodule(branch.layer), dict[Holders, HolderPart]()
    if PARTS not in layer._modules:
        layer.add_module(PARTS, PartsDict())
    outputs = mask.output_biases()
    for owner, held_parts in owners.items():
        bias, is_sum = outputs.get(owner, ("", False))
        leaves = _split_layer(mask, mask.model.get_submodule(owner), held_parts, bias, is_sum=is_sum)
        for part, leaf in zip(next(iter(held_parts.values())), leaves, strict=True):
            key, _, path = part.path.removeprefix(f"{branch.layer}.{PARTS}.").partition(".")
            module = modules.setdefault(part.holders, HolderPart())
            module.add(path.rpartition(".")[0], leaf)
            layer.get_submodule(PARTS)._modules[key] = module
    modules = dict(sorted(modules.items()))
    wrap_forward(mask.model.get_submodule(branch.bodies[0]), partial(_run_inside, list(modules.values())))
    return modules


def _split_layer(
    mask: Mask, layer: nn.Module, parts: Mapping[str, Sequence[Part]], bias: str, *, is_sum: bool
) -> list[nn.Module]:
    """Make a narrow layer run with each part of its parameters, and combine the outputs.

    Args:
        parts: held parts, by name of the layer's parameter, sorted by holders.
        bias: name of the parameter that is added to the output once; empty if there is none.
        is_sum: whether the output is a sum over the parts (experts).

    Returns:
        For each holder set a layer of the same class with its parameters.
    """
    sets = [part.holders for part in next(iter(parts.values()))]
    weight, dim = layer._parameters.get("weight"), parts["weight"][0].dim if "weight" in parts else None
    runs_in_parts = is_sum or (weight is not None and dim is not None and input_dim(layer) is not None)
    leaves = []
    for number in range(len(sets)):
        leaf = bare_copy(layer)  # of the same class, which initializers check
        leaf._parameters = dict.fromkeys(layer._parameters)
        if not runs_in_parts:
            leaf._modules, leaf._buffers = {}, {}
        for name in set(layer._parameters) - set(parts) if is_sum else ():
            del leaf._parameters[name]
            vars(leaf)[name] = torch.empty(0)  # placeholder of the bias
        for name, own in parts.items():
            values = torch.cat([mask.view(piece) for piece in own[number].pieces], own[number].dim or 0)
            leaf._parameters[name] = nn.Parameter(values, requires_grad=mask.trainable[own[number].name])
        set_sizes(leaf)
        leaves.append(leaf)
    ranges = {name: _ranges(mask, own[0].name, sets) for name, own in parts.items()}
    if is_sum:
        wrap_forward(layer, partial(_add_experts, layer, leaves, bias))
    elif not runs_in_parts:
        cuts = {name: (ranges[name], own[0].dim or 0) for name, own in parts.items()}
        wrap_forward(layer, partial(_join_parameters, layer, leaves, cuts))
    else:
        assert weight is not None
        is_depthwise = sizes_of(layer, weight).get("groups", 1) > 1
        join = _add_outputs if dim == input_dim(layer) and not is_depthwise else _join_outputs
        along = Along(-max(1, weight.dim() - 1), ranges["weight"], is_depthwise)
        wrap_forward(layer, partial(join, layer, leaves, along))
    for name in parts:
        parameter = layer._parameters.pop(name)
        assert parameter is not None
        set_data(parameter, parameter.new_empty(0))
        vars(layer)[name] = parameter.detach()  # for code that reads its dtype
    return leaves


def _ranges(mask: Mask, name: str, sets: Sequence[Holders]) -> Ranges:
    held = [(piece.length, sets.index(holders)) for piece, holders in mask.pieces[name] if mask.is_held(piece)]
    return Ranges(tuple(length for length, _ in held), tuple(number for _, number in held)).merged()


def bare_copy(module: nn.Module) -> Any:
    """A shallow copy of a module without hooks, with its own dicts of parameters, buffers and children."""
    copied = object.__new__(type(module))
    vars(copied).update(vars(module))
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers", "_modules"):
            vars(copied)[name] = dict(value)
        elif "_hooks" in name:
            vars(copied)[name] = type(value)()
    vars(copied)["_compiled_call_impl"] = None
    return copied


# ---- forward passes -------------------------------------------------------------------------------------------------


def wrap_forward(module: nn.Module, function: Callable[..., Any]) -> None:
    """Replace the forward of a module by `function(previous_forward, *args, **kwargs)`."""
    inner = module.forward

    @wraps(inner)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return function(inner, *args, **kwargs)

    vars(module)["forward"] = forward


def _run_inside(modules: Sequence[HolderPart], inner: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    for module in reversed(modules):
        inner = partial(module, inner)
    return inner(*args, **kwargs)


class Along(NamedTuple):
    """How a layer is split.

    Args:
        dim: dimension of the activations that contains neurons, heads or channels.
        ranges: of the parts along `dim`.
        is_depthwise: whether the layer is a depthwise convolution.
    """

    dim: int
    ranges: Ranges
    is_depthwise: bool


def _join_outputs(_: Any, leaves: Sequence[Any], along: Along, __: Any, x: torch.Tensor) -> torch.Tensor:
    """Forward of a layer that is split along its outputs, such as `up_proj`."""
    inputs = along.ranges.split(x, along.dim) if along.is_depthwise else [x] * len(leaves)
    return along.ranges.join([leaf(own) for leaf, own in zip(leaves, inputs, strict=True)], along.dim)


def _add_outputs(layer: Any, leaves: Sequence[Any], along: Along, _: Any, x: torch.Tensor) -> torch.Tensor:
    """Forward of a layer that is split along its inputs, such as `down_proj`; the bias is added once."""
    total = None
    for leaf, own in zip(leaves, along.ranges.split(x, along.dim), strict=True):
        # Transformers' Conv1D requires a bias.
        output = functional.linear(own, leaf.weight.t()) if is_conv1d(leaf) else leaf(own)
        total = output if total is None else total + output
    assert total is not None
    bias = layer._parameters.get("bias")
    return total if bias is None else total + bias.view(-1, *[1] * (-along.dim - 1))


def _add_experts(layer: Any, leaves: Sequence[Any], bias: str, _: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Forward of experts that are split by neurons: every part reads the whole input."""
    total = None
    for leaf in leaves:
        if (own := layer._parameters.get(bias)) is not None:
            vars(leaf)[bias] = own if total is None else own.new_zeros(()).expand_as(own)
        output = leaf(*args, **kwargs)
        total = output if total is None else total + output
    assert total is not None
    return total


def _join_parameters(
    layer: Any, leaves: Sequence[Any], cuts: Mapping[str, tuple[Ranges, int]], inner: Any, *args: Any, **kwargs: Any
) -> Any:
    """Forward of a module with small parameters, which are concatenated: it runs once."""
    places = {name: vars(layer)[name] for name in cuts}
    for name, (ranges, dim) in cuts.items():
        vars(layer)[name] = ranges.join([leaf._parameters[name] for leaf in leaves], dim)
    try:
        return inner(*args, **kwargs)
    finally:
        vars(layer).update(places)
