"""Neuron strategy: a branch's body becomes a sum over sets of holders, each addend a narrower body of its own.

FSDP2 shards whole parameters. So neurons or heads that different ranks hold must be different parameters: all those of
a branch with the same holders make one piece, a module that FSDP2 shards over these holders, and whose reduce-scatter
averages over just them. A rank builds the pieces that it holds and no others; what the branch has once (output bias,
norms of each head, dropout at its end) stays in the body itself, is shared, and counts once.

    model.layers.0.mlp                            the body: sums, adds the bias
    model.layers.0.mlp.pieces.3.down_proj.weight  of the piece whose holders are the fourth set of holders

In the dense model the body runs as it was built, on whole parameters that come for a while.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._pytree import tree_map_only

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.fsdp.narrow_copies import Changes, Heads, make_piece
from sdp_deepspeed.fsdp.piece_table import PieceTable
from sdp_deepspeed.fsdp.piece_values import PieceValues
from sdp_deepspeed.fsdp.splittable import PIECES
from sdp_deepspeed.fsdp.state_dicts import PiecesTensor, check_pieces
from sdp_deepspeed.fsdp.whole_layers import WholeLayers, drop
from sdp_deepspeed.layout.places import side_by_side
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.masking.counts import Counts
from sdp_deepspeed.masking.halves import leave_out_caches
from sdp_deepspeed.masking.mixins import Mixin, mix_in
from sdp_deepspeed.masking.outputs import Outputs
from sdp_deepspeed.masking.part import DenseTensors, MaskedPart, replace_data, stand_in

if TYPE_CHECKING:
    from torch.distributed.fsdp import MixedPrecisionPolicy


class SplitBranch(MaskedPart):
    """A branch whose neurons or heads are not all held by all ranks, on one rank.

    Args:
        module: the model, of which `branch` is still whole.
        model: the plan, and the module's tensors.
        branch: the branch; `check_splittable` has passed.
        units: indices of the branch's units in the plan.
        scales: whether the dense model has pieces of output projections times their coverage.

    Attributes:
        table: of all pieces of the branch.
        pieces: modules by the numbers of their sets of holders, ascending; of all sets, those that this rank lacks
            without anything in them. They run in this order.
        values: of the dense tensors.
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
        super().__init__(branch.name, units, [module.get_submodule(branch.root)], whole=False)
        assert branch.description.inner is not None, "units of neurons come from a description of them"
        self.inner = branch.description.inner
        self.outputs = Outputs.of(branch.description)
        self.table = PieceTable(model, branch)
        self.pieces: dict[int, nn.Module] = {}
        self._branch = branch
        self._model = model
        self._scales = scales
        self._layers = WholeLayers(self.body, {path: tensor.parameter for path, tensor in self.table.cut.items()})
        shapes = self._layers.shapes
        self._dense = {name: model.views.tensors[name] for name in shapes}  # they stand for values, which come and go
        self.values = PieceValues(self.table, self.pieces, self._dense, shapes, model.rank)
        self._device = torch.device("cpu")
        self._dtype: torch.dtype | None = None  # that FSDP2 gathers weights in
        self._output_dtype: torch.dtype | None = None

    @property
    def body(self) -> nn.Module:
        """The module that is split."""
        return self.modules[0]

    @property
    def held(self) -> list[int]:
        """Numbers of the pieces that this rank has."""
        return [number for number, holders in self.table.sets.items() if self._model.rank in holders]

    def apply(self) -> None:
        counts = Counts(self._branch, [self.body])
        for number, holders in self.table.sets.items():
            holds = self._model.rank in holders
            self.pieces[number] = self._make_piece(number, counts) if holds else LackingPiece()
        self._layers.remove()
        self._keep_for_values()
        self.body.add_module(PIECES, nn.ModuleDict(self._children))
        mix_in(SumModule, self.body)
        object.__setattr__(self.body, "_sdp_part", self)

    def run(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """The body's output on this rank: the sum over the pieces that it holds.

        All ranks run the pieces of a branch in the order of the sets of holders. Autograd runs what was recorded later
        first, so the backward pass has finished a piece before it begins one that ran earlier.
        """
        body = self.body
        leave_out_caches(self.inner, self.name, body, kwargs, parts="pieces", way="from the dense model")
        total: Any = None
        for piece in self.pieces.values():
            if piece.training != body.training:  # it was no child of the body while that was dense
                piece.train(body.training)
            if isinstance(piece, LackingPiece):
                piece()
                continue
            output = piece(*args, **kwargs)
            addend = output[0] if self.outputs.count > 1 else output
            total = addend if total is None else total + addend
        for bias in self._layers.biases():
            total = total + bias.to(total.dtype)
        for name in self.inner.tail:
            total = body.get_submodule(name)(total)
        if self.inner.tail_dropout:
            total = functional.dropout(total, p=getattr(body, self.inner.tail_dropout), training=body.training)
        return self.outputs.around(total, kwargs)

    @property
    def num_bytes(self) -> int:
        return self.values.num_bytes

    def allocate(self) -> DenseTensors:
        """With what this rank stores of it."""
        values, targets = self.values.allocate(self._device)
        return DenseTensors(targets, {self._dense[name]: value for name, value in values.items()})

    def complete(self, dense: DenseTensors) -> None:
        self.scale(dense)
        for tensor, value in dense.values.items():
            dense.values[tensor] = value.to(self._dtype or value.dtype)

    def scale(self, dense: DenseTensors) -> None:
        """Its targets were filled: what is left to do to be of the dense model that is exported."""
        if self._scales:
            self.values.scale(self.by_name(dense), len(self._model.plan.subnetwork_of_rank))

    def show(self, dense: DenseTensors) -> None:
        delattr(self.body, PIECES)
        self._layers.give(self.by_name(dense))
        self.filled = True

    def release(self) -> None:
        self._layers.remove()
        self.body.add_module(PIECES, nn.ModuleDict(self._children))
        self.filled = False

    def take_over(self) -> None:
        raise AssertionError("what is sharded is never resident, so nobody has changed it")

    def stand_ins(self) -> dict[torch.Tensor, torch.Tensor]:
        return {tensor: stand_in(tensor, self._layers.shapes[name]) for name, tensor in self._dense.items()}

    def by_name(self, dense: DenseTensors) -> dict[str, torch.Tensor]:
        """What makes the part dense, by dense names."""
        return {name: dense.values[tensor] for name, tensor in self._dense.items()}

    def stand_in_of(self, dense_name: str) -> torch.Tensor:
        """What stands for a dense tensor among the values of this part."""
        return self._dense[dense_name]

    def join(self, device: torch.device, policy: MixedPrecisionPolicy) -> None:
        """Its pieces are sharded now.

        Args:
            device: of the model that runs.
            policy: of its pieces; what FSDP2 does to their inputs and outputs is done to those of the dense body.
        """
        self._device, self._dtype, self._output_dtype = device, policy.param_dtype, policy.output_dtype
        if policy.param_dtype is not None and policy.cast_forward_inputs:
            self.body.register_forward_pre_hook(self._cast_inputs, with_kwargs=True)
        if policy.output_dtype is not None:
            self.body.register_forward_hook(self._cast_output)

    def _cast_inputs(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        return _cast((args, kwargs), self._dtype) if self.filled else None

    def _cast_output(self, module: nn.Module, args: Any, output: Any) -> Any:
        return _cast(output, self._output_dtype) if self.filled else None

    @property
    def _children(self) -> dict[str, nn.Module]:
        return {f"{number}": piece for number, piece in self.pieces.items()}

    def _make_piece(self, number: int, counts: Counts) -> nn.Module:
        parameters: dict[str, nn.Parameter | None] = dict.fromkeys(self._layers.bias_paths)
        for path, tensor in self.table.tensors(number).items():
            dense = self.body.get_parameter(path)
            parts = [dense.detach().narrow(tensor.dim or 0, start, length) for start, length in tensor.intervals]
            parameters[path] = _like(dense, torch.cat(parts, tensor.dim or 0))
        owners = [path.rpartition(".")[0] for path in self.inner.scaled if not path.startswith("config.")]
        changes = Changes(parameters, {name: nn.Identity() for name in self.inner.tail}, owners)
        heads = Heads(self.inner.by_head, self.table.cells(number), self._branch.num_cells, self.outputs)
        module = make_piece(self.body, changes, heads)
        if self.inner.tail_dropout:
            setattr(module, self.inner.tail_dropout, 0.0)
        counts.set([module])
        return module

    def _keep_for_values(self) -> None:
        """Of tensors without storage, what this rank holds in the place where `Init` stores values."""
        for name, tensor in self._dense.items():
            if tensor.is_meta:
                held = [piece for piece, ranks in self._model.pieces["parameter", name] if self._model.rank in ranks]
                whole = torch.empty(self._layers.shapes[name], dtype=tensor.dtype, device="meta")
                replace_data(tensor, side_by_side(held, whole))
                self._model.views.put(held)

    def take_values(self) -> None:
        """Move the values that `Init` stored to the pieces; before these are sharded."""
        views = self._model.views
        for number in self.held:
            for path, tensor in self.table.tensors(number).items():
                own = [p for p, ranks in self._model.pieces["parameter", tensor.dense_name] if ranks == tensor.holders]
                value = torch.cat([views.weight_view(piece) for piece in own], tensor.dim or 0)
                layer, _, name = path.rpartition(".")
                parameters = self.pieces[number].get_submodule(layer)._parameters
                parameters[name] = _like(self.pieces[number].get_parameter(path), value)
        for parameter in self._dense.values():
            drop(parameter)


class LackingPiece(nn.Module):
    """Stands where other ranks have a piece, so that all ranks know in which order pieces run."""

    def forward(self) -> None:
        pass


class SumModule(Mixin):
    """Mixed in before the class of a body that is split."""

    _sdp_part: SplitBranch

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self._sdp_part.dense:
            return super().forward(*args, **kwargs)
        return self._sdp_part.run(args, kwargs)

    def get_extra_state(self) -> PiecesTensor:
        return PiecesTensor.of(self._sdp_part.table, self._sdp_part.name)

    def set_extra_state(self, state: Any) -> None:
        check_pieces(self._sdp_part.table, self._sdp_part.name, state)


def _like(parameter: torch.Tensor, value: torch.Tensor) -> nn.Parameter:
    """Another value, with what users noted on a parameter."""
    result = nn.Parameter(value.contiguous(), requires_grad=parameter.requires_grad)
    vars(result).update(vars(parameter))
    return result


def _cast(values: Any, dtype: torch.dtype | None) -> Any:
    return tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, values)
