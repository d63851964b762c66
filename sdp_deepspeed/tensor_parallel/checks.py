"""What tensor-parallel groups cannot be, said before anything waits for them."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from deepspeed.utils.bwc import bwc_pipeline_parallel_world_size
from torch import nn

from sdp_deepspeed.architectures import LocatedBranch
from sdp_deepspeed.config import KEY
from sdp_deepspeed.distributed.communicator import RankGroups
from sdp_deepspeed.plan.shards import Shards


def check_mpu(mpu: Any) -> None:
    """Refuse what an `mpu` object may name besides tensor and data parallelism."""
    sequence = mpu.get_sequence_parallel_world_size() if hasattr(mpu, "get_sequence_parallel_world_size") else 1
    for what, size in {"pipeline": bwc_pipeline_parallel_world_size(mpu), "sequence": sequence}.items():
        if size > 1:
            raise ValueError(
                f"{KEY}: mpu has {size} {what}-parallel ranks; only tensor and data parallelism are possible with it"
            )


def check_size(size: int, num_ranks: int) -> None:
    """AutoTP says it by an assertion without words."""
    if num_ranks % size:
        raise ValueError(
            f"tensor_parallel.autotp_size: got {size}, which does not divide the {num_ranks} ranks that run; use a "
            "divisor of their number"
        )


def refuse_uneven(shards: Shards, stage: int) -> None:
    """
    Args:
        stage: ZeRO stage.

    Raises:
        ValueError: at stage 2 ranks of a group would have other buckets than one another, and pair up with their own.
    """
    uneven = next((name for name, division in shards.divisions.items() if not division.is_even), None)
    if uneven is not None and stage == 2:
        raise ValueError(
            f"zero_optimization.stage: got 2, but {shards.size} tensor-parallel ranks do not divide {uneven!r} evenly "
            f"({shards.divisions[uneven].lengths}); pad the vocabulary to a multiple of {shards.size} "
            "(resize_token_embeddings), or use stage 1"
        )


@contextmanager
def translated_autotp_errors(model: nn.Module) -> Iterator[None]:
    """ValueError for AutoTP's assertions about models that it does not know."""
    try:
        yield
    except AssertionError as problem:
        raise ValueError(
            f"tensor_parallel.autotp_size: DeepSpeed's AutoTP cannot divide a {type(model).__name__}: {problem}. Use a "
            "Llama, Mistral, Qwen2, Qwen3 or GPT-NeoX, or remove tensor_parallel"
        ) from problem


def check_divided(model: nn.Module, branches: Sequence[LocatedBranch], divided: Collection[str]) -> None:
    """Refuse branches that AutoTP divides so that its ranks do not compute what they do: heads that need each other,
    fused projections, layers of which only some are divided. DeepSpeed trains some of them to something else.

    Args:
        model: divided.
        branches: as this rank has them (`Shards.local_branch`).
        divided: dense names of the divided parameters.

    Raises:
        ValueError: by name. Layers that gather their output are left to whoever says so in a `partition_config`.
    """
    for branch in branches:
        parents = {piece.parameter.rpartition(".")[0] for piece in branch.pieces if piece.parameter in divided}
        gathers = any(getattr(model.get_submodule(name), "gather_output", False) for name in parents)
        reason = branch.uncuttable_reason if branch.cut_tensors else branch.description.uncut_reason
        if parents and reason and not gathers:
            raise ValueError(
                f"tensor_parallel.autotp_size: DeepSpeed's AutoTP divides {branch.name!r} so that its ranks would not "
                f"compute what it does: {reason}. Remove tensor_parallel, or say in tensor_parallel.partition_config "
                "how to divide it"
            )


def check_groups(groups: RankGroups) -> None:
    """Data-parallel times tensor-parallel ranks must be all ranks; ValueError if an `mpu` object says otherwise."""
    num_peers = 1 if groups.tp_group is None else groups.tp_group.size
    if groups.dp_group.size * num_peers != groups.world.size:
        raise ValueError(
            f"mpu: {groups.dp_group.size} data-parallel times {num_peers} tensor-parallel ranks are not the "
            f"{groups.world.size} ranks that run, and there can be no other kind"
        )
