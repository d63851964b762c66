"""What DeepSpeed's config asks of the optimizer and the exchange, read through DeepSpeed's own engine."""

from __future__ import annotations

import os
import socket
from collections.abc import Hashable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from deepspeed import comm as deepspeed_comm
from deepspeed.runtime.fp16.loss_scaler import CreateLossScaler, LossScalerBase

from sdp_deepspeed.config import SubnetworkConfig
from sdp_deepspeed.distributed.agreement import Gatherer
from sdp_deepspeed.distributed.communicator import Communicator, RankGroups
from sdp_deepspeed.distributed.host_group import Channel, HostGroup
from sdp_deepspeed.distributed.last_acts import LastActs
from sdp_deepspeed.distributed.receive_first import ReceiveFirst
from sdp_deepspeed.distributed.step_limit import take_limit_of_the_run
from sdp_deepspeed.engine.host_engine import HostConfig, HostEngine
from sdp_deepspeed.optimizer.settings import Offload, OptimizerSettings
from sdp_deepspeed.tensor_parallel.model import tp_group_of


def resolved_config(config: Mapping[str, Any], read: HostConfig) -> dict[str, Any]:
    """A config with the values that DeepSpeed made of it where it converts them: it takes "1" for 1, "false" for false.

    Args:
        config: loaded.
        read: what DeepSpeed read in it.
    """
    parts = {"zero_optimization": read.zero_config, "fp16": read.float16_config, "bf16": read.bfloat16_config}
    values = {}
    for key, part in parts.items():
        given = config.get(key)  # with old keys, which DeepSpeed turned into others
        values[key] = {
            **(given if isinstance(given, Mapping) else {}),
            **part.model_dump(mode="json", exclude_unset=True),
        }
    return {**config, **values, "gradient_accumulation_steps": read.gradient_accumulation_steps}


def optimizer_settings(engine: HostEngine, block: SubnetworkConfig) -> OptimizerSettings:
    """Read when the engine builds its optimizer, and when it is re-planned.

    Args:
        block: of the plan that the optimizer is for.
    """
    model_dtype, accumulation_dtype = engine.get_data_types()
    stage = int(engine.zero_optimization_stage())
    given = engine._config.zero_config.model_fields_set  # DeepSpeed's own defaults are one bucket for most models
    if engine.bfloat16_enabled():
        skip_overflow = bool(engine._config.bfloat16_config.check_grad_overflow)
    else:
        under_zero = stage > 0 and bool(engine.zero_compute_grad_norm())
        skip_overflow = under_zero or engine.fp16_enabled()  # as DeepSpeed: steps in fp32 are skipped under ZeRO only
    return OptimizerSettings(
        stage=stage,
        clip=float(engine.gradient_clipping()),
        bucket_elements=int(engine.zero_reduce_bucket_size()) if "reduce_bucket_size" in given else None,
        return_bucket_elements=int(engine.zero_allgather_bucket_size()) if "allgather_bucket_size" in given else None,
        wire_dtype=engine.communication_data_type,
        max_in_flight=int(bool(engine.zero_overlap_comm())),
        accumulate_in_fp32=accumulation_dtype == torch.float32 and model_dtype != torch.float32,
        skip_overflow=skip_overflow,
        offload=Offload(bool(engine.zero_offload_optimizer().pin_memory)) if engine.zero_use_cpu_optimizer() else None,
        needs_norm=bool(engine.zero_compute_grad_norm()),
        lr_by_coverage=block.lr_by_coverage,
        whole_tensors=block.allow_optimizer == "whole_tensors",
    )


def loss_scaler(engine: HostEngine) -> LossScalerBase:
    """DeepSpeed's own: static, dynamic, or one that scales by 1 without fp16."""
    return CreateLossScaler(
        engine.get_data_types()[0],
        static_loss_scale=engine.loss_scale(),
        dynamic_scaling=engine.dynamic_loss_scale(),
        dynamic_loss_args=engine.dynamic_loss_scale_args(),
    )


def rank_groups(engine: HostEngine, world: Communicator, host: HostGroup, last_acts: LastActs) -> RankGroups:
    """This rank's; DeepSpeed has made those that are its own. Every rank calls it."""
    group = engine.seq_data_parallel_group
    take_limit_of_the_run(dist, group)
    ranks = dist.get_process_group_ranks(group)
    objects = host.channel(Channel.DATA_PARALLEL, ranks)
    nodes = set(objects.gather_objects(node_of_process(os.environ, socket.gethostname())))
    has_links = dist.get_backend(group) == "gloo" and len(nodes) > 1  # in one node's memory nothing has a direction
    collectives = ReceiveFirst(deepspeed_comm, ranks) if has_links else deepspeed_comm
    dp_group = Communicator(collectives, group, objects=objects, last_acts=last_acts)
    return RankGroups(dp_group, world, host, last_acts, tp_group_of(engine.mpu, host))


def node_of_process(environment: Mapping[str, str], hostname: str) -> str:
    """A label of the node that a process runs on: the host's name, which cloned machines share, and the launcher's
    number of the node (torchrun's, or DeepSpeed's), which MPI does not give."""
    numbers = [environment[name] for name in ("GROUP_RANK", "CROSS_RANK") if name in environment]
    return "/".join([hostname, *numbers[:1]])


def nodes_of_ranks(dp_group: Gatherer, tp_group: Gatherer | None = None) -> tuple[Hashable, ...]:
    """The node of each data-parallel rank, or the nodes of its tensor-parallel group; every rank calls it."""
    node: Hashable = node_of_process(os.environ, socket.gethostname())
    if tp_group is not None:
        node = tuple(tp_group.gather_objects(node))
    return tuple(dp_group.gather_objects(node))
