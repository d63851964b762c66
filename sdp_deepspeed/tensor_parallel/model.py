"""The live tensor-parallel model: DeepSpeed's AutoTP, or a model of the user's whose groups an `mpu` object names.

Its ranks train one copy of a subnetwork together. AutoTP has divided the module when we plan; evaluation runs on the
shards as they are, and only state dicts need the whole tensors.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from deepspeed import comm as deepspeed_comm
from deepspeed.runtime.utils import is_model_parallel_parameter
from deepspeed.utils.bwc import (
    bwc_tensor_model_parallel_group,
    bwc_tensor_model_parallel_world_size,
)
from torch import nn

from sdp_deepspeed.architectures import LocatedBranch, locate_branches
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.distributed.host_group import Channel, HostGroup
from sdp_deepspeed.distributed.replicas import differing_replicas
from sdp_deepspeed.messages import listed
from sdp_deepspeed.plan.shards import UNDIVIDED, Division, Shards
from sdp_deepspeed.tensor_parallel.checks import check_divided, refuse_uneven
from sdp_deepspeed.tensor_parallel.group import TensorParallelGroup
from sdp_deepspeed.tensor_parallel.state_dicts import StateDicts

PARSED = "ds_autotp_parsed"  # attribute of a model that AutoTP has divided


@dataclass(frozen=True)
class ModelBeforeAutoTP:
    """What AutoTP's division does not leave in a model.

    Args:
        shapes: of its parameters.
        branches: its residual branches.
    """

    shapes: Mapping[str, tuple[int, ...]]
    branches: Sequence[LocatedBranch]

    @classmethod
    def of(cls, model: nn.Module) -> ModelBeforeAutoTP:
        """Of a whole model.

        Raises:
            ValueError: the model is divided already, or has no branches that are described.
        """
        if getattr(model, PARSED, False):
            raise ValueError(
                "tensor_parallel: an earlier engine divided this model among tensor-parallel ranks; build or load it "
                "anew"
            )
        return cls({name: tuple(p.shape) for name, p in model.named_parameters()}, locate_branches(model))


class TensorParallel:
    """One rank's part in a tensor-parallel group, or in none.

    Args:
        communicator: the tensor-parallel group, None without one.
        branches: the model's residual branches, as this rank has them.
        shards: who stores what.
        partial_gradients: replicated parameters of which each rank computes only a summand of the gradient.
    """

    def __init__(
        self,
        communicator: Communicator | None = None,
        *,
        branches: Sequence[LocatedBranch],
        shards: Shards = UNDIVIDED,
        partial_gradients: Sequence[str] = (),
    ) -> None:
        self.communicator = communicator
        self.branches = list(branches)
        self.shards = shards
        self.group: TensorParallelGroup | None = None
        self.state_dicts: StateDicts | None = None
        if communicator is not None:
            self.group = TensorParallelGroup(communicator, frozenset(shards.divisions), frozenset(partial_gradients))
            self.state_dicts = StateDicts(communicator, shards)

    def install(self, model: nn.Module) -> None:
        """Hook state dicts of the divided model; called once."""
        if self.state_dicts is not None:
            self.state_dicts.install(model)

    @classmethod
    def of_autotp(cls, model: nn.Module, communicator: Communicator, before: ModelBeforeAutoTP) -> TensorParallel:
        """Of a model that AutoTP has divided; all ranks of the group call it.

        Raises:
            ValueError: on all ranks: neurons or heads, or another dim, that the group cannot divide evenly, or a branch
                of which its ranks would compute something else.
        """
        parameters = dict(model.named_parameters())
        shapes_by_rank = communicator.gather_objects({name: tuple(p.shape) for name, p in parameters.items()})
        divisions = {}
        for name, dense in before.shapes.items():
            dims = {dim for own in shapes_by_rank for dim, size in enumerate(own[name]) if size != dense[dim]}
            if dims:
                divisions[name] = _division(name, dense, dims, shapes_by_rank)
        shards = Shards(communicator.rank, communicator.size, divisions)
        branches = [shards.local_branch(branch) for branch in before.branches]
        check_divided(model, branches, shards.divisions)
        return cls(
            communicator,
            branches=branches,
            shards=shards,
            partial_gradients=_partial_gradients(model, branches, shards),
        )

    @classmethod
    def of_mpu(cls, model: nn.Module, communicator: Communicator) -> TensorParallel:
        """Of a model that its author divided and whose parameters say so, as for ZeRO-1 (`model_parallel` or
        `tensor_model_parallel`, with Megatron's `partition_dim` if they have it); all ranks of the group call it."""
        marked = {name: p for name, p in model.named_parameters() if is_model_parallel_parameter(p)}
        shapes_by_rank = communicator.gather_objects({name: tuple(p.shape) for name, p in marked.items()})
        branches = [_without_heads_of_config(branch, marked) for branch in locate_branches(model)]
        dims = {tensor.parameter: tensor.dim for branch in branches for tensor in branch.cut_tensors}
        said = {name: int(getattr(p, "partition_dim", -1)) for name, p in marked.items()}
        dims |= {name: dim for name, dim in said.items() if dim >= 0}
        divisions = {
            name: _division_of_shapes([own[name] for own in shapes_by_rank], dims.get(name)) for name in marked
        }
        return cls(communicator, branches=branches, shards=Shards(communicator.rank, communicator.size, divisions))

    def check_replicated(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Whether the group's ranks agree on what all of them have; all of them call it.

        Args:
            tensors: what this rank stores, by dense name (`engine.held_tensors()`).

        Raises:
            RuntimeError: on all ranks of the group, naming the first tensors on which they differ.
        """
        if differing := self._differing(tensors):
            raise RuntimeError(f"tensor-parallel ranks do not agree on {differing}: training has diverged")

    def _differing(self, tensors: Mapping[str, torch.Tensor]) -> str:
        if self.communicator is None:
            return ""
        divided = self.shards.divisions
        replicated = {name: t for name, t in tensors.items() if name.removesuffix(" (lacking)") not in divided}
        return differing_replicas(replicated, self.communicator)

    def check_same_model(self, model: nn.Module) -> None:
        """DeepSpeed gives data-parallel ranks the same weights, but not the ranks of a tensor-parallel group; all of
        those call it.

        Raises:
            ValueError: on all ranks of the group.
        """
        if differing := self._differing(dict(model.named_parameters())):
            raise ValueError(
                f"tensor-parallel ranks have different weights in {differing}, of which each has all: build the model "
                "with the same seed, or from the same weights, on every rank"
            )

    def whole_state_dicts(self) -> AbstractContextManager[None]:
        """Inside, `state_dict` gives whole tensors, a collective of the group, and `load_state_dict` takes them."""
        return nullcontext() if self.state_dicts is None else self.state_dicts.whole()

    def state_dict(self, model: nn.Module) -> dict[str, Any]:
        """Keyword arguments for Transformers' `save_pretrained`: a state dict where it takes all ranks to make one."""
        return {} if self.communicator is None else {"state_dict": model.state_dict()}


def _division(name: str, dense: tuple[int, ...], dims: set[int], every: Sequence[Mapping[str, Any]]) -> Division:
    dim = min(dims)
    division = Division(dense, dim, tuple(own[name][dim] for own in every))
    if len(dims) > 1 or sum(division.lengths) != dense[dim]:
        raise ValueError(
            f"tensor_parallel: {name!r} of shape {dense} is not divided along one dim: its shards have the shapes "
            f"{listed(own[name] for own in every)}"
        )
    return division


def _division_of_shapes(shapes: Sequence[tuple[int, ...]], dim: int | None) -> Division:
    if dim is None:
        lengths = tuple(torch.Size(shape).numel() for shape in shapes)
        return Division((sum(lengths),), 0, lengths, is_known=False)
    lengths = tuple(shape[dim] for shape in shapes)
    return Division((*shapes[0][:dim], sum(lengths), *shapes[0][dim + 1 :]), dim, lengths)


def _without_heads_of_config(branch: LocatedBranch, divided: Mapping[str, Any]) -> LocatedBranch:
    """A config counts the heads of the dense model, or of a shard: it does not say which."""
    heads = branch.description.inner.heads if branch.description.inner else None
    if (
        heads is None
        or not heads.startswith("config.")
        or divided.keys().isdisjoint(p.parameter for p in branch.pieces)
    ):
        return branch
    why = (
        f"{heads} does not say whether it counts the heads of one tensor-parallel rank; describe an attribute that does"
    )
    return replace(branch, num_cells=0, cut_tensors=(), uncuttable_reason=branch.uncuttable_reason or why)


def _partial_gradients(model: nn.Module, branches: Sequence[LocatedBranch], shards: Shards) -> list[str]:
    """Per-head norms of divided branches whose gradients AutoTP does not sum, as its plan from Transformers would."""
    names = []
    parameters = dict(model.named_parameters())
    for branch in branches:
        if (
            any(tensor.parameter in shards.divisions for tensor in branch.cut_tensors)
            and branch.description.inner is not None
        ):
            inside = tuple(f"{branch.root}.{norm}." for norm in branch.description.inner.per_head)
            names += [piece.parameter for piece in branch.pieces if piece.parameter.startswith(inside)]
    return [name for name in names if not getattr(parameters[name], "_ds_grad_allreduce_registered", False)]


def tp_group_of(mpu: Any, host: HostGroup) -> Communicator | None:
    """This rank's tensor-parallel group, from DeepSpeed's `engine.mpu`; None if it is alone."""
    if mpu is None or bwc_tensor_model_parallel_world_size(mpu) < 2:
        return None
    group = bwc_tensor_model_parallel_group(mpu)
    objects = host.channel(Channel.TENSOR_PARALLEL, torch.distributed.get_process_group_ranks(group))
    return Communicator(deepspeed_comm, group, objects=objects)


def build_tensor_parallel(
    model: nn.Module, tp_group: Communicator | None, before: ModelBeforeAutoTP | None, *, stage: int
) -> TensorParallel:
    """This rank's part in its group; all ranks of the group call it.

    Args:
        model: divided, on its final device.
        tp_group: the group.
        before: what AutoTP has left no trace of; None if it was not AutoTP that divided the model.
        stage: ZeRO stage.

    Raises:
        ValueError: on all ranks of the group: what cannot be divided so, or is not the same where it must be.
    """
    if tp_group is None:
        return TensorParallel(branches=locate_branches(model))
    of_mpu, of_autotp = TensorParallel.of_mpu, TensorParallel.of_autotp
    result = of_mpu(model, tp_group) if before is None else of_autotp(model, tp_group, before)
    refuse_uneven(result.shards, stage)
    result.check_same_model(model)
    result.install(model)
    return result
