"""The state that `fully_shard` attaches to a model whose units are sharded over their holders."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from sdp_deepspeed.batch_norm import average_running_statistics
from sdp_deepspeed.config import SubnetworkConfig
from sdp_deepspeed.fsdp.dense_model import DenseModel
from sdp_deepspeed.fsdp.dtensors import ReplacedDTensors
from sdp_deepspeed.fsdp.parts import Part
from sdp_deepspeed.masking import Mask
from sdp_deepspeed.messages import KEY
from sdp_deepspeed.parallel.boxes import local_of
from sdp_deepspeed.parallel.call_barrier import CallBarrier
from sdp_deepspeed.parallel.groups import Groups
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensor_parallel_shards import TensorParallelShards

logger = logging.getLogger("sdp_deepspeed")
_ATTRIBUTE = "_sdp_sharded"


@dataclass
class ShardedModel:
    """A model whose units are sharded over their holders.

    Args:
        plan: plan in coordinates of the dense model.
        mask: applied before the module was sharded. Its pieces, shapes and buffers are valid, its parameters are not.
        mesh: of the data-parallel ranks.
        device: of the collectives.
        fsdp_groups: modules of each FSDP2 group of this rank, ordered by the last module.
        state_names: dense name of the tensor of each key of the dense state dict.
        coverage: C of the plan, weighted by FLOPs.

    Attributes:
        owners: module and attribute name of each parameter that this rank has, by its path when it was sharded, since
            modules may be wrapped later.
    """

    module: nn.Module
    block: SubnetworkConfig
    plan: Plan
    mask: Mask
    groups: Groups
    mesh: DeviceMesh
    device: torch.device
    parts: Mapping[str, Sequence[Part]]
    fsdp_groups: Sequence[Sequence[Any]]
    dense: DenseModel
    state_names: Mapping[str, str]
    coverage: float
    dtensors: ReplacedDTensors
    barrier: CallBarrier
    has_warned: bool = False
    has_trained: bool = True  # since the last average of running statistics
    owners: dict[str, tuple[nn.Module, str]] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        for part in self.held_parts():
            owner, _, name = part.path.rpartition(".")
            self.owners[part.path] = self.module.get_submodule(owner), name

    @property
    def rank(self) -> int:
        """This rank's data-parallel index."""
        return self.groups.rank

    @property
    def tensor_parallel_shards(self) -> TensorParallelShards:
        """The part of each parameter on this tensor-parallel rank."""
        return self.dtensors.shards(self.groups.tensor_parallel_rank)

    def held_parts(self) -> Iterator[Part]:
        """Yield the parts of which this rank has a shard, or the whole (`ignored_params`)."""
        return (part for parts in self.parts.values() for part in parts if self.rank in part.holders)

    def parameter(self, part: Part) -> Any:
        """The current parameter of a held part, sharded or gathered."""
        module, name = self.owners[part.path]
        return module._parameters[name]

    def shard(self, part: Part) -> torch.Tensor:
        """This rank's shard of a held part, which must not be gathered."""
        return local_of(self.parameter(part))

    def reshard(self) -> None:
        """Free gathered parameters, so that all parameters are shards."""
        self.reshard_groups()
        root: Any = self.module
        root.reshard()

    def reshard_groups(self) -> None:
        for modules in self.fsdp_groups:
            modules[0].reshard()

    def begin_evaluation(self, what: str) -> None:
        """Prepare for a pass of the dense model: reshard all groups but the root. If the model was trained since the
        last time, wait for all ranks and average running statistics. Collective."""
        self.reshard_groups()
        if self.has_trained:
            self.barrier.wait(what)
            self.average_statistics()

    def warn(self) -> None:
        """Warn once that a pass that looks like an evaluation runs a subnetwork."""
        if not self.has_warned and self.plan.trains_subnetworks:
            logger.warning("%s: this pass runs a subnetwork; for the dense model use eval() and torch.no_grad()", KEY)
        self.has_warned = True

    def average_statistics(self) -> None:
        """Average running statistics of batch norms if the model was trained since the last time. Collective."""
        if self.has_trained:
            average_running_statistics(self.mask, self.groups.data_parallel, self.device)
            self.has_trained = False


def attach(sharded: ShardedModel) -> None:
    setattr(sharded.module, _ATTRIBUTE, sharded)


def is_sharded(module: object) -> bool:
    """Whether `sdp_deepspeed.fully_shard` returned the module."""
    return _ATTRIBUTE in getattr(module, "__dict__", {})


def sharded_model_of(module: nn.Module) -> ShardedModel:
    """The state of a model that `sdp_deepspeed.fully_shard` returned, such as its plan and coverage.

    Raises:
        ValueError: the model was not sharded by `sdp_deepspeed.fully_shard`.
    """
    if not is_sharded(module):
        raise ValueError(f"{type(module).__name__} was not sharded by sdp_deepspeed.fully_shard; call that first")
    sharded: ShardedModel = vars(module)[_ATTRIBUTE]
    return sharded
