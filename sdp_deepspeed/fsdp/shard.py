"""`sdp_deepspeed.fully_shard`: FSDP2 with each unit sharded over a mesh of its holders. The entry point of this
package.

FSDP2's reduce-scatter averages a unit over its mesh, which consists of its holders: that is the masked average.

Order of construction:

1. Arguments are checked (refused_arguments.py), then the plan is computed, and this rank's mask (`_plan`).
2. The modules are copied, without weights, for the dense model (dense_model.py).
3. The mask is applied (`_apply_mask`). Modules with the same holders become groups; branches with neurons of several
   holder sets are split (fsdp_groups.py, parts.py).
4. FSDP2 shards the groups over their holders, and the rest over all ranks (`_wrap`).
5. Hooks order the collectives (order.py), and run the dense model in evaluation (evaluation.py).

A training step is FSDP2's own: a group is gathered before its first module runs, and in backward its gradients are
averaged. The user's optimizer steps shards. `clip_grad_norm_` (clip_grad_norm.py) knows the meshes.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from sdp_deepspeed.config import SubnetworkConfig
from sdp_deepspeed.fsdp import state_dicts
from sdp_deepspeed.fsdp.dense_model import DenseModel
from sdp_deepspeed.fsdp.dtensors import ReplacedDTensors, check_per_head, find_dtensors
from sdp_deepspeed.fsdp.evaluation import run_dense_in_evaluation
from sdp_deepspeed.fsdp.fsdp_groups import (
    BranchModules,
    FsdpGroup,
    gathered_together,
    modules_by_branch,
    split_and_group,
    without_own_parameters,
)
from sdp_deepspeed.fsdp.meshes import OF_SHARED, holder_meshes, with_axes
from sdp_deepspeed.fsdp.options import ShardOptions
from sdp_deepspeed.fsdp.order import CollectiveOrder
from sdp_deepspeed.fsdp.parts import parts_of
from sdp_deepspeed.fsdp.refused_arguments import check_call, check_same_settings, check_tensors
from sdp_deepspeed.fsdp.sharded_model import ShardedModel, attach
from sdp_deepspeed.init import DeferredWeights
from sdp_deepspeed.masking import Mask
from sdp_deepspeed.masking.proof import proven_branches
from sdp_deepspeed.masking.scale import describe_scale
from sdp_deepspeed.masking.tensor_data import move_in_place, set_data
from sdp_deepspeed.masking.wrappers import compile_in_place, without_wrappers
from sdp_deepspeed.messages import announce, quoted
from sdp_deepspeed.parallel.call_barrier import CallBarrier
from sdp_deepspeed.parallel.consistency import (
    check_agreement,
    check_same_parameters,
    check_same_plan,
    gather_objects,
    run_on_all_ranks,
)
from sdp_deepspeed.parallel.groups import Groups, control_group, device_type
from sdp_deepspeed.parallel.refused_models import refuse_model
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.strategies import unit_costs
from sdp_deepspeed.plan.tensors import dense_tensors, named_tensors
from sdp_deepspeed.planner import announce_plan, plan_model

logger = logging.getLogger("sdp_deepspeed")
T = TypeVar("T", bound=nn.Module)


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
    """Reduce a model to this rank's subnetwork and shard it with FSDP2: units over their holders, the rest over all
    ranks.

    Collective. Call it with the whole model, before creating the optimizer. The module is changed in place and becomes
    an FSDPModule, as with `torch.distributed.fsdp.fully_shard`. In evaluation mode without gradients its forward pass
    is the dense model's.

    Args:
        module: the same model on all ranks. A model on the meta device stays there, as in FSDP2: call `to_empty` and
            initialize it. A model built under `sdp_deepspeed.Init` is initialized here. Submodules wrapped by
            torch.compile(...) are compiled in place, so that names are those of the model without wrappers.
        mesh: 1-d mesh of all ranks in order. Default: created here. With tensor parallelism (`parallelize_module` over
            one axis of a mesh of all ranks): the other axis.
        block: the block `subnetwork_data_parallel`, as in a DeepSpeed config.
        reshard_after_forward, mp_policy, offload_policy, ignored_params: as in FSDP2, for each unit and the root.

    Returns:
        The module.

    Raises:
        ValueError, RuntimeError: on all ranks, before anything is changed, if something is not supported, or differs
            between ranks.
    """
    if not dist.is_initialized():
        raise RuntimeError("sdp_deepspeed.fully_shard: call torch.distributed.init_process_group first")
    options = ShardOptions(
        reshard_after_forward,
        mp_policy or MixedPrecisionPolicy(),
        offload_policy or OffloadPolicy(),
        frozenset(ignored_params),
    )
    control = control_group()
    try:
        config = run_on_all_ranks(partial(check_call, module, mesh, block, options), control)
        check_same_settings(config, options.describe(module), control)
        mesh = mesh or init_device_mesh(device_type(), (dist.get_world_size(),))
        dtensors = find_dtensors(module, mesh, control)
        compile_in_place(module)
        with without_wrappers(module):
            sharded = _shard(CheckedCall(module, config, mesh, options, control, dtensors))
    except Exception:
        dist.destroy_process_group(control)
        raise
    run_dense_in_evaluation(sharded)
    attach(sharded)
    return module


@dataclass(frozen=True)
class CheckedCall:
    """The arguments of `fully_shard`, checked and the same on all ranks, and the model's DTensors."""

    module: nn.Module
    block: SubnetworkConfig
    mesh: DeviceMesh
    options: ShardOptions
    control: dist.ProcessGroup
    dtensors: ReplacedDTensors

    @property
    def device(self) -> torch.device:
        kind = self.mesh.device_type
        is_cpu = kind == "cpu"
        return torch.device(kind) if is_cpu else torch.device(kind, torch.get_device_module(kind).current_device())


@dataclass(frozen=True)
class PlannedModel:
    """What is known before the model is changed.

    Args:
        mask: mask in coordinates of this rank's tensors.
        branches: modules of all branches, also of those that this rank lacks.
        together: first layer of the range with which each branch is gathered (`gathered_together`).
        state_names: dense name of the tensor of each key of the state dict.
        deferred: weights of a model built under `Init`, else None.
    """

    plan: Plan
    mask: Mask
    branches: Sequence[BranchModules]
    together: Mapping[str, str]
    state_names: Mapping[str, str]
    deferred: DeferredWeights | None


def _shard(call: CheckedCall) -> ShardedModel:
    """Compute the plan, apply the mask, materialize and shard the model; collective."""
    module, options, control = call.module, call.options, call.control
    with call.dtensors:
        planned = run_on_all_ranks(partial(_plan, call), control)
        check_same_plan(planned.plan, control)
        check_same_parameters(module, call.dtensors.columns, control)
        mask, parts = planned.mask, parts_of(planned.mask, options.ignored_params)
        make = partial(DenseModel, mask, parts, options.mp_policy, call.dtensors)
        dense = run_on_all_ranks(make, control)
    coverage = mask.plan.coverage_by_flops(unit_costs(module, mask.plan.units))
    all_parts = [part for of_name in parts.values() for part in of_name]
    groups = Groups({part.holders for part in all_parts}, ranks=call.dtensors.columns, control=control)
    _apply_mask(call, planned, groups)
    fsdp_groups = split_and_group(mask, planned.branches, parts, planned.together)
    in_groups = _wrap(call, mask, fsdp_groups, groups)
    sharded = ShardedModel(
        module=module,
        block=call.block,
        plan=planned.plan,
        mask=mask,
        groups=groups,
        mesh=call.mesh,
        device=call.device,
        parts=parts,
        fsdp_groups=[group.modules for group in fsdp_groups],
        dense=dense,
        state_names=planned.state_names,
        coverage=coverage,
        dtensors=call.dtensors,
        barrier=CallBarrier(),
    )
    whole = {}  # parameters of all ranks, or ignored ones: FSDP2's root has them
    for part in all_parts:
        if len(part.holders) == groups.data_parallel.size and id(sharded.parameter(part)) not in in_groups:
            whole[part.path] = sharded.owners[part.path]
    wrapped = (module.get_submodule(path) for of_branch in planned.branches for path in of_branch.paths)
    dense.attach(groups, call.device, sharded.shard, whole, wrapped)
    can_run_again = not any(branch.description.extra_outputs for branch in mask.branches)
    CollectiveOrder(
        module, sharded.fsdp_groups, can_run_again=can_run_again, output_dtype=options.mp_policy.output_dtype
    )
    return sharded


def _plan(call: CheckedCall) -> PlannedModel:
    """Compute the plan and check the model, without communication. Only DTensors are replaced; they are restored after
    an error.

    Raises:
        ValueError: the model or block is not supported.
    """
    module, options = call.module, call.options
    state_names = _state_names(module)
    is_deferred = any(hasattr(tensor, "_sdp_weights") for tensor in named_tensors(module).values())
    deferred = DeferredWeights(module) if is_deferred else None
    cut = call.block.strategy if not call.dtensors.exist else "neuron"  # checks of tensor parallelism need heads
    branches = without_own_parameters(proven_branches(module, cut))
    plan, warnings = plan_model(module, call.block, call.mesh.size(), branches=branches)
    check_tensors(module, plan, options.ignored_params)
    together = gathered_together(plan, dense_tensors(module), branches)
    local_plan = plan
    if call.dtensors.exist:
        check_per_head(module, branches)
        call.dtensors.take_local(module)
        refuse_model(module)  # again, for the local parts
        column = next(index for index, ranks in enumerate(call.dtensors.columns) if dist.get_rank() in ranks)
        local_plan = call.dtensors.shards(column).local_plan(plan)
    mask = Mask(module, local_plan, call.mesh.get_local_rank(), branches, is_scaled=call.block.is_scaled)
    branch_modules = list(modules_by_branch(mask))
    if dist.get_rank() == 0:
        announce_plan(module, plan, mask, warnings, logger)
        if mask.scaled:
            announce(describe_scale(module, mask.branches, mask.scaled, by_init=deferred is not None), logger)
    return PlannedModel(plan, mask, branch_modules, together, state_names, deferred)


def _apply_mask(call: CheckedCall, planned: PlannedModel, groups: Groups) -> None:
    """Apply the mask, and materialize a model built under `Init`. Tensors without elements are moved to the device
    here, others by FSDP2."""
    mask, deferred = planned.mask, planned.deferred
    absent = [mask.parameters.get(name, mask.buffers.get(name)) for name in _absent_names(mask)]
    if deferred is None:
        for tensor in absent:
            if tensor is not None and tensor.is_meta:
                move_in_place(tensor, torch.empty_like(tensor, device=call.device))  # `to_empty` skips it
    mask.apply()
    if deferred is not None:
        seed = gather_objects(deferred.seed, call.control)[0]
        run_on_all_ranks(lambda: deferred.materialize(mask, call.device, seed), call.control)
        check_agreement(mask, groups)
    for tensor in absent:
        if tensor is not None and tensor.device != call.device:
            tensor.data = tensor.data.to(call.device)


def _wrap(call: CheckedCall, mask: Mask, fsdp_groups: Sequence[FsdpGroup], groups: Groups) -> set[int]:
    """Call FSDP2: for each group over its holders, then for the rest over all ranks.

    Returns:
        Ids of the sharded parameters of these groups.
    """
    options, mesh = call.options, call.mesh
    meshes = holder_meshes({group.holders for group in fsdp_groups}, groups, mesh, is_divided=call.dtensors.exist)
    for group in fsdp_groups:
        _shard_modules(group.modules, meshes[group.holders], options.arguments())
    in_groups = [p for group in fsdp_groups for module in group.modules for p in module.parameters()]
    absent = _absent_names(mask)
    state_dicts.install(call.module, {name: mask.shapes[name] for name in absent})
    left_out = [mask.parameters[name] for name in absent if name in mask.parameters]
    shared_mesh = with_axes(mesh, OF_SHARED) if call.dtensors.exist else mesh
    _shard_modules([call.module], shared_mesh, options.arguments(*left_out))
    return {id(parameter) for parameter in in_groups if parameter not in options.ignored_params}


def _state_names(module: nn.Module) -> dict[str, str]:
    """Dense name of the tensor of each key of the state dict.

    Raises:
        ValueError: a parameter has no key, so an export would lack it.
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
            f"fully_shard: {quoted(missing)} has another name in the model's state dict; apply wrappers or hooks that "
            "rename it after fully_shard"
        )
    return names


def _absent_names(mask: Mask) -> set[str]:
    """Parameters and buffers that this rank lacks entirely."""
    return {name for name in mask.shapes if not mask.held_pieces(name)}


def _shard_modules(modules: Sequence[nn.Module], mesh: DeviceMesh, arguments: Mapping[str, Any]) -> None:
    """Shard modules as one FSDP2 group."""
    group: Any = list(modules) if len(modules) > 1 else modules[0]
    before = [parameter for module in modules for parameter in module.parameters()]
    torch_fully_shard(group, mesh=mesh, **arguments)
    after = {id(parameter) for module in modules for parameter in module.parameters()}
    for parameter in before:  # FSDP2 copies shards; free parameters that are still referenced
        if id(parameter) not in after:
            set_data(parameter, parameter.new_empty(0))
