"""Tensor parallelism on the DeepSpeed host: its AutoTP, or an `mpu` object of the user."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from deepspeed.utils.bwc import (
    bwc_pipeline_parallel_world_size,
    bwc_tensor_model_parallel_group,
    bwc_tensor_model_parallel_world_size,
)
from torch import nn

from sdp_deepspeed.architectures import locate_branches
from sdp_deepspeed.config import KEY
from sdp_deepspeed.parallel.tensor_parallel import TensorParallel, WholeModel, of_author, of_autotp


def check_mpu(mpu: Any) -> None:
    """Raise ValueError for an `mpu` object with pipeline or sequence parallelism."""
    sizes = {"pipeline": 1 if mpu is None else bwc_pipeline_parallel_world_size(mpu)}
    sizes["sequence"] = getattr(mpu, "get_sequence_parallel_world_size", lambda: 1)()
    for what, size in sizes.items():
        if size > 1:
            raise ValueError(
                f"{KEY}: mpu has {size} {what}-parallel ranks; only tensor and data parallelism are supported"
            )


def check_autotp(size: int, *, is_deferred: bool) -> None:
    """Raise ValueError for an AutoTP size that does not fit the ranks, or a model built under `Init`."""
    if dist.get_world_size() % size:
        raise ValueError(
            f"tensor_parallel.autotp_size: got {size}, which does not divide the {dist.get_world_size()} ranks"
        )
    if is_deferred:
        raise ValueError("tensor_parallel needs initialized weights; build the model without sdp_deepspeed.Init")


@contextmanager
def explained_autotp(model: nn.Module) -> Iterator[None]:
    """Context that turns AutoTP's assertions into ValueErrors."""
    try:
        yield
    except AssertionError as error:
        raise ValueError(
            f"tensor_parallel.autotp_size: DeepSpeed's AutoTP cannot divide a {type(model).__name__}: {error}. Use "
            "a Llama, Mistral, Qwen2, Qwen3 or GPT-NeoX, or remove tensor_parallel"
        ) from error


def find_tensor_parallel(
    model: nn.Module,
    mpu: Any,
    before_autotp: WholeModel | None,
    data_parallel: dist.ProcessGroup,
    control: dist.ProcessGroup,
) -> TensorParallel:
    """Find this rank's part of the model under AutoTP or an `mpu` object. Collective.

    Args:
        before_autotp: the model before AutoTP divided it; None without AutoTP.
        data_parallel: this rank's data-parallel group.
        control: gloo group of all ranks.
    """
    if mpu is None or bwc_tensor_model_parallel_world_size(mpu) < 2:
        return TensorParallel(locate_branches(model))
    group, members = bwc_tensor_model_parallel_group(mpu), dist.get_world_size(data_parallel)
    if members * dist.get_world_size(group) != dist.get_world_size():
        raise ValueError(
            f"mpu: got {members} data-parallel x {dist.get_world_size(group)} tensor-parallel ranks, expected "
            f"{dist.get_world_size()} ranks in all"
        )
    if before_autotp is None:
        tensor_parallel = of_author(model, group, control)
    else:
        tensor_parallel = of_autotp(model, before_autotp, group, control)
    tensor_parallel.check_replicated(dict(model.named_parameters()), control)
    return tensor_parallel


def refuse_stage(stage: int, tensor_parallel: TensorParallel) -> None:
    """Raise ValueError for a ZeRO stage in which tensor-parallel ranks would have different buckets."""
    uneven = [name for name, division in tensor_parallel.shards.divisions.items() if not division.is_even]
    if uneven and stage == 2:
        raise ValueError(
            f"zero_optimization.stage: got 2, but tensor-parallel ranks do not divide {uneven[0]!r} evenly; pad "
            "the vocabulary (resize_token_embeddings), or use stage 1"
        )
