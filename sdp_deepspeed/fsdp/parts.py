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
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.fsdp.state_dicts import PartsDict
from sdp_deepspeed.masking import Mask
from sdp_deepspeed.masking.forwards import ReplacedForward, replace_forward
from sdp_deepspeed.masking.split_layers import ParameterSplit, Ranges, parent_in_branch, set_sizes, split_layer
from sdp_deepspeed.masking.tensor_data import set_data
from sdp_deepspeed.parallel.boxes import Box
from sdp_deepspeed.units import Holders, Piece

PARTS = "sdp_parts"  # child of a layer that contains the parts of its branches


@dataclass(frozen=True)
class Part:
    """Slices of a dense tensor with the same holders, concatenated: one parameter, sharded over them along dim 0.

    Args:
        holders: data-parallel indices, ascending.
        dim: dimension along which the pieces are slices; None for the whole tensor.
        is_sharded: False for `ignored_params`, which every rank has as a whole.
    """

    name: str
    path: str
    holders: Holders
    pieces: tuple[Piece, ...]
    dim: int | None
    shape: tuple[int, ...]
    is_sharded: bool = True

    def rows(self, rank: int) -> tuple[int, int]:
        """Range along dim 0 of a holder's shard, as of `torch.chunk`."""
        if not self.is_sharded:
            return 0, self.shape[0]
        return chunk_range(self.shape[0], self.holders.index(rank), len(self.holders))

    def boxes(self, rank: int, tensor: torch.Tensor, *, is_stepped: bool) -> Iterator[Box]:
        """The boxes of a holder's shard; rank 0 saves ignored parameters."""
        start, stop = self.rows(rank)
        first, is_written = 0, self.is_sharded or rank == 0
        for piece in self.pieces:
            bounds = [(start, stop), *((0, size) for size in self.shape[1:])]  # of the piece, within the part
            offsets = list(piece.offsets(len(self.shape)))
            if self.dim is not None:
                low, high = bounds[self.dim]
                bounds[self.dim] = (max(low, first), min(high, first + piece.length))
            low, high = bounds[0]
            offsets[0] += low - first if self.dim == 0 else low
            inside = (slice(low - start, high - start), *(slice(*columns) for columns in bounds[1:]))
            sizes = tuple(end - begin for begin, end in bounds)
            if all(size > 0 for size in sizes):
                yield Box(self.name, tuple(offsets), sizes, tensor, inside, is_stepped, is_written)
            if self.dim is not None:
                first += piece.length


def chunk_range(length: int, position: int, number: int) -> tuple[int, int]:
    """Range of the chunk at a position of `torch.chunk(number)`; empty beyond the last chunk."""
    size = -(-length // number)
    return min(position * size, length), min((position + 1) * size, length)


def parts_of(mask: Mask, ignored: AbstractSet[nn.Parameter]) -> dict[str, list[Part]]:
    """Parts of each parameter on all ranks, by dense name, sorted by holders.

    Args:
        mask: not applied yet.
    """
    branch_of = {t.parameter: branch for branch in mask.branches for t in branch.cut_tensors}
    digests = {branch.name: _digests(mask, branch) for branch in mask.branches}
    parts: dict[str, list[Part]] = {}
    for name, pieces in mask.pieces.items():
        shape, dim = list(mask.shapes[name]), pieces[0][0].dim
        if dim is None:
            is_sharded = mask.parameters[name] not in ignored
            parts[name] = [Part(name, name, pieces[0][1], (pieces[0][0],), None, tuple(shape), is_sharded)]
            continue
        branch = branch_of[name]
        by_holders = dict[Holders, list[Piece]]()
        for piece, holders in pieces:
            by_holders.setdefault(holders, []).append(piece)
        parts[name] = []
        for holders, of_holders in sorted(by_holders.items()):
            shape[dim] = sum(piece.length for piece in of_holders)
            key = f"{branch.description.name}_{digests[branch.name][holders]}"
            path = f"{branch.layer}.{PARTS}.{key}.{_inside(branch, name)}"
            parts[name].append(Part(name, path, holders, tuple(of_holders), dim, tuple(shape)))
    return parts


def _digests(mask: Mask, branch: LocatedBranch) -> dict[Holders, str]:
    """A digest of each holder set's part of a branch, for its name, which differs under another plan."""
    pieces: dict[Holders, list[Any]] = {}
    for name in (tensor.parameter for tensor in branch.cut_tensors if tensor.parameter in mask.pieces):
        for piece, holders in mask.pieces[name]:
            pieces.setdefault(holders, []).append((name, piece.dim, piece.start, piece.length))
    return {h: hashlib.sha256(json.dumps([h, of_holders]).encode()).hexdigest()[:8] for h, of_holders in pieces.items()}


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

    Returns:
        The parts by holder set, in the order in which they are gathered; empty if the branch is not split.
    """
    held_of: dict[str, dict[str, list[Part]]] = {}  # by path of the module and name of its parameter
    for name in (tensor.parameter for tensor in branch.cut_tensors):
        if name in parts and parts[name][0].dim is not None:
            module_path, _, attribute = name.rpartition(".")
            held = [part for part in parts[name] if mask.rank in part.holders]
            held_of.setdefault(module_path, {})[attribute] = held
    if not held_of:
        return {}
    layer = mask.model.get_submodule(branch.layer)
    modules = dict[Holders, HolderPart]()
    if PARTS not in layer._modules:
        layer.add_module(PARTS, PartsDict())
    outputs = mask.output_biases()
    for module_path, held_parts in held_of.items():
        bias, is_sum = outputs.get(module_path, ("", False))
        parent = parent_in_branch(mask.model, branch, module_path)
        copies = _split_layer(mask, mask.model.get_submodule(module_path), held_parts, bias, parent, is_sum=is_sum)
        for part, copied in zip(next(iter(held_parts.values())), copies, strict=True):
            key, _, path = part.path.removeprefix(f"{branch.layer}.{PARTS}.").partition(".")
            module = modules.setdefault(part.holders, HolderPart())
            module.add(path.rpartition(".")[0], copied)
            layer.get_submodule(PARTS)._modules[key] = module
    modules = dict(sorted(modules.items()))
    replace_forward(mask.model.get_submodule(branch.bodies[0]), _run_inside, list(modules.values()))
    return modules


def _split_layer(
    mask: Mask,
    layer: nn.Module,
    parts: Mapping[str, Sequence[Part]],
    bias: str,
    parent: nn.Module | None,
    *,
    is_sum: bool,
) -> list[nn.Module]:
    """Split the parameters of a narrow layer.

    Args:
        parts: held parts, by name of the layer's parameter, sorted by holders.
        bias, is_sum: see `Mask.output_biases`.
        parent: see `split_layer`.

    Returns:
        For each holder set a module with its parameters, of the layer's class, which initializers check.
    """
    sets = [part.holders for part in next(iter(parts.values()))]
    copies = []
    for number in range(len(sets)):
        copied = copy_without_hooks(layer)
        copied._modules, copied._buffers = {}, {}
        copied._parameters = {name: None for name, value in layer._parameters.items() if value is None}
        for name in layer._parameters.keys() - copied._parameters.keys() - parts.keys():
            vars(copied)[name] = torch.empty(0)  # the layer keeps this bias; initializers look for the attribute
        for name, held in parts.items():
            part = held[number]
            values = torch.cat([mask.view(piece) for piece in part.pieces], part.dim or 0)
            copied._parameters[name] = nn.Parameter(values, requires_grad=mask.trainable[part.name])
        set_sizes(copied)
        copies.append(copied)
    cuts = {}
    for name, (first, *_) in parts.items():
        cuts[name] = ParameterSplit(first.dim or 0, _ranges(mask, first.name, sets))
    portions = [copied._parameters for copied in copies]
    split_layer(layer, portions, cuts, output_bias=bias, is_sum=is_sum, parent=parent)
    for name in parts:
        parameter = layer._parameters.pop(name)
        assert parameter is not None
        set_data(parameter, parameter.new_empty(0))
        vars(layer)[name] = parameter.detach()  # for code that reads its dtype
    return copies


def _ranges(mask: Mask, name: str, sets: Sequence[Holders]) -> Ranges:
    held = [(piece.length, sets.index(holders)) for piece, holders in mask.pieces[name] if mask.is_held(piece)]
    return Ranges(tuple(length for length, _ in held), tuple(number for _, number in held)).merged()


def _run_inside(forward: ReplacedForward, *args: Any, **kwargs: Any) -> Any:
    """Forward of a body, inside its parts."""
    run = forward.previous
    for module in reversed(forward.state):
        run = partial(module, run)
    return run(*args, **kwargs)


def copy_without_hooks(module: nn.Module) -> Any:
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
