"""`load_checkpoint` with DeepSpeed's own `checkpoint.load_universal`: on any layout, from its universal format."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import Any

from deepspeed.utils import log_dist

from sdp_deepspeed.atomic_files import regular
from sdp_deepspeed.checkpoint.interop.name_matching import NameMap
from sdp_deepspeed.checkpoint.interop.pretrained import check_shapes
from sdp_deepspeed.checkpoint.interop.universal import (
    LATEST_UNIVERSAL,
    ModelStates,
    UniversalReader,
    check_model,
    is_universal,
    optimizer_metadata,
)
from sdp_deepspeed.checkpoint.load import LoadOptions, restore_progress
from sdp_deepspeed.checkpoint.state.chunks import translated_dcp_errors
from sdp_deepspeed.checkpoint.state.fill import fill
from sdp_deepspeed.checkpoint.state.trained_state import TrainedState
from sdp_deepspeed.checkpoint.storage import folder as files
from sdp_deepspeed.checkpoint.storage.errors import translating_os_errors
from sdp_deepspeed.distributed.agreement import run_on_all_ranks


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
    tags = files.candidates(folder)[0]  # of our own checkpoints
    if not pointer.is_file():
        if tags:
            return None
        raise ValueError(
            f"load_checkpoint: {folder} has no {LATEST_UNIVERSAL} and no checkpoint of sdp_deepspeed; make the first "
            "with `sdp checkpoint from-zero`, or switch checkpoint.load_universal off"
        )
    named = regular(pointer).read_text(encoding="utf-8").strip()
    if not is_universal(folder / named):
        raise ValueError(f"load_checkpoint: {pointer} names {named!r}, which is no universal checkpoint in {folder}")
    if tags:
        log_dist(
            f"load_checkpoint: loading {folder / named}, because checkpoint.load_universal is set; switch it off to go "
            f"on from {tags[0]}",
            ranks=[0],
            level=logging.WARNING,
        )
    return named


def load_universal(trained: TrainedState, path: Path, options: LoadOptions) -> dict[str, Any]:
    """Fill weights, masters and moments, and counters and schedule as `options` say; every rank calls it.

    Returns:
        The client state.

    Raises:
        ValueError: on all ranks, before anything is changed: files are damaged, or of another model.
    """
    return run_on_all_ranks(trained.world, translating_os_errors(partial(_load, trained, path, options)))


def _load(trained: TrainedState, path: Path, options: LoadOptions) -> dict[str, Any]:
    where = f"load_checkpoint: {path}"
    weights = trained.rank_state().weights
    shapes = {name: weights.shape(name) for name in weights.tensors}
    states = ModelStates.read(path)
    reader = UniversalReader.of_folder(path, NameMap.of(trained.module, weights.tensors), shapes)
    check_model(reader, path, strict=options.module_strict)
    check_shapes(reader, weights, where)
    groups = [{k: v for k, v in group.items() if k != "params"} for group in trained.optimizer.param_groups]
    metadata = optimizer_metadata(reader, path, groups) if options.moments else None
    with translated_dcp_errors(where):
        fill(trained, reader, strict=options.module_strict, optimizer_metadata=metadata)
    if not options.module_only:
        restore_progress(trained, states.counters, states.lr_scheduler, options)
    return states.client_state
