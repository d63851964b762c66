"""`load_checkpoint` with DeepSpeed's own `checkpoint.load_universal`: on any layout, from its universal format."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deepspeed.utils import log_dist

from sdp_deepspeed.checkpoint.interop.name_matching import Names
from sdp_deepspeed.checkpoint.interop.pretrained import check_shapes
from sdp_deepspeed.checkpoint.interop.universal import ModelStates, UniversalReader, check_model, facts, is_universal
from sdp_deepspeed.checkpoint.load import What, begin_step, load_tensors
from sdp_deepspeed.checkpoint.save import together
from sdp_deepspeed.checkpoint.state.chunks import explained
from sdp_deepspeed.checkpoint.storage import folder as files

if TYPE_CHECKING:
    from sdp_deepspeed.checkpoint.checkpointer import CheckpointingEngine

LATEST_UNIVERSAL = "latest_universal"


def universal_tag(folder: Path, tag: str | None) -> str | None:
    """The tag to load if it is in the universal format, else None: then it is to be loaded as one of ours.

    Args:
        folder: `load_dir`.
        tag: None for the one that `latest_universal` names.

    Raises:
        ValueError: `latest_universal` names none, or there is neither that file nor a checkpoint of ours.
    """
    if tag is not None:
        return tag if is_universal(folder / tag) else None
    pointer = folder / LATEST_UNIVERSAL
    own = files.candidates(folder)[0]
    if not pointer.is_file():
        if own:
            return None
        raise ValueError(
            f"load_checkpoint: {folder} has no {LATEST_UNIVERSAL} and no checkpoint of sdp_deepspeed; make the first "
            "with `python -m sdp_deepspeed.checkpoint from-zero`, or switch checkpoint.load_universal off"
        )
    named = pointer.read_text(encoding="utf-8").strip()
    if not is_universal(folder / named):
        raise ValueError(f"load_checkpoint: {pointer} names {named!r}, which is no universal checkpoint in {folder}")
    if own:
        log_dist(
            f"load_checkpoint: loading {folder / named}, because checkpoint.load_universal is set; switch it off to go "
            f"on from {own[0]}",
            ranks=[0],
            level=logging.WARNING,
        )
    return named


def load_universal(engine: CheckpointingEngine, path: Path, what: What) -> dict[str, Any]:
    """Fill weights, masters and moments, and counters and schedule as `what` says; every rank calls it.

    Returns:
        The client state.

    Raises:
        ValueError: on all ranks, before anything is changed: files are damaged, or of another model.
    """
    return together(engine.world, partial(_load, engine, path, what))


def _load(engine: CheckpointingEngine, path: Path, what: What) -> dict[str, Any]:
    where = f"load_checkpoint: {path}"
    layout = engine.layout()
    shapes = {name: layout.shape(name) for name in layout.tensors}
    states = ModelStates.read(path)
    reader = UniversalReader(path, Names.of(engine.module, layout.tensors), shapes)
    check_model(reader, path, strict=what.module_strict)
    check_shapes(reader, layout, where)
    wants_moments = what.optimizer_states and not what.module_only
    options = [{k: v for k, v in group.items() if k != "params"} for group in engine.optimizer.param_groups]
    with explained(where):
        load_tensors(engine, reader, what, facts(reader, path, options) if wants_moments else None)
    if what.module_only:
        return states.client_state
    if what.lr_scheduler_states and engine.lr_scheduler is not None and states.lr_scheduler is not None:
        engine.lr_scheduler.load_state_dict(states.lr_scheduler)
    for name, value in states.counters.items():
        setattr(engine, name, value)
    begin_step(engine)
    return states.client_state
