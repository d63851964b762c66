"""The residual branches of a live model, derived or described, with their pieces and cuts."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import NoReturn

import torch
from torch import nn

from sdp_deepspeed.architectures.branch import Branch, InnerLayers, attribute
from sdp_deepspeed.architectures.cut_tensors import CutTensor, cut_tensors_of
from sdp_deepspeed.architectures.derivation import Derivation, derivation_of
from sdp_deepspeed.architectures.registry import branches_of, how_to_describe
from sdp_deepspeed.units import Piece

_NOT_ASKED = "its neurons or heads are derived when a strategy cuts them"  # proven_branches


@dataclass(frozen=True)
class LocatedBranch:
    """A residual branch in a live model.

    Args:
        layer: dense name of its layer, as in `named_modules()`.
        pieces: all of the branch's parameters and buffers, whole.
        num_cells: number of neurons or (key/value) heads; 0 if the description names none.
        cut_tensors: tensors with an index for each of these cells.
        uncuttable_reason: why this branch cannot be cut; empty if it can.
        is_bypassed: whether the skip connection is the identity, so that the branch can be a block.
        is_trained: whether a parameter requires gradients. If none does, all ranks hold the branch.
        is_derived: whether it was derived from a traced pass, not described.
    """

    layer: str
    description: Branch
    pieces: tuple[Piece, ...]
    num_cells: int = 0
    cut_tensors: tuple[CutTensor, ...] = ()
    uncuttable_reason: str = ""
    is_bypassed: bool = True
    is_trained: bool = True
    is_derived: bool = False

    @property
    def name(self) -> str:
        return f"{self.layer}.{self.description.name}"

    @property
    def bodies(self) -> tuple[str, ...]:
        """Dense names of the bodies, in forward order."""
        return tuple(f"{self.layer}.{name}" for name in self.description.bodies)

    @property
    def root(self) -> str:
        """Dense name of the module to which names of `inner` are relative."""
        return f"{self.layer}.{self.description.root}".rstrip(".")

    @property
    def parameters(self) -> tuple[str, ...]:
        """Dense names of the layer's own parameters in the branch."""
        inside = {piece.parameter for piece in self.pieces}
        return tuple(name for path in self.description.parameters if (name := f"{self.layer}.{path}") in inside)

    @property
    def outputs(self) -> list[str]:
        """Dense names of the weights of the output projections."""
        if self.is_derived:
            return [f"{self.layer}.{name}" for name in self.description.outputs]
        return [tensor.parameter for tensor in self.cut_tensors if tensor.cut.is_output]

    @property
    def per_head_parameters(self) -> list[str]:
        """Dense names of parameters that are applied to each head, such as Qwen3's norms of queries and keys."""
        inner = self.description.inner
        inside = tuple(f"{self.root}.{norm}." for norm in inner.per_head) if inner else ()
        return [p.parameter for p in self.pieces if p.kind == "parameter" and p.parameter.startswith(inside)]

    def pieces_of_cells(self, cells: range) -> tuple[Piece, ...]:
        """Pieces of a range of cells, in model order."""
        return tuple(piece for tensor in self.cut_tensors for piece in tensor.pieces(cells, self.num_cells))

    @property
    def has_stacked_matrices(self) -> bool:
        """Whether tensors over the cells contain a matrix for each expert."""
        return any(tensor.dim > 1 for tensor in self.cut_tensors)

    @property
    def modules(self) -> tuple[str, ...]:
        """Dense names of the modules, in forward order."""
        return tuple(f"{self.layer}.{name}" for name in self.description.modules)


def locate_branches(model: nn.Module) -> list[LocatedBranch]:
    """All residual branches that are described, in model order; if none is, those that can be derived.

    Raises:
        ValueError: nothing is described or can be derived; the model itself is described; a described submodule is
            missing; or a branch shares a tensor with another part of the model.
    """
    branches = _described(model) or _derived(model)
    trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    branches = [replace(b, is_trained=any(piece.parameter in trained for piece in b.pieces)) for b in branches]
    _refuse_tied(model, branches)
    _refuse_common_modules(model, branches)
    return branches


def trained_layers(branches: Sequence[LocatedBranch]) -> set[str]:
    """Names of the layers with a trained branch, and of all modules that contain one."""
    names = {""}
    for branch in branches:
        path = branch.layer.split(".") if branch.is_trained else []
        names |= {".".join(path[:end]) for end in range(1, len(path) + 1)}
    return names


def _described(model: nn.Module) -> list[LocatedBranch]:
    branches = []
    for name, module in model.named_modules():
        for branch in branches_of(type(module)):
            if not name:
                raise ValueError(
                    f"the class of the model itself, {type(model).__name__}, is described, expected a model that "
                    "contains such layers; wrap it, as in nn.Sequential(model)"
                )
            located = LocatedBranch(name, branch, _pieces(name, module, branch), is_bypassed=not branch.is_projected)
            branches.append(_with_described_cells(model, located))
    return branches


def _with_described_cells(model: nn.Module, branch: LocatedBranch) -> LocatedBranch:
    inner = branch.description.inner
    if inner is None:
        return replace(branch, uncuttable_reason="its description names no neurons or heads (InnerLayers)")
    try:
        root = model.get_submodule(branch.root)
        number = attribute(root, inner.heads) if isinstance(inner.heads, str) else inner.heads
        return with_cells(model, branch, inner, number)
    except (AttributeError, ValueError) as problem:  # irrelevant for the block strategy
        return replace(branch, uncuttable_reason=f"{problem}; correct its description")


def _derived(model: nn.Module) -> list[LocatedBranch]:
    derivation = derivation_of(model)
    branches = []
    for name, of_layer in derivation.branches.items():
        for branch in of_layer:
            layer = model.get_submodule(name)
            located = LocatedBranch(name, branch, _pieces(name, layer, branch), is_bypassed=not branch.is_projected)
            branches.append(replace(located, uncuttable_reason=_NOT_ASKED, is_derived=True))
    if not branches:
        _refuse_unknown(model, derivation)
    return branches


def _refuse_common_modules(model: nn.Module, branches: Sequence[LocatedBranch]) -> None:
    """Raise ValueError for modules in two branches."""
    owners: dict[nn.Module, str] = {}
    for branch in branches:
        for name in branch.modules:
            module = model.get_submodule(name)
            if owners.setdefault(module, branch.name) != branch.name:
                raise ValueError(
                    f"{name!r} is the same {type(module).__name__} in the branches {owners[module]} and {branch.name}; "
                    "give each branch a separate module"
                )


def _refuse_unknown(model: nn.Module, derivation: Derivation) -> NoReturn:
    """Raise ValueError for a model of which no branch is described or was derived: why, and what to do."""
    name = type(model).__name__
    if derivation.problem:
        raise ValueError(
            f"{name}: its forward pass could not be traced ({derivation.problem}). Give an example of inputs before "
            "deepspeed.initialize, fully_shard or join:\nsdp_deepspeed.trace(model, *args, **kwargs)"
        )
    layer, reason = next(iter(derivation.reasons.items()), ("the model", "no repeated module adds to its input"))
    known = _repeated_layer(model)
    how = f"\n\n{how_to_describe(known)}" if known is not None else ""
    raise ValueError(f"{name} has no residual branch that can be left out; {layer}: {reason}.{how}")


def _repeated_layer(model: nn.Module) -> nn.Module | None:
    """First module of the repeated class with the most parameters; None if no class is repeated."""
    sizes: Counter[type] = Counter()
    first: dict[type, nn.Module] = {}
    for container in model.modules():
        if isinstance(container, nn.ModuleList | nn.Sequential):
            for child in container:
                if any(True for _ in child.children()):
                    first.setdefault(type(child), child)
                    sizes[type(child)] += sum(parameter.numel() for parameter in child.parameters())
    return first[max(sizes, key=lambda kind: sizes[kind])] if sizes else None


def _pieces(layer_name: str, layer: nn.Module, branch: Branch) -> tuple[Piece, ...]:
    pieces = []
    for path in branch.modules:
        try:
            module = layer.get_submodule(path)
        except AttributeError:
            raise ValueError(
                f"{layer_name} ({type(layer).__name__}) has no submodule {path!r}, which its description names in "
                f"{branch.name!r}; its submodules are {[name for name, _ in layer.named_children()]}"
            ) from None
        prefix = f"{layer_name}.{path}"
        pieces += [Piece(name, None, 0, p.numel()) for name, p in module.named_parameters(prefix)]
        pieces += [Piece(name, None, 0, b.numel(), "buffer") for name, b in module.named_buffers(prefix)]
    return (*pieces, *_own_pieces(layer_name, layer, branch))


def _own_pieces(layer_name: str, layer: nn.Module, branch: Branch) -> list[Piece]:
    """Pieces of a branch that are parameters of the layer itself."""
    pieces = []
    for path in branch.parameters:
        try:
            parameter = attribute(layer, path)
        except AttributeError:
            parameter = layer
        if parameter is not None and not isinstance(parameter, nn.Parameter):
            raise ValueError(
                f"{layer_name} ({type(layer).__name__}) has no parameter {path!r}, which its description names in "
                f"{branch.name!r}; its own are {[name for name, _ in layer.named_parameters(recurse=False)]}"
            )
        if parameter is not None:
            pieces.append(Piece(f"{layer_name}.{path}", None, 0, parameter.numel()))
    return pieces


def with_cells(model: nn.Module, branch: LocatedBranch, inner: InnerLayers, number: int | None) -> LocatedBranch:
    """A branch with its neurons or heads.

    Args:
        number: of heads; ignored for neurons, of which branches of one form may have different numbers.

    Raises:
        AttributeError: a layer is missing.
        ValueError: tensors do not divide into that many cells.
    """
    root = model.get_submodule(branch.root)
    tensors = [tensor for cut in inner.cuts for tensor in cut_tensors_of(branch.root, root, cut)]
    if inner.heads is None or number is None:
        number = gcd(*(tensor.size for tensor in tensors if tensor.cut.is_output))
    for tensor in tensors:
        if not tensor.has_blocks_of(number):
            raise ValueError(
                f"{tensor.parameter} has {tensor.size} indices along dim {tensor.dim}, which do not divide into "
                f"{len(tensor.shares)} blocks of {number} neurons or heads"
            )
    description = replace(branch.description, inner=inner)
    return replace(branch, description=description, num_cells=number, cut_tensors=tuple(tensors), uncuttable_reason="")


def _refuse_tied(model: nn.Module, branches: Sequence[LocatedBranch]) -> None:
    """Raise ValueError for tensors in two places. A layer may have several names: it is masked wherever it runs."""
    owners: dict[int, str] = {}
    inside = {piece.parameter: branch.name for branch in branches for piece in branch.pieces}
    layers = {model.get_submodule(branch.layer): branch.layer for branch in branches}
    aliases = {f"{name}.": layers[m] for name, m in model.named_modules(remove_duplicate=False) if m in layers}
    tensors: Iterable[tuple[str, torch.Tensor]] = itertools.chain(
        model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)
    )
    for name, tensor in tensors:
        alias = next((alias for alias in aliases if name.startswith(alias)), "")
        known_as = f"{aliases[alias]}.{name.removeprefix(alias)}" if alias else name
        place = inside.get(known_as, "what all ranks hold")
        if owners.setdefault(id(tensor), place) != place:
            raise ValueError(
                f"{name!r} is the same tensor in {owners[id(tensor)]} and in {place}; give each its own (untie "
                "weights, or use separate modules), or do not describe this layer"
            )
