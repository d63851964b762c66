"""What `fully_shard` refuses, each with its reason, before anything is changed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from sdp_deepspeed.architectures import LocatedBranch, branches_of_units
from sdp_deepspeed.config import KEY, SubnetworkConfig, parse
from sdp_deepspeed.engine.refusals import refuse_model
from sdp_deepspeed.fsdp.options import ShardOptions
from sdp_deepspeed.fsdp.parts import chunk
from sdp_deepspeed.fsdp.wrappers import is_wrapper
from sdp_deepspeed.messages import listed, quoted
from sdp_deepspeed.parallel.agree import gather_objects
from sdp_deepspeed.plan.plan import Plan

_IMPL = "checkpoint_impl"  # of torch's checkpoint_wrapper
_FIXED = "the plan cannot change while FSDP2 holds its shards; remove the key"
# Keys of the block that only DeepSpeed's engine takes, and why.
_REFUSED = {
    "regime": "it gathers a unit among the ranks that average it, while all ranks would run it; use "
    '"forward", or DeepSpeed',
    "redraw_interval": _FIXED,
    "check_agreement": "each element is stored once, so holders cannot disagree; remove the key",
    "allow_optimizer": "any optimizer over DTensors may step them; remove the key",
}


def parsed(block: Mapping[str, Any] | None) -> SubnetworkConfig:
    """The block, as in a DeepSpeed config.

    Raises:
        ValueError: what is wrong in it.
    """
    if not isinstance(block, Mapping):
        raise ValueError(f'fully_shard: block: got {block!r}, expected the block {KEY!r}, such as {{"coverage": 0.5}}')
    if KEY in block:
        raise ValueError(f"fully_shard: block: give what stands under {KEY!r}, not the config around it")
    if block.get("schedule") is not None:
        raise ValueError(f"{KEY}.schedule: not possible with FSDP2: {_FIXED}")
    config = parse({KEY: dict(block)})
    if config is None:
        raise ValueError(f"{KEY}.enabled: false leaves nothing to do here: call torch's own fully_shard")
    return config


def check_call(module: nn.Module, mesh: DeviceMesh | None, config: SubnetworkConfig, options: ShardOptions) -> None:
    """Whatever does not need a plan.

    Raises:
        ValueError: all that is refused, a line for each.
    """
    lines = [*refused_of_block(config), *_of_mesh(module, mesh), *_of_model(module), *_of_options(options)]
    lines += _of_tensor_parallelism(module, config, options)
    if lines:
        raise ValueError("\n".join(lines))
    refuse_model(module)


def check_not_ignored(module: nn.Module, plan: Plan, ignored: Collection[nn.Parameter]) -> None:
    """Refuse to leave out parameters of units, which are averaged over their holders, also where all ranks are.

    Raises:
        ValueError: by name.
    """
    of_units = {piece.parameter for unit in plan.units for piece in unit.pieces}
    names = sorted(name for name, parameter in module.named_parameters() if name in of_units and parameter in ignored)
    if names:
        raise ValueError(
            f"fully_shard: ignored_params: {quoted(names)} is of a unit: nobody would average it over those that hold "
            "it; leave it to FSDP2, or match its unit's name in `shared`"
        )


def check_buffers(module: nn.Module, plan: Plan) -> None:
    """Refuse DTensors among the buffers that would travel, or of which a rank has a part.

    Raises:
        ValueError: by name.
    """
    some = _that_some_ranks_lack(plan)
    dtensors = {name: buffer for name, buffer in module.named_buffers() if isinstance(buffer, DTensor)}
    odd = [name for name, buffer in dtensors.items() if name in some or tuple(buffer.placements) != (Replicate(),)]
    if odd:
        raise ValueError(
            f"fully_shard: {quoted(odd)} is a buffer and a DTensor, of a unit that some ranks lack or divided; "
            "register it in a module that parallelize_module does not divide"
        )


def check_not_wrapped_inside(plan: Plan, branches: Sequence[LocatedBranch], wrapped: Collection[str]) -> None:
    """Refuse wrappers inside of branches whose neurons or heads are cut: pieces are copies without them.

    Args:
        wrapped: names of modules.

    Raises:
        ValueError: by name.
    """
    names = branches_of_units(plan.units, branches)
    cut = {name for index, name in enumerate(names) if plan.coverage_of(index) < 1}
    bodies = tuple(f"{body}." for branch in branches if branch.name in cut for body in branch.bodies)
    inside = [name for name in wrapped if name.startswith(bodies)]
    if inside:
        raise ValueError(
            f"fully_shard: {quoted(inside)} is wrapped inside of a branch whose neurons or heads are cut; wrap the "
            "whole layer"
        )


def _that_some_ranks_lack(plan: Plan) -> set[str]:
    lacking = (unit for index, unit in enumerate(plan.units) if plan.coverage_of(index) < 1)
    return {piece.parameter for unit in lacking for piece in unit.pieces}


def check_same_settings(config: SubnetworkConfig, options: str, control: Any) -> None:
    """Every rank calls it.

    Args:
        options: in words.

    Raises:
        RuntimeError: on all ranks, what they were given differently.
    """
    own = config.model_dump() | {"options": options}
    if config.plan_path is not None:  # nodes may keep it in folders of their own; the plan itself is compared later
        own["assignment"] = "<a plan>"
    every = gather_objects(own, control)
    different = [name for name in own if any(other[name] != every[0][name] for other in every)]
    if different:
        first = different[0]
        values = {rank: other[first] for rank, other in enumerate(every)}
        raise RuntimeError(
            f"fully_shard: ranks were given different settings: {first} is {listed(values.values())} on ranks "
            f"{listed(values)}. Give all ranks the same block and arguments"
        )


def refused_of_block(config: SubnetworkConfig) -> Iterator[str]:
    """What a block asks for that is not possible, a line for each."""
    for name, why in _REFUSED.items():
        value = getattr(config, name)
        if value != SubnetworkConfig.model_fields[name].default:
            yield f"{KEY}.{name}: got {value!r}, which is not possible with FSDP2: {why}"


def _of_mesh(module: nn.Module, mesh: DeviceMesh | None) -> Iterator[str]:
    has_dtensors = any(isinstance(parameter, DTensor) for parameter in module.parameters())
    if mesh is None:
        if has_dtensors:
            yield 'fully_shard: mesh: got None; the parameters are DTensors, so give the other axis, such as mesh["dp"]'
        return
    ranks, size = mesh.mesh.flatten().tolist(), dist.get_world_size()
    if mesh.ndim != 1:
        yield (
            f"fully_shard: mesh: got {mesh.ndim} axes {tuple(mesh.shape)}, expected one: a unit is sharded over its "
            'holders, which are no rectangle of a mesh (no HSDP); with tensor parallelism give mesh["dp"]'
        )
    elif ranks != sorted(ranks):
        yield f"fully_shard: mesh: got ranks {ranks}, expected them in order"
    elif not has_dtensors and len(ranks) != size:
        yield (
            f"fully_shard: mesh: got ranks {ranks}, expected all {size} without tensor parallelism (DTensors): every "
            "rank trains a subnetwork"
        )


def _of_model(module: nn.Module) -> Iterator[str]:
    if "_sdp_masked" in vars(module):
        yield "fully_shard: this model was cut down to subnetworks before; build or load it anew"
    if is_wrapper(module):
        yield (
            "fully_shard: the model itself is wrapped, by checkpoint_wrapper or torch.compile; wrap its layers, or the "
            "model afterwards"
        )
    reentrant = [
        name for name, inner in module.named_modules() if getattr(vars(inner).get(_IMPL), "name", "") == "REENTRANT"
    ]
    if reentrant:
        yield f"fully_shard: {quoted(reentrant)}: reentrant checkpointing; take CheckpointImpl.NO_REENTRANT"
    sharded = [name for name, inner in module.named_modules() if isinstance(inner, FSDPModule)]
    if sharded:
        yield f"fully_shard: {quoted(sharded)} went through torch's fully_shard before; give the plain model"
    scalars = [name for name, parameter in module.named_parameters() if not parameter.dim()]
    if scalars:
        yield f"fully_shard: {quoted(scalars)} has no dim, so FSDP2 cannot shard it; give it one"


def _of_tensor_parallelism(module: nn.Module, config: SubnetworkConfig, options: ShardOptions) -> Iterator[str]:
    """What cannot be done to a model that torch's parallelize_module went over."""
    dtensors = {name: p for name, p in module.named_parameters() if isinstance(p, DTensor)}
    if not dtensors:
        return
    strategies = [config.strategy] if isinstance(config.strategy, str) else list(config.strategy.values())
    if "neuron" in strategies:
        yield (
            f'{KEY}.strategy: "neuron" is not possible with DTensors: styles of tensor parallelism divide whole '
            'layers, and pieces would be layers of their own; use "block", or DeepSpeed with AutoTP'
        )
    odd = [name for name, tensor in dtensors.items() if not _is_placed_as_usual(tensor)]
    if odd:
        yield (
            f"fully_shard: {quoted(odd)} is placed otherwise than Shard or Replicate on a mesh of one axis, or divided "
            "otherwise than torch.chunk does; give it to torch's parallelize_module or distribute_tensor"
        )
    without = [name for name, tensor in module.named_parameters() if tensor.is_meta]
    if without:
        yield (
            f"fully_shard: {quoted(without)} is on the meta device: with tensor parallelism the weights must be there, "
            "since who initializes a part would not give it the dense model's values"
        )
    if ignored := [name for name, tensor in dtensors.items() if tensor in options.ignored_params]:
        yield f"fully_shard: ignored_params: {quoted(ignored)} is a DTensor; leave it to FSDP2"


def _is_placed_as_usual(tensor: DTensor) -> bool:
    mesh, (placement, *_), shape = tensor.device_mesh, tensor.placements, list(tensor.shape)
    if mesh.ndim != 1 or not isinstance(placement, Shard | Replicate):
        return False
    if isinstance(placement, Shard):
        start, stop = chunk(shape[placement.dim], mesh.get_local_rank(), mesh.size())
        shape[placement.dim] = stop - start
    return list(tensor.to_local().shape) == shape


def _of_options(options: ShardOptions) -> Iterator[str]:
    value = options.reshard_after_forward
    if value is not None and not isinstance(value, bool):
        yield (
            f"fully_shard: reshard_after_forward: got {value!r}, expected True, False or None: no number of ranks "
            "divides every holder set"
        )
    policy = options.mp_policy
    for name in ("param_dtype", "reduce_dtype"):
        if getattr(policy, name) == torch.float16:
            yield (
                f"fully_shard: mp_policy.{name}: got torch.float16, which is not possible with FSDP2 here: ranks with "
                "different units would have to agree on a loss scale; use bfloat16"
            )
