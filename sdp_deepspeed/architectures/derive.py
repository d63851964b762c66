"""Residual branches of a model, derived from one traced pass.

What computes the end of a branch (streams.py), up to the stream, is the branch. What two branches use, or anything
else, belongs to neither. A branch's modules are the largest that contain nothing else.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.architectures.branch import CROSS_ATTENTION, LIKE_INPUT, Branch, Zeros, is_inside, is_nested
from sdp_deepspeed.architectures.streams import (
    BranchPath,
    Layer,
    ancestors,
    candidates,
    last_products,
    layer_of,
)
from sdp_deepspeed.architectures.trace import Call, Node, Trace

# Operators that multiply their input by something, or only arrange it.
_LINEAR = frozenset(
    """mul mul_ div div_ neg sum view _unsafe_view reshape transpose permute t unsqueeze squeeze expand clone alias
    detach _to_copy slice select split chunk cat contiguous roll constant_pad_nd index copy_ narrow unbind pad
    index_put_ unfold movedim flip native_dropout bernoulli_ lift_fresh""".split()  # noqa: SIM905
)
_SOFTMAX = ("_softmax", "_safe_softmax")


class NotDerived(ValueError):
    """A branch that cannot be a unit, with the reason."""


def derive(model: nn.Module, traced: Trace) -> tuple[dict[str, list[Branch]], dict[str, str]]:
    """Branches of each layer, by its dense name, in forward order; and reasons why others cannot be, by layer."""
    live = ancestors(traced.result)
    reasons: dict[str, str] = {}
    known: list[dict[str, list[Branch]]] = []
    for names in candidates(model):
        of_names: dict[str, list[Branch]] = {}
        for name in names:
            if branches := _branches_of_calls(model, traced, name, live, reasons):
                of_names[name] = branches
        known.append(of_names)
    chosen = _innermost(model, *known)
    order = {name: index for index, (name, _) in enumerate(model.named_modules())}
    left = {
        name: reason for name, reason in reasons.items() if not any(is_nested(name, c) for c in chosen if c != name)
    }
    return {name: chosen[name] for name in sorted(chosen, key=lambda name: order[name])}, left


def _innermost(
    model: nn.Module, repeated: Mapping[str, list[Branch]], other: Mapping[str, list[Branch]]
) -> dict[str, list[Branch]]:
    """The innermost of nested repeated layers, unless the outer one has more parameters in branches; and other layers
    that are neither in these nor around them, the outermost. Parts of one layer in a list (T5's self-attention,
    cross-attention and MLP) are not repeated."""
    chosen: dict[str, list[Branch]] = {}
    sizes = {name: _num_parameters(model, name, branches) for name, branches in repeated.items()}
    for name in sorted(repeated, key=lambda name: -name.count(".")):
        inner = [known for known in chosen if known.startswith(f"{name}.")]
        if sum(sizes[known] for known in inner) < sizes[name]:
            for known in inner:
                del chosen[known]
            chosen[name] = repeated[name]
    for name in sorted(other, key=lambda name: name.count(".")):
        if not any(is_nested(name, known) for known in chosen):
            chosen[name] = other[name]
    return chosen


def _num_parameters(model: nn.Module, layer: str, branches: Sequence[Branch]) -> int:
    modules = [model.get_submodule(f"{layer}.{name}") for branch in branches for name in branch.modules]
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _branches_of_calls(
    model: nn.Module, traced: Trace, name: str, live: set[Node], reasons: dict[str, str]
) -> list[Branch]:
    """Branches of a module that may be called several times; none if its calls differ."""
    layers = [layer_of(model, traced, name, call) for call in traced.calls.get(name, ())]
    of_calls = [[] if layer is None else _branches(traced, layer, live, reasons) for layer in layers]
    if any(branches != of_calls[0] for branches in of_calls):
        reasons[name] = "its calls in one pass differ"
        return []
    if not any(of_calls):
        return []
    assert layers[0] is not None
    if (product := _in_no_branch(traced, layers[0], live)) and name not in reasons:
        reasons[name] = f"what {product.module!r} computes is not only added to the stream"
    return of_calls[0]


def _in_no_branch(traced: Trace, layer: Layer, live: set[Node]) -> Node | None:
    """A product with weights on neither a branch nor a skip connection with matrices."""
    known = set[Node]().union(*(path.nodes for path in layer.paths))
    products = (node for node in traced.nodes[layer.call.first : layer.call.last] if node.flops and node in live)
    return next((node for node in products if layer.is_bypassed and node not in known), None)


def _branches(traced: Trace, layer: Layer, live: set[Node], reasons: dict[str, str]) -> list[Branch]:
    branches: list[Branch] = []
    names: Counter[str] = Counter()
    for path in layer.paths:
        try:
            branch = _describe(traced, layer, path, live)
        except NotDerived as problem:
            reasons.setdefault(layer.name, str(problem))
            continue
        names[branch.name] += 1
        number = names[branch.name]
        branches.append(branch if number == 1 else replace(branch, name=f"{branch.name}_{number}"))
    return branches


# ---- one branch -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Module:
    """A module that belongs to a branch, by its name in the layer.

    Args:
        first: order of its first node.
        added_to: position or keyword of the argument to which it adds its output itself.
        zeros: number and shape of its outputs.
        extra_outputs: positions or keywords of arguments that it returns as further outputs.
    """

    name: str
    first: int
    is_product: bool
    added_to: int | str | None = None
    zeros: Zeros = LIKE_INPUT
    extra_outputs: tuple[int | str, ...] = ()

    @property
    def keeps_shape(self) -> bool:
        """Whether it turns a tensor into one of the same shape."""
        return self.zeros == LIKE_INPUT


def _describe(traced: Trace, layer: Layer, path: BranchPath, live: set[Node]) -> Branch:
    """Describe a branch for masking.

    Raises:
        NotDerived: it cannot be a unit.
    """
    others = set[Node]().union(*(other.nodes for other in layer.paths if other is not path))
    nodes_of_call = traced.nodes[layer.call.first : layer.call.last]
    elsewhere = _read_elsewhere(traced, layer, path)
    mine = {node for node in path.nodes if node not in others and node.parameters.keys().isdisjoint(elsewhere)}
    _refuse_other_use(traced, layer, path, live, others)
    work = [node for node in nodes_of_call if (node.parameters or node.is_product) and node in live]
    modules = sorted(_modules(traced, layer, path, mine, work, live), key=lambda module: module.first)
    products = [index for index, module in enumerate(modules) if module.is_product]
    if not products:
        raise NotDerived(f"{path.end.operation} in {path.end.module!r}: the branch has no module of its own")
    begin, last = products[0], products[-1]
    while begin > 0 and not modules[begin - 1].keeps_shape:  # not a norm
        begin -= 1
    while last + 1 < len(modules) and not modules[last + 1].keeps_shape:
        last += 1
    norms, bodies, after = modules[:begin], modules[begin : last + 1], modules[last + 1 :]
    tail = _tail(traced, layer, path, modules)
    relative = tuple(module.name for module in bodies)
    first = bodies[0]
    return Branch(
        _type_of(layer, mine),
        norm=tuple(module.name for module in norms) or None,
        body=relative[0] if len(relative) == 1 else relative,
        after=(*(module.name for module in after), *tail),
        num_outputs=first.zeros.num_outputs,
        added_to=first.added_to,
        extra_outputs=first.extra_outputs,
        zeros=tuple(module.zeros for module in bodies),
        parameters=_own_parameters(layer, mine),
        outputs=_outputs(layer, path, mine),
        is_projected=not layer.is_bypassed,
        is_written=any(node.operation.endswith("_") for node in nodes_of_call),
    )


def _read_elsewhere(traced: Trace, layer: Layer, path: BranchPath) -> set[str]:
    """Parameters of a branch that are read outside of the calls of its layer, too."""
    inside = {node for call in traced.calls[layer.name] for node in traced.nodes[call.first : call.last]}
    parameters = {parameter for node in path.nodes for parameter in node.parameters}
    return {parameter for parameter in parameters if not inside.issuperset(traced.readers[parameter])}


def _refuse_other_use(traced: Trace, layer: Layer, path: BranchPath, live: set[Node], others: set[Node]) -> None:
    """Raise NotDerived if what the branch computes is used elsewhere, too, or handed on to modules after the layer."""
    known = path.nodes | others | path.sums | {other.addition for other in layer.paths}
    for source in sorted(path.nodes - others, key=lambda node: node.order):
        users = [node.module for node in traced.users.get(source, ()) if node in live and node not in known]
        users += [name for name, call in traced.receivers.get(source, ()) if call.first >= layer.call.last]
        if users and _is_of_products(source, path.nodes, layer.call.first):
            raise NotDerived(f"{users[0]!r} uses a result of {source.module!r}, which this branch computes")


def _is_of_products(node: Node, nodes: set[Node], first: int) -> bool:
    return any(n.parameters or n.is_product for n in ancestors([node], first) & nodes)


def _modules(
    traced: Trace, layer: Layer, path: BranchPath, mine: set[Node], work: Sequence[Node], live: set[Node]
) -> list[_Module]:
    """The largest modules of a layer all of whose work is this branch's."""
    found: list[_Module] = []
    stream = {*layer.stream}

    def visit(name: str, module: nn.Module) -> None:
        inside = [node for node in work if is_inside(node.module, name)]
        if mine.isdisjoint(inside):
            return
        if mine.issuperset(inside) and (known := _as_whole(traced, layer, path, name, inside, stream, live)):
            found.append(known)
            return
        for key, child in module.named_children():
            visit(f"{name}.{key}", child)

    for key, child in layer.module.named_children():
        visit(f"{layer.name}.{key}", child)
    return found


def _as_whole(
    traced: Trace,
    layer: Layer,
    path: BranchPath,
    name: str,
    inside: Sequence[Node],
    stream: set[Node],
    live: set[Node],
) -> _Module | None:
    """A module as a whole, if it can be replaced by one that returns zeros or its input."""
    calls = [c for c in traced.calls.get(name, ()) if layer.call.first <= c.first and c.last <= layer.call.last]
    if len(calls) != 1 or not calls[0].outputs or not calls[0].inputs:
        return None
    call = calls[0]
    output = call.output
    is_tuple = isinstance(output, tuple) and type(output) is tuple
    first = output[0] if is_tuple and output else output
    if not isinstance(first, torch.Tensor):
        return None
    of_call = {*traced.nodes[call.first : call.last]}
    added_to = None
    if not stream.isdisjoint(of_call):
        added_to = _residual(call, path, path.nodes & of_call, of_call & stream)
        if added_to is None:
            return None
    extra = _extra_outputs(traced, call, output, of_call, live) if is_tuple else ()
    if extra is None:
        return None
    num_outputs = len(output) if is_tuple else 1
    of_stream = [(key, tensor) for key, tensor, node in call.inputs if node in path.nodes or node in stream]
    key, given = of_stream[0] if of_stream else call.inputs[0][:2]
    zeros = _zeros(tuple(given.shape), tuple(first.shape), num_outputs, is_tuple=is_tuple)
    if zeros is None and layer.is_bypassed:
        return None
    zeros = zeros or Zeros(num_outputs, size=first.shape[-1])  # of a branch that is never absent
    if key != next(iter((*range(len(call.args)), *call.kwargs))):
        zeros = replace(zeros, like=key)
    relative = name[len(layer.name) + 1 :]
    is_product = any(node.is_product for node in inside)
    return _Module(relative, inside[0].order, is_product, added_to, zeros, extra)


def _residual(call: Call, path: BranchPath, mine: set[Node], on_stream: set[Node]) -> int | str | None:
    """The argument to which a module adds its branch itself, if it does nothing else with it."""
    if (
        any(node.is_product and node not in mine for node in path.nodes)
        or on_stream != {path.addition}
        or call.outputs[0][1] is not path.addition
    ):
        return None
    for key, tensor, node in call.inputs:
        is_used = any(node in other.inputs for other in mine)
        if node in path.addition.inputs and not is_used and tensor.shape == call.outputs[0][0].shape:
            return key
    return None


def _extra_outputs(
    traced: Trace, call: Call, output: tuple[object, ...], of_call: set[Node], live: set[Node]
) -> tuple[int | str, ...] | None:
    """Positions or keywords of arguments that a module returns after its first output; None if others of its results
    are used."""
    names: list[int | str] = []
    for index, value in enumerate(output[1:]):
        if isinstance(value, list | tuple) and value and all(type(size) is int for size in value):
            arguments: list[tuple[int | str, Any]] = [*enumerate(call.args), *call.kwargs.items()]
            same = next((key for key, given in arguments if type(given) is type(value) and given == value), None)
            if same is None or len(names) < index:
                return None
            names.append(same)
        if not isinstance(value, torch.Tensor):
            continue
        node = traced.node_of(value)
        given = [key for key, tensor, _ in call.inputs if tensor is value]
        if given and len(names) == index:
            names.append(given[0])
        elif (given or (node in of_call and node is not call.outputs[0][1])) and any(
            user in live and user.order >= call.last for user in traced.users.get(node, ())
        ):
            return None
    return tuple(names)


def _zeros(given: tuple[int, ...], made: tuple[int, ...], num_outputs: int, *, is_tuple: bool) -> Zeros | None:
    """Zeros of the shape of an output, as described by that of the input; None if more than one dim differs."""
    zeros = Zeros(num_outputs, is_tuple=is_tuple and num_outputs == 1)
    if given == made:
        return zeros
    if len(made) == 2 and made == (math.prod(given[:-1]), given[-1]):
        return replace(zeros, is_flat=True)
    different = [dim for dim, (a, b) in enumerate(zip(given, made, strict=False)) if a != b]
    if len(given) != len(made) or len(different) != 1:
        return None
    dim = different[0]
    return replace(zeros, dim=-1 if dim == len(made) - 1 else dim, size=made[dim])


def _tail(traced: Trace, layer: Layer, path: BranchPath, modules: Sequence[_Module]) -> tuple[str, ...]:
    """Modules without parameters that run once on the output of a branch's last module, such as dropout.

    Raises:
        NotDerived: what follows is not linear, so that the branch could not be scaled.
    """
    if modules[-1].added_to is not None:
        return ()
    calls = traced.calls[f"{layer.name}.{modules[-1].name}"]
    output = next(call for call in calls if layer.call.first <= call.first).outputs[0][1]
    between = path.after(output)
    names = _modules_between(traced, layer, between | {output}, [module.name for module in modules])
    for node in between:
        is_sum = node.operation in ("add", "add_") and not node.parameters
        is_sum = is_sum and (node in path.sums or {*node.inputs} <= between | {output})
        is_named = any(is_inside(node.module, f"{layer.name}.{name}") for name in names)
        if not (is_named or is_sum or node.operators <= _LINEAR):
            raise NotDerived(f"{node.operation} in {node.module!r} runs on the branch's output, which is not linear")
    return names


def _modules_between(traced: Trace, layer: Layer, nodes: set[Node], others: Sequence[str]) -> tuple[str, ...]:
    """The largest modules without parameters that run once, from and to one of some nodes, in forward order.

    Args:
        others: names of modules that are known, in which they must not be.
    """
    found: list[tuple[int, str]] = []
    for key, child in layer.module.named_modules():
        calls = traced.calls.get(f"{layer.name}.{key}", ())
        if not key or any(True for _ in child.parameters()) or len(calls) != 1 or not calls[0].inputs:
            continue
        (call,) = calls
        is_known = any(is_nested(key, known) for known in (*others, *(name for _, name in found)))
        ends = {call.inputs[0][2], *(node for _, node in call.outputs[:1])}
        if isinstance(call.output, torch.Tensor) and ends <= nodes and not is_known:
            found.append((call.first, key))
    return tuple(name for _, name in sorted(found))


def _own_parameters(layer: Layer, mine: set[Node]) -> tuple[str, ...]:
    """Parameters of the layer itself that the branch uses, by name in the layer."""
    own = {f"{layer.name}.{name}": name for name, _ in layer.module.named_parameters(recurse=False)}
    used = {parameter for node in mine if node.operation != "module" for parameter in node.parameters}
    return tuple(name for parameter, name in own.items() if parameter in used)


def _outputs(layer: Layer, path: BranchPath, mine: set[Node]) -> tuple[str, ...]:
    """Weights of the layer by which all that the branch adds is multiplied, by name in the layer."""
    names = []
    for product in last_products(path):
        is_linear = all(node.operators <= _LINEAR or node.operation in ("add", "add_") for node in path.after(product))
        if product in mine and product.operation == "module" and is_linear and product.shape[-1] in path.end.shape:
            read = [name[len(layer.name) + 1 :] for name in product.parameters]
            dims = [layer.module.get_parameter(name).dim() for name in read]
            names += [name for name, dim in zip(read, dims, strict=True) if dim == max(dims)][-1:]
    return tuple(names)


def _type_of(layer: Layer, mine: set[Node]) -> str:
    """Type of a branch, by what it computes."""
    operators = set[str]().union(*(node.operators for node in mine))
    if any("attention" in name for name in operators) or _has_softmax_of_products(mine):
        return CROSS_ATTENTION if _reads_other_stream(layer, mine) else "attention"
    dims = [node for node in mine if "convolution" in node.operators]
    has_matrix = bool(operators & {"mm", "addmm", "bmm", "_grouped_mm"})
    if dims:
        if has_matrix and any(len(node.shape) == 3 for node in dims):
            return "linear_attention"
        return "layer" if has_matrix else "convolution"
    if any(node.is_floating and "cumsum" in node.operators for node in mine):
        return "linear_attention"
    return "mlp"


def _has_softmax_of_products(mine: set[Node]) -> bool:
    """Whether a softmax runs on products of activations, as in attention, and not on those with weights, as routers
    do."""
    softmax = [node for node in mine if not node.operators.isdisjoint(_SOFTMAX)]
    before = ancestors(softmax, min(node.order for node in mine)) & mine
    return any(node.operators & {"bmm", "baddbmm"} and not node.parameters for node in before)


def _reads_other_stream(layer: Layer, mine: set[Node]) -> bool:
    """Whether products of the branch read activations from outside of the layer other than its input."""
    outside = {
        node
        for key, tensor, node in layer.call.inputs
        if node is not layer.stream[-1] and tensor.is_floating_point() and tensor.dim() == len(layer.stream[-1].shape)
    }
    sources = [source for node in mine if node.flops for source in node.inputs]
    return any(_unarranged(source, outside) in outside for source in sources)


def _unarranged(node: Node, ends: set[Node]) -> Node:
    """The first of a chain of nodes that only arrange or multiply what that computes, such as a transposed argument."""
    while node not in ends and len(node.inputs) == 1 and not node.parameters and node.operators <= _LINEAR:
        node = node.inputs[0]
    return node
