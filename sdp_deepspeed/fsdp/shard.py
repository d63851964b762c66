"""`sdp_deepspeed.fully_shard`: FSDP2's, with each unit sharded over its holders. Read this first.

The reduce-scatter of a unit averages over the ranks of its mesh, which are its holders: that is the masked average.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from sdp_deepspeed.architectures import LocatedBranch, locate_branches, unit_costs
from sdp_deepspeed.config import KEY, SubnetworkConfig
from sdp_deepspeed.core.init import DeferredWeights
from sdp_deepspeed.core.masking.compiled import compile_in_place
from sdp_deepspeed.distributed.agreement import Gatherer, OneRank, run_on_all_ranks
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.distributed.store_gatherer import StoreGatherer
from sdp_deepspeed.engine.refusals import refuse_model
from sdp_deepspeed.fsdp.block_units import block_units, shared_tensors
from sdp_deepspeed.fsdp.collective_order import order_collectives
from sdp_deepspeed.fsdp.consistency import check_holders_agree, check_same_plan
from sdp_deepspeed.fsdp.dense_view import install_view
from sdp_deepspeed.fsdp.holder_meshes import device_type, make_meshes, mesh_of_shared
from sdp_deepspeed.fsdp.materialize import materialize
from sdp_deepspeed.fsdp.neuron_units import in_model_order, neuron_units
from sdp_deepspeed.fsdp.options import ShardOptions
from sdp_deepspeed.fsdp.pieces import ShardedUnit
from sdp_deepspeed.fsdp.refusals import (
    check_buffers,
    check_call,
    check_not_ignored,
    check_not_wrapped_inside,
    check_same_settings,
    parsed,
)
from sdp_deepspeed.fsdp.sharded_mask import ShardedMask
from sdp_deepspeed.fsdp.sharded_model import ShardedModel, attach
from sdp_deepspeed.fsdp.tensor_parallel import TensorParallel, check_per_head, columns_of
from sdp_deepspeed.fsdp.whole_layers import drop
from sdp_deepspeed.fsdp.wrappers import without_wrappers
from sdp_deepspeed.layout.places import PieceViews
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.masking.description_check import check_descriptions
from sdp_deepspeed.masking.synchronized import Holders, synchronize, synchronized_over
from sdp_deepspeed.messages import quoted
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.planner import plan_model
from sdp_deepspeed.plan.tensors import dense_tensors, named_tensors

logger = logging.getLogger("sdp_deepspeed")
T = TypeVar("T", bound=nn.Module)
Synchronized = dict[str, Holders]


@dataclass(frozen=True)
class Start:
    """A model that is about to be sharded.

    Args:
        module: whole; its weights are there, or on the meta device, or under `Init`.
        block: parsed.
        mesh: the data-parallel ranks.
        ranks: all, for what they agree on.
        options: for FSDP2.
        tensor_parallel: what it is to units; None without.
    """

    module: nn.Module
    block: SubnetworkConfig
    mesh: DeviceMesh
    ranks: Gatherer
    options: ShardOptions
    tensor_parallel: TensorParallel | None = None

    @property
    def device(self) -> torch.device:
        kind = self.mesh.device_type
        return (
            torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())
        )


def fully_shard(
    module: T,
    mesh: DeviceMesh | None = None,
    block: Mapping[str, Any] | None = None,
    *,
    reshard_after_forward: bool | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    ignored_params: Iterable[nn.Parameter] = (),
) -> T:
    """Make a model this rank's subnetwork, sharded by FSDP2: each unit over its holders, all else over all ranks.

    Every rank calls it, with a whole model, before it makes an optimizer of the parameters that are left. The module is
    changed in place; it is an FSDPModule afterwards, as after `torch.distributed.fsdp.fully_shard`.

    Args:
        module: the same on all ranks. On the meta device it stays there, as in FSDP2: call `to_empty` and initialize
            it. Built under `sdp_deepspeed.Init` it gets the values that it would have without. What torch.compile(...)
            wrapped inside of it is compiled in place, so that names are those of the model without wrappers.
        mesh: 1-d, of all ranks in order; None makes it. After torch's `parallelize_module` over one axis of a mesh of
            all ranks, the other axis.
        block: `subnetwork_data_parallel` as in a DeepSpeed config.
        reshard_after_forward, mp_policy, offload_policy, ignored_params: as FSDP2's, for each unit and the root.

    Raises:
        ValueError, RuntimeError: on all ranks, what one of them cannot do or what is not the same on all of them,
            before anything is changed.
    """
    options = ShardOptions(
        reshard_after_forward,
        mp_policy or MixedPrecisionPolicy(),
        offload_policy or OffloadPolicy(),
        frozenset(ignored_params),
    )
    ranks = _ranks()
    config = run_on_all_ranks(ranks, partial(parsed, block), partial(_checked, module, mesh, block, options))
    check_same_settings(config, options.in_words(module), ranks)
    mesh = mesh or init_device_mesh(device_type(), (dist.get_world_size(),))
    columns = columns_of(module, mesh, ranks)
    compile_in_place(module)
    start = Start(module, config, mesh, ranks, options, TensorParallel(columns) if columns else None)
    with without_wrappers(module) as wrapped:
        sharded = shard(start, wrapped)
        order_collectives(sharded)
        install_view(sharded, start.device, options.mp_policy)
    attach(sharded)
    if ranks.rank == 0:
        groups = f"{sharded.num_groups} process groups for holder sets, rank 0 in {sharded.num_own_groups}"
        logger.info("%s: %s", KEY, groups)
    return module


def shard(start: Start, wrapped: Collection[str] = ()) -> ShardedModel:
    """Plan, mask, materialize, shard.

    Args:
        wrapped: names of modules whose wrappers are off for the moment.
    """
    module, mesh = start.module, start.mesh
    state_names = run_on_all_ranks(start.ranks, partial(_state_names, module))
    tensor_parallel = start.tensor_parallel
    deferred = run_on_all_ranks(start.ranks, partial(_deferred, module)) if tensor_parallel is None else None

    def plan_and_mask() -> tuple[tuple[Plan, float, ShardedMask, list[LocatedBranch]], list[ShardedUnit], Synchronized]:
        branches = locate_branches(module)
        plan, warnings = plan_model(module, start.block, mesh.size(), branches=branches)
        check_not_ignored(module, plan, start.options.ignored_params)
        check_buffers(module, plan)
        if tensor_parallel is not None:
            check_per_head(module, branches)
            tensor_parallel.take_local(module)
            refuse_model(module)
        warnings += check_descriptions(module, branches, plan, start.device)
        costs = unit_costs(module, plan.units)
        if start.ranks.rank == 0:
            for warning in warnings:
                logger.warning("%s: %s", KEY, warning)
            logger.info("%s\n%s", KEY, plan.table(costs))
        model = RankModel(plan, tuple(dense_tensors(module)), PieceViews(named_tensors(module)), mesh.get_local_rank())
        mask = ShardedMask(module, model, branches, scales=start.block.dense_branch_scale == "coverage")
        mask.check()
        check_not_wrapped_inside(plan, branches, wrapped)
        coverage = plan.mean_coverage([cost.flops for cost in costs])
        synchronized = synchronized_over(module, model, branches)
        return (plan, coverage, mask, branches), list(block_units(module, model, branches)), synchronized

    with tensor_parallel or nullcontext():
        planned, blocks, synchronized = run_on_all_ranks(start.ranks, plan_and_mask)
        plan, coverage, mask, branches = planned
        check_same_plan(plan, start.ranks)
    mask.apply_on(start.device, is_deferred=deferred is not None)
    if deferred is not None:
        world = Communicator(dist, mesh.get_group(), objects=start.ranks)
        seed = start.ranks.gather_objects(deferred.seed)[0]
        run_on_all_ranks(start.ranks, lambda: materialize(deferred, mask, start.device, seed))
        try:
            check_holders_agree(mask.model, world)
        except RuntimeError as error:
            raise ValueError(f"{error}: inside sdp_deepspeed.Init build the same model on every rank") from error
        for part in mask.split:
            part.take_values()
    units = in_model_order(branches, blocks, neuron_units(module, mask.model, branches, mask.split))
    columns = tensor_parallel.columns if tensor_parallel else ()
    meshes, num_groups = make_meshes(mesh, (unit.holders for unit in units), columns)
    lacking = mask.lacking_names()
    ignored = {name for name, parameter in module.named_parameters() if parameter in start.options.ignored_params}
    shared = shared_tensors(module, units, not_shared=lacking | ignored, everyone=tuple(range(mesh.size())))
    synchronize(module, synchronized, {holders: own.get_group() for holders, own in meshes.items()})
    _wrap(start, units, meshes, [module.get_parameter(name) for name in sorted(lacking)])
    return ShardedModel(
        module, start.block, mask, mesh, meshes, units, shared, state_names, coverage, num_groups, tensor_parallel
    )


def _wrap(
    start: Start,
    units: Sequence[ShardedUnit],
    meshes: Mapping[tuple[int, ...], DeviceMesh],
    lacking: Sequence[nn.Parameter],
) -> None:
    """FSDP2 itself: each held unit over its holders, then what is left over all ranks."""
    for unit in units:
        if unit.is_held:
            _shard_modules(unit.modules, meshes[unit.holders], start.options.arguments())
    columns = start.tensor_parallel.columns if start.tensor_parallel else ()
    _shard_modules([start.module], mesh_of_shared(start.mesh, columns), start.options.arguments(*lacking))


def _shard_modules(modules: Sequence[nn.Module], mesh: DeviceMesh, arguments: Mapping[str, Any]) -> None:
    """As one group of FSDP2's. It copies shards, and whole parameters go when nobody refers to them any more; the mask
    does, so their storage is given back here."""
    whole = [parameter for module in modules for parameter in module.parameters()]
    group: Any = list(modules) if len(modules) > 1 else modules[0]
    torch_fully_shard(group, mesh=mesh, **arguments)
    remaining = {id(parameter) for module in modules for parameter in module.parameters()}
    for parameter in whole:
        if id(parameter) not in remaining:
            drop(parameter)


def _state_names(module: nn.Module) -> dict[str, str]:
    """Of a state dict, each with the first name of its tensor among the module's parameters and buffers.

    Raises:
        ValueError: a parameter is in no state dict, so that an export would lack it.
    """
    first = {id(tensor): name for name, tensor in named_tensors(module).items()}
    every = {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }
    state = module.state_dict(keep_vars=True)
    tensors = {name: tensor if id(tensor) in first else every.get(name) for name, tensor in state.items()}
    names = {name: first[id(tensor)] for name, tensor in tensors.items() if tensor is not None}
    if missing := sorted({name for name, _ in module.named_parameters()}.difference(names.values())):
        raise ValueError(
            f"fully_shard: {quoted(missing)} is not in the model's state dict under a name that can be told, so an "
            "export would lack it: a wrapper or a hook of state dicts gives other names; put it on after fully_shard"
        )
    return names


def _deferred(module: nn.Module) -> DeferredWeights | None:
    """What makes the weights of a model of `Init`; one that is on the meta device for FSDP2's own way stays there."""
    is_ours = any(hasattr(tensor, "_sdp_weights") for tensor in named_tensors(module).values())
    return DeferredWeights(module) if is_ours else None


def _checked(
    module: nn.Module, mesh: DeviceMesh | None, block: Mapping[str, Any] | None, options: ShardOptions
) -> SubnetworkConfig:
    config = parsed(block)
    check_call(module, mesh, config, options)
    return config


def _ranks() -> Gatherer:
    """All ranks, for one model; through the store, as groups come later."""
    if not dist.is_initialized():
        raise RuntimeError("sdp_deepspeed.fully_shard: call torch.distributed.init_process_group first")
    if dist.get_world_size() == 1:
        return OneRank()
    rank = dist.get_rank()
    store: Any = dist.distributed_c10d._get_default_store()
    number = store.add(f"sdp_deepspeed/sharded_models/{rank}", 1)
    return StoreGatherer(
        store,
        f"sdp_deepspeed/sharded_model/{number}",
        (rank, dist.get_world_size()),
        what="sdp_deepspeed.fully_shard",
        seconds=store.timeout.total_seconds(),
        notify=logger.warning,
    )
