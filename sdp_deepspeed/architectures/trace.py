"""One traced forward pass of a model: a graph of its operations, without weights or computation.

Nodes are calls of leaf modules (modules with parameters, none of whose children have any) and the operations between
them; edges are tensors. The pass runs a copy of the model whose parameters are fake tensors, so that nothing is
allocated. What does not depend on parameters (masks, positions) is computed, since a forward may read its values.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields, is_dataclass
from functools import cached_property
from itertools import chain
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from sdp_deepspeed.architectures.examples import Example

# Operators that combine features or positions.
_PRODUCTS = frozenset({"mm", "bmm", "addmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "convolution", "_grouped_mm"})
_HOSTS = ("deepspeed", "torch.distributed", "accelerate", "sdp_deepspeed")
_COMPILED = "_torchdynamo_orig_callable"  # of what torch.compile returns
_MAX_ELEMENTS = 2**26  # of a model that is computed
_COLLECTIVES = ("c10d", "_c10d_functional")


@dataclass(eq=False)
class Node:
    """A call of a leaf module, or an operation outside of leaf modules.

    Args:
        operation: name of the operator; "module" for a leaf module, "input" for a tensor from outside of the pass.
        module: dense name of the leaf module, or of the module in whose forward the operation runs.
        parameters: dense names of parameters that it reads, in this order.
        flops: of its products with each of them.
        operators: names of the operators in it, whose results are floating.
        constants: numbers among the arguments of these operators, and of all others in it.
        shape, is_floating: of its (first) result.
        value: result of an operation, if the trace keeps values.
    """

    operation: str
    module: str
    order: int
    inputs: list[Node] = field(default_factory=list)
    parameters: dict[str, None] = field(default_factory=dict)
    flops: Counter[str] = field(default_factory=Counter)
    operators: set[str] = field(default_factory=set)
    constants: list[Any] = field(default_factory=list)
    shape: tuple[int, ...] = ()
    is_floating: bool = False
    value: torch.Tensor | None = None

    @property
    def is_product(self) -> bool:
        """Whether it contains a matrix product, a convolution or attention."""
        return any(name in _PRODUCTS or "attention" in name for name in self.operators)


@dataclass(eq=False)
class Call:
    """A call of a module.

    Args:
        args, kwargs: as given; tensors may have been changed in place since.
        inputs: tensors in them with their nodes, each with its position or keyword.
        first, last: range of the nodes that ran in it.
    """

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    inputs: list[tuple[int | str, torch.Tensor, Node]]
    first: int
    output: Any = None
    outputs: list[tuple[torch.Tensor, Node]] = field(default_factory=list)
    last: int = 0


class Trace(TorchDispatchMode):
    """A traced pass.

    Attributes:
        nodes: in the order of the pass.
        calls: of each module, by dense name.
        result: nodes of the model's output.
        model: the copy that ran.
    """

    def __init__(self, model: nn.Module, *, keeps_values: bool = False) -> None:
        super().__init__()
        self.model = model
        self._keeps_values = keeps_values
        self.nodes: list[Node] = []
        self.calls: dict[str, list[Call]] = {}
        self.result: list[Node] = []
        self._paths = {module: name for name, module in model.named_modules()}
        self._leaves = {name for name, module in model.named_modules() if _is_leaf(module)}
        self._parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        self._weights = {_storage(p): name for name, p in model.named_parameters() if p.dim() > 1}
        self._running: list[tuple[str, Node | None, Call]] = []
        self._made: dict[int, Node] = {}  # by id of a result
        self._written: dict[int, Node] = {}  # last write to each storage
        self._alive: list[Any] = []  # results, so that ids stay unique while it records

    def node_of(self, tensor: torch.Tensor) -> Node:
        """The node that made a tensor, or that wrote to it last."""
        made, written = self._made.get(id(tensor)), self._written.get(_storage(tensor))
        if made is None or (written is not None and written.order > made.order):
            made = written or made
        if made is None:
            made = self._made[id(tensor)] = Node("input", self._path(), len(self.nodes), shape=tuple(tensor.shape))
            self._alive.append(tensor)
        return made

    @cached_property
    def users(self) -> dict[Node, list[Node]]:
        """Nodes that read the result of a node, after the pass."""
        users: dict[Node, list[Node]] = defaultdict(list)
        for node in self.nodes:
            for source in node.inputs:
                users[source].append(node)
        return users

    @cached_property
    def receivers(self) -> dict[Node, list[tuple[str, Call]]]:
        """Calls of modules that are given the result of a node, after the pass."""
        receivers: dict[Node, list[tuple[str, Call]]] = defaultdict(list)
        for name, calls in self.calls.items():
            for call in calls:
                for _, _, source in call.inputs:
                    receivers[source].append((name, call))
        return receivers

    @cached_property
    def readers(self) -> dict[str, list[Node]]:
        """Nodes that read a parameter, after the pass."""
        readers: dict[str, list[Node]] = defaultdict(list)
        for node in self.nodes:
            for parameter in node.parameters:
                readers[parameter].append(node)
        return readers

    def _path(self) -> str:
        return self._running[-1][0] if self._running else ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace in _COLLECTIVES:
            raise RuntimeError("its forward is a collective")
        if func.namespace == "prim":  # asks for the device of a fake tensor
            return func(*args, **kwargs)
        name = func._schema.name.partition("::")[2]
        is_fake = name == "_grouped_mm" and isinstance(args[1], FakeTensor)
        if is_fake and (args[0].dim(), args[1].dim()) == (2, 3):  # fake tensors have it in bf16 only
            result: Any = args[0].new_empty(args[0].shape[0], args[1].shape[2])
        else:
            result = func(*args, **kwargs)
        node = next((leaf for _, leaf, _ in self._running if leaf is not None), None)
        if node is None:
            node = Node(name, self._path(), len(self.nodes))
            self.nodes.append(node)
        self._count(func, args, kwargs, result, node)
        node.constants += [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, int | float | str)]
        reads_values = not (name.endswith("_like") or name.startswith("new_"))
        for tensor in tensors_in((args, kwargs)) if reads_values else []:
            if id(tensor) in self._parameters and id(tensor) not in self._made:
                node.parameters[self._parameters[id(tensor)]] = None
            elif (source := self.node_of(tensor)) is not node and source not in node.inputs:
                node.inputs.append(source)
        for argument, value in zip(func._schema.arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._written |= {_storage(tensor): node for tensor in tensors_in(value)}
        for tensor in tensors_in(result):
            self._made[id(tensor)] = node
            self._alive.append(tensor)
            if tensor.is_floating_point():
                node.operators.add(name)
            if node.operation != "module":
                node.shape, node.is_floating = tuple(tensor.shape), tensor.is_floating_point()
                node.value = tensor.clone() if self._keeps_values else None
        return result

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any, node: Node) -> None:
        """Count the FLOPs of a product with weights, even if they were transposed, cast, normalized, or chosen."""
        name = func._schema.name.partition("::")[2]
        if name in _PRODUCTS:
            factors = tensors_in(args[1:] if name.startswith("add") or name == "baddbmm" else args)
            formula = flop_registry.get(func.overloadpacket)
            flops = 2 * result.numel() * factors[0].shape[-1]
            if formula is not None:
                flops = int(formula(*args, **kwargs, out_val=result))
            for weight in dict.fromkeys(self._weights.get(_storage(factor)) for factor in factors):
                if weight is not None:
                    node.flops[weight] += flops
            return
        operands = [tensor for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point()]
        if not operands or any(_storage(operand) not in self._weights for operand in operands):
            return
        largest = max(operands, key=torch.Tensor.numel)  # others are scales or norms
        is_choice = name in ("index", "index_select") and largest.dim() > 2
        if is_choice or all(tensor.is_floating_point() for tensor in tensors_in((args, kwargs))):
            for tensor in tensors_in(result):
                self._weights.setdefault(_storage(tensor), self._weights[_storage(largest)])

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Forward pre-hook of all modules."""
        path = self._paths[module]
        values: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        given = [(key, tensor) for key, value in values for tensor in tensors_in(value)]
        call = Call(args, kwargs, [(key, tensor, self.node_of(tensor)) for key, tensor in given], len(self.nodes))
        self.calls.setdefault(path, []).append(call)
        node = None
        if path in self._leaves and all(leaf is None for _, leaf, _ in self._running):
            node = Node("module", path, len(self.nodes))
            self.nodes.append(node)
        self._running.append((path, node, call))

    def leave(self, module: nn.Module, _: Any, output: Any) -> None:
        """Forward hook of all modules."""
        _, node, call = self._running.pop()
        call.output, call.last = output, len(self.nodes)
        call.outputs = [(tensor, self.node_of(tensor)) for tensor in tensors_in(output)]
        if node is not None and call.outputs:
            node.shape, node.is_floating = tuple(call.outputs[0][0].shape), call.outputs[0][0].is_floating_point()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Context in which calls of the model, or of its modules, are recorded, without gradients."""
        hooks = []
        for module in self.model.modules():
            hooks.append(module.register_forward_pre_hook(self.enter, with_kwargs=True, prepend=True))
            hooks.append(module.register_forward_hook(self.leave))
        with torch.no_grad(), _unfused(), self:
            yield
        for hook in hooks:
            hook.remove()
        self._alive.clear()  # arguments and outputs of calls stay


def trace_pass(model: nn.Module, example: Example, *, is_training: bool = False) -> Trace:
    """Run a model once on an example, in evaluation mode or in training mode. The model is unchanged.

    A small model whose forward reads values of activations (how many tokens an expert gets) runs with random weights.

    Args:
        model: whole, on any device, including meta.
    """
    try:
        return _trace(without_storage(model).train(is_training), example)
    except (DataDependentOutputException, DynamicOutputShapeException):
        if sum(parameter.numel() for parameter in model.parameters()) > _MAX_ELEMENTS:
            raise
        return _trace(without_storage(model, random=True).train(is_training), example)


def _trace(copied: nn.Module, example: Example) -> Trace:
    traced = Trace(copied)
    dtype = next((p.dtype for p in copied.parameters() if p.is_floating_point()), torch.get_default_dtype())
    given = (example.args, example.kwargs)  # of the model's dtype, which hosts change, and on the CPU
    args, kwargs = map_tensors(lambda t: t.to("cpu", dtype if t.is_floating_point() else t.dtype), given)
    with traced.recording():
        output = copied(*args, **kwargs)
    main = next((o for name in ("loss", "logits") if (o := getattr(output, name, None)) is not None), output)
    traced.result = [traced.node_of(tensor) for tensor in tensors_in(main)]
    return traced


@contextmanager
def _unfused() -> Iterator[None]:
    """Context in which PyTorch's own layers run their modules, in evaluation mode, too."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


def without_storage(model: nn.Module, *, random: bool = False) -> nn.Module:
    """A copy of a model with fake parameters, or with random ones. Buffers are copied unless they have no values."""
    memo: dict[int, Any] = {}
    plain = [value for module in model.modules() for value in vars(module).values() if isinstance(value, torch.Tensor)]
    generator = torch.Generator().manual_seed(0)
    mode = nullcontext() if random else FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        for tensor in chain(model.parameters(), model.buffers(), plain):
            is_parameter = isinstance(tensor, nn.Parameter)
            if is_parameter or tensor.is_meta or type(tensor) is not torch.Tensor:
                fake = torch.empty(tensor.shape, dtype=tensor.dtype)
                if random and tensor.is_floating_point():
                    fake.normal_(generator=generator)
                memo[id(tensor)] = nn.Parameter(fake, requires_grad=False) if is_parameter else fake
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            memo[id(hooks)] = type(hooks)((k, hook) for k, hook in hooks.items() if not is_of_a_host(hook))
    for tensor in chain(model.buffers(), plain):
        if id(tensor) not in memo:
            memo[id(tensor)] = tensor.detach().to("cpu", copy=True)
    copied = copy.deepcopy(model, memo)
    for module, of_copy in zip(model.modules(), copied.modules(), strict=True):
        forward: Any = vars(module).get("forward")
        method = inspect.unwrap(forward) if hasattr(forward, _COMPILED) else None
        if isinstance(method, MethodType) and method.__self__ is module:  # the compiled one would run the original
            vars(of_copy)["forward"] = MethodType(method.__func__, of_copy)
    return copied


def is_of_a_host(hook: Any) -> bool:
    """Whether a hook refers to an engine, which is not to be copied."""
    return str(getattr(hook, "__module__", "")).startswith(_HOSTS)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Tensors in nested containers and dataclasses, in order."""
    found = []
    for leaf in tree_leaves(value):
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif is_dataclass(leaf) and not isinstance(leaf, type):
            found += tensors_in([getattr(leaf, field.name) for field in fields(leaf)])
    return found


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], value: Any) -> Any:
    """Nested containers and dataclasses with other tensors."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        if is_dataclass(leaf) and not isinstance(leaf, type):
            copied = copy.copy(leaf)
            for name in (field.name for field in fields(leaf)):
                object.__setattr__(copied, name, map_tensors(function, getattr(leaf, name)))
            return copied
        return leaf

    return tree_map(of, value)


def _is_leaf(module: nn.Module) -> bool:
    has_parameters = any(True for _ in module.parameters(recurse=False))
    return has_parameters and not any(True for child in module.children() for _ in child.parameters())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
