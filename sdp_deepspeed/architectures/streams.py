"""The residual streams of a traced pass: which modules are layers, and where branches are added to the stream.

From a layer's output back to its input runs the residual stream: through additions, and through operations and modules
without matrix products (norms, activations, scales). An operand of an addition that is not on the stream, and that
comes out of a product, is the end of a branch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass

from torch import nn

from sdp_deepspeed.architectures.trace import Call, Node, Trace

_ADDITIONS = ("add", "add_", "sub", "sub_", "addcmul", "addcmul_")


@dataclass(eq=False)
class BranchPath:
    """A branch in the graph.

    Args:
        addition: node that adds it to the stream.
        end: the operand of the addition.
        nodes: all that compute it from the stream.
        sums: additions to parallel branches, before that to the stream.
    """

    addition: Node
    end: Node
    nodes: set[Node]
    sums: set[Node]

    def after(self, node: Node) -> set[Node]:
        """Nodes between one of the branch and its end, which is included."""
        behind = descendants(node, sorted(self.nodes, key=lambda other: other.order))
        return behind & ancestors([self.end], node.order) - {node}


@dataclass(eq=False)
class Layer:
    """A call of a layer, with its stream and branches.

    Args:
        stream: nodes from the layer's output (first) to its input (last).
        is_bypassed: whether the skip connection has no matrices, so that branches can be blocks.
    """

    name: str
    module: nn.Module
    call: Call
    stream: list[Node]
    paths: list[BranchPath]
    is_bypassed: bool = True


def candidates(model: nn.Module) -> tuple[list[str], list[str]]:
    """Names of modules with siblings of the same class, or alone in a list; and of others in a list."""
    repeated, other = [], []
    for name, parent in model.named_modules():
        children = [(f"{name}.{key}".lstrip("."), child) for key, child in parent.named_children()]
        children = [(path, child) for path, child in children if any(True for _ in child.children())]
        classes = Counter(type(child) for _, child in children)
        is_list = isinstance(parent, nn.ModuleList | nn.Sequential | nn.ModuleDict)
        is_repeated = any(number > 1 for number in classes.values())
        for path, child in children:
            if classes[type(child)] > 1 or (is_list and (is_repeated or len(children) == 1)):
                repeated.append(path)
            elif is_list:
                other.append(path)
    return repeated, other


def layer_of(model: nn.Module, traced: Trace, name: str, call: Call) -> Layer | None:
    """The stream and branches of a call of a module; None if it has none."""
    for output, end in call.outputs:
        for _, given, start in call.inputs:
            if given.shape == output.shape and given.is_floating_point() and end is not start:
                stream, paths = _stream(traced.nodes[call.first : call.last], start, end)
                if paths:
                    return Layer(name, model.get_submodule(name), call, stream, paths)
    if len(call.inputs) == len(call.outputs) == 1:
        nodes = traced.nodes[call.first : call.last]
        stream, paths = _projected_stream(nodes, call.inputs[0][2], call.outputs[0][1])
        if paths:
            return Layer(name, model.get_submodule(name), call, stream, paths, is_bypassed=False)
    return None


def _projected_stream(nodes: Sequence[Node], start: Node, end: Node) -> tuple[list[Node], list[BranchPath]]:
    """The stream of a layer whose skip connection has fewer products than its only branch, such as the first of a stage
    of a ResNet."""
    inside = {*nodes}
    stream = [end]
    while end.operation not in _ADDITIONS and len(end.inputs) == 1 and end in inside and not end.is_product:
        end = end.inputs[0]
        stream.append(end)
    if end.operation not in _ADDITIONS or len(end.inputs) != 2 or not inside.issuperset(end.inputs):
        return [], []
    of_operands = [(ancestors([operand], nodes[0].order, {start}), operand) for operand in end.inputs]
    (shorter, _), (longer, operand) = sorted(of_operands, key=lambda item: _num_products(item[0]))
    if not 0 < _num_products(shorter) < _num_products(longer) or not shorter.isdisjoint(longer):
        return [], []
    return [*stream, start], [BranchPath(end, operand, longer, set())]


def _num_products(nodes: set[Node]) -> int:
    return sum(node.is_product for node in nodes)


def _stream(nodes: Sequence[Node], start: Node, end: Node) -> tuple[list[Node], list[BranchPath]]:
    """Nodes from `end` back to `start` on the stream, and the branches that are added to it, in forward order."""
    on = descendants(start, [node for node in nodes if not node.is_product])
    inside, first = {*nodes}, nodes[0].order if nodes else 0
    stream, ends = [], []
    at = end
    while at is not start:
        if at not in on:
            return [], []
        stream.append(at)
        if at.operation in _ADDITIONS:
            ends += [(at, node) for node in at.inputs if node not in on and node in inside]
        at = next(node for node in at.inputs if node in on)
    stream.append(start)
    stop = {*stream}
    paths = []
    for addition, operand in ends:
        parts = _parallel(addition, operand, first, stop)
        of_parts = [ancestors([part], first, stop) for part in parts]
        sums = ancestors([operand], first, stop).difference(*of_parts)
        for part, of_part in zip(parts, of_parts, strict=True):
            if any(node.is_product for node in of_part):
                paths.append(BranchPath(addition, part, of_part, sums))
    return stream, sorted(paths, key=lambda path: path.end.order)


def _parallel(addition: Node, operand: Node, first: int, stop: set[Node]) -> list[Node]:
    """Branches that the same forward adds up, and may multiply, before it adds them to the stream, last first."""
    whole = operand
    while operand.operation in ("mul", "div") and len(operand.inputs) == 1 and not operand.parameters:
        operand = operand.inputs[0]
    parts = [node for node in operand.inputs if ancestors([node], first, stop)]
    if operand.operation not in ("add", "add_") or operand.module != addition.module or len(parts) < 2:
        return [whole]
    if not all(any(node.is_product for node in ancestors([part], first, stop)) for part in parts):
        return [whole]
    return [branch for part in parts[::-1] for branch in _parallel(addition, part, first, stop)]


def last_products(path: BranchPath) -> list[Node]:
    """Products of a branch that no other product follows."""
    found: list[Node] = []
    seen: set[Node] = set()
    todo = [path.end]
    while todo:
        node = todo.pop()
        if node not in path.nodes or node in seen:
            continue
        seen.add(node)
        if node.is_product:
            found.append(node)
        else:
            todo += node.inputs
    return sorted(found, key=lambda node: node.order)


def descendants(start: Node, nodes: Iterable[Node]) -> set[Node]:
    """Those of some nodes that a node computes, and this.

    Args:
        nodes: in the order of the pass.
    """
    found = {start}
    for node in nodes:
        if not found.isdisjoint(node.inputs):
            found.add(node)
    return found


def ancestors(ends: Iterable[Node], first: int = 0, stop: Container[Node] = ()) -> set[Node]:
    """Nodes of the pass that compute others, and these.

    Args:
        first: order of the first node that may be among them.
        stop: nodes that are not among them, nor what only these read.
    """
    found: set[Node] = set()
    todo = [*ends]
    while todo:
        node = todo.pop()
        if node.operation != "input" and node.order >= first and node not in stop and node not in found:
            found.add(node)
            todo += node.inputs
    return found
