"""What `fully_shard` refuses, and why. All checks run before the module is changed."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate, Shard

from sdp_deepspeed.config import SubnetworkConfig, parse_block
from sdp_deepspeed.fsdp.options import ShardOptions
from sdp_deepspeed.fsdp.parts import chunk_range
from sdp_deepspeed.masking.mask import is_masked
from sdp_deepspeed.masking.wrappers import is_wrapper
from sdp_deepspeed.messages import KEY, quoted
from sdp_deepspeed.parallel.consistency import describe_different_settings, gather_objects
from sdp_deepspeed.parallel.refused_models import refuse_model
from sdp_deepspeed.plan.plan import Plan

_IMPL = "checkpoint_impl"  # of torch's checkpoint_wrapper
_FIXED = "the plan cannot change while FSDP2 holds its shards; remove the key"
# Keys of the block that only the DeepSpeed engine supports, and why; docs/config.md lists them.
REFUSED_KEYS = {
    "regime": 'FSDP2 gathers a unit only among its holders, but all ranks would run it; use "forward", or DeepSpeed',
    "schedule": _FIXED,
    "redraw_interval": _FIXED,
    "check_agreement": "holders keep shards, and no copies to compare; remove the key",
    "local_steps": "each team is a job of its own; call sdp_deepspeed.join, and PyTorch's fully_shard after it",
}


def check_call(
    module: nn.Module, mesh: DeviceMesh | None, block: Mapping[str, Any] | None, options: ShardOptions
) -> SubnetworkConfig:
    """Parse the block, and check what does not need a plan.

    Raises:
        ValueError: everything that is refused, one line each.
    """
    config = parse_block(block, "fully_shard")
    lines = [*refused_of_block(config), *_of_mesh(module, mesh), *_of_model(module), *_of_options(options)]
    lines += _of_tensor_parallelism(module, config, options)
    if lines:
        raise ValueError("\n".join(lines))
    refuse_model(module)
    return config


def check_tensors(module: nn.Module, plan: Plan, ignored: Collection[nn.Parameter]) -> None:
    """Check ignored parameters and DTensor buffers, for which the plan must be known.

    Args:
        ignored: `ignored_params`; parameters of units may not be among them, since they must be averaged over holders.

    Raises:
        ValueError: everything that is refused, one line each.
    """
    lines = []
    of_units = {piece.parameter for unit in plan.units for piece in unit.pieces}
    some = {index for index in range(len(plan.units)) if plan.coverage_of(index) < 1}  # units that some ranks lack
    names = sorted(name for name, parameter in module.named_parameters() if name in of_units and parameter in ignored)
    if names:
        lines.append(
            f"fully_shard: ignored_params: gradients of {quoted(names)} must be averaged over the holders of a unit; "
            "remove these, or match their units in `shared`"
        )
    absent = {piece.parameter for index in some for piece in plan.units[index].pieces}
    dtensors = {name: buffer for name, buffer in module.named_buffers() if isinstance(buffer, DTensor)}
    if odd := [name for name, b in dtensors.items() if name in absent or tuple(b.placements) != (Replicate(),)]:
        lines.append(
            f"fully_shard: buffer {quoted(odd)} is a DTensor that is sharded, or of a unit that some ranks lack; "
            "exclude its module from parallelize_module"
        )
    if lines:
        raise ValueError("\n".join(lines))


def check_same_settings(config: SubnetworkConfig, options: str, control: dist.ProcessGroup) -> None:
    """Compare block and options across all ranks; collective.

    Raises:
        RuntimeError: on all ranks, naming the settings that differ and their values.
    """
    settings = {name: f"{value}" for name, value in config.comparable().items()} | {"options": options}
    every = gather_objects(settings, control)
    if any(other != settings for other in every):
        raise RuntimeError(f"fully_shard: {describe_different_settings(every)}")


def refused_of_block(config: SubnetworkConfig) -> Iterator[str]:
    """Keys of the block that FSDP2 does not support, one line each."""
    given = config.model_dump(exclude_unset=True)
    for name, why in REFUSED_KEYS.items():
        default = SubnetworkConfig.model_fields[name].default
        value = given.get(name, default)
        if value != default:
            yield f"{KEY}.{name}: got {value!r}, which is not supported with FSDP2: {why}"


def _of_mesh(module: nn.Module, mesh: DeviceMesh | None) -> Iterator[str]:
    has_dtensors = any(isinstance(parameter, DTensor) for parameter in module.parameters())
    if mesh is None:
        if has_dtensors:
            yield 'fully_shard: mesh: got None; with DTensors pass the data-parallel axis, such as mesh["dp"]'
        return
    ranks = mesh.mesh.flatten().tolist()
    size = dist.get_world_size()
    if mesh.ndim != 1:
        yield (
            f"fully_shard: mesh: got {mesh.ndim} axes {tuple(mesh.shape)}, expected one (no HSDP); with tensor "
            'parallelism pass the data-parallel axis, such as mesh["dp"]'
        )
    elif ranks != sorted(ranks):
        yield f"fully_shard: mesh: got ranks {ranks}, expected ascending order"
    elif not has_dtensors and len(ranks) != size:
        yield (
            f"fully_shard: mesh: got ranks {ranks}, expected all {size} ranks; fewer are possible with tensor "
            "parallelism (DTensors) only"
        )


def _is_reentrant(module: nn.Module) -> bool:
    """Whether checkpoint_wrapper or Transformers runs the module again by reentrant checkpointing."""
    if getattr(vars(module).get(_IMPL), "name", "") == "REENTRANT":
        return True
    keywords = getattr(vars(module).get("_gradient_checkpointing_func"), "keywords", {})
    return bool(getattr(module, "gradient_checkpointing", False) and keywords.get("use_reentrant"))


def _of_model(module: nn.Module) -> Iterator[str]:
    if is_masked(module):
        yield "fully_shard: an earlier engine or fully_shard reduced this model to a subnetwork; load a new one"
    if is_wrapper(module):
        yield (
            "fully_shard: the model itself is wrapped, by checkpoint_wrapper or torch.compile; wrap its layers, or the "
            "model after fully_shard"
        )
    if reentrant := [name for name, inner in module.named_modules() if _is_reentrant(inner)]:
        yield (
            f"fully_shard: {quoted(reentrant)} uses reentrant checkpointing; use CheckpointImpl.NO_REENTRANT or "
            "use_reentrant=False"
        )
    sharded = [name for name, inner in module.named_modules() if isinstance(inner, FSDPModule)]
    if sharded:
        yield f"fully_shard: {quoted(sharded)} is sharded by torch's fully_shard already; pass the plain model"
    scalars = [name for name, parameter in module.named_parameters() if not parameter.dim()]
    if scalars:
        yield f"fully_shard: {quoted(scalars)} is a scalar, which FSDP2 cannot shard; use a tensor of shape [1]"


def _of_tensor_parallelism(module: nn.Module, config: SubnetworkConfig, options: ShardOptions) -> Iterator[str]:
    """Settings that are not supported after torch's `parallelize_module`, one line each."""
    dtensors = {name: p for name, p in module.named_parameters() if isinstance(p, DTensor)}
    if not dtensors:
        return
    strategies = [config.strategy] if isinstance(config.strategy, str) else list(config.strategy.values())
    if "neuron" in strategies:
        yield (
            f'{KEY}.strategy: "neuron" is not supported with DTensors: parallelize_module shards whole layers; use '
            '"block", or DeepSpeed with AutoTP'
        )
    odd = [name for name, tensor in dtensors.items() if not _is_placed_as_usual(tensor)]
    if odd:
        yield (
            f"fully_shard: {quoted(odd)}: expected Shard or Replicate on a mesh of one axis, in chunks of torch.chunk; "
            "use parallelize_module or distribute_tensor"
        )
    without = [name for name, tensor in module.named_parameters() if tensor.is_meta]
    if without:
        yield (
            f"fully_shard: {quoted(without)} is on the meta device, which is not supported with tensor parallelism; "
            "initialize the weights first"
        )
    if ignored := [name for name, tensor in dtensors.items() if tensor in options.ignored_params]:
        yield f"fully_shard: ignored_params: {quoted(ignored)} is a DTensor; leave it to FSDP2"


def _is_placed_as_usual(tensor: DTensor) -> bool:
    mesh, (placement, *_), shape = tensor.device_mesh, tensor.placements, list(tensor.shape)
    if mesh.ndim != 1 or not isinstance(placement, Shard | Replicate):
        return False
    if isinstance(placement, Shard):
        start, stop = chunk_range(shape[placement.dim], mesh.get_local_rank(), mesh.size())
        shape[placement.dim] = stop - start
    return list(tensor.to_local().shape) == shape


def _of_options(options: ShardOptions) -> Iterator[str]:
    value = options.reshard_after_forward
    if value is not None and not isinstance(value, bool):
        yield (
            f"fully_shard: reshard_after_forward: got {value!r}, expected True, False or None (no number of ranks "
            "divides every holder set)"
        )
    policy = options.mp_policy
    for name in ("param_dtype", "reduce_dtype"):
        if getattr(policy, name) == torch.float16:
            yield (
                f"fully_shard: mp_policy.{name}: got torch.float16, which needs a loss scale that ranks agree on; use "
                "torch.bfloat16"
            )
