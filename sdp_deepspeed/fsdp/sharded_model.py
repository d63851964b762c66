"""What `fully_shard` makes: a model whose units are sharded over their holders, and what is known of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from sdp_deepspeed.config import SubnetworkConfig
from sdp_deepspeed.engine.fsdp_refusals import SHARDED
from sdp_deepspeed.fsdp.dense_model import DenseModel
from sdp_deepspeed.fsdp.parts import Part
from sdp_deepspeed.fsdp.tensor_parallel import TensorParallel
from sdp_deepspeed.masking import Mask
from sdp_deepspeed.masking.batch_norm import average_running_statistics
from sdp_deepspeed.parallel.agree import Meetings
from sdp_deepspeed.parallel.groups import Groups
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.shards import UNDIVIDED, Shards

_ATTRIBUTE = "_sdp_sharded"
# Of the axis of each mesh under tensor parallelism. They differ, so that no unit's mesh is equal to that of what is
# shared: over DTensors of several meshes `torch.nn.utils.clip_grad_norm_` raises, where it would miss parts.
OF_UNITS, OF_SHARED = ("sdp_holders",), ("sdp_shared",)


@dataclass
class ShardedModel:
    """
    Args:
        module: sharded.
        block: parsed.
        plan: in the coordinates of the dense model.
        mask: applied before the module was sharded. Its parameters are gone; pieces, shapes and buffers are there.
        groups: of the holder sets.
        mesh: of the data-parallel ranks.
        device: of the collectives.
        parts: of all parameters, by dense name.
        owners: by the path of a parameter that this rank has, its module and name there.
        units: modules of each unit that this rank holds, in the order in which they run.
        dense: the dense model.
        state_names: of the dense model's state dict, each with the dense name of its tensor.
        ignored: dense names of the parameters that FSDP2 ignores.
        coverage: C of the plan, units weighted by their FLOPs.
        tensor_parallel: None without.
    """

    module: nn.Module
    block: SubnetworkConfig
    plan: Plan
    mask: Mask
    groups: Groups
    mesh: DeviceMesh
    device: torch.device
    parts: Mapping[str, Sequence[Part]]
    owners: Mapping[str, tuple[nn.Module, str]]
    units: Sequence[Sequence[Any]]
    dense: DenseModel
    state_names: Mapping[str, str]
    ignored: frozenset[str]
    coverage: float
    tensor_parallel: TensorParallel | None
    meetings: Meetings
    is_dense: bool = False  # inside of `dense(model)`
    has_warned: bool = False
    has_trained: bool = True  # since running statistics were averaged

    @property
    def rank(self) -> int:
        """Data-parallel index of this rank."""
        return self.groups.rank

    @property
    def shards(self) -> Shards:
        return (
            UNDIVIDED if self.tensor_parallel is None else self.tensor_parallel.shards(self.groups.tensor_parallel_rank)
        )

    def held_parts(self) -> Iterator[Part]:
        """Parts of which this rank has a shard."""
        for name, parts in self.parts.items():
            if name not in self.ignored:
                yield from (part for part in parts if self.rank in part.holders)

    def parameter(self, part: Part) -> Any:
        """A held part as the model has it now: sharded, unless it is gathered."""
        module, name = self.owners[part.path]
        return module._parameters[name]

    def shard(self, part: Part) -> torch.Tensor:
        """This rank's shard of a held part, while that is sharded."""
        return local_of(self.parameter(part))

    def reshard(self) -> None:
        """Free what a forward pass has left gathered, so that parameters are shards."""
        self.reshard_units()
        root: Any = self.module
        root.reshard()

    def reshard_units(self) -> None:
        for modules in self.units:
            modules[0].reshard()

    def begin_evaluation(self, what: str) -> None:
        """Make the state that of the dense model; every rank calls it.

        Args:
            what: the call that needs it, for messages.
        """
        self.reshard_units()
        if self.has_trained:
            self.meetings.meet(what)
            self.average_statistics()

    def average_statistics(self) -> None:
        """Of batch norms, if the model was trained since; every rank calls it."""
        if self.has_trained:
            average_running_statistics(self.mask, self.groups.data_parallel.process_group, self.device)
            self.has_trained = False


def local_of(tensor: Any) -> torch.Tensor:
    """What this rank has of a DTensor, or of another tensor; detached."""
    local: torch.Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach()


def attach(sharded: ShardedModel) -> None:
    setattr(sharded.module, _ATTRIBUTE, sharded)
    SHARDED.add(sharded.module)


def is_sharded(module: object) -> bool:
    """Whether `sdp_deepspeed.fully_shard` returned it."""
    return _ATTRIBUTE in getattr(module, "__dict__", {})


def sharded_model_of(module: nn.Module) -> ShardedModel:
    """What is known of a model that `sdp_deepspeed.fully_shard` returned: its plan and coverage, for logs.

    Raises:
        ValueError: it did not.
    """
    if not is_sharded(module):
        raise ValueError(f"{type(module).__name__} was not sharded by sdp_deepspeed.fully_shard; call that first")
    found: ShardedModel = vars(module)[_ATTRIBUTE]
    return found


def device_type() -> str:
    """Of a mesh that nobody gave: the accelerator's, unless there is none or all groups are gloo's."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return "cpu" if accelerator is None or dist.get_backend() == "gloo" else accelerator.type
