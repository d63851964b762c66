"""Neurons and heads of a derived branch, read from gradients.

The inputs of a branch's output projection divide into cells of equal width: the smallest for which different cells
read either different rows of another parameter, or the same. In a pass with random numbers, a row is read where its
gradient is not zero. So no layout has to be known: fused blocks, gates that alternate with ups, query heads that share
a key/value head, latent projections, channels with batch norms, experts in one tensor. A norm over all neurons makes
each read all rows; then there are no cells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import gcd

import torch
from torch import Tensor, nn

from sdp_deepspeed.architectures.branch import CONVOLUTIONS, Branch, Cut, InnerLayers, is_inside
from sdp_deepspeed.architectures.streams import BranchPath, Layer, ancestors, last_products
from sdp_deepspeed.architectures.trace import Node

# For each parameter and dim: which indices a group of cells reads.
Reads = dict[str, list[Tensor]]


class NoCells(ValueError):
    """A branch that cannot be cut, with the reason."""


class UnevenBlocks(NoCells):
    """Cells read different numbers of rows; with other random numbers (before a ReLU) they may not."""


@dataclass(frozen=True)
class _Projection:
    """An output projection, and what its cells read.

    Args:
        cut: of the projection itself.
        width_of_cell: number of inputs of a cell.
        cuts: of other parameters.
    """

    cut: Cut
    width: int
    width_of_cell: int
    cuts: tuple[Cut, ...]

    @property
    def num_cells(self) -> int:
        return self.width // self.width_of_cell


def propose_cells(
    layer: Layer, module: nn.Module, branch: Branch, run: Callable[[], object]
) -> tuple[InnerLayers, int]:
    """The layers that may be cut inside a branch, and the number of cells. `scaled` and `by_head` are left out.

    Args:
        layer: in the traced pass.
        module: the layer, with random numbers as weights.

    Raises:
        NoCells: with the reason.
    """
    path = max(layer.paths, key=lambda path: len(_nodes_inside(layer, path, branch)))
    nodes = _nodes_inside(layer, path, branch)
    outputs = [node for node in last_products(path) if node in nodes and node.operation == "module"]
    if not outputs:
        raise NoCells("its last matrix product is not that of a module")
    root = f"{layer.name}.{branch.root}".rstrip(".")
    inside = module.get_submodule(branch.root)
    parameters = _parameters(inside, branch)
    projections = _projections(inside, [node.module[len(root) + 1 :] for node in outputs], run, parameters)
    numbers = {projection.num_cells for projection in projections}
    is_of_neurons = all(projection.width_of_cell == 1 for projection in projections)
    if len(numbers) > 1 and not is_of_neurons:
        raise NoCells(f"its output projections read {sorted(numbers)} heads")
    cuts = _merged(projections, inside)
    known = {cut.names(parameters)[0] for cut in cuts}
    inner = _with_other_modules(InnerLayers(cuts), root, nodes, outputs, known)
    number = gcd(*numbers)
    return (inner if is_of_neurons else replace(inner, heads=number)), number


def _projections(
    root: nn.Module, names: Sequence[str], run: Callable[[], object], parameters: Mapping[str, nn.Parameter]
) -> list[_Projection]:
    """Those output projections that can be cut.

    Raises:
        NoCells: none can.
    """
    results = _results(root, names, run)
    projections: list[_Projection] = []
    reason: NoCells | None = None
    for name in names:
        output = root.get_submodule(name)
        try:
            projections.append(_projection(name, output, results[output], parameters))
        except UnevenBlocks:
            raise
        except NoCells as problem:
            reason = problem
    if not projections and reason is not None:
        raise reason
    return projections


def _nodes_inside(layer: Layer, path: BranchPath, branch: Branch) -> set[Node]:
    names = [f"{layer.name}.{name}" for name in branch.bodies]
    return {node for node in path.nodes if any(is_inside(node.module, name) for name in names)}


def _parameters(root: nn.Module, branch: Branch) -> dict[str, nn.Parameter]:
    """Parameters of the bodies, by name in the root, without biases, which are cut like their weights."""
    parameters = dict(root.named_parameters())
    if not branch.root:
        parameters = {n: p for n, p in parameters.items() if any(is_inside(n, body) for body in branch.bodies)}
    return {n: p for n, p in parameters.items() if _weight_of_bias(n) not in parameters}


def _weight_of_bias(name: str) -> str | None:
    path, _, last = name.rpartition(".")
    if last == "bias":
        return f"{path}.weight".lstrip(".")
    return name.removesuffix("_bias") if last.endswith("_bias") else None


def _results(module: nn.Module, names: Iterable[str], run: Callable[[], object]) -> dict[nn.Module, list[Tensor]]:
    """Results of submodules in one pass."""
    results: dict[nn.Module, list[Tensor]] = {module.get_submodule(name): [] for name in names}

    def keep(called: nn.Module, _: object, result: Tensor | tuple[Tensor, ...]) -> None:
        results[called].append(result if isinstance(result, Tensor) else result[0])

    hooks = [called.register_forward_hook(keep) for called in results]
    run()
    for hook in hooks:
        hook.remove()
    return results


def _projection(
    name: str, output: nn.Module, results: Sequence[Tensor], parameters: Mapping[str, nn.Parameter]
) -> _Projection:
    """Divide the inputs of an output projection into cells."""
    weight, dim = _weight_of(name, output, results)
    prefix = f"{name}." if name else ""
    others = {n: p for n, p in parameters.items() if p is not getattr(output, weight)}
    if not others:
        raise NoCells(f"the branch has no weight before {name or type(output).__name__}")
    total = torch.stack([(result * _numbers(result)).sum() for result in results]).sum()
    (gradient,) = torch.autograd.grad(total, [getattr(output, weight)], create_graph=True)  # linear in the inputs
    gradient = gradient * _numbers(gradient)
    width = gradient.shape[dim]
    path = name if weight == "weight" else f"{prefix}{weight}"
    for size in (size for size in range(1, width // 2 + 1) if width % size == 0):
        first = _reads(gradient.narrow(dim, 0, size).sum(), others)
        dims = _cut_dims(first, _reads(gradient.narrow(dim, size, width - size).sum(), others))
        if dims:
            number = width // size
            cuts = [_cut(n, d, _blocks(n, first[n][d], number)) for n, d in dims.items()]
            return _Projection(Cut(path, dim, is_output=True), width, size, tuple(cuts))
    raise NoCells(f"the inputs of {path or type(output).__name__} depend on each other")


def _numbers(like: Tensor) -> Tensor:
    """Numbers without regularity, none of which is zero."""
    return torch.arange(1, like.numel() + 1, dtype=like.dtype).sin().reshape(like.shape)


def _weight_of(name: str, output: nn.Module, results: Sequence[Tensor]) -> tuple[str, int]:
    """Name of the weight of an output projection, and its dim that runs over the inputs.

    The first feature of the output depends on all elements of other weights in the module, such as those of experts
    before their own output projections.
    """
    if not results:
        raise NoCells(f"{name} did not run on the example")
    if isinstance(output, CONVOLUTIONS):
        return "weight", 1
    weights = {n: p for n, p in output.named_parameters(recurse=False) if p.dim() in (2, 3)}
    if not weights:
        raise NoCells(f"{name or type(output).__name__} has no matrix of its own")
    first = torch.stack([result[..., 0].sum() for result in results]).sum()
    gradients = torch.autograd.grad(first, [*weights.values()], retain_graph=True, allow_unused=True)
    for (key, weight), gradient in zip(weights.items(), gradients, strict=True):
        for dim in (weight.dim() - 1, weight.dim() - 2):
            if gradient is not None and _indices_read(gradient, dim).nonzero().flatten().tolist() == [0]:
                return key, 2 * weight.dim() - 3 - dim
    raise NoCells(f"{name or type(output).__name__} is not linear in one of its weights")


def _reads(scalar: Tensor, parameters: Mapping[str, nn.Parameter]) -> Reads:
    """Indices of each parameter, along each dim, that a scalar depends on."""
    gradients = torch.autograd.grad(scalar, [*parameters.values()], retain_graph=True, allow_unused=True)
    reads = {}
    for name, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            reads[name] = [_indices_read(gradient, dim) for dim in range(gradient.dim())]
    return reads


def _indices_read(gradient: Tensor, dim: int) -> Tensor:
    return (gradient != 0).movedim(dim, 0).reshape(gradient.shape[dim], -1).any(1)


def _cut_dims(first: Reads, others: Reads) -> dict[str, int] | None:
    """For each parameter of which two groups of cells read different indices: the dim; None if some are read by both.
    Of other parameters, both read the same."""
    dims: dict[str, int] = {}
    for name, of_first in first.items():
        pairs = [*zip(of_first, others[name], strict=True)]
        apart = [dim for dim, (a, b) in enumerate(pairs) if a.any() and b.any() and not (a & b).any()]
        if len(apart) == 1:
            dims[name] = apart[0]
        elif not all(torch.equal(a, b) for a, b in pairs):
            return None
    return dims


def _blocks(name: str, of_first_cell: Tensor, number: int) -> tuple[int, ...]:
    """Widths of the blocks of a parameter, per cell, from the indices of the first cell."""
    indices = of_first_cell.nonzero().flatten().tolist()
    starts = [index for index in indices if index - 1 not in indices]
    ends = [index + 1 for index in indices if index + 1 not in indices]
    widths = tuple(end - start for start, end in zip(starts, ends, strict=True))
    expected = [number * sum(widths[:block]) for block in range(len(widths))]
    if starts != expected or number * sum(widths) != len(of_first_cell):
        raise UnevenBlocks(f"indices of {name} are not in blocks over all neurons or heads")
    return widths


def _cut(name: str, dim: int, widths: tuple[int, ...]) -> Cut:
    module = name.removesuffix("weight").rstrip(".") if name.endswith(".weight") or name == "weight" else name
    is_even = len({*widths}) == 1
    return Cut(module, dim, len(widths) if is_even else widths)


def _merged(projections: Sequence[_Projection], root: nn.Module) -> tuple[Cut, ...]:
    """Cuts of all projections. Experts in a list that no token of the example used are cut like the others."""
    cuts: dict[str, Cut] = {}
    for projection in projections:
        for cut in (*projection.cuts, projection.cut):
            if cuts.setdefault(cut.module, cut) != cut:
                raise NoCells(f"{cut.module} is cut in two ways")
    lists = {name: module for name, module in root.named_modules() if isinstance(module, nn.ModuleList)}
    for cut in [*cuts.values()]:
        for name, experts in lists.items():
            if is_inside(cut.module, name) and name and len({form(expert) for expert in experts}) == 1:
                _, _, inside = cut.module[len(name) + 1 :].partition(".")
                for index in range(len(experts)):
                    other = replace(cut, module=f"{name}.{index}.{inside}".rstrip("."))
                    cuts.setdefault(other.module, other)
    return tuple(cuts.values())


def form(module: nn.Module) -> tuple[type, tuple[tuple[str, torch.Size], ...]]:
    return type(module), tuple((name, parameter.shape) for name, parameter in module.named_parameters())


def _with_other_modules(
    inner: InnerLayers, root: str, nodes: set[Node], outputs: Sequence[Node], cut: set[str]
) -> InnerLayers:
    """Add the modules that are not cut: after the output projections, and between them and cut layers."""
    cut_nodes = {node for node in nodes if any(name[len(root) + 1 :] in cut for name in node.parameters)}
    tail: dict[str, None] = {}
    per_head: dict[str, None] = {}
    for node in sorted(nodes - cut_nodes - {*outputs}, key=lambda node: node.order):
        name = node.module[len(root) + 1 :]
        if node.operation == "module" and node.parameters and name:
            earlier = ancestors([node])
            if not earlier.isdisjoint(outputs):
                tail[name] = None
            elif not earlier.isdisjoint(cut_nodes):
                per_head[name] = None
    return replace(inner, tail=tuple(tail), per_head=tuple(per_head))
