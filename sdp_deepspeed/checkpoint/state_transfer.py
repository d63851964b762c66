"""Move state between ranks in memory: a checkpoint that is saved and loaded without files.

For re-planning: `collect_state` of the old layout, then a new mask and a new `ShardedOptimizer` with the same wrapped
optimizer, then `load_state`. The result equals saving under the old plan and loading under the new one, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from sdp_deepspeed.checkpoint.box_exchange import BoxDirectory, fill
from sdp_deepspeed.checkpoint.dcp_planners import State
from sdp_deepspeed.checkpoint.optimizer_state import OptimizerFacts, group_facts, optimizer_facts, restore_optimizer
from sdp_deepspeed.checkpoint.rank_state import RankState, buffers_of_rank, restore_buffers
from sdp_deepspeed.checkpoint.saved_tensors import make_targets, written_state
from sdp_deepspeed.parallel.consistency import gather_results, run_on_all_ranks


@dataclass(frozen=True)
class StateSnapshot:
    """One rank's share of the training state, as in a checkpoint.

    Args:
        tensors: views of the old shards, which must not be written to before `load_state`.
        buffers: copies of this rank's buffers, which it keeps if the layout is unchanged.
    """

    tensors: State
    optimizer: OptimizerFacts
    layout: dict[str, Any]
    buffers: dict[str, torch.Tensor]


def collect_state(state: RankState) -> StateSnapshot:
    """The state of the old layout; collective."""
    control = state.groups.control
    numbers = gather_results(lambda: group_facts(state), control)

    def copied() -> StateSnapshot:
        buffers = {name: buffer.clone() for name, buffer in buffers_of_rank(state).items()}
        return StateSnapshot(written_state(state), optimizer_facts(state, numbers), state.layout, buffers)

    return run_on_all_ranks(copied, control)


def load_state(snapshot: StateSnapshot, state: RankState, device: torch.device) -> int:
    """Load the state into the new layout; collective.

    Returns:
        Number of bytes that this rank has sent.

    Raises:
        ValueError: on all ranks, if the state does not fit the new optimizer.
    """
    control = state.groups.control
    directory = BoxDirectory(snapshot.tensors, control)
    stored = directory.metadata.state_dict_metadata
    boxes, moments = run_on_all_ranks(lambda: make_targets(state, stored, snapshot.optimizer), control)
    num_bytes = fill(boxes, snapshot.tensors, directory, device)
    assert moments is not None
    restore_optimizer(state, moments, snapshot.optimizer)
    state.optimizer.gather_weights()
    if snapshot.layout == state.layout:
        restore_buffers(state, snapshot.buffers)
    return num_bytes
