"""Everything that one rank contributes to a checkpoint, collected without a collective."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from sdp_deepspeed.checkpoint.state.chunks import StateDict
from sdp_deepspeed.checkpoint.state.trained_state import TrainedState
from sdp_deepspeed.checkpoint.storage.names import CONFIG, GENERATION_CONFIG, MODEL_CONFIG, PLAN
from sdp_deepspeed.checkpoint.storage.plain_pickles import refusal_reason
from sdp_deepspeed.core.checkpoint.random_state import random_state

# Not micro_steps: gradients that wait for the end of an accumulation are not saved, so a step begins anew.
COUNTERS = ("global_steps", "global_samples", "skipped_steps")


@dataclass(frozen=True)
class Snapshot:
    """One rank's share.

    Args:
        chunks: of dense tensors, which this rank writes.
        own: what only this rank has (random numbers, buffers), as bytes of `torch.save`.
        common: what is one for the whole run, as bytes; the same on all ranks.
        documents: JSON files for readers: plan, config, model config.
        global_steps: steps of the optimizer so far.
    """

    chunks: StateDict
    own: bytes
    common: bytes
    documents: Mapping[str, str]
    global_steps: int


def step_counts(trained: TrainedState) -> Any:
    """As far as this rank knows them (`OptimizerChunks.counts`)."""
    return trained.rank_state().optimizer.counts()


def take_snapshot(
    trained: TrainedState,
    client_state: Mapping[str, Any],
    counts: Sequence[Any],
    *,
    exclude_frozen: bool,
) -> Snapshot:
    """This rank's share now; chunks are views of live tensors.

    Args:
        counts: `step_counts` of all ranks.

    Raises:
        ValueError: client state that could not be loaded again safely.
    """
    state = trained.rank_state()
    common = {
        "client_state": dict(client_state),
        "lr_scheduler": trained.lr_scheduler.state_dict() if trained.lr_scheduler is not None else None,
        "counters": {name: getattr(trained, name) for name in COUNTERS},
        "optimizer": state.optimizer.metadata(counts),
        "same": layout_metadata(trained),
    }
    own = {"random": random_state(), "buffers": state.weights.own_buffers()}
    return Snapshot(
        state.optimizer.written(exclude_frozen=exclude_frozen),
        _plain_bytes(own),
        _plain_bytes(common),
        _documents(trained),
        int(trained.global_steps),
    )


def layout_metadata(trained: TrainedState) -> dict[str, Any]:
    """Only where these are as they were a rank goes on with its own random numbers and buffers."""
    return {
        "ranks": trained.world.size,
        "plan": trained.plan.hash,
        "subnetwork_of_rank": list(trained.plan.subnetwork_of_rank),
        "tensor_parallel": trained.tensor_parallel_layout,
    }


def _plain_bytes(state: Mapping[str, Any]) -> bytes:
    """As `torch.save` writes what a reader gets: plain, and on the host, so that no file names a device."""
    buffer = io.BytesIO()
    try:
        torch.save(dict(state), buffer)
        buffer.seek(0)
        plain = torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception as problem:
        raise ValueError(
            "checkpoint: client_state and the LR scheduler's state may hold tensors, numbers, strings, lists and dicts "
            f"only, so that loading never runs foreign code: {refusal_reason(problem)}"
        ) from None
    buffer = io.BytesIO()
    torch.save(plain, buffer)
    return buffer.getvalue()


def _documents(trained: TrainedState) -> dict[str, str]:
    texts = {PLAN: _json(trained.plan.to_json()), CONFIG: _json(trained.config)}
    config: Any = getattr(trained.module, "config", None)
    if hasattr(config, "to_dict"):
        texts[MODEL_CONFIG] = _json(config.to_dict() | {"architectures": [type(trained.module).__name__]})
    generation: Any = getattr(trained.module, "generation_config", None)
    if hasattr(generation, "to_dict"):
        texts[GENERATION_CONFIG] = _json(generation.to_dict())
    return texts


def _json(content: Any) -> str:
    return json.dumps(content, indent=1, default=str) + "\n"
