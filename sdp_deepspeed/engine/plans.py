"""The plans of an engine: the first one, and re-planning, by a schedule or a call.

Re-planning continues a live run under another plan, as if a checkpoint were saved and loaded, but in memory.
All checks run before anything is changed. During the exchange, each rank has the dense weights in the run's precision.
The user's engine, optimizer, param groups, schedulers and Parameters stay the same objects.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from deepspeed.utils import log_dist, logger

from sdp_deepspeed import planner
from sdp_deepspeed.checkpoint.rank_state import RankState
from sdp_deepspeed.checkpoint.state_transfer import collect_state, load_state
from sdp_deepspeed.config import SubnetworkConfig, parse
from sdp_deepspeed.engine.refused_settings import refuse_config
from sdp_deepspeed.engine.tensor_parallel import refuse_stage
from sdp_deepspeed.masking.mask import Mask
from sdp_deepspeed.masking.proof import replicated_layers
from sdp_deepspeed.messages import KEY, announce, quoted
from sdp_deepspeed.parallel.consistency import check_same_plan, gather_objects, gather_results, run_on_all_ranks
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.strategies import unit_costs
from sdp_deepspeed.schedule import FIXED, OF_SCHEDULE, Schedule, merge_blocks, with_stage

if TYPE_CHECKING:
    from sdp_deepspeed.engine.engine import SubnetworkEngine

_STAGES = (0, 1, 2)


@dataclass(frozen=True)
class Replanned:
    """Cost of a re-plan.

    Args:
        sent_bytes: maximum over ranks of the bytes sent, without the dense weights.
        seconds: maximum over ranks of the time taken.
    """

    sent_bytes: int
    seconds: float

    def __str__(self) -> str:
        return f"re-planned in {self.seconds:.3g} s; a rank sent up to {self.sent_bytes:,} bytes of optimizer state"


def rank_state(engine: SubnetworkEngine) -> RankState:
    """This rank's share of the model and optimizer state."""
    return RankState(engine.mask, engine.optimizer.sharded, engine.groups, engine.tensor_parallel.shards)


def plan_and_mask(engine: SubnetworkEngine, block: SubnetworkConfig, *, logs: bool = True) -> tuple[Plan, Mask]:
    """Compute the plan of a block and this rank's mask, without applying it. Collective; the module must be dense.

    Args:
        logs: whether to log the plan and warnings.

    Raises:
        ValueError: on all ranks, if the block does not fit the model or the number of ranks.
    """
    members = engine.data_parallel_ranks()

    def make() -> tuple[Plan, Mask]:
        branches, shards = engine.tensor_parallel.branches, engine.tensor_parallel.shards
        rank = members.index(dist.get_rank())
        plan, mask, warnings = planner.plan_and_mask(engine.module, block, len(members), rank, branches, shards)
        if logs:
            for warning in [*warnings, *replicated_layers(engine.module)]:
                log_dist(f"{KEY}: {warning}", ranks=[0], level=logging.WARNING)
            if dist.get_rank() == 0:
                announce(f"{KEY}\n{plan.table(unit_costs(engine.module, mask.plan.units))}", logger)
        return plan, mask

    plan, mask = run_on_all_ranks(make, engine._control)
    check_same_plan(plan, engine._control)
    return plan, mask


def find_schedule(engine: SubnetworkEngine) -> Schedule | None:
    """The plans over time, from the config; None if the plan is fixed. Collective."""

    def find() -> Schedule | None:
        schedule = Schedule.of(engine.config)
        if schedule is not None:
            schedule.check_first(engine.stage_of_config)
        return schedule

    return run_on_all_ranks(find, engine._control)


def check_schedule(engine: SubnetworkEngine) -> None:
    """Check the later phases, and the first re-drawn assignment, at start-up. Collective; the module must be dense.

    Raises:
        ValueError, RuntimeError: on all ranks; the message begins with the phase.
    """
    schedule: Schedule | None = engine.schedule
    if schedule is None:
        return
    for steps in schedule.turns[1:]:
        phase = schedule.phase_after(steps)
        with _prefixed_errors(schedule.path_of(phase)):
            config = schedule.config_after(steps)
            block = parse(config)
            assert block is not None, "`enabled` is in FIXED"
            run_on_all_ranks(lambda: refuse_config(config, engine._config), engine._control)  # noqa: B023
            refuse_stage(_stage_of(engine, phase), engine.tensor_parallel)
            plan_and_mask(engine, block, logs=False)


def new_config(engine: SubnetworkEngine, block: Mapping[str, Any], stage: int | None) -> dict[str, Any]:
    """The DeepSpeed config with changed keys of the block.

    Raises:
        ValueError: keys that cannot change, or an unknown stage.
    """
    if engine.schedule is not None:
        raise ValueError(
            f"engine.replan: not supported with {KEY}.schedule or redraw_interval; add a phase to the schedule"
        )
    if not isinstance(block, Mapping):
        raise ValueError(f'engine.replan: got {block!r}, expected keys of {KEY} that change, such as {{"coverage": 1}}')
    if stage is not None and (isinstance(stage, bool) or stage not in _STAGES):
        raise ValueError(f"engine.replan(stage=...): got {stage!r}, expected 0, 1 or 2, or None")
    if fixed := [name for name in block if name in (*FIXED, *OF_SCHEDULE, "local_steps")]:
        raise ValueError(
            f"engine.replan: {quoted([f'{KEY}.{name}' for name in fixed])} cannot change in a run; save a checkpoint "
            "and load it in a new engine"
        )
    return with_stage({**engine.config, KEY: merge_blocks(engine.config[KEY], block)}, stage)


def replan(engine: SubnetworkEngine, config: Mapping[str, Any], stage: int | None) -> Replanned:
    """Continue under the plan of another config. Collective, between two steps.

    Raises:
        ValueError, RuntimeError: on all ranks. All checks run before anything is changed.
    """
    begin, control = time.monotonic(), engine.groups.control

    before = int(engine.zero_optimization_stage())
    after = before if stage is None else stage

    def check() -> tuple[SubnetworkConfig, int]:
        _refuse_run(engine)
        refuse_stage(after, engine.tensor_parallel)
        changed = parse(config)
        assert changed is not None, "`enabled` is in FIXED"
        refuse_config(config, engine._config)
        return changed, after

    asked = gather_results(check, control)
    if other := [rank for rank, others in enumerate(asked) if others != asked[0]]:
        texts = [f"{block!r}, stage {after}" for block, after in (asked[other[0]], asked[0])]
        raise ValueError(
            f"engine.replan: rank {other[0]} got {texts[0]}, rank 0 got {texts[1]}; pass equal arguments on all ranks"
        )
    block, _ = asked[0]
    engine.checkpoints.wait()
    engine.dense_view.make_resident("engine.replan")
    try:
        _set_stage(engine, after)
        plan, mask = plan_and_mask(engine, block)
    except Exception:
        _set_stage(engine, before)
        engine.dense_view.end()
        raise
    with torch.no_grad():
        snapshot = collect_state(rank_state(engine))
        run_on_all_ranks(lambda: engine.apply_plan(block, plan, mask), control)
        sent = load_state(snapshot, rank_state(engine), engine.device)
    del snapshot
    engine.config = dict(config)
    result = Replanned(*map(max, zip(*gather_objects((sent, time.monotonic() - begin), control), strict=True)))
    log_dist(f"{KEY}: {result}", ranks=[0])
    return result


def follow_schedule(engine: SubnetworkEngine, steps: int) -> None:
    """Re-plan if the next step is in another phase of `schedule`, or `redraw_interval` has passed. Collective.

    Args:
        steps: number of steps so far.

    Raises:
        ValueError, RuntimeError: as `replan`; the message begins with the phase.
    """
    schedule: Schedule | None = engine.schedule
    if schedule is None:
        return
    phase, draw = schedule.phase_after(steps), schedule.draw_after(steps)
    is_other_draw = draw != engine.draw and not engine.plan.is_dense
    if phase != engine.phase or is_other_draw:
        with _prefixed_errors(schedule.path_of(phase)):
            replan(engine, schedule.config_after(steps), _stage_of(engine, phase))
    engine.phase, engine.draw = phase, draw


@contextmanager
def _prefixed_errors(path: str) -> Iterator[None]:
    """Prefix error messages with a path in the config."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        kind = ValueError if isinstance(error, ValueError) else RuntimeError
        raise kind(f"{path}: {error}") from error


def _stage_of(engine: SubnetworkEngine, phase: int) -> int:
    assert engine.schedule is not None
    stage = engine.schedule.phases[phase].stage
    return int(engine.stage_of_config if stage is None else stage)


def _refuse_run(engine: SubnetworkEngine) -> None:
    """Raise ValueError or RuntimeError if the state of the run does not allow re-planning."""
    engine.dense_view.end_evaluation()
    engine._known_parameters.check()
    if engine.dense_view.is_resident:
        raise RuntimeError("engine.replan inside engine.dense(): leave the context first, on all ranks")
    engine.optimizer.sharded.refuse_unfinished("engine.replan")
    mask = engine.mask
    frozen = [n for n, p in mask.parameters.items() if mask.trainable[n] and p.numel() and not p.requires_grad]
    held = {piece.parameter for pieces in mask.pieces.values() for piece, _ in pieces if mask.is_held(piece)}
    if frozen := [name for name in frozen if name in held]:
        raise ValueError(
            f"engine.replan: {quoted(frozen)} required gradients at deepspeed.initialize but not now; undo that, or "
            "load a checkpoint in a new engine"
        )


def _set_stage(engine: SubnetworkEngine, stage: int) -> None:
    """Set the stage in DeepSpeed's config object, where its engine reads it."""
    config = engine._config
    config.zero_config.stage = stage
    config.zero_optimization_stage, config.zero_enabled = stage, stage > 0
