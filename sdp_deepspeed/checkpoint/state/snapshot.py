"""Everything that one rank contributes to a checkpoint, collected without a collective."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from sdp_deepspeed.checkpoint.state import random_state
from sdp_deepspeed.checkpoint.state.chunks import StateDict
from sdp_deepspeed.checkpoint.state.optimizer_state import Counts, OptimizerState

if TYPE_CHECKING:
    from sdp_deepspeed.checkpoint.checkpointer import CheckpointingEngine

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

    def to_host(self) -> Snapshot:
        """A copy that later steps do not change."""
        return replace(self, chunks={key: chunks.to_host() for key, chunks in self.chunks.items()})


def step_counts(engine: CheckpointingEngine) -> list[Counts | None]:
    """Of the optimizer's groups, as far as this rank knows them."""
    return OptimizerState(engine.optimizer, engine.layout()).counts()


def take(
    engine: CheckpointingEngine,
    client_state: Mapping[str, Any],
    counts: Sequence[Counts | None],
    *,
    exclude_frozen: bool,
) -> Snapshot:
    """This rank's share now; chunks are views of live tensors.

    Args:
        counts: `step_counts` of all ranks, merged.

    Raises:
        ValueError: client state that could not be loaded again safely.
    """
    layout = engine.layout()
    optimizer = OptimizerState(engine.optimizer, layout)
    owned = [fragment for fragments in optimizer.owned_fragments() for fragment in fragments]
    chunks = layout.of_one_writer(layout.owned_weights(owned, exclude_frozen=exclude_frozen) | optimizer.owned())
    common = {
        "client_state": dict(client_state),
        "lr_scheduler": engine.lr_scheduler.state_dict() if engine.lr_scheduler is not None else None,
        "counters": {name: getattr(engine, name) for name in COUNTERS},
        "optimizer": optimizer.facts(counts),
        "same": same_layout_facts(engine),
    }
    own = {"random": random_state.capture(), "buffers": layout.own_buffers()}
    return Snapshot(chunks, _plain_bytes(own), _plain_bytes(common), _documents(engine), int(engine.global_steps))


def same_layout_facts(engine: CheckpointingEngine) -> dict[str, Any]:
    """Only where these are as they were a rank goes on with its own random numbers and buffers."""
    return {
        "ranks": engine.world.size,
        "plan": engine.plan.hash,
        "subnetwork_of_rank": list(engine.plan.subnetwork_of_rank),
        "tensor_parallel": engine.shards.size,
    }


def _plain_bytes(state: Mapping[str, Any]) -> bytes:
    buffer = io.BytesIO()
    try:
        torch.save(dict(state), buffer)
        buffer.seek(0)
        torch.load(buffer, weights_only=True)
    except Exception as problem:
        raise ValueError(
            "checkpoint: client_state and the LR scheduler's state may hold tensors, numbers, strings, lists and dicts "
            f"only, so that loading never runs foreign code: {str(problem).splitlines()[0]}"
        ) from problem
    return buffer.getvalue()


def _documents(engine: CheckpointingEngine) -> dict[str, str]:
    texts = {"plan.json": _json(engine.plan.to_json()), "config.json": _json(engine.config)}
    config: Any = getattr(engine.module, "config", None)
    if hasattr(config, "to_dict"):
        texts["model_config.json"] = _json(config.to_dict() | {"architectures": [type(engine.module).__name__]})
    generation: Any = getattr(engine.module, "generation_config", None)
    if hasattr(generation, "to_dict"):
        texts["generation_config.json"] = _json(generation.to_dict())
    return texts


def _json(facts: Any) -> str:
    return json.dumps(facts, indent=1, default=str) + "\n"
