"""`sdp_deepspeed.join`: reduce a model to the subnetwork of this team."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import nn

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.config import SubnetworkConfig, parse_block
from sdp_deepspeed.init import DeferredWeights, has_meta_tensors
from sdp_deepspeed.masking import Mask
from sdp_deepspeed.masking.proof import proven_branches
from sdp_deepspeed.masking.scale import describe_scale
from sdp_deepspeed.messages import KEY, announce
from sdp_deepspeed.parallel.groups import device_type
from sdp_deepspeed.plan.tensor_parallel_shards import UNDIVIDED, TensorParallelShards
from sdp_deepspeed.planner import plan_and_mask
from sdp_deepspeed.teams.dense_modules import DenseModules
from sdp_deepspeed.teams.ranks import TeamRanks
from sdp_deepspeed.teams.team import Team
from sdp_deepspeed.teams.weights import TorchHost, hide_absent
from sdp_deepspeed.version import __version__

logger = logging.getLogger("sdp_deepspeed")

_MARGIN = 60.0  # seconds in which rank 0 connects, and says that it has given up
NUMBER, LIGHTHOUSE = "SDP_TEAM", "TORCHFT_LIGHTHOUSE"  # variables of the environment


def join(model: nn.Module, block: Mapping[str, Any], *, communication_dtype: torch.dtype = torch.float32) -> Team:
    """Reduce a model to the subnetwork of this team, for training that meets the other teams every H steps.

    Call it on all ranks of the team, after `init_process_group` if the team has several, and before anything wraps the
    model or takes its parameters: DistributedDataParallel, FSDP2's `fully_shard`, the optimizer. The module is changed
    in place; parameters that this team lacks are gone. Then call `start` before the first step, and `step` after each
    step of the optimizer.

    The number of this team is read from SDP_TEAM, the address of torchft's lighthouse from TORCHFT_LIGHTHOUSE; `sdp
    teams` sets both.

    Args:
        model: whole, on its final device, with the same weights in all ranks of the team; or built under
            `sdp_deepspeed.Init`, on the device of the accelerator, if there is one.
        block: the block `subnetwork_data_parallel` with `local_steps.teams`, the same in all teams.
        communication_dtype: dtype in which differences are sent.

    Raises:
        ValueError: the block, the model or the environment is not supported. The model is unchanged.
    """
    deferred = DeferredWeights(model) if has_meta_tensors(model) else None
    return make_team(model, block, TorchHost(), communication_dtype, deferred=deferred, device=device_type())


def make_team(
    model: nn.Module,
    block: Mapping[str, Any],
    host: TorchHost,
    communication_dtype: torch.dtype,
    *,
    deferred: DeferredWeights | None,
    device: torch.device | str,
    branches: Sequence[LocatedBranch] | None = None,
    shards: TensorParallelShards = UNDIVIDED,
    data_parallel: Sequence[Sequence[int]] = (),
) -> Team:
    """As `join`, for any host.

    Args:
        deferred: weights of a model built under `Init`; None if the model has them.
        device: of what is built from them.
        branches: under tensor parallelism, as on this rank. Default: derived and proven here.
        shards: what tensor-parallel ranks have divided.
        data_parallel: ranks with the same shards, a list for each tensor-parallel rank.
    """
    config = _parse(block)
    settings = config.local_steps
    assert settings is not None
    number, address = _environment(settings.teams)
    if communication_dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(f"communication_dtype: got {communication_dtype}, expected torch.float32 or torch.bfloat16")
    ranks = TeamRanks(settings.wait_timeout + settings.exchange_timeout + _MARGIN, shards, data_parallel)
    if not ranks.all(ranks.broadcast(number) == number):
        raise ValueError(
            f"{NUMBER}: got {number}, and another number on other ranks; set the same on all ranks of a team"
        )
    if branches is None:
        branches = proven_branches(model, config.strategy)
    try:
        plan, mask, warnings = plan_and_mask(model, config, settings.teams, number, branches, shards)
    except ValueError as error:
        raise ValueError(str(error).replace(" subnetworks", " teams")) from error
    dense = DenseModules(mask)
    host.reduce(mask)
    if deferred is not None:
        seed = ranks.broadcast(deferred.seed)
        deferred.materialize(mask, torch.device(device), seed)
        dense.initialize(deferred, seed)
    hide_absent(mask)
    dense.keep_changed()
    if ranks.rank == 0:
        for warning in warnings:
            logger.warning("%s: %s", KEY, warning.replace(" subnetworks", " teams"))
        if mask.scaled:
            text = describe_scale(model, mask.branches, mask.scaled, by_init=deferred is not None)
            announce(text.replace(" subnetworks", " teams"), logger)
    agreed = {
        "version of sdp_deepspeed": __version__,
        "tensor-parallel ranks": shards.size,
        "plan": plan.hash[:12],
        "model": _hash(mask, config),
        "local_steps": f"every {settings.every}, outer_lr {settings.outer_lr}, momentum {settings.outer_momentum}",
        "communication_dtype": str(communication_dtype).removeprefix("torch."),
    }
    return Team(
        plan,
        mask,
        settings,
        host,
        dense,
        ranks,
        address=address,
        agreed=agreed,
        communication_dtype=communication_dtype,
    )


def _parse(block: Mapping[str, Any]) -> SubnetworkConfig:
    config = parse_block(block, "join")
    if config.local_steps is None:
        raise ValueError(f'join: expected {KEY}.local_steps such as {{"teams": 4, "every": 50}}')
    return config.model_copy(update={"subnetworks": config.local_steps.teams})


def _environment(num_teams: int) -> tuple[int, str]:
    """Number of this team, and the address of the lighthouse."""
    number, address = os.environ.get(NUMBER, ""), os.environ.get(LIGHTHOUSE, "")
    if not number.isascii() or not number.isdecimal() or int(number) >= num_teams:
        raise ValueError(f"{NUMBER}: got {number!r}, expected a number from 0 to {num_teams - 1}; `sdp teams` sets it")
    if not _is_complete(address):
        raise ValueError(f'{LIGHTHOUSE}: got {address!r}, expected an address such as "http://host:29510"')
    check_torchft()
    return int(number), address


def _is_complete(address: str) -> bool:
    parts = urlsplit(address)
    try:
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port is not None
    except ValueError:  # not a port
        return False


def check_torchft() -> None:
    """Raise ValueError if torchft is not installed, without importing it."""
    if importlib.util.find_spec("torchft") is None:
        raise ValueError('teams need torchft, for Python up to 3.13: pip install "sdp_deepspeed[teams]"')


def _hash(mask: Mask, config: SubnetworkConfig) -> str:
    """What subnetworks have in common beside the plan."""
    shapes = [(name, tuple(shape)) for name, shape in mask.shapes.items()]
    return hashlib.sha256(repr((shapes, mask.trainable, config.branch_scale)).encode()).hexdigest()[:12]
