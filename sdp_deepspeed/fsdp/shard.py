"""`sdp_deepspeed.fully_shard`: FSDP2's, with each unit sharded over its holders. Read this first.

The reduce-scatter of a unit averages over the ranks of its mesh, which are its holders: that is the masked average.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial, wraps
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from sdp_deepspeed.architectures import locate_branches, unit_costs
from sdp_deepspeed.config import KEY, SubnetworkConfig
from sdp_deepspeed.core.init import DeferredWeights, give
from sdp_deepspeed.core.masking import Mask
from sdp_deepspeed.core.masking.compiled import compile_in_place
from sdp_deepspeed.core.masking.forwards import set_data
from sdp_deepspeed.core.parallel.agree import Meetings, check_agreement, gather_objects, run_on_all_ranks
from sdp_deepspeed.core.parallel.groups import DESCRIPTION, Groups, timeout_of_the_run
from sdp_deepspeed.engine.refusals import refuse_model
from sdp_deepspeed.fsdp import state_dicts
from sdp_deepspeed.fsdp.dense_model import DenseModel
from sdp_deepspeed.fsdp.options import ShardOptions
from sdp_deepspeed.fsdp.order import CollectiveOrder
from sdp_deepspeed.fsdp.parts import Holders, parts_of
from sdp_deepspeed.fsdp.refusals import (
    check_buffers,
    check_call,
    check_not_ignored,
    check_not_wrapped_inside,
    check_same_settings,
    parsed,
)
from sdp_deepspeed.fsdp.sharded_model import OF_SHARED, OF_UNITS, ShardedModel, attach, device_type
from sdp_deepspeed.fsdp.tensor_parallel import TensorParallel, check_per_head, columns_of
from sdp_deepspeed.fsdp.units import Unit, held_units, units_of
from sdp_deepspeed.fsdp.wrappers import without_wrappers
from sdp_deepspeed.messages import listed, quoted
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.planner import plan_model
from sdp_deepspeed.plan.tensors import named_tensors

logger = logging.getLogger("sdp_deepspeed")
T = TypeVar("T", bound=nn.Module)

_numbers = itertools.count()  # of models: all ranks shard them together, so that all count them alike


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
    changed in place; it is an FSDPModule afterwards, as after `torch.distributed.fsdp.fully_shard`. In evaluation mode
    without gradients its forward pass is the dense model's.

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
    if not dist.is_initialized():
        raise RuntimeError("sdp_deepspeed.fully_shard: call torch.distributed.init_process_group first")
    options = ShardOptions(
        reshard_after_forward,
        mp_policy or MixedPrecisionPolicy(),
        offload_policy or OffloadPolicy(),
        frozenset(ignored_params),
    )
    control = dist.new_group(backend="gloo", timeout=timeout_of_the_run(), group_desc=DESCRIPTION)
    try:
        config = run_on_all_ranks(partial(_checked, module, mesh, block, options), control)
        check_same_settings(config, options.in_words(module), control)
        mesh = mesh or init_device_mesh(device_type(), (dist.get_world_size(),))
        columns = columns_of(module, mesh, control)
        compile_in_place(module)
        with without_wrappers(module) as wrapped:
            sharded = _shard(module, config, mesh, columns, options, wrapped, control)
    except Exception:
        dist.destroy_process_group(control)
        raise
    _run_dense_in_evaluation(sharded)
    attach(sharded)
    if dist.get_rank() == 0:
        logger.info("%s: rank 0 is in %d process groups", KEY, sharded.groups.num_groups)
    return module


def _checked(
    module: nn.Module, mesh: DeviceMesh | None, block: Mapping[str, Any] | None, options: ShardOptions
) -> SubnetworkConfig:
    config = parsed(block)
    check_call(module, mesh, config, options)
    return config


def _shard(
    module: nn.Module,
    block: SubnetworkConfig,
    mesh: DeviceMesh,
    columns: Sequence[tuple[int, ...]],
    options: ShardOptions,
    wrapped: Collection[str],
    control: Any,
) -> ShardedModel:
    """Plan, mask, materialize, shard.

    Args:
        columns: the data-parallel ranks of each tensor-parallel rank; none without tensor parallelism.
        wrapped: names of modules whose wrappers are off for the moment.
        control: gloo group of all ranks.
    """
    rank, device = mesh.get_local_rank(), _device_of(mesh)
    tensor_parallel = TensorParallel(tuple(columns)) if columns else None

    def prepare() -> tuple[Plan, Mask, list[Unit], DeferredWeights | None, dict[str, str]]:
        state_names = _state_names(module)
        is_deferred = any(hasattr(tensor, "_sdp_weights") for tensor in named_tensors(module).values())
        deferred = DeferredWeights(module) if is_deferred else None
        branches = locate_branches(module)
        plan, warnings = plan_model(module, block, mesh.size(), branches=branches)
        check_not_ignored(module, plan, options.ignored_params)
        check_buffers(module, plan)
        local = plan
        if tensor_parallel is not None:
            check_per_head(module, branches)
            tensor_parallel.take_local(module)
            refuse_model(module)
            local = tensor_parallel.shards(_column_of(columns)).local_plan(plan)
        mask = Mask(module, local, rank, branches=branches)
        found = list(units_of(mask))
        check_not_wrapped_inside(plan, branches, wrapped)
        if dist.get_rank() == 0:
            for warning in warnings:
                logger.warning("%s: %s", KEY, warning)
            logger.info("%s\n%s", KEY, plan.table(unit_costs(module, plan.units)))
        return plan, mask, found, deferred, state_names

    with tensor_parallel or nullcontext():
        plan, mask, found, deferred, state_names = run_on_all_ranks(prepare, control)
        _check_same_plan(plan, control)
        parts = parts_of(mask)
        is_scaled = block.dense_branch_scale == "coverage"
        dense = run_on_all_ranks(
            lambda: DenseModel(
                mask, parts, is_scaled=is_scaled, policy=options.mp_policy, tensor_parallel=tensor_parallel
            ),
            control,
        )
    coverage = plan.mean_coverage([cost.flops for cost in unit_costs(module, mask.plan.units)])
    lacking = _lacking(mask)
    ignored = {name for name, parameter in mask.parameters.items() if parameter in options.ignored_params}
    holder_sets = {part.holders for own in parts.values() for part in own}
    groups = Groups(holder_sets, ranks=columns or None, control=control)
    if deferred is None:
        for name in lacking & {name for name, tensor in named_tensors(module).items() if tensor.is_meta}:
            tensor = mask.parameters[name] if name in mask.parameters else mask.buffers[name]
            give(tensor, torch.empty_like(tensor, device=device))  # to_empty must not fill it
    mask.apply()
    if deferred is not None:
        seed = gather_objects(deferred.seed, control)[0]
        run_on_all_ranks(lambda: deferred.materialize(mask, device, seed), control)
        check_agreement(mask, groups)
    for name in lacking:
        tensor = mask.parameters[name] if name in mask.parameters else mask.buffers[name]
        if tensor.device != device:
            tensor.data = tensor.data.to(device)
    units = held_units(mask, found, parts)
    meshes = _meshes({unit.holders for unit in units}, groups, mesh, is_divided=bool(columns))
    for unit in units:
        _shard_modules(unit.modules, meshes[unit.holders], options.arguments())
    of_units = {id(parameter) for unit in units for m in unit.modules for parameter in m.parameters()}
    state_dicts.install(module, {name: mask.shapes[name] for name in lacking})
    shared_mesh = _named(mesh, OF_SHARED) if columns else mesh
    left_out = [mask.parameters[name] for name in lacking if name in mask.parameters]
    _shard_modules([module], shared_mesh, options.arguments(*left_out))
    owners = {
        part.path: (module.get_submodule(part.path.rpartition(".")[0]), part.path.rpartition(".")[2])
        for own in parts.values()
        for part in own
        if rank in part.holders
    }
    sharded = ShardedModel(
        *(module, block, plan, mask, groups, mesh, device, parts, owners, [unit.modules for unit in units], dense),
        *(state_names, frozenset(ignored), coverage, tensor_parallel, Meetings(f"sdp_deepspeed/fsdp/{next(_numbers)}")),
    )
    everyone = tuple(range(mesh.size()))
    whole = {
        name: owners[name]
        for name, (part, *_) in parts.items()
        if part.path == name
        and part.holders == everyone
        and id(owners[name][0]._parameters[owners[name][1]]) not in of_units
    }
    dense.attach(groups, device, sharded.shard, whole)
    dense.cast_like(module.get_submodule(path) for unit in found for path in unit.paths)
    CollectiveOrder(module, sharded.units)
    return sharded


def _device_of(mesh: DeviceMesh) -> torch.device:
    kind = mesh.device_type
    return torch.device(kind) if kind == "cpu" else torch.device(kind, torch.get_device_module(kind).current_device())


def _column_of(columns: Sequence[tuple[int, ...]]) -> int:
    """Tensor-parallel index of this rank."""
    return next(index for index, ranks in enumerate(columns) if dist.get_rank() in ranks)


def _state_names(module: nn.Module) -> dict[str, str]:
    """Of a state dict, each with the dense name of its tensor.

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
            f"fully_shard: {quoted(missing)} has another name in the model's state dict; put what renames it, a "
            "wrapper or a hook, on after fully_shard"
        )
    return names


def _check_same_plan(plan: Plan, control: Any) -> None:
    """The hash, and which rank has which subnetwork: the hash does not cover that. Every rank calls it.

    Raises:
        RuntimeError: on all ranks, naming those whose plan is another.
    """
    plans = gather_objects((plan.hash, plan.subnetwork_of_rank), control)
    if different := [rank for rank, other in enumerate(plans) if other != plans[0]]:
        raise RuntimeError(
            f"rank {listed(different)} made another plan than rank 0 ({plans[different[0]][0][:12]}, not "
            f"{plans[0][0][:12]}); give all ranks the same model, config and version of sdp_deepspeed"
        )


def _lacking(mask: Mask) -> set[str]:
    """Parameters and buffers of which this rank has nothing."""
    return {name for name in mask.shapes if not any(mask.is_held(piece) for piece, _ in mask.pieces_of(name))}


def _meshes(
    holder_sets: set[Holders], groups: Groups, mesh: DeviceMesh, *, is_divided: bool
) -> dict[Holders, DeviceMesh]:
    """By holder set that this rank is in; a set of all ranks has the mesh itself."""
    everyone, axes = tuple(range(mesh.size())), OF_UNITS if is_divided else None
    meshes = {everyone: _named(mesh, OF_UNITS) if is_divided else mesh}
    for holders in sorted(holder_sets - {everyone}):
        own = groups.of(holders)
        assert own is not None
        group = own.process_group or groups.single()
        meshes[holders] = DeviceMesh.from_group(group, mesh.device_type, mesh_dim_names=axes)
    return meshes


def _named(mesh: DeviceMesh, axes: tuple[str, ...]) -> DeviceMesh:
    return DeviceMesh.from_group(mesh.get_group(), mesh.device_type, mesh_dim_names=axes)


def _shard_modules(modules: Sequence[nn.Module], mesh: DeviceMesh, arguments: Mapping[str, Any]) -> None:
    """As one group of FSDP2's."""
    group: Any = list(modules) if len(modules) > 1 else modules[0]
    before = [parameter for module in modules for parameter in module.parameters()]
    torch_fully_shard(group, mesh=mesh, **arguments)
    after = {id(parameter) for module in modules for parameter in module.parameters()}
    for parameter in before:  # FSDP2 copies shards, and some refer to the whole parameter still
        if id(parameter) not in after:
            set_data(parameter, parameter.new_empty(0))


# ---- evaluation -----------------------------------------------------------------------------------------------------


def _run_dense_in_evaluation(sharded: ShardedModel) -> None:
    """In evaluation mode without gradients a forward pass is the dense model's."""
    model, subnetwork = sharded.module, sharded.module.forward

    def before(*_: Any) -> None:
        if _is_evaluating(model):
            sharded.begin_evaluation("an evaluation")
            return
        if sharded.is_dense:
            raise RuntimeError("inside sdp_deepspeed.fsdp.dense(model) call the model in eval() and torch.no_grad()")
        sharded.meetings.passing()
        sharded.has_trained = True

    def after(*_: Any) -> None:
        """FSDP2 keeps the root gathered for backward. Without one an optimizer that is made now, clipping, and the next
        pass after a step would take the copies for the weights."""
        if not torch.is_grad_enabled():
            sharded.reshard()

    @wraps(subnetwork)
    def forward(*args: Any, **kwargs: Any) -> Any:
        return sharded.dense(*args, **kwargs) if _is_evaluating(model) else subnetwork(*args, **kwargs)

    vars(model)["forward"] = forward
    model.register_forward_pre_hook(torch.compiler.disable(before), prepend=True)
    model.register_forward_hook(torch.compiler.disable(after))


def _is_evaluating(model: nn.Module) -> bool:
    return not model.training and not torch.is_grad_enabled()
