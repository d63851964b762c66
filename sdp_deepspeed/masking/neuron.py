"""Neuron strategy: a branch's linear layers keep the rows and columns of this rank's neurons or heads.

The modules stay stock modules, with narrower weights. In the forward regime nothing else exists. In the backward
regime the branch has a second, frozen copy of its modules with the weights that the rank lacks: its body runs once
on each and the outputs are added, so that autograd computes no weight gradients for what is lacking and keeps none
of the activations that only those would need.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..architectures import Site
from ..places import Places, side_by_side
from ..units import Piece
from .part import Fetch, MaskedPart


@dataclass
class CutParameter:
    """A parameter of which this rank holds a part.

    Args:
        parameter: the module's own, narrower.
        shape: dense.
        held, lacking: its pieces in dense order.
        scaled: pieces to which the dense model's scale applies (of units, in the output projection).
        kept: its storage and gradient while it is dense.
        version: of its content when it became dense.
    """

    parameter: nn.Parameter
    shape: torch.Size
    held: tuple[Piece, ...]
    lacking: tuple[Piece, ...]
    scaled: frozenset[Piece] = frozenset()
    kept: tuple[torch.Tensor, torch.Tensor | None] | None = None
    version: int = 0


class NeuronPart(MaskedPart):
    """The body of one branch on one rank.

    Args:
        model: the module, of which `site` is still whole.
        units: indices of the branch's units in the plan.
        site: the branch.
        pieces: per cut tensor its pieces in dense order, each with whether this rank holds it.
        places: told where the pieces are from now on.
        keeps_lacking: whether the rank stores what it lacks (backward regime).
        scale: of the units' part of the output projection in the dense model.
        scaled: pieces of the units, of which those in the output projection are scaled.
    """

    def __init__(
        self,
        model: nn.Module,
        units: Sequence[int],
        site: Site,
        pieces: Mapping[str, Sequence[tuple[Piece, bool]]],
        places: Places,
        *,
        keeps_lacking: bool,
        scale: float = 1.0,
        scaled: frozenset[Piece] = frozenset(),
    ) -> None:
        self._body = model.get_submodule(site.body)
        super().__init__(site.name, units, [self._body], whole=False)
        self._places = places
        self._scale = scale
        inner = site.branch.inner
        assert inner is not None, "units of neurons come from a description of them"
        self.caches = inner.caches
        self.num_outputs = site.branch.num_outputs
        self._layers = [self._body.get_submodule(cut.module) for cut in inner.cuts]
        self._counts = {name: (getattr(self._body, name), site.num_cells) for name in inner.scaled}
        self._cut_width = site.cut_tensors[0]
        outputs = {tensor.parameter for tensor in site.cut_tensors if tensor.cut.is_output}
        self.cuts = [
            _cut(model.get_parameter(name), own, scaled if scale != 1.0 and name in outputs else frozenset())
            for name, own in pieces.items()
        ]
        lacking = self._split(keeps_lacking=keeps_lacking)
        self._set_counts()
        self.twin = self._make_twin(site, lacking) if any(t is not None for t in lacking.values()) else None
        if self.twin is not None:
            self._body.__class__ = _split_class(type(self._body))
            object.__setattr__(self._body, "_sdp_part", self)

    def _split(self, *, keeps_lacking: bool) -> dict[int, torch.Tensor | None]:
        """Narrow the parameters to what is held; per parameter (its id) what is lacking, if that is kept."""
        result: dict[int, torch.Tensor | None] = {}
        for cut in self.cuts:
            dense = cut.parameter.detach()
            lacking = side_by_side(cut.lacking, dense) if keeps_lacking and cut.lacking else None
            cut.parameter.data = side_by_side(cut.held, dense)
            self._places.put(cut.held)
            if lacking is not None:
                self._places.put(cut.lacking, lacking)
            result[id(cut.parameter)] = lacking
        return result

    def _make_twin(self, site: Site, lacking: Mapping[int, torch.Tensor | None]) -> nn.Module:
        """The body's modules again, with the lacking weights; what is shared and no output bias is the same object."""
        replaced = {key: nn.Parameter(t, requires_grad=False) for key, t in lacking.items() if t is not None}
        assert site.branch.inner is not None
        for cut in site.branch.inner.cuts:
            bias = getattr(self._body.get_submodule(cut.module), "bias", None)
            if cut.is_output and isinstance(bias, nn.Parameter):  # it is added once
                zero = torch.zeros(1, dtype=bias.dtype, device=bias.device).expand(bias.shape)
                replaced[id(bias)] = nn.Parameter(zero, requires_grad=False)
        twin = _twin(self._body, replaced)
        _set_sizes([twin.get_submodule(cut.module) for cut in site.branch.inner.cuts])
        share = sum(piece.length for piece in self.cuts[0].lacking) / self._cut_width.size
        for name, (count, _) in self._counts.items():
            setattr(twin, name, round(count * share))
        return twin

    def _set_counts(self) -> None:
        """Make what the modules say of their sizes true."""
        _set_sizes(self._layers)
        share = self.cuts[0].parameter.shape[self._cut_width.dim] / self._cut_width.size
        for name, (count, _) in self._counts.items():
            setattr(self._body, name, round(count * share))

    def fill(self, fetch: Fetch) -> None:
        targets: dict[Piece, torch.Tensor] = {}
        wholes = []
        for cut in self.cuts:
            wholes.append(cut.parameter.new_empty(cut.shape, requires_grad=False))
            stored = cut.held if self.twin is None else (*cut.held, *cut.lacking)
            for piece in (*cut.held, *cut.lacking):
                targets[piece] = piece.narrow(wholes[-1])
            for piece in stored:
                targets.pop(piece).copy_(self._places.weight(piece))
        fetch(targets)
        for cut, whole in zip(self.cuts, wholes, strict=True):
            for piece in cut.scaled:
                piece.narrow(whole).mul_(self._scale)
            cut.kept = cut.parameter.data, cut.parameter.grad
            cut.parameter.grad = None
            cut.parameter.data = whole
            cut.version = cut.parameter._version
        self.filled = True
        self._set_counts()

    def release(self) -> None:
        for cut in self.cuts:
            assert cut.kept is not None, "fill comes before release"
            dense, changed = cut.parameter.data, cut.parameter._version != cut.version
            cut.parameter.grad = None
            cut.parameter.data, gradient = cut.kept
            cut.parameter.grad = gradient
            cut.kept = None
            if changed:
                self._take_over(cut, dense)
        self.filled = False
        self._set_counts()

    def _take_over(self, cut: CutParameter, dense: torch.Tensor) -> None:
        """Weights that were changed in the dense model (a state dict was loaded) go into what this rank stores."""
        for piece in cut.held if self.twin is None else (*cut.held, *cut.lacking):
            value = piece.narrow(dense)
            self._places.weight(piece).copy_(value / self._scale if piece in cut.scaled else value)


class _SplitModule(nn.Module):
    """Mixed in before a body's own class in the backward regime: first the held neurons or heads, then the lacking."""

    _sdp_part: NeuronPart

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        part = self._sdp_part
        if part.dense:
            return super().forward(*args, **kwargs)
        kwargs |= dict.fromkeys((name for name in part.caches if kwargs.get(name) is not None), None)
        twin = part.twin
        assert twin is not None
        if twin.training != self.training:
            twin.train(self.training)
        held = super().forward(*args, **kwargs)
        lacking = type(twin).forward(twin, *args, **kwargs)
        if part.num_outputs == 1:
            return held + lacking
        return (held[0] + lacking[0], *held[1:])


_SPLIT_CLASSES: dict[type[nn.Module], type[nn.Module]] = {}


def _split_class(base: type[nn.Module]) -> type[nn.Module]:
    if base not in _SPLIT_CLASSES:
        made = type(base.__name__, (_SplitModule, base), {"__module__": base.__module__})
        _SPLIT_CLASSES[base] = made
    return _SPLIT_CLASSES[base]


def _cut(parameter: nn.Parameter, pieces: Sequence[tuple[Piece, bool]], scaled: frozenset[Piece]) -> CutParameter:
    held = tuple(piece for piece, mine in pieces if mine)
    lacking = tuple(piece for piece, mine in pieces if not mine)
    return CutParameter(parameter, parameter.shape, held, lacking, scaled.intersection(held + lacking))


def _twin(module: nn.Module, replaced: Mapping[int, nn.Parameter]) -> nn.Module:
    twin = module.__class__.__new__(module.__class__)
    twin.__dict__ = dict(module.__dict__)
    twin._parameters = {name: replaced.get(id(p), p) for name, p in module._parameters.items()}
    twin._modules = {name: None if child is None else _twin(child, replaced) for name, child in module._modules.items()}
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
