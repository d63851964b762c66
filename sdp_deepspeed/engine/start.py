"""Before an engine is built, all ranks agree that they build one, of the same config; no group and no device yet."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import log_dist, logger
from torch import nn

from sdp_deepspeed.config import KEY, SubnetworkConfig, parse
from sdp_deepspeed.distributed.agreement import Gatherer, OneRank, raise_on_all_ranks, run_on_all_ranks
from sdp_deepspeed.distributed.store_gatherer import StoreGatherer
from sdp_deepspeed.engine.deepspeed_settings import resolved_config
from sdp_deepspeed.engine.private_api import check_hosts
from sdp_deepspeed.gpus import unusable_gpus
from sdp_deepspeed.masking.mixins import is_cut
from sdp_deepspeed.messages import listed
from sdp_deepspeed.schedule import Schedule
from sdp_deepspeed.support.host_types import refuse_wrong_types
from sdp_deepspeed.support.refusals import refuse_modules, refuse_unsupported, without_effect
from sdp_deepspeed.tensor_parallel.checks import check_mpu
from sdp_deepspeed.version import __version__

# Of DeepSpeed's config what decides the training. Ranks may log and profile as they like.
_COMPARED = (
    *("zero_optimization", "bf16", "fp16", "torch_autocast", "data_types", "communication_data_type"),
    *("gradient_accumulation_steps", "managed_gradient_accumulation", "gradient_clipping", "optimizer", "scheduler"),
    *("tensor_parallel", "sequence_parallel_size"),
)


@dataclass(frozen=True)
class Start:
    """An engine that this rank is about to build.

    Args:
        block: the parsed block, of its first phase; None for an engine of DeepSpeed's own.
        ranks: all ranks; meets through the store, since groups and devices come later.
        schedule: of the block; None if nothing changes over time.
    """

    block: SubnetworkConfig | None
    ranks: Gatherer
    schedule: Schedule | None = None

    @classmethod
    def of(cls, config: Any) -> Start:
        """Announce an engine to the other ranks. One with the block waits for theirs.

        Args:
            config: DeepSpeed's, loaded.

        Raises:
            ValueError: on all ranks, what is wrong with the block on one of them.
            RuntimeError: another rank builds an engine of DeepSpeed's own, or none.
        """
        ranks = _ranks()
        error = block = schedule = None
        try:
            block = parse(config) if isinstance(config, dict) else None
            schedule = None if block is None else Schedule.of(config, KEY)
        except ValueError as problem:
            error = problem
        if block is None and error is None:
            if isinstance(ranks, StoreGatherer):
                ranks.leave(f"has a config without {KEY!r}, or with enabled: false. Give all ranks the same config")
            return cls(None, OneRank())
        raise_on_all_ranks(ranks, error)
        return cls(block, ranks, schedule)

    def check(self, model: nn.Module, options: Mapping[str, Any]) -> None:
        """Refuse on all ranks what one of them cannot do, and values that only some of them have.

        Args:
            options: of the engine's constructor.

        Raises:
            ValueError: by name.
        """
        assert self.block is not None
        run_on_all_ranks(self.ranks, partial(_refuse, self.block, model, options))
        if self.schedule is not None:
            run_on_all_ranks(self.ranks, partial(self.schedule.check_first, _of_first_phase(options["config_class"])))
        given = _given(options) | ({} if self.schedule is None else {f"{KEY}.schedule": self.schedule.in_words()})
        values = comparable(self.block, resolved_config(options["config"], options["config_class"]), given)
        digest = hashlib.sha256(repr(sorted(values.items())).encode()).hexdigest()
        if len(set(self.ranks.gather_objects(digest))) > 1:
            raise ValueError(difference(self.ranks.gather_objects(values)))


def _refuse(block: SubnetworkConfig, model: nn.Module, options: Mapping[str, Any]) -> None:
    """Refuse what cannot work, before any group is made or any tensor is broadcast.

    Raises:
        ValueError: by name.
    """
    refuse_wrong_types(options["config"])
    config = resolved_config(options["config"], options["config_class"])
    refuse_unsupported(block, config)
    if is_cut(model):  # before DeepSpeed broadcasts tensors of which some ranks have none
        raise ValueError(f"{KEY}: an earlier engine cut this model down to subnetworks; build or load it anew")
    refuse_modules(model)
    unusable = unusable_gpus() if get_accelerator().device_name() == "cpu" else None
    if unusable is not None and int(os.environ.get("LOCAL_RANK", "0")) == 0:  # may be so on one node only
        logger.warning(unusable)
    for warning in check_hosts() + without_effect(block, config):
        log_dist(warning, ranks=[0], level=logging.WARNING)
    if options.get("mesh_device") is not None:
        raise ValueError(f"{KEY}: sequence parallelism is not possible, so deepspeed.initialize takes no mesh_param")
    if options.get("mpu") is not None:
        check_mpu(options["mpu"])


def _of_first_phase(config: Any) -> dict[str, int]:
    """What of DeepSpeed's own settings a phase may change, as the config has it."""
    micro_batch = config.train_micro_batch_size_per_gpu
    return {"stage": int(config.zero_config.stage), "train_micro_batch_size_per_gpu": int(micro_batch)}


def _given(options: Mapping[str, Any]) -> dict[str, str]:
    """What is handed in beside the config and not compared later, as the optimizer is."""
    return {"lr_scheduler (argument)": type(options.get("lr_scheduler")).__qualname__}


def comparable(block: SubnetworkConfig, config: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, str]:
    """What must be the same on all ranks, by JSON path, as JSON."""
    own = block.model_dump()
    if block.plan_path is not None:  # nodes may keep it in folders of their own; the plan itself is compared later
        own["assignment"] = "<a plan>"
    checkpoint = config.get("checkpoint") or {}
    tree = {
        KEY: own,
        **{key: config[key] for key in _COMPARED if key in config},
        "checkpoint.load_universal": checkpoint.get("load_universal", False),
        **given,
        "version of sdp_deepspeed": __version__,
        "accelerator": get_accelerator().device_name(),
    }
    return {path: json.dumps(value, default=_words, skipkeys=True) for path, value in _leaves(tree)}


def _words(value: Any) -> str:
    """Of what is no JSON; never an address in memory, which differs between ranks."""
    return str(value) if isinstance(value, (torch.dtype, Enum, Path)) else type(value).__qualname__


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key in sorted(tree, key=str):
        if isinstance(tree[key], Mapping):
            yield from _leaves(tree[key], f"{path}{key}.")
        else:
            yield f"{path}{key}", tree[key]


def difference(values: Sequence[Mapping[str, str]]) -> str:
    """The message for settings that differ.

    Args:
        values: of each rank, by JSON path.
    """
    paths = sorted({path for own in values for path in own})
    lines = []
    for path in paths:
        ranks: dict[str, list[int]] = {}
        for rank, own in enumerate(values):
            ranks.setdefault(own.get(path, "absent"), []).append(rank)
        if len(ranks) > 1:
            said = [f"{value} on rank {listed(own)}" for value, own in ranks.items()]
            lines.append(f"{path} is {' and '.join(said[:5])}")
    return (
        f"ranks were given different settings: {listed(lines, separator='; ')}. Give all ranks the same config and "
        "arguments"
    )


def _ranks() -> Gatherer:
    """All ranks, for one engine: ranks build engines together, so that all count them alike."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return OneRank()
    rank = dist.get_rank()
    store: Any = dist.distributed_c10d._get_default_store()
    number = store.add(f"sdp_deepspeed/engines/{rank}", 1)
    return StoreGatherer(
        store,
        f"sdp_deepspeed/engine/{number}",
        (rank, dist.get_world_size()),
        what=f"deepspeed.initialize with {KEY!r}",
        seconds=store.timeout.total_seconds(),
        notify=logger.warning,
    )
