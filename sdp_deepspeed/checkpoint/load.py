"""Choose a checkpoint, verify it, and restore it on any layout."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from sdp_deepspeed.checkpoint.state.chunks import translated_dcp_errors
from sdp_deepspeed.checkpoint.state.fill import fill
from sdp_deepspeed.checkpoint.state.snapshot import COUNTERS, layout_metadata
from sdp_deepspeed.checkpoint.state.trained_state import TrainedState
from sdp_deepspeed.checkpoint.storage import folder as files
from sdp_deepspeed.checkpoint.storage import manifest as manifests
from sdp_deepspeed.checkpoint.storage.chunk_files import SafetensorsReader
from sdp_deepspeed.checkpoint.storage.errors import translating_os_errors
from sdp_deepspeed.checkpoint.storage.names import COMMON, PLAN, rank_file
from sdp_deepspeed.checkpoint.storage.plain_pickles import read_plain
from sdp_deepspeed.core.checkpoint.random_state import restore_random_state
from sdp_deepspeed.distributed.agreement import run_on_all_ranks, run_on_rank_0
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.messages import MAX_LISTED, listed, quoted
from sdp_deepspeed.plan.plan import Plan


@dataclass(frozen=True)
class LoadOptions:
    """What of a checkpoint is loaded, as in DeepSpeed's `load_checkpoint`."""

    optimizer_states: bool = True
    lr_scheduler_states: bool = True
    module_only: bool = False
    module_strict: bool = True

    @property
    def moments(self) -> bool:
        """Whether the optimizer's state is loaded."""
        return self.optimizer_states and not self.module_only


def select_checkpoint(folder: Path, tag: str | None, world: Communicator) -> tuple[str | None, list[str]]:
    """The tag to load, verified, and warnings; None if the folder has no checkpoint. Every rank calls it.

    Raises:
        ValueError: on all ranks: the tag that was asked for is missing or damaged, or all are.
    """
    run_on_rank_0(world, translating_os_errors(lambda: files.restore_for_readers(folder)))
    if tag is not None:
        problems = _problems(folder / tag, world)
        if problems:
            raise ValueError(listed(problems, separator="; "))
        return tag, []
    tags, remark = run_on_rank_0(world, translating_os_errors(lambda: files.candidates(folder)))
    warnings = [] if remark is None else [f"checkpoint: {remark}; looking for the newest complete one"]
    for name in tags:
        problems = _problems(folder / name, world)
        if not problems:
            return name, [*warnings, *([f"checkpoint: loading {folder / name}"] if warnings else [])]
        warnings += problems[:MAX_LISTED]
    if warnings:
        raise ValueError(f"{'; '.join(warnings)}; {folder} has no complete checkpoint")
    return None, []


def num_steps(path: Path) -> int:
    """Steps of the optimizer before a verified checkpoint was saved."""
    return int(manifests.read_manifest(path)["global_steps"])


def _problems(path: Path, world: Communicator) -> list[str]:
    """What is wrong with a checkpoint; each rank looks at its share of the files."""
    seen_here: list[str] = []
    try:
        manifest = manifests.read_manifest(path)
        seen_here += [f"checkpoint: {problem}" for problem in manifests.gaps_in(path, manifest)]
        records = {} if seen_here else manifest["files"]
        for name in manifests.share(list(records), world.rank, world.size):
            if problem := manifests.problem_of(path, name, records[name]):
                seen_here.append(f"checkpoint: {problem}")
    except (OSError, ValueError) as problem:
        seen_here.append(str(problem))
    return list(dict.fromkeys(problem for of_rank in world.gather_objects(seen_here) for problem in of_rank))


def restore(trained: TrainedState, path: Path, options: LoadOptions) -> dict[str, Any]:
    """Restore a verified checkpoint; every rank calls it. Returns the client state.

    Raises:
        ValueError: on all ranks, before anything is changed, if it does not fit the model or the optimizer.
    """
    world = trained.world

    def read_common() -> dict[str, Any]:
        return read_plain(path / COMMON)

    common = run_on_all_ranks(world, translating_os_errors(read_common))
    if options.lr_scheduler_states and not options.module_only:
        run_on_all_ranks(world, partial(_refuse_another_scheduler, trained.lr_scheduler, common["lr_scheduler"]))

    def read_tensors() -> None:
        with translated_dcp_errors(f"checkpoint: {path}"):
            optimizer = common["optimizer"] if options.moments else None
            fill(trained, SafetensorsReader(path), strict=options.module_strict, optimizer_metadata=optimizer)

    run_on_all_ranks(world, translating_os_errors(read_tensors))
    if not options.module_only:
        restore_progress(trained, common["counters"], common["lr_scheduler"], options)
        run_on_all_ranks(world, translating_os_errors(lambda: _restore_own(trained, path, common)))
    return common["client_state"]


def _refuse_another_scheduler(scheduler: Any, stored: Any) -> None:
    """ValueError for state that has nothing of what this one keeps: it would go on from its beginning, or fail when
    everything else is loaded."""
    here = scheduler.state_dict() if scheduler is not None else None
    if stored and here and not stored.keys() & here.keys():
        raise ValueError(
            f"checkpoint: its LR scheduler keeps {quoted(sorted(stored))}, and {type(scheduler).__name__} keeps "
            f"{quoted(sorted(here))}; train with the scheduler that was saved, or load it with "
            "load_lr_scheduler_states=False and set the schedule yourself"
        )


def restore_progress(
    trained: TrainedState, counters: Mapping[str, int], lr_scheduler: Any, options: LoadOptions
) -> None:
    """Set counters and schedule, and begin a step anew: one that is half accumulated belongs to the run that was left,
    and may have had another number of parts.

    Args:
        lr_scheduler: state of the one that was saved, None if there was none.
    """
    if options.lr_scheduler_states and trained.lr_scheduler is not None and lr_scheduler is not None:
        trained.lr_scheduler.load_state_dict(lr_scheduler)
    for name in COUNTERS:
        if name in counters:
            setattr(trained, name, counters[name])
    trained.micro_steps = trained.global_steps * trained.gradient_accumulation_steps()
    trained.optimizer.zero_grad()


def _restore_own(trained: TrainedState, path: Path, common: Mapping[str, Any]) -> None:
    if common["same"] != layout_metadata(trained):
        if trained.world.rank == 0 and (remark := _remark_on_plan(trained.plan, path)):
            trained.log_on_rank_0(remark, logging.WARNING)
        return
    own = read_plain(path / rank_file(trained.world.rank))
    restore_random_state(own["random"])
    trained.rank_state().weights.restore_buffers(own["buffers"])


def _remark_on_plan(plan: Plan, path: Path) -> str | None:
    """A warning if a config that may be the same makes another plan now, as after an update of this package."""
    saved = Plan.load(path / PLAN)
    facts = [(p.units, p.num_subnetworks, [*map(len, p.holders)], p.regime, p.strategy) for p in (saved, plan)]
    if saved.hash == plan.hash or facts[0] != facts[1]:
        return None
    return (
        f"checkpoint: {path} was written under another plan of the same units (hash {saved.hash[:12]}, now "
        f"{plan.hash[:12]}). The dense model and its optimizer state go on, random numbers begin anew. To train on "
        f'under its plan, copy {path / PLAN} and give the copy as "assignment"'
    )
