"""A layer that runs by itself, with random weights and the inputs that it had in the traced pass."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from sdp_deepspeed.architectures.derivation import known_random_numbers
from sdp_deepspeed.architectures.streams import Layer
from sdp_deepspeed.architectures.trace import Node, Trace, map_tensors, tensors_in

LAYER = "layer"
OUTPUT = "its output"
_LARGE = 2**22  # elements of weights that are not stored, but overlap in memory
_TOLERANCE = 1e-4  # of fp32 sums of thousands of terms


class ReplayedLayer:
    """A layer in training mode, in fp32 on the CPU. Inputs that depend on weights are random.

    Args:
        layer: in the traced pass.
        stored: large weights with these names in the holder have a gradient, and do not overlap in memory.
        later: nodes after the call, which may read further outputs of the layer.
        drops: see `SameRandomNumbers`.
        seed: of weights and inputs.

    Attributes:
        holder: module with the layer as `LAYER`.
    """

    def __init__(
        self,
        layer: Layer,
        *,
        stored: Collection[str] = (),
        later: Sequence[Node] = (),
        drops: bool = True,
        seed: int = 0,
    ) -> None:
        self._drops = drops
        values = _Values(seed)
        holder = nn.ModuleDict({LAYER: layer.module})
        self.holder = values.of_module(holder, stored).train()
        self._inputs = values.of((layer.call.args, layer.call.kwargs))
        self._given = _index(layer.call.inputs, layer.stream[-1])  # indices of the stream's tensors
        self._made = _index(layer.call.outputs, layer.stream[0])
        read = {source for node in later for source in node.inputs}
        self._read_later = [index for index, (_, node) in enumerate(layer.call.outputs) if node in read]

    def copy(self) -> ReplayedLayer:
        """A copy with a module of its own; weights are the same memory."""
        copied = copy.copy(self)
        copied.holder = copy.deepcopy(
            self.holder, {id(p): nn.Parameter(p.data, p.requires_grad) for p in self.holder.parameters()}
        )
        return copied

    def in_double_precision(self) -> ReplayedLayer | None:
        """A copy with weights and inputs in fp64; None if it has large weights."""
        if any(parameter.numel() > _LARGE for parameter in self.holder.parameters()):
            return None
        copied, known = copy.copy(self), dict[int, torch.Tensor]()
        copied.holder = copy.deepcopy(self.holder).double()

        def cast(tensor: torch.Tensor) -> torch.Tensor:
            return known.setdefault(id(tensor), tensor.double() if tensor.is_floating_point() else tensor)

        copied._inputs = map_tensors(cast, self._inputs)
        return copied

    def forward(self, traced: Trace | None = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The stream before the layer, and the layer's outputs.

        Args:
            traced: records the pass, if given, which then has no gradients.
        """
        layer: Callable[..., Any] = self.holder.get_submodule(LAYER)
        original = tensors_in(self._inputs)[self._given]
        given = original.clone().requires_grad_()
        recording = nullcontext() if traced is None else traced.recording()
        with known_random_numbers(), torch.enable_grad(), SameRandomNumbers(drops=self._drops), recording:
            stream = given * 1  # may be changed in place
            args, kwargs = map_tensors(lambda tensor: stream if tensor is original else tensor.clone(), self._inputs)
            return given, tensors_in(layer(*args, **kwargs))

    def output(self) -> torch.Tensor:
        """The stream after the layer."""
        return self.forward()[1][self._made].detach()

    def run(self) -> dict[str, torch.Tensor]:
        """Output, what is read of further outputs, and gradients, by name."""
        given, outputs = self.forward()
        output = outputs[self._made]
        wave = torch.linspace(-1, 1, output.numel()).sin().reshape(output.shape)
        with torch.enable_grad(), SameRandomNumbers(drops=self._drops):
            (output * wave).sum().backward()
        trained = {name: parameter for name, parameter in self.holder.named_parameters() if parameter.requires_grad}
        of_names = {
            f"the gradient of {name}": torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for name, tensor in {"its input": given, **trained}.items()
        }
        of_places = {f"its output {index}": outputs[index].detach() for index in self._read_later}
        return {OUTPUT: output.detach(), **of_places, **of_names}


def _index(tensors: Sequence[tuple[Any, ...]], node: Node) -> int:
    """Index of the stream's tensor among those of a call."""
    return next(index for index, (*_, made) in enumerate(tensors) if made is node)


def first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


class _Values:
    """Numbers in place of fake tensors, each tensor's the same wherever it occurs."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._known: dict[int, torch.Tensor] = {}

    def of(self, value: Any) -> Any:
        return map_tensors(self._of_tensor, value)

    def _of_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in self._known:
            if not isinstance(tensor, FakeTensor):
                number = tensor.detach().clone()
            elif tensor.is_floating_point() or tensor.is_complex():
                number = torch.randn(tensor.shape, generator=self._generator, dtype=tensor.dtype)
            else:
                number = torch.ones(tensor.shape, dtype=tensor.dtype) * (tensor.dtype == torch.bool)
            self._known[id(tensor)] = number.float() if number.is_floating_point() else number
        return self._known[id(tensor)]

    def of_module(self, module: nn.Module, stored: Collection[str]) -> nn.Module:
        memo: dict[int, Any] = {}
        for name, parameter in module.named_parameters():
            is_stored = parameter.numel() <= _LARGE or name in stored
            memo[id(parameter)] = nn.Parameter(self._weight(parameter, is_stored), requires_grad=is_stored)
        for buffer in module.buffers():
            memo[id(buffer)] = self._of_tensor(buffer).abs() if isinstance(buffer, FakeTensor) else self.of(buffer)
        return copy.deepcopy(module, memo)

    def _weight(self, parameter: torch.Tensor, is_stored: bool) -> torch.Tensor:
        """Random weights; those of a large matrix overlap in memory, as its rows are shifted by one."""
        if parameter.dim() < 2:
            return 0.5 + 0.2 * torch.randn(parameter.shape, generator=self._generator)
        scale = (parameter.shape[0] / max(1, parameter.numel())) ** (0.25 if parameter.dim() == 3 else 0.5)
        if is_stored:
            return torch.randn(parameter.shape, generator=self._generator).mul_(scale)
        values = scale * torch.randn(sum(parameter.shape), generator=self._generator)
        return values.as_strided(parameter.shape, (1,) * parameter.dim())


class SameRandomNumbers(TorchDispatchMode):
    """Each random operation draws the same numbers, however many were drawn before.

    Args:
        drops: whether dropout drops anything; what it drops depends on the number of neurons or heads.
    """

    def __init__(self, *, drops: bool = True) -> None:
        super().__init__()
        self._drops = drops

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._drops and func._schema.name in ("aten::bernoulli", "aten::bernoulli_"):
            return args[0].fill_(1) if func._schema.name.endswith("_") else torch.ones_like(args[0])
        if torch.Tag.nondeterministic_seeded in func.tags:
            torch.manual_seed(0)
        is_product = func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) and not kwargs
        if is_product and args[-1].stride() == (1, 1) and args[-1].numel() > _LARGE:
            product = _product_in_overlapping_memory(*args[-2:])
            return product if len(args) == 2 else args[0] + product
        if func is torch.ops.aten._grouped_mm.default:
            return _grouped_product(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _product_in_overlapping_memory(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a @ b` where `b[i, j]` is `v[i + j]`: a correlation, without a copy of b."""
    values = b.as_strided((sum(b.shape) - 1,), (1,))
    length = 2 * len(values)
    spectrum = torch.fft.rfft(values, length) * torch.fft.rfft(a, length).conj()
    return torch.fft.irfft(spectrum, length)[:, : b.shape[1]]


def _grouped_product(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None = None, *_: Any) -> torch.Tensor:
    """The product of experts, also of weights that overlap in memory."""
    if offs is None:
        return a @ b
    ends = offs.tolist()
    ranges = [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]
    if b.dim() == 2:
        return torch.stack([a[:, rows] @ b[rows] for rows in ranges])
    products = [a[rows] @ matrix for rows, matrix in zip(ranges, b, strict=True)]
    return torch.cat([*products, a.new_zeros(len(a) - ends[-1], b.shape[-1])])


def difference(
    first: Mapping[str, torch.Tensor], second: Mapping[str, torch.Tensor], tolerance: float = _TOLERANCE
) -> str:
    """The first name that both results have with different values, and by how much; empty without any."""
    for name in (name for name in first if name in second):
        largest = max(1.0, _largest(second[name]))
        off = _largest(first[name] - second[name]) if first[name].shape == second[name].shape else float("nan")
        if not off <= tolerance * largest:
            return f"{name} by {off:.2g} of {largest:.2g}"
    return ""


def _largest(tensor: torch.Tensor) -> float:
    """Absolute value of the largest element; not a number if an element is not."""
    return max(abs(float(end)) for end in tensor.aminmax())
