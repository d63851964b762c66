"""Neuron strategy: a branch's linear layers and convolutions keep the rows and columns of this rank's neurons, channels
or heads; its batch norms the elements of theirs.

The modules stay stock modules, with narrower weights. In the forward regime nothing else exists. In the backward
regime the body runs twice and the outputs are added (halves.py): as one shallow copy of its modules with the held
weights, and as one with the lacking weights, frozen, so that autograd computes no weight gradients for those and keeps
none of the activations that only they would need. Each half updates the running statistics of its own channels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from sdp_deepspeed.architectures import Cut, LocatedBranch
from sdp_deepspeed.architectures.active_experts import has_experts
from sdp_deepspeed.layout.places import side_by_side
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.masking.counts import Counts, place
from sdp_deepspeed.masking.halves import FirstModule, Halves, LastModule, SplitModule, make_narrow
from sdp_deepspeed.masking.mixins import mix_in
from sdp_deepspeed.masking.outputs import Outputs
from sdp_deepspeed.masking.part import DenseTensors, MaskedPart, empty_like, replace_data, stand_in
from sdp_deepspeed.masking.twins import RunsOnce, twin_of
from sdp_deepspeed.plan.tensors import TensorInfo, pieces_by_tensor
from sdp_deepspeed.units import Piece


@dataclass(frozen=True)
class StoredCut:
    """A parameter or a buffer of which this rank holds a part.

    Args:
        module: that has it.
        name: in the module, such as "weight" or "running_mean".
        tensor: the module's own, narrower; it makes room for another while the part is dense.
        shape: dense.
        format: dense, and of what is stored.
        held, lacking: its pieces in dense order.
    """

    module: nn.Module
    name: str
    tensor: torch.Tensor
    shape: torch.Size
    format: torch.memory_format
    held: tuple[Piece, ...]
    lacking: tuple[Piece, ...]

    @property
    def is_buffer(self) -> bool:
        return not isinstance(self.tensor, nn.Parameter)

    @property
    def registry(self) -> dict[str, Any]:
        """Of the module, where it looks the tensor up."""
        return self.module._buffers if self.is_buffer else self.module._parameters

    def like(self, value: torch.Tensor) -> torch.Tensor:
        """What stands for the tensor, with another value."""
        return value if self.is_buffer else nn.Parameter(value, requires_grad=self.tensor.requires_grad)


class NeuronPart(MaskedPart):
    """The body of one branch on one rank.

    Args:
        module: the model, of which `branch` is still whole.
        model: the plan, and the module's tensors; told where the pieces are from now on.
        branch: the branch.
        units: indices of the branch's units in the plan.
        scales: whether the dense model has the units' part of the output projection times their coverage.
    """

    def __init__(
        self,
        module: nn.Module,
        model: RankModel,
        branch: LocatedBranch,
        units: Sequence[int],
        *,
        scales: bool = False,
    ) -> None:
        super().__init__(branch.name, units, [module.get_submodule(name) for name in branch.bodies], whole=False)
        self._views = model.views
        self._keeps_lacking = model.stores_all
        self._scales = _scales(model, branch, units) if scales else {}
        assert branch.description.inner is not None, "units of neurons come from a description of them"
        self.inner = branch.description.inner
        self._counts = Counts(branch, self.modules)
        self._router = _router(module, branch)
        self._places = {cut.module: place(branch, cut.module) for cut in self.inner.cuts}
        self.cuts = _stored_cuts(module, model, branch)
        self._halves = Halves(self.name, self, self.inner, Outputs.of(branch.description), _cells(branch, self.cuts))

    @property
    def twins(self) -> tuple[nn.Module, ...]:
        """Bodies once more, in the backward regime."""
        return self._halves.twins

    def apply(self) -> None:
        lacking = self._split()
        self._counts.set(self.modules)
        self._halves.twins = self._make_twins(lacking)
        if not self.twins:
            make_narrow(self.modules[0], self._halves)
        elif len(self.modules) == 1:
            self._mix_in(SplitModule, self.modules[0])
        else:
            self._mix_in(FirstModule, self.modules[0])
            self._mix_in(LastModule, self.modules[-1])

    def _mix_in(self, mixin: type[nn.Module], body: nn.Module) -> None:
        mix_in(mixin, body)
        object.__setattr__(body, "_sdp_part", self._halves)

    def _split(self) -> dict[int, torch.Tensor]:
        """Narrow the tensors to what is held; per tensor (its id) what is lacking, if that is kept."""
        result: dict[int, torch.Tensor] = {}
        for cut in self.cuts:
            dense = cut.tensor.detach()
            if self._keeps_lacking and cut.lacking:
                lacking = side_by_side(cut.lacking, dense, cut.format)
                self._views.put(cut.lacking, lacking)
                result[id(cut.tensor)] = lacking if cut.is_buffer else nn.Parameter(lacking, requires_grad=False)
            replace_data(cut.tensor, side_by_side(cut.held, dense, cut.format))
            self._views.put(cut.held)
        return result

    def _make_twins(self, lacking: Mapping[int, torch.Tensor]) -> tuple[nn.Module, ...]:
        """The body twice, without its tail: with the held weights, and with the lacking ones. Of several bodies those
        with the lacking weights, since the layer itself runs the held ones.

        Layers that are not cut are the same objects in both. Output biases are added once.
        """
        if not lacking:
            return ()
        replaced = dict(lacking)
        for cut in self.inner.cuts:
            bias = self._bias(cut) if cut.is_output else None
            if bias is not None:
                zero = torch.zeros(1, dtype=bias.dtype, device=bias.device).expand(bias.shape)
                replaced[id(bias)] = nn.Parameter(zero, requires_grad=False)
        first, second = self._instead()
        others = [twin_of(body, replaced, second) for body in self.modules]
        self._counts.set(others)
        if len(others) > 1:
            return tuple(others)
        twins = twin_of(self.modules[0], {}, first), others[0]
        if self.inner.tail_dropout:
            for twin in twins:
                setattr(twin, self.inner.tail_dropout, 0.0)
        return twins

    def _instead(self) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
        """What stands in each twin by its path: nothing for the tail, and one for both of what is not of the cells, a
        router or what runs before them."""
        first: dict[str, nn.Module] = {name: nn.Identity() for name in self.inner.tail}
        second = dict(first)
        if len(self.modules) == 1:
            for path in (*([self._router] if self._router else []), *self.inner.before):
                once = RunsOnce(self.modules[0].get_submodule(path))
                first[path], second[path] = once.first, once.second
        return first, second

    def _bias(self, cut: Cut) -> nn.Parameter | None:
        body, inside = self._places[cut.module]
        parameters = dict(self.modules[body].named_parameters())
        return parameters.get(replace(cut, module=inside).names(parameters)[1])

    def _stored(self, cut: StoredCut) -> tuple[Piece, ...]:
        return (*cut.held, *cut.lacking) if self.twins else cut.held

    @property
    def num_bytes(self) -> int:
        return sum(cut.shape.numel() * cut.tensor.element_size() for cut in self.cuts)

    def allocate(self) -> DenseTensors:
        dense = DenseTensors({})
        for cut in self.cuts:
            whole = empty_like(cut.tensor, cut.shape, cut.format)
            dense.values[cut.tensor] = whole
            dense.targets |= {piece: piece.narrow(whole) for piece in (*cut.held, *cut.lacking)}
            for piece in self._stored(cut):
                dense.targets.pop(piece).copy_(self._views.weight_view(piece))
        return dense

    def complete(self, dense: DenseTensors) -> None:
        for cut in self.cuts:
            for piece in self._scales.keys() & {*cut.held, *cut.lacking}:
                piece.narrow(dense.values[cut.tensor]).mul_(self._scales[piece])

    def show(self, dense: DenseTensors) -> None:
        for cut in self.cuts:
            cut.registry[cut.name] = cut.like(dense.values[cut.tensor])
        self._counts.set(self.modules)
        self.filled = True

    def release(self) -> None:
        for cut in self.cuts:
            cut.registry[cut.name] = cut.tensor
        self._counts.set(self.modules)
        self.filled = False

    def take_over(self) -> None:
        self._take_over(self.cuts)

    def keep_statistics(self) -> None:
        self._take_over([cut for cut in self.cuts if cut.is_buffer])

    def _take_over(self, cuts: Sequence[StoredCut]) -> None:
        for cut in cuts:
            dense = cut.registry[cut.name]
            for piece in self._stored(cut):
                value, stored = piece.narrow(dense.data), self._views.weight_view(piece)
                scale = self._scales.get(piece, 1.0)
                if not torch.equal(value, stored * scale):
                    stored.copy_(value / scale)

    def stand_ins(self) -> dict[torch.Tensor, torch.Tensor]:
        return {cut.tensor: stand_in(cut.tensor, cut.shape) for cut in self.cuts}

    def undo(self) -> None:
        super().undo()
        self._counts.set(self.modules)


def _router(module: nn.Module, branch: LocatedBranch) -> str:
    """Of a mixture its path in the body; empty for others."""
    experts = branch.description.experts
    if experts is None or not has_experts(module.get_submodule(branch.layer), branch.description):
        return ""
    try:
        module.get_submodule(f"{branch.root}.{experts.router}")
    except AttributeError as problem:
        raise ValueError(f"{branch.name!r}: Experts(router={experts.router!r}): no such submodule: {problem}") from None
    return experts.router


def _stored_cuts(module: nn.Module, model: RankModel, branch: LocatedBranch) -> list[StoredCut]:
    tensors = {tensor.parameter: model.views.tensors[tensor.parameter] for tensor in branch.cut_tensors}
    kinds = {tensor.parameter: tensor.kind for tensor in branch.cut_tensors}
    infos = [TensorInfo(name, tuple(tensor.shape), tensor.dtype, kind=kinds[name]) for name, tensor in tensors.items()]
    found = []
    for (_, name), pieces in pieces_by_tensor(infos, model.plan).items():
        owner, _, attribute = name.rpartition(".")
        held = tuple(piece for piece, ranks in pieces if model.rank in ranks)
        lacking = tuple(piece for piece, ranks in pieces if model.rank not in ranks)
        inside = module.get_submodule(owner)
        memory_format = model.views.formats[name]
        found.append(StoredCut(inside, attribute, tensors[name], tensors[name].shape, memory_format, held, lacking))
    return found


def _scales(model: RankModel, branch: LocatedBranch, units: Sequence[int]) -> dict[Piece, float]:
    """Of the units' part of the output projection."""
    outputs = {tensor.parameter for tensor in branch.cut_tensors if tensor.cut.is_output}
    scaled = {index: model.plan.coverage_of(index) for index in units if model.plan.coverage_of(index) < 1}
    return {
        piece: scale
        for index, scale in scaled.items()
        for piece in model.plan.units[index].pieces
        if piece.parameter in outputs
    }


def _cells(branch: LocatedBranch, cuts: Sequence[StoredCut]) -> tuple[Sequence[int], Sequence[int]]:
    """Those that are held, and those that are lacking."""
    output = next(index for index, tensor in enumerate(branch.cut_tensors) if tensor.cut.is_output)
    width = branch.cut_tensors[output].size // branch.num_cells
    held, lacking = (
        [cell for piece in pieces for cell in range(piece.start // width, (piece.start + piece.length) // width)]
        for pieces in (cuts[output].held, cuts[output].lacking)
    )
    return held, lacking
