"""Compare the block, and the settings that training depends on, across all ranks before an engine is built.

Ranks compare through the store of the default process group: a rank whose config lacks the block builds DeepSpeed's own
engine and would not take part in our collectives.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.utils import log_dist

from sdp_deepspeed.config import SubnetworkConfig, parse
from sdp_deepspeed.messages import KEY, listed
from sdp_deepspeed.parallel.consistency import describe_different_settings
from sdp_deepspeed.parallel.groups import default_store
from sdp_deepspeed.version import __version__

# Keys of the DeepSpeed config that affect training. Logging and profiling may differ between ranks.
_COMPARED = (
    *("zero_optimization", "bf16", "fp16", "torch_autocast", "data_types", "communication_data_type"),
    *("gradient_accumulation_steps", "managed_gradient_accumulation", "gradient_clipping", "optimizer", "scheduler"),
    *("tensor_parallel", "sequence_parallel_size"),
)
_NO_BLOCK = "no block"
_numbers = itertools.count()  # of engines; all ranks build them together, so the counts agree


def parse_and_compare(config: Any, options: Mapping[str, Any]) -> SubnetworkConfig | None:
    """Parse the block and check that it is the same on all ranks.

    Returns:
        The block; None if DeepSpeed's own engine is to be built.

    Raises:
        ValueError: the block is invalid on some rank, or settings differ between ranks.
        RuntimeError: some ranks have a config without the block.
    """
    error = block = None
    try:
        block = parse(config) if isinstance(config, Mapping) else None
    except ValueError as problem:
        error = f"{problem}"
    has_optimizer = options.get("optimizer") is not None or "optimizer" in (config or {})
    if block is not None and not has_optimizer:
        block = None  # a model that is not trained, such as a reference model
        log_dist(f"{KEY}: there is no optimizer, so the engine is plain DeepSpeed's with the whole model", ranks=[0])
    if not dist.is_initialized() or dist.get_world_size() == 1:
        if error is not None:
            raise ValueError(error)
        return block
    store: Any = default_store()
    rank, size, number = dist.get_rank(), dist.get_world_size(), next(_numbers)
    values = {} if block is None else _comparable(block, config, options)
    text = json.dumps({"error": error, "values": values if error is None else {}})
    store.set(f"sdp_deepspeed/engine/{number}/{rank}", _NO_BLOCK if block is None and error is None else text)
    if block is None and error is None:
        return None
    keys = [f"sdp_deepspeed/engine/{number}/{other}" for other in range(size)]
    store.wait(keys)
    texts = [value.decode() for value in store.multi_get(keys)]
    _check(texts)
    return block


def _check(texts: Sequence[str]) -> None:
    without = [rank for rank, text in enumerate(texts) if text == _NO_BLOCK]
    if without:
        raise RuntimeError(
            f"rank {listed(without)} has a config without {KEY!r}, or with enabled: false; use one config on all ranks"
        )
    of_ranks = [json.loads(text) for text in texts]
    failed = [rank for rank, of_rank in enumerate(of_ranks) if of_rank["error"] is not None]
    if failed:
        where = f" [on rank {listed(failed)}]" if len(failed) < len(of_ranks) else ""
        raise ValueError(of_ranks[failed[0]]["error"] + where)
    if len(set(texts)) > 1:
        raise ValueError(describe_different_settings([of_rank["values"] for of_rank in of_ranks]))


def _comparable(block: SubnetworkConfig, config: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, str]:
    """The settings that must be equal on all ranks: JSON values by JSON path."""
    tree = {
        KEY: block.comparable() | {"schedule": config[KEY].get("schedule")},
        **{key: config[key] for key in _COMPARED if key in config},
        "lr_scheduler (argument)": type(options.get("lr_scheduler")).__qualname__,
        "version of sdp_deepspeed": __version__,
        "accelerator": get_accelerator().device_name(),
    }
    return {path: json.dumps(value, default=_words, skipkeys=True) for path, value in _leaves(tree)}


def _words(value: Any) -> str:
    """Text for values that are not JSON, without memory addresses, which differ between ranks."""
    return str(value) if isinstance(value, (torch.dtype, Enum)) else type(value).__qualname__


def _leaves(tree: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    for key in sorted(tree, key=str):
        if isinstance(tree[key], Mapping):
            yield from _leaves(tree[key], f"{path}{key}.")
        else:
            yield f"{path}{key}", tree[key]
