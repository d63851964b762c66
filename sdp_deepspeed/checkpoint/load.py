"""Read a checkpoint on any layout: verify, choose, fill what this rank has (DESIGN.md section 6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.storage import StorageReader

from sdp_deepspeed.checkpoint.save import COMMON, own_file, together
from sdp_deepspeed.checkpoint.state import random_state
from sdp_deepspeed.checkpoint.state.chunks import Chunks, StateDict, explained, fill
from sdp_deepspeed.checkpoint.state.optimizer_state import OptimizerState
from sdp_deepspeed.checkpoint.state.rank_chunks import MASTER, WEIGHT, Layout
from sdp_deepspeed.checkpoint.state.snapshot import COUNTERS, same_layout_facts
from sdp_deepspeed.checkpoint.storage import folder as files
from sdp_deepspeed.checkpoint.storage.chunk_files import SafetensorsReader
from sdp_deepspeed.distributed.communicator import Communicator

if TYPE_CHECKING:
    from sdp_deepspeed.checkpoint.checkpointer import CheckpointingEngine


@dataclass(frozen=True)
class What:
    """What of a checkpoint is loaded, as in DeepSpeed's `load_checkpoint`."""

    optimizer_states: bool = True
    lr_scheduler_states: bool = True
    module_only: bool = False
    module_strict: bool = True


def choose(folder: Path, tag: str | None, communicator: Communicator) -> tuple[str | None, list[str]]:
    """The tag to load, verified, and warnings; None if the folder has no checkpoint. Every rank calls it.

    Raises:
        ValueError: on all ranks: the tag that was asked for is missing or damaged, or all are.
    """
    writes = communicator.rank == 0
    together(communicator, lambda: files.bring_back(folder) if writes and folder.is_dir() else None)
    if tag is not None:
        problems = _problems(folder / tag, communicator)
        if problems:
            raise ValueError("; ".join(problems[:5]))
        return tag, []
    found = together(communicator, lambda: files.candidates(folder) if writes else None)
    tags, remark = communicator.gather_objects(found)[0]
    warnings = [] if remark is None else [f"checkpoint: {remark}; looking for the newest complete one"]
    for name in tags:
        problems = _problems(folder / name, communicator)
        if not problems:
            return name, [*warnings, *([f"checkpoint: loading {folder / name}"] if warnings else [])]
        warnings += problems[:5]
    if warnings:
        raise ValueError(f"{'; '.join(warnings)}; {folder} has no complete checkpoint")
    return None, []


def _problems(path: Path, communicator: Communicator) -> list[str]:
    """What is wrong with a checkpoint; each rank looks at its share of the files."""
    own: list[str] = []
    try:
        records = files.read_manifest(path)["files"]
        for name in files.share(list(records), communicator.rank, communicator.size):
            if problem := files.problem_of(path, name, records[name]):
                own.append(f"checkpoint: {problem}")
    except (OSError, ValueError) as problem:
        own.append(str(problem))
    return list(dict.fromkeys(problem for every in communicator.gather_objects(own) for problem in every))


def restore(engine: CheckpointingEngine, path: Path, what: What) -> dict[str, Any]:
    """Restore a verified checkpoint; every rank calls it. Returns the client state.

    Raises:
        ValueError: on all ranks, before anything is changed, if it does not fit the model or the optimizer.
    """
    everyone = engine.world
    common: dict[str, Any] = together(everyone, lambda: torch.load(path / COMMON, weights_only=True))

    def read() -> None:
        with explained(f"checkpoint: {path}"):
            load_tensors(engine, SafetensorsReader(path), what, common["optimizer"])

    together(everyone, read)
    if not what.module_only:
        _restore_rest(engine, common, what)
        together(everyone, lambda: _restore_own(engine, path, common))
    return common["client_state"]


def load_tensors(
    engine: CheckpointingEngine, reader: StorageReader, what: What, facts: Mapping[str, Any] | None
) -> None:
    """Fill what this rank has from any source; no collective.

    Args:
        facts: of the optimizer that wrote it (`OptimizerState.facts`); None if there is none.
    """
    metadata = reader.read_metadata()
    layout = engine.layout()
    weights = _weight_targets(layout, metadata, strict=what.module_strict)
    optimizer = OptimizerState(engine.optimizer, layout)
    masters = optimizer.master_targets(metadata.state_dict_metadata)
    _check_known(masters, metadata)
    moments, state = None, None
    if facts is not None and what.optimizer_states and not what.module_only:
        moments, state = optimizer.new_moments(metadata.state_dict_metadata, facts)
    with torch.no_grad():
        fill(weights, reader)
        fill(masters, reader)
        if moments is not None and state is not None and facts is not None:
            fill(moments, reader)
            optimizer.restore(state, facts)


def _weight_targets(layout: Layout, metadata: Metadata, *, strict: bool) -> StateDict:
    """Where weights are loaded to; in another precision from masters, or they would be rounded twice."""
    stored = metadata.state_dict_metadata
    _check_names(layout, stored, strict=strict)
    result: StateDict = {}
    for piece, box, values in layout.stored_weights():
        name = piece.parameter
        weight: Any = stored.get(f"{WEIGHT}/{name}")
        if weight is not None:
            other = weight.properties.dtype != values.dtype and f"{MASTER}/{name}" in stored
            key = MASTER if other else WEIGHT
            result.setdefault(f"{key}/{name}", Chunks(layout.shape(name), values.dtype)).add(box, values)
    return result


def _check_names(layout: Layout, stored: Mapping[str, Any], *, strict: bool) -> None:
    names = {key.removeprefix(f"{WEIGHT}/") for key in stored if key.startswith(f"{WEIGHT}/")}
    missing = sorted({name for name in layout.tensors if prod(layout.shape(name))} - names)
    unknown = sorted(names - set(layout.tensors))
    if strict and (missing or unknown):
        raise ValueError(
            f"checkpoint: it is of another model: {len(missing)} tensors are missing in it ({missing[:3]}), "
            f"{len(unknown)} are not in the model ({unknown[:3]}); build the model that was saved, or give "
            "load_module_strict=False"
        )
    for name in names & set(layout.tensors):
        found, here = tuple(stored[f"{WEIGHT}/{name}"].size), layout.shape(name)
        if found != here:
            raise ValueError(
                f"checkpoint: {name!r} has shape {found} in it and {here} in the model; build the model that was saved"
            )


def _check_known(masters: StateDict, metadata: Metadata) -> None:
    """Masters of tensors that the checkpoint lacks (not strict) stay as they are."""
    for key in [key for key in masters if key not in metadata.state_dict_metadata]:
        del masters[key]


def _restore_rest(engine: CheckpointingEngine, common: Mapping[str, Any], what: What) -> None:
    if what.lr_scheduler_states and engine.lr_scheduler is not None and common["lr_scheduler"] is not None:
        engine.lr_scheduler.load_state_dict(common["lr_scheduler"])
    for name in COUNTERS:
        setattr(engine, name, common["counters"][name])
    begin_step(engine)


def begin_step(engine: CheckpointingEngine) -> None:
    """A step that is half accumulated belongs to the run that was left, and may have had another number of parts."""
    engine.micro_steps = engine.global_steps * engine.gradient_accumulation_steps()
    engine.optimizer.zero_grad()


def _restore_own(engine: CheckpointingEngine, path: Path, common: Mapping[str, Any]) -> None:
    if common["same"] != same_layout_facts(engine):
        return
    own = torch.load(path / own_file(engine.world.rank), weights_only=True)
    random_state.restore(own["random"])
    engine.layout().restore_buffers(own["buffers"])
