"""Another plan for a live run: as if a checkpoint were saved, and loaded under it, but from memory to memory.

All that can be refused is refused before anything is changed. In between each rank has the dense weights in the run's
precision. The user's engine, optimizer, param groups, schedule and Parameters stay the objects that they are.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.utils import log_dist

from sdp_deepspeed.checkpoint.peers import give_state, take_state
from sdp_deepspeed.checkpoint.state import RankState
from sdp_deepspeed.config import KEY, SubnetworkConfig, parse
from sdp_deepspeed.engine.refusals import refuse_config
from sdp_deepspeed.messages import quoted
from sdp_deepspeed.parallel.agree import gather_objects, run_on_all_ranks
from sdp_deepspeed.schedule import FIXED, OF_SCHEDULE, Schedule, merged, with_stage

_STAGES = (0, 1, 2)


@dataclass(frozen=True)
class Replanned:
    """What a re-plan cost.

    Args:
        sent_bytes: most that a rank has sent, beside the dense weights.
        seconds: that it took.
    """

    sent_bytes: int
    seconds: float

    def __str__(self) -> str:
        return f"re-planned in {self.seconds:.3g} s; a rank sent up to {self.sent_bytes:,} bytes of optimizer state"


def rank_state(engine: Any) -> RankState:
    """This rank's share of the model in training."""
    return RankState(engine.mask, engine.optimizer.sharded, engine.groups, engine.tensor_parallel.shards)


def new_config(engine: Any, block: Mapping[str, Any], stage: int | None) -> dict[str, Any]:
    """DeepSpeed's config with other keys of the block.

    Raises:
        ValueError: keys that cannot change, or a stage that there is not.
    """
    if engine.schedule is not None:
        raise ValueError(f"engine.replan: {KEY}.schedule or redraw_interval decides; add a phase there")
    if not isinstance(block, Mapping):
        raise ValueError(f'engine.replan: got {block!r}, expected keys of {KEY} that change, such as {{"coverage": 1}}')
    if stage is not None and (isinstance(stage, bool) or stage not in _STAGES):
        raise ValueError(f"engine.replan(stage=...): got {stage!r}, expected 0, 1 or 2, or None")
    if fixed := [name for name in block if name in (*FIXED, *OF_SCHEDULE)]:
        raise ValueError(
            f"engine.replan: {quoted([f'{KEY}.{name}' for name in fixed])} cannot change in a run; save a checkpoint "
            "and load it in an engine that is built with it"
        )
    return with_stage({**engine.config, KEY: merged(engine.config[KEY], block)}, stage)


def replan(engine: Any, config: Mapping[str, Any], stage: int | None) -> Replanned:
    """Go on under the plan of another config; every rank calls it, between two steps.

    Raises:
        ValueError, RuntimeError: on all ranks; before anything is changed, if it is something that can be refused.
    """
    begin, control = time.monotonic(), engine.groups.control

    before = int(engine.zero_optimization_stage())
    after = before if stage is None else stage

    def check() -> SubnetworkConfig:
        _refuse_run(engine)
        engine.refuse_stage(after)
        found = _block_of(config)
        refuse_config(config, engine._config)
        return found

    block = run_on_all_ranks(check, control)
    asked = gather_objects(f"{block!r}, stage {after}", control)
    if other := [rank for rank, found in enumerate(asked) if found != asked[0]]:
        raise ValueError(f"engine.replan: rank {other[0]} asks for {asked[other[0]]}, rank 0 for {asked[0]}")
    engine.checkpoints.wait()
    engine.dense_view.make_resident("engine.replan", scales=False)
    try:
        _set_stage(engine, after)
        plan, mask = engine.plan_and_mask(block)
    except Exception:
        _set_stage(engine, before)
        engine.dense_view.end()
        raise
    with torch.no_grad():
        taken = take_state(rank_state(engine))
        run_on_all_ranks(lambda: engine.lay_out(block, plan, mask), control)
        sent = give_state(taken, rank_state(engine), engine.device)
    del taken
    engine.config = dict(config)
    result = Replanned(max(gather_objects(sent, control)), max(gather_objects(time.monotonic() - begin, control)))
    log_dist(f"{KEY}: {result}", ranks=[0])
    return result


def follow_schedule(engine: Any, steps: int) -> None:
    """Be laid out for the step after so many, as the block's `schedule` and `redraw_interval` say; every rank calls it.

    Raises:
        ValueError, RuntimeError: as `replan`, with the phase.
    """
    schedule: Schedule | None = engine.schedule
    if schedule is None:
        return
    phase, draw = schedule.phase_after(steps), schedule.draw_after(steps)
    is_other_draw = draw != engine.draw and not engine.plan.is_whole
    if phase != engine.phase or is_other_draw:
        with _named(schedule.path_of(phase)):
            replan(engine, schedule.config_after(steps), _stage_of(engine, phase))
    engine.phase, engine.draw = phase, draw


def try_schedule(engine: Any) -> None:
    """Look for what is wrong with phases after the first, and with the first other draw. Every rank calls it while the
    module is dense.

    Raises:
        ValueError, RuntimeError: on all ranks, with the phase.
    """
    schedule: Schedule | None = engine.schedule
    if schedule is None:
        return
    for steps in schedule.turns[1:]:
        phase = schedule.phase_after(steps)
        with _named(schedule.path_of(phase)):
            config = schedule.config_after(steps)
            block = _block_of(config)
            run_on_all_ranks(lambda: refuse_config(config, engine._config), engine._control)  # noqa: B023
            engine.refuse_stage(_stage_of(engine, phase))
            engine.plan_and_mask(block, tells=False)


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Errors begin with what of the config asks for it."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        kind = ValueError if isinstance(error, ValueError) else RuntimeError
        raise kind(f"{path}: {error}") from error


def _stage_of(engine: Any, phase: int) -> int:
    stage = engine.schedule.phases[phase].stage
    return int(engine.stage_of_config if stage is None else stage)


def _block_of(config: Mapping[str, Any]) -> SubnetworkConfig:
    block = parse(config)
    if block is None:
        raise ValueError(f"engine.replan: {KEY}.enabled cannot change in a run")
    return block


def _refuse_run(engine: Any) -> None:
    """
    Raises:
        ValueError, RuntimeError: what makes re-planning impossible now.
    """
    engine.dense_view.end_evaluation()
    engine._known_parameters.check()
    if engine.dense_view.is_resident:
        raise RuntimeError("engine.replan inside engine.dense(): leave it first, on all ranks")
    if engine.optimizer.has_gradients():
        raise RuntimeError(
            "engine.replan: there are gradients of a step that has begun; call it after engine.step() at the end of an "
            "accumulation, or drop them with engine.zero_grad()"
        )
    mask = engine.mask
    frozen = [n for n, p in mask.parameters.items() if mask.trainable[n] and p.numel() and not p.requires_grad]
    held = {piece.parameter for pieces in mask.pieces.values() for piece, _ in pieces if mask.is_held(piece)}
    if frozen := [name for name in frozen if name in held]:
        raise ValueError(
            f"engine.replan: {quoted(frozen)} required gradients when deepspeed.initialize was called and do not now; "
            "let them require gradients again, or save a checkpoint and load it in a new engine"
        )


def _set_stage(engine: Any, stage: int) -> None:
    """DeepSpeed's engine asks its config for the stage."""
    config = engine._config
    config.zero_config.stage = stage
    config.zero_optimization_stage, config.zero_enabled = stage, stage > 0
