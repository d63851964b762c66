"""Tensor parallelism: the part of each dense tensor on a rank, under DeepSpeed's AutoTP or in a model that its author
has divided (with an `mpu` object).

The ranks of a tensor-parallel group train one copy of a subnetwork together: they hold the same units and see the same
batches. Each of them has its own data-parallel ranks, and therefore its own holder groups. Plans use coordinates of the
dense model; masks and buckets use those of a rank's tensors (`TensorParallelShards.local_plan`).

Undivided tensors are equal on all tensor-parallel ranks (`tp_replicated` in the code). Their gradients are complete on
every rank: a column-parallel layer all-reduces the gradient of its input, and the bias of a row-parallel layer is added
after the all-reduce of outputs. Ranks compute them from the same numbers in the same order, so these tensors stay equal
without further collectives. Norms inside heads are the exception, since each rank sees only its own heads
(`partial_gradients`).
"""

from __future__ import annotations

import os.path
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils.bwc import (
    bwc_pipeline_parallel_world_size,
    bwc_tensor_model_parallel_group,
    bwc_tensor_model_parallel_world_size,
)
from torch import nn
from torch.utils.hooks import RemovableHandle

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.engine.partitioned_model import is_partitioned
from sdp_deepspeed.engine.whole_state_dicts import WholeStateDicts
from sdp_deepspeed.init import has_meta_tensors
from sdp_deepspeed.masking.proof import proven_branches
from sdp_deepspeed.messages import KEY, listed, quoted
from sdp_deepspeed.parallel.consistency import gather_objects, run_on_all_ranks
from sdp_deepspeed.plan.tensor_parallel_shards import UNDIVIDED, Division, TensorParallelShards


@dataclass(frozen=True)
class UndividedModel:
    """Shapes and branches of the dense model, recorded before AutoTP divides it."""

    shapes: Mapping[str, tuple[int, ...]]
    branches: Sequence[LocatedBranch]

    @classmethod
    def of(cls, model: nn.Module) -> UndividedModel:
        """Record a model before AutoTP.

        Raises:
            ValueError: an earlier engine has divided it.
        """
        if getattr(model, "ds_autotp_parsed", False):
            raise ValueError("tensor_parallel: an earlier engine divided this model; build or load a new one")
        return cls({name: tuple(p.shape) for name, p in model.named_parameters()}, proven_branches(model, "neuron"))


@dataclass(frozen=True)
class TensorParallel:
    """One rank's part of a model under tensor parallelism.

    Args:
        group: tensor-parallel process group; None without tensor parallelism.
        shards: which parameters are divided, and how; all others are equal on all ranks of the group.
        partial_gradients: undivided parameters whose gradients must be summed over the group.
    """

    branches: Sequence[LocatedBranch]
    shards: TensorParallelShards = UNDIVIDED
    group: dist.ProcessGroup | None = None
    partial_gradients: Sequence[str] = ()

    def tp_replicated(self, parameters: Mapping[str, Any]) -> list[str]:
        """Names of parameters that are equal on all tensor-parallel ranks; none without tensor parallelism."""
        return [name for name in parameters if self.group is not None and name not in self.shards.divisions]

    def sum_partial_gradients(self, parameters: Mapping[str, nn.Parameter]) -> list[RemovableHandle]:
        """Install hooks that sum gradients of `partial_gradients` over the group before accumulation."""

        def summed(gradient: torch.Tensor) -> torch.Tensor:
            gradient = gradient.clone()
            dist.all_reduce(gradient, group=self.group)
            return gradient

        trained = [parameters[name] for name in sorted(self.partial_gradients) if parameters[name].requires_grad]
        return [parameter.register_hook(summed) for parameter in trained]

    def check_tp_replicated(self, tensors: Mapping[str, torch.Tensor], control: dist.ProcessGroup | None) -> None:
        """Compare undivided tensors over the group; a collective of all ranks of the job.

        Raises:
            ValueError: on all ranks of the group, if tensors differ.
        """
        names = [name for name in self.tp_replicated(tensors) if tensors[name].numel()]
        hashes = {name: torch.hash_tensor(tensors[name]).view(torch.int64).item() for name in names}
        every = _of_group(gather_objects(hashes, control), self.group)
        differing = [name for name in hashes if any(other.get(name) != hashes[name] for other in every)]
        if differing:
            raise ValueError(
                f"tensor-parallel ranks have different values of {listed(differing)}; build the model "
                "with the same seed or weights on every rank"
            )


class DividedEngine(DeepSpeedEngine):
    """DeepSpeed's engine of a model that tensor-parallel ranks may divide, before a mask reduces it."""

    tensor_parallel: TensorParallel
    _control: dist.ProcessGroup  # of all ranks
    _state_dicts: WholeStateDicts
    _before_autotp: UndividedModel | None = None

    def _configure_tensor_parallel(self, model: nn.Module, tp_config: Any) -> Any:
        _check_autotp(int(self.autotp_size()), model)
        self._before_autotp = run_on_all_ranks(lambda: UndividedModel.of(model), self._control)
        with _explained_autotp(model):
            return super()._configure_tensor_parallel(model, tp_config)

    def _find_tensor_parallel(self) -> None:
        """Find this rank's part of the model, which is not masked yet. Collective."""
        self.tensor_parallel = _tensor_parallel_of(
            self.module, self.mpu, self._before_autotp, self.seq_data_parallel_group, self._control
        )
        self._state_dicts = WholeStateDicts(self.module, self.tensor_parallel.shards, self.tensor_parallel.group)

    def _data_parallel_groups(self) -> list[tuple[int, ...]]:
        """Global ranks of the data-parallel group of each tensor-parallel rank; collective."""
        ranks = dist.get_process_group_ranks(self.seq_data_parallel_group)
        return sorted({tuple(of_rank) for of_rank in gather_objects(ranks, self._control)})


def check_mpu(mpu: Any) -> None:
    """Raise ValueError for an `mpu` object with pipeline or sequence parallelism."""
    sizes = {"pipeline": 1 if mpu is None else bwc_pipeline_parallel_world_size(mpu)}
    sizes["sequence"] = getattr(mpu, "get_sequence_parallel_world_size", lambda: 1)()
    for what, size in sizes.items():
        if size > 1:
            raise ValueError(
                f"{KEY}: mpu has {size} {what}-parallel ranks; only tensor and data parallelism are supported"
            )


def _check_autotp(size: int, model: nn.Module) -> None:
    """Raise ValueError for an AutoTP size that does not fit the ranks, or a model built under an `Init`."""
    if dist.get_world_size() % size:
        raise ValueError(
            f"tensor_parallel.autotp_size: got {size}, which does not divide the {dist.get_world_size()} ranks"
        )
    if has_meta_tensors(model):
        raise ValueError("tensor_parallel needs initialized weights; build the model without sdp_deepspeed.Init")
    if is_partitioned(model):
        raise ValueError("tensor_parallel needs whole weights; build the model without deepspeed.zero.Init")


@contextmanager
def _explained_autotp(model: nn.Module) -> Iterator[None]:
    """Context that turns AutoTP's assertions into ValueErrors."""
    try:
        yield
    except AssertionError as error:
        raise ValueError(
            f"tensor_parallel.autotp_size: DeepSpeed's AutoTP cannot divide a {type(model).__name__}: {error}. Use "
            "a Llama, Mistral, Qwen2, Qwen3 or GPT-NeoX, or remove tensor_parallel"
        ) from error


def _tensor_parallel_of(
    model: nn.Module,
    mpu: Any,
    before_autotp: UndividedModel | None,
    data_parallel: dist.ProcessGroup,
    control: dist.ProcessGroup,
) -> TensorParallel:
    """Find this rank's part of the model under AutoTP or an `mpu` object. Collective.

    Args:
        before_autotp: the model before AutoTP divided it; None without AutoTP.
    """
    if mpu is None or bwc_tensor_model_parallel_world_size(mpu) < 2:
        return run_on_all_ranks(lambda: TensorParallel(proven_branches(model)), control)
    group = bwc_tensor_model_parallel_group(mpu)
    members = dist.get_world_size(data_parallel)
    if members * dist.get_world_size(group) != dist.get_world_size():
        raise ValueError(
            f"mpu: got {members} data-parallel x {dist.get_world_size(group)} tensor-parallel ranks, expected "
            f"{dist.get_world_size()} ranks in all"
        )
    if before_autotp is None:
        tensor_parallel = _of_author(model, group, control)
    else:
        tensor_parallel = _of_autotp(model, before_autotp, group, control)
    tensor_parallel.check_tp_replicated(dict(model.named_parameters()), control)
    return tensor_parallel


def refuse_stage(stage: int, tensor_parallel: TensorParallel) -> None:
    """Raise ValueError for a ZeRO stage in which tensor-parallel ranks would have different buckets."""
    uneven = [name for name, division in tensor_parallel.shards.divisions.items() if not division.is_even]
    if uneven and stage == 2:
        raise ValueError(
            f"zero_optimization.stage: got 2, but tensor-parallel ranks do not divide {uneven[0]!r} evenly; pad "
            "the vocabulary (resize_token_embeddings), or use stage 1"
        )


def _of_autotp(
    model: nn.Module, undivided: UndividedModel, group: dist.ProcessGroup | None, control: dist.ProcessGroup | None
) -> TensorParallel:
    """This rank's part of a model that AutoTP has divided; a collective of all ranks of the job.

    Raises:
        ValueError: the group's size does not divide heads or neurons, or AutoTP divides a branch in a way that changes
            what it computes.
    """
    parameters = dict(model.named_parameters())
    every = _of_group(gather_objects({name: tuple(p.shape) for name, p in parameters.items()}, control), group)
    divisions = {}
    for name, dense in undivided.shapes.items():
        shapes = [of_rank[name] for of_rank in every]
        dims = {dim for shape in shapes for dim, size in enumerate(shape) if size != dense[dim]}
        if dims:
            dim = min(dims)
            divisions[name] = Division(dense, dim, tuple(shape[dim] for shape in shapes))
            if len(dims) > 1 or sum(divisions[name].lengths) != dense[dim]:
                raise ValueError(
                    f"tensor_parallel: {name!r} of shape {dense} is divided into {listed(shapes)}, expected parts "
                    "along one dim"
                )
    shards = TensorParallelShards(dist.get_rank(group), len(every), divisions)
    branches = [shards.local_branch(branch) for branch in undivided.branches]
    _check_divided(model, branches, divisions)
    return TensorParallel(branches, shards, group, _partial_gradients(parameters, branches, divisions))


def _of_author(model: nn.Module, group: dist.ProcessGroup | None, control: dist.ProcessGroup | None) -> TensorParallel:
    """This rank's part of a model that its author has divided; a collective of all ranks of the job.

    Divided parameters have the attribute `model_parallel` or `tensor_model_parallel`, as for ZeRO-1, and, if they are
    in no described branch, Megatron's `partition_dim`.

    Raises:
        ValueError: it is not known along which dim a parameter is divided.
    """
    marked = {
        name: parameter
        for name, parameter in model.named_parameters()
        if getattr(parameter, "model_parallel", False) or getattr(parameter, "tensor_model_parallel", False)
    }
    every = _of_group(gather_objects({name: tuple(p.shape) for name, p in marked.items()}, control), group)
    branches = [_without_heads_of_config(branch, marked) for branch in proven_branches(model, "neuron")]
    dims = {tensor.parameter: tensor.dim for branch in branches for tensor in branch.cut_tensors}
    dims |= {name: dim for name, p in marked.items() if (dim := int(getattr(p, "partition_dim", -1))) >= 0}
    if unknown := sorted(marked.keys() - dims.keys()):
        raise ValueError(
            f"mpu: {quoted(unknown)} is divided among tensor-parallel ranks; set its attribute partition_dim to the "
            "divided dim"
        )
    divisions = {}
    for name in marked:
        shapes = [of_rank[name] for of_rank in every]
        dim = dims[name]
        lengths = tuple(shape[dims[name]] for shape in shapes)
        divisions[name] = Division((*shapes[0][:dim], sum(lengths), *shapes[0][dim + 1 :]), dim, lengths)
    return TensorParallel(branches, TensorParallelShards(dist.get_rank(group), len(every), divisions), group)


def _of_group(values: Sequence[Any], group: dist.ProcessGroup | None) -> list[Any]:
    """The values of a group's ranks, from one value per rank."""
    return [values[rank] for rank in dist.get_process_group_ranks(group)] if group is not None else []


def _check_divided(model: nn.Module, branches: Sequence[LocatedBranch], divided: Mapping[str, Division]) -> None:
    """Raise ValueError for branches that AutoTP changes: heads that depend on each other, fused projections, partly
    divided branches. Layers that gather their output are accepted, and what has the modules of a branch that can be
    cut: of T5's cross-attention only the first one cannot, whose mask others use."""

    def form(branch: LocatedBranch) -> tuple[object, ...]:
        names = [(piece.parameter.removeprefix(branch.layer), piece.length) for piece in branch.pieces]
        parents = [piece.parameter.split(".")[:-1] for piece in branch.pieces]
        common = ".".join(os.path.commonprefix(parents))  # noqa: RUF071 (compares lists)
        types = [(name, type(module)) for name, module in model.get_submodule(common).named_modules()]
        return branch.description.name, *names, *types

    cut = {form(branch) for branch in branches if not branch.uncuttable_reason}
    for branch in branches:
        parents = {piece.parameter.rpartition(".")[0] for piece in branch.pieces if piece.parameter in divided}
        gathers = any(getattr(model.get_submodule(name), "gather_output", False) for name in parents)
        if parents and form(branch) not in cut and not gathers:
            raise ValueError(
                f"tensor_parallel.autotp_size: AutoTP would change what {branch.name!r} computes: "
                f"{branch.uncuttable_reason}. Remove tensor_parallel, or set tensor_parallel.partition_config"
            )


def _partial_gradients(
    parameters: Mapping[str, nn.Parameter], branches: Sequence[LocatedBranch], divided: Mapping[str, Division]
) -> list[str]:
    """Norms of single heads in divided branches, unless AutoTP itself sums their gradients."""
    names: list[str] = []
    for branch in branches:
        if any(tensor.parameter in divided for tensor in branch.cut_tensors):
            names += branch.per_head_parameters
    return [name for name in names if not getattr(parameters[name], "_ds_grad_allreduce_registered", False)]


def _without_heads_of_config(branch: LocatedBranch, divided: Mapping[str, Any]) -> LocatedBranch:
    """Drop head counts from a config, which may count the heads of the dense model or of one rank."""
    heads = branch.description.inner.heads if branch.description.inner else None
    is_divided = not divided.keys().isdisjoint(piece.parameter for piece in branch.pieces)
    if not isinstance(heads, str) or not heads.startswith("config.") or not is_divided:
        return branch
    why = f"{heads} may count the heads of all ranks or of one; describe an attribute that counts those of one rank"
    return replace(branch, num_cells=0, cut_tensors=(), uncuttable_reason=branch.uncuttable_reason or why)
