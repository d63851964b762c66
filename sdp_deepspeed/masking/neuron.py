"""Neuron strategy: a branch's linear layers keep the rows and columns of this rank's neurons or heads.

The modules stay stock modules, with narrower weights. In the forward regime nothing else exists. In the backward
regime the body runs twice and the outputs are added: as one shallow copy of its modules with the held weights, and as
one with the lacking weights, frozen, so that autograd computes no weight gradients for those and keeps none of the
activations that only they would need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.layout.places import side_by_side
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.masking.mixins import Mixin, mixed_in
from sdp_deepspeed.masking.part import DenseTensors, MaskedPart
from sdp_deepspeed.units import Piece


@dataclass(frozen=True)
class CutParameter:
    """A parameter of which this rank holds a part.

    Args:
        module: that has it.
        name: in the module, "weight" or "bias".
        parameter: the module's own, narrower; it makes room for another while the part is dense.
        shape: dense.
        held, lacking: its pieces in dense order.
    """

    module: nn.Module
    name: str
    parameter: nn.Parameter
    shape: torch.Size
    held: tuple[Piece, ...]
    lacking: tuple[Piece, ...]


class NeuronPart(MaskedPart):
    """The body of one branch on one rank.

    Args:
        module: the model, of which `branch` is still whole.
        model: the plan, and the module's tensors; told where the pieces are from now on.
        branch: the branch.
        units: indices of the branch's units in the plan.
        scale: of the units' part of the output projection in the dense model.
    """

    def __init__(
        self,
        module: nn.Module,
        model: RankModel,
        branch: LocatedBranch,
        units: Sequence[int],
        *,
        scale: float = 1.0,
    ) -> None:
        self._body = module.get_submodule(branch.body)
        super().__init__(branch.name, units, [self._body], whole=False)
        self._views = model.views
        self._keeps_lacking = model.stores_all
        self._scales = _scales(model, branch, units, scale)
        assert branch.description.inner is not None, "units of neurons come from a description of them"
        self.inner = branch.description.inner
        self.num_outputs = branch.description.num_outputs
        self._first = branch.cut_tensors[0]
        self._counts = {name: getattr(self._body, name) for name in self.inner.scaled}
        self.cuts = [_cut(module, model, tensor.parameter) for tensor in branch.cut_tensors]
        self.twins: tuple[nn.Module, ...] = ()

    def apply(self) -> None:
        lacking = self._split()
        self._set_counts(self._body)
        self.twins = self._make_twins(lacking)
        if self.twins:
            self._body.__class__ = mixed_in(_SplitModule, type(self._body))
            object.__setattr__(self._body, "_sdp_part", self)

    def _split(self) -> dict[int, nn.Parameter]:
        """Narrow the parameters to what is held; per parameter (its id) what is lacking, if that is kept."""
        result = {}
        for cut in self.cuts:
            dense = cut.parameter.detach()
            if self._keeps_lacking and cut.lacking:
                lacking = side_by_side(cut.lacking, dense)
                self._views.put(cut.lacking, lacking)
                result[id(cut.parameter)] = nn.Parameter(lacking, requires_grad=False)
            other = torch.float32 if dense.dtype == torch.float64 else torch.float64
            cut.parameter.data = dense.new_empty(0, dtype=other)  # autograd forgets the shape that it knew
            cut.parameter.data = side_by_side(cut.held, dense)
            self._views.put(cut.held)
        return result

    def _make_twins(self, lacking: Mapping[int, nn.Parameter]) -> tuple[nn.Module, ...]:
        """The body twice, without its tail: with the held weights, and with the lacking ones.

        Layers that are not cut are the same objects in both. Output biases are added once.
        """
        if not lacking:
            return ()
        replaced = dict(lacking)
        for cut in self.inner.cuts:
            bias = self._body.get_submodule(cut.module)._parameters.get("bias")
            if cut.is_output and bias is not None:
                zero = torch.zeros(1, dtype=bias.dtype, device=bias.device).expand(bias.shape)
                replaced[id(bias)] = nn.Parameter(zero, requires_grad=False)
        twins = _twin(self._body, {}, self.inner.tail), _twin(self._body, replaced, self.inner.tail)
        self._set_counts(twins[1])
        return twins

    def _set_counts(self, body: nn.Module) -> None:
        """Make what the modules of `body` say of their sizes true."""
        layers = [body.get_submodule(cut.module) for cut in self.inner.cuts]
        _set_sizes(layers)
        width = layers[0].get_parameter("weight").shape[self._first.dim]
        for name, count in self._counts.items():
            setattr(body, name, count * width // self._first.size)

    def _stored(self, cut: CutParameter) -> tuple[Piece, ...]:
        return (*cut.held, *cut.lacking) if self.twins else cut.held

    @property
    def num_bytes(self) -> int:
        return sum(cut.shape.numel() * cut.parameter.element_size() for cut in self.cuts)

    def allocate(self) -> DenseTensors:
        dense = DenseTensors({})
        for cut in self.cuts:
            whole = torch.empty(cut.shape, dtype=cut.parameter.dtype, device=cut.parameter.device)
            dense.values[cut.parameter] = whole
            dense.targets |= {piece: piece.narrow(whole) for piece in (*cut.held, *cut.lacking)}
            for piece in self._stored(cut):
                dense.targets.pop(piece).copy_(self._views.weight_view(piece))
        return dense

    def complete(self, dense: DenseTensors) -> None:
        for cut in self.cuts:
            for piece in self._scales.keys() & {*cut.held, *cut.lacking}:
                piece.narrow(dense.values[cut.parameter]).mul_(self._scales[piece])

    def show(self, dense: DenseTensors) -> None:
        for cut in self.cuts:
            whole = dense.values[cut.parameter]
            cut.module._parameters[cut.name] = nn.Parameter(whole, requires_grad=cut.parameter.requires_grad)
        self._set_counts(self._body)
        self.filled = True

    def release(self) -> None:
        for cut in self.cuts:
            cut.module._parameters[cut.name] = cut.parameter
        self._set_counts(self._body)
        self.filled = False

    def take_over(self) -> None:
        for cut in self.cuts:
            dense = cut.module._parameters[cut.name]
            assert dense is not None
            for piece in self._stored(cut):
                value, stored = piece.narrow(dense.data), self._views.weight_view(piece)
                scale = self._scales.get(piece, 1.0)
                if not torch.equal(value, stored * scale):
                    stored.copy_(value / scale)


class _SplitModule(Mixin):
    """Mixed in before a body's own class in the backward regime: first the held neurons or heads, then the lacking.
    A copy has the held ones."""

    _sdp_part: NeuronPart

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        part = self._sdp_part
        if part.dense:
            return super().forward(*args, **kwargs)
        for name in part.inner.caches:
            if kwargs.get(name) is not None:
                _leave_out(kwargs[name], part.name, getattr(self, "layer_idx", None))
                kwargs[name] = None
        outputs = []
        for twin in part.twins:
            if twin.training != self.training:
                twin.train(self.training)
            outputs.append(type(twin).forward(twin, *args, **kwargs))
        held, lacking = outputs
        result = held + lacking if part.num_outputs == 1 else held[0] + lacking[0]
        for name in part.inner.tail:
            result = self.get_submodule(name)(result)
        # What else attention returns, its weights, would be those of the held heads only.
        return result if part.num_outputs == 1 else (result, *[None] * (part.num_outputs - 1))


class _LayerCopy(nn.Module):
    """Mixed in before the class of a layer's copy, which has the lacking weights.

    Hooks of the layer run for the copy too; what they note on the module (a profiler its counts) is the layer's.
    """

    _sdp_layer: nn.Module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "_sdp_layer" not in self.__dict__:  # not there yet: it is being copied or unpickled
                raise
            return getattr(self._sdp_layer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__:
            super().__setattr__(name, value)
        else:
            setattr(self._sdp_layer, name, value)


def _leave_out(cache: Any, name: str, layer: int | None) -> None:
    """Run without a cache that is empty. One that holds tokens is refused, and so is one that should hold some."""
    missing = cache.__dict__.setdefault("_sdp_missing", set()) if hasattr(cache, "__dict__") else set()
    has_tokens = layer is not None and hasattr(cache, "get_seq_length") and cache.get_seq_length(layer) > 0
    if name in missing or has_tokens:
        raise RuntimeError(
            f"{name} runs in two parts, which have no cache of keys and values: generate without gradients, or inside "
            "engine.dense(resident=True)"
        )
    missing.add(name)


def _cut(module: nn.Module, model: RankModel, name: str) -> CutParameter:
    owner, _, attribute = name.rpartition(".")
    parameter = module.get_parameter(name)
    pieces = model.pieces["parameter", name]
    held = tuple(piece for piece, ranks in pieces if model.rank in ranks)
    lacking = tuple(piece for piece, ranks in pieces if model.rank not in ranks)
    return CutParameter(module.get_submodule(owner), attribute, parameter, parameter.shape, held, lacking)


def _scales(model: RankModel, branch: LocatedBranch, units: Sequence[int], scale: float) -> dict[Piece, float]:
    """Of the units' part of the output projection."""
    if scale == 1.0:
        return {}
    outputs = {tensor.parameter for tensor in branch.cut_tensors if tensor.cut.is_output}
    pieces = (piece for index in units for piece in model.plan.units[index].pieces)
    return {piece: scale for piece in pieces if piece.parameter in outputs}


def _twin(module: nn.Module, replaced: Mapping[int, nn.Parameter], left_out: Sequence[str]) -> nn.Module:
    """`module` and its modules once more, with other parameters and without the modules of the paths `left_out`."""
    twin = module.__class__.__new__(module.__class__)
    twin.__dict__ = dict(module.__dict__)
    twin.__dict__.pop("_compiled_call_impl", None)  # of the module itself, with its own weights
    twin._parameters = {name: None if p is None else replaced.get(id(p), p) for name, p in module._parameters.items()}
    twin._modules = {}
    for name, child in module._modules.items():
        below = [path.removeprefix(f"{name}.") for path in left_out if path.startswith(f"{name}.")]
        if name in left_out:
            twin._modules[name] = nn.Identity()
        elif child is None or not (below or any(id(p) in replaced for p in child.parameters())):
            twin._modules[name] = child  # who changes it later, or hooks it, does so for all
        else:
            twin._modules[name] = _twin(child, replaced, below)
            twin._modules[name].__class__ = mixed_in(_LayerCopy, type(child))
            object.__setattr__(twin._modules[name], "_sdp_layer", child)
    return twin


def _set_sizes(layers: Sequence[nn.Module]) -> None:
    """Linear and Conv1D say how wide they are; Conv1D computes with it."""
    layer: Any
    for layer in layers:
        weight = layer.weight
        if hasattr(layer, "nf"):
            layer.nx, layer.nf = weight.shape
        elif hasattr(layer, "out_features"):
            layer.out_features, layer.in_features = weight.shape
