"""A model whose units are sharded over their holders: what every part of this room works with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from sdp_deepspeed.config import SubnetworkConfig
from sdp_deepspeed.distributed.host_group import HostGroup
from sdp_deepspeed.engine.fsdp_refusals import SHARDED
from sdp_deepspeed.fsdp.pieces import HeldTensor, ShardedUnit
from sdp_deepspeed.fsdp.shard_fetcher import ShardFetcher
from sdp_deepspeed.fsdp.sharded_mask import ShardedMask
from sdp_deepspeed.fsdp.tensor_parallel import TensorParallel
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.masking.dense_view import DenseView
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.shards import UNDIVIDED, Shards

_ATTRIBUTE = "_sdp_sharded"


@dataclass
class ShardedModel:
    """
    Args:
        module: the model, sharded, this rank's subnetwork.
        block: the parsed config block.
        mask: applied to the module before it was sharded.
        mesh: of all data-parallel ranks.
        meshes: by holder set (ranks, ascending), for sets that this rank is in.
        units: in the order of the model.
        shared: parameters that every rank has, sharded over the whole mesh.
        state_names: of the dense model's state dict, each with the first name of its tensor in the module.
        coverage: C of the plan, units weighted by their FLOPs.
        num_groups: process groups made for holder sets, beside the mesh's own.
        tensor_parallel: what units are divided over beside; all else here is of this rank's part of each tensor.
        host: all ranks, over gloo; its collectives are the checkpoints'.
        fetcher: of units, from their holders' shards to the ranks that lack them.
        view: what makes the module the dense model for a while.
    """

    module: nn.Module
    block: SubnetworkConfig
    mask: ShardedMask
    mesh: DeviceMesh
    meshes: dict[tuple[int, ...], DeviceMesh]
    units: Sequence[ShardedUnit]
    shared: Sequence[HeldTensor]
    state_names: Mapping[str, str]
    coverage: float
    num_groups: int
    tensor_parallel: TensorParallel | None
    host: HostGroup = field(init=False)
    fetcher: ShardFetcher = field(init=False)
    view: DenseView = field(init=False)

    @property
    def plan(self) -> Plan:
        """Who holds what, the same on every rank."""
        return self.mask.model.plan

    @property
    def rank_model(self) -> RankModel:
        """The plan, and the dense shapes. Its tensors are those from before they were sharded."""
        return self.mask.model

    @property
    def rank(self) -> int:
        """Of this process in the mesh."""
        return self.rank_model.rank

    @property
    def shards(self) -> Shards:
        """What this rank has of the dense model's tensors under tensor parallelism, before FSDP2 shards that."""
        tensor_parallel = self.tensor_parallel
        return UNDIVIDED if tensor_parallel is None else tensor_parallel.shards(self.mesh.get_rank())

    @property
    def num_own_groups(self) -> int:
        """Of these groups, those that this rank is in; what each costs: README.md, "Groups"."""
        return sum(1 < len(holders) < self.mesh.size() for holders in self.meshes)

    @property
    def held_units(self) -> list[ShardedUnit]:
        return [unit for unit in self.units if unit.is_held]

    def held_tensors(self) -> list[HeldTensor]:
        """All parameters of this rank's subnetwork: the shared ones, then unit by unit."""
        return [*self.shared, *(tensor for unit in self.units for tensor in unit.tensors)]

    def reshard(self) -> None:
        """Have every parameter be its shard (a DTensor) in the module, whatever a forward pass has left gathered."""
        for unit in self.held_units:
            unit.fsdp.reshard()
        root: Any = self.module
        root.reshard()

    def parameter(self, tensor: HeldTensor) -> Any:
        """The DTensor in the module; only while the model is sharded (`reshard`)."""
        return self.module.get_parameter(tensor.name)

    def local(self, tensor: HeldTensor) -> torch.Tensor:
        """This rank's shard, which shares memory with the module's; no rows where there are fewer than holders. Its
        unit is freed if a forward pass has left it gathered."""
        if not isinstance(self.parameter(tensor), DTensor):
            next(unit for unit in self.held_units if tensor in unit.tensors).fsdp.reshard()
        shard: torch.Tensor = self.parameter(tensor).detach().to_local()
        return shard


def attach(sharded: ShardedModel) -> None:
    """Have `sharded_model_of` find it; once. Hosts that cannot take it over refuse it."""
    object.__setattr__(sharded.module, _ATTRIBUTE, sharded)
    SHARDED.add(sharded.module)


def is_sharded(module: object) -> bool:
    """Whether `sharded_model_of` knows it."""
    return isinstance(module, nn.Module) and _ATTRIBUTE in vars(module)


def sharded_model_of(module: nn.Module) -> ShardedModel:
    """What `fully_shard` made of a model.

    Raises:
        ValueError: it was not called with the model.
    """
    sharded = vars(module).get(_ATTRIBUTE)
    if not isinstance(sharded, ShardedModel):
        raise ValueError(
            f"{type(module).__name__} was not sharded by sdp_deepspeed.fully_shard: give the model that it returned"
        )
    return sharded
