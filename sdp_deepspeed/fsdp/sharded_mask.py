"""Masking under FSDP2: lacking blocks are as in masking/block.py; what is held is FSDP2's, and stays in its hands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from sdp_deepspeed.architectures import LocatedBranch, branches_of_units
from sdp_deepspeed.fsdp.neuron import SplitBranch
from sdp_deepspeed.fsdp.pieces import ShardedUnit
from sdp_deepspeed.fsdp.splittable import check_splittable
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.masking.block import BlockPart, output_names
from sdp_deepspeed.masking.mask import Mask
from sdp_deepspeed.masking.part import DenseTensors


class ShardedBlockPart(BlockPart):
    """One block unit on one rank. Where it is held, the dense view has nothing to do but to scale it.

    Attributes:
        unit: its modules, once they are sharded.
        dtype: that FSDP2 gathers weights in, and casts inputs to (`mp_policy`); None for their own.
        casts_inputs: whether it casts them.
        scale: of the dense model's output projections.
        scaled_names: of those.
    """

    unit: ShardedUnit | None = None
    dtype: torch.dtype | None = None
    casts_inputs = False

    def __init__(
        self,
        module: nn.Module,
        model: RankModel,
        index: int,
        branches: Sequence[LocatedBranch],
        *,
        scale: float = 1.0,
        copies: bool = False,
    ) -> None:
        super().__init__(module, model, index, branches, scale=scale, copies=copies)
        self._module = module
        self._dtypes = {piece: tensor.dtype for piece, tensor in self._tensors.items()}
        tensors = model.views.tensors
        names = [name for branch in branches for name in output_names(branch, tensors)] if scale != 1.0 else []
        self.scale, self.scaled_names = scale, frozenset(names)
        if self.whole:
            self._scaled = []  # they are not what the module has once it is sharded
        self._unscaled_shards: list[torch.Tensor] = []

    @property
    def names(self) -> list[str]:
        """Of its parameters and buffers."""
        return [piece.parameter for piece in self._tensors]

    def join(self, unit: ShardedUnit, dtype: torch.dtype | None, *, casts_inputs: bool) -> None:
        """It is sharded now."""
        self.unit, self.dtype, self.casts_inputs = unit, dtype, casts_inputs
        if not self.whole and dtype is not None and casts_inputs:
            for module in self.modules:
                module.register_forward_pre_hook(self._cast, with_kwargs=True)

    def _cast(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        """What FSDP2 does to the inputs of what is held."""
        if not self.filled:
            return None
        return tree_map_only(torch.Tensor, lambda t: t.to(self.dtype) if t.is_floating_point() else t, (args, kwargs))

    def complete(self, dense: DenseTensors) -> None:
        super().complete(dense)
        kinds = {self._tensors[piece]: piece.kind for piece in dense.targets}
        for tensor, value in dense.values.items():
            if self.dtype is not None and value.is_floating_point() and kinds[tensor] == "parameter":
                dense.values[tensor] = value.to(self.dtype)

    def show(self, dense: DenseTensors) -> None:
        super().show(dense)
        if self.whole and self.scaled_names:
            assert self.unit is not None
            self.unit.fsdp.reshard()
            shards = self._shards()
            self._unscaled_shards = [shard.clone() for shard in shards]
            for shard in shards:
                shard.mul_(self.scale)
        if self.whole and self._of_layers:
            # FSDP2 gathered the layer before its first module runs, and reading its shards has freed it again.
            assert self.unit is not None
            self.unit.fsdp.unshard()

    def release(self) -> None:
        super().release()
        if not self._unscaled_shards:
            return
        assert self.unit is not None
        self.unit.fsdp.reshard()  # what is still gathered is scaled
        for shard, unscaled in zip(self._shards(), self._unscaled_shards, strict=True):
            shard.copy_(unscaled)
        self._unscaled_shards = []

    def _drop(self) -> None:
        for piece, tensor in self._tensors.items():
            if tensor.dtype != self._dtypes[piece]:  # gathered in another
                with torch.inference_mode(False):
                    tensor.data = torch.empty(0, dtype=self._dtypes[piece], device=tensor.device)
        super()._drop()

    def _shards(self) -> list[torch.Tensor]:
        parameters: list[Any] = [self._module.get_parameter(name) for name in sorted(self.scaled_names)]
        return [parameter.detach().to_local() for parameter in parameters]


class ShardedMask(Mask):
    """A mask whose module is sharded after it was applied."""

    block_part = ShardedBlockPart
    neuron_part = SplitBranch

    def check(self) -> tuple[Mapping[int, Sequence[LocatedBranch]], Mapping[str, Sequence[int]], str]:
        plan = self.model.plan
        names = branches_of_units(plan.units, self._branches)
        is_cut = {name for index, name in enumerate(names) if plan.coverage_of(index) < 1}
        check_splittable(self._module, [branch for branch in self._branches if branch.name in is_cut])
        return super().check()

    @property
    def split(self) -> list[SplitBranch]:
        """Branches of which ranks hold other neurons or heads."""
        return [part for part in self.parts if isinstance(part, SplitBranch)]

    def apply_on(self, device: torch.device, *, is_deferred: bool) -> None:
        """As `apply`; tensors without elements stand on `device` where others' do not yet.

        Args:
            is_deferred: whether somebody gives the module its storage; else what is on the meta device stays there,
                but for lacking units, which `to_empty` must not replace.
        """
        tensors, module = self.model.views.tensors, self._module
        lacking = {} if is_deferred else self._lacking_pieces()
        for name, kind in lacking.items():
            if tensors[name].is_meta:
                empty = torch.empty(0, dtype=tensors[name].dtype, device=device)
                path, _, attribute = name.rpartition(".")
                tensors[name] = nn.Parameter(empty, requires_grad=False) if kind == "parameter" else empty
                setattr(module.get_submodule(path), attribute, tensors[name])
        self.apply()
        for name in lacking:
            tensors[name].data = tensors[name].data.to(device)

    def scales_of(self, unit: str) -> Callable[[str], float]:
        """For a unit of the plan, what the dense model has its tensors multiplied by."""
        parts = (part for part in self.parts if part.name == unit and isinstance(part, ShardedBlockPart))
        scales = {name: part.scale for part in parts for name in part.scaled_names}
        return lambda name: scales.get(name, 1.0)

    def lacking_names(self) -> set[str]:
        """Parameters without storage on this rank."""
        return {name for name, kind in self._lacking_pieces().items() if kind == "parameter"}

    def _lacking_pieces(self) -> dict[str, str]:
        """Of block units: kinds by dense name."""
        model = self.model
        return {
            piece.parameter: piece.kind
            for index, unit in enumerate(model.plan.units)
            if not model.holds(index)
            for piece in unit.pieces
            if piece.dim is None
        }
