"""The plans of an engine over time: by the schedule of its config, or by calls of `engine.replan`.

Re-planning continues a live run under another plan, as if a checkpoint were saved and loaded, but in memory. All checks
run before anything is changed. During the exchange, each rank has the dense weights in the run's precision. The user's
optimizer, param groups and Parameters stay the same objects.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.utils import log_dist

from sdp_deepspeed.checkpoint.state_transfer import collect_state, load_state
from sdp_deepspeed.config import SubnetworkConfig, parse
from sdp_deepspeed.config.schedule import FIXED, OF_SCHEDULE, Schedule, merge_blocks, with_stage
from sdp_deepspeed.engine.core import Core
from sdp_deepspeed.engine.optimizer_options import skips_overflow, step_options
from sdp_deepspeed.engine.refused_settings import refuse_config
from sdp_deepspeed.engine.tensor_parallel import refuse_stage
from sdp_deepspeed.messages import KEY, quoted
from sdp_deepspeed.parallel.consistency import gather_objects, gather_results, run_on_all_ranks
from sdp_deepspeed.parallel.step_options import StepOptions

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


class Plans:
    """The plans of an engine over time. The constructor is collective.

    Attributes:
        schedule: None if the plan is fixed.
        phase, draw: current phase of the schedule, and number of re-drawn assignments.

    Raises:
        ValueError, RuntimeError: on all ranks; the message begins with the phase.
    """

    def __init__(self, engine: DeepSpeedEngine, core: Core) -> None:
        self._engine, self._core = engine, core
        self.phase = self.draw = 0
        self._first_stage = int(engine.zero_optimization_stage())
        self.schedule = run_on_all_ranks(self._find, core.control)

    def check_later(self) -> None:
        """Check the later phases and the first re-drawn assignment. Collective; the module must be dense.

        Raises:
            ValueError, RuntimeError: on all ranks; the message begins with the phase.
        """
        if self.schedule is not None:
            for steps in self.schedule.turns[1:]:
                self._check(self.schedule, steps)

    def _find(self) -> Schedule | None:
        schedule = Schedule.of(self._engine.config)
        if schedule is not None:
            schedule.check_first(self._first_stage)
        return schedule

    def _check(self, schedule: Schedule, steps: int) -> None:
        with _prefixed_errors(schedule.path_of(schedule.phase_after(steps))):
            config, stage = schedule.config_after(steps), self._stage_after(schedule, steps)
            block = run_on_all_ranks(lambda: self._supported_block(config, stage), self._core.control)
            self._core.plan_and_mask(block, logs=False)

    def _supported_block(self, config: Mapping[str, Any], stage: int) -> SubnetworkConfig:
        """The block of a config. Raises ValueError if it, other settings or the ZeRO stage are not supported."""
        block = parse(config)
        assert block is not None, "`enabled` is in FIXED"
        refuse_config(config, self._engine._config)
        refuse_stage(stage, self._core.tensor_parallel)
        return block

    def _stage_after(self, schedule: Schedule, steps: int) -> int:
        stage = schedule.phases[schedule.phase_after(steps)].stage
        return self._first_stage if stage is None else stage

    def follow(self, steps: int) -> None:
        """Re-plan if the next step is in another phase of `schedule`, or `redraw_interval` has passed. Collective.

        Raises:
            ValueError, RuntimeError: as `replan`; the message begins with the phase.
        """
        if (schedule := self.schedule) is None:
            return
        phase, draw = schedule.phase_after(steps), schedule.draw_after(steps)
        is_other_draw = draw != self.draw and not self._core.plan.is_dense
        if phase != self.phase or is_other_draw:
            with _prefixed_errors(schedule.path_of(phase)):
                is_other_phase = phase != self.phase  # a plan that is only re-drawn is not logged
                self._apply(schedule.config_after(steps), self._stage_after(schedule, steps), logs=is_other_phase)
        self.phase, self.draw = phase, draw

    def replan(self, changes: Mapping[str, Any], stage: int | None) -> Replanned:
        """See `SubnetworkEngine.replan`."""
        config = run_on_all_ranks(lambda: self._changed_config(changes, stage), self._core.control)
        return self._apply(config, int(self._engine.zero_optimization_stage()) if stage is None else stage)

    def _changed_config(self, changes: Mapping[str, Any], stage: int | None) -> dict[str, Any]:
        """The DeepSpeed config with changed keys of the block.

        Raises:
            ValueError: keys that cannot change, or an unknown stage.
        """
        if self.schedule is not None:
            raise ValueError(
                f"engine.replan: not supported with {KEY}.schedule or redraw_interval; add a phase to the schedule"
            )
        if not isinstance(changes, Mapping):
            raise ValueError(
                f'engine.replan: got {changes!r}, expected keys of {KEY} that change, such as {{"coverage": 1}}'
            )
        if stage is not None and (isinstance(stage, bool) or stage not in _STAGES):
            raise ValueError(f"engine.replan(stage=...): got {stage!r}, expected 0, 1 or 2, or None")
        if fixed := [name for name in changes if name in (*FIXED, *OF_SCHEDULE, "local_steps")]:
            raise ValueError(
                f"engine.replan: {quoted([f'{KEY}.{name}' for name in fixed])} cannot change in a run; save a "
                "checkpoint and load it in a new engine"
            )
        config = self._engine.config
        return with_stage({**config, KEY: merge_blocks(config[KEY], changes)}, stage)

    def _apply(self, config: Mapping[str, Any], stage: int, *, logs: bool = True) -> Replanned:
        """Continue under the plan of another config. Collective, between two steps."""
        engine, core = self._engine, self._core

        def check() -> tuple[SubnetworkConfig, int]:
            self._refuse_state()
            return self._supported_block(config, stage), stage

        asked = gather_results(check, core.control)
        if other := [rank for rank, others in enumerate(asked) if others != asked[0]]:
            texts = [f"{block!r}, stage {stage}" for block, stage in (asked[other[0]], asked[0])]
            raise ValueError(
                f"engine.replan: rank {other[0]} got {texts[0]}, rank 0 got {texts[1]}; pass equal arguments on all "
                "ranks"
            )
        block, _ = asked[0]
        result = self._change_plan(block, step_options(engine, stage), logs=logs)
        read = engine._config  # where DeepSpeed's engine reads the stage
        read.zero_config.stage = read.zero_optimization_stage = stage
        read.zero_enabled = stage > 0
        engine.optimizer.skips_overflow = skips_overflow(engine)
        engine.block, engine.config = block, dict(config)
        log_dist(f"{KEY}: {result}", ranks=[0])
        return result

    def _refuse_state(self) -> None:
        """Raise ValueError or RuntimeError if the state of the run does not allow re-planning."""
        core = self._core
        core.require_subnetwork("engine.replan")
        core.known_parameters.check()
        core.sharded.refuse_unfinished("engine.replan")
        mask = core.mask
        frozen = [n for n, p in mask.parameters.items() if mask.trainable[n] and p.numel() and not p.requires_grad]
        if frozen := [name for name in frozen if mask.held_pieces(name)]:
            raise ValueError(
                f"engine.replan: {quoted(frozen)} required gradients at deepspeed.initialize but not now; undo that, "
                "or load a checkpoint in a new engine"
            )

    def _change_plan(self, block: SubnetworkConfig, options: StepOptions, *, logs: bool) -> Replanned:
        """Continue under the plan of another block, with other options of the step. Collective, between two steps.

        Raises:
            ValueError, RuntimeError: on all ranks. All checks run before anything is changed.
        """
        core = self._core
        begin = time.monotonic()
        core.checkpoints.wait()
        core.dense_view.make_resident("engine.replan")
        try:
            plan, mask = core.plan_and_mask(block, logs=logs)
        except Exception:
            core.dense_view.end()
            raise

        def change() -> None:
            core.close_plan()
            core.sharded.optimizer.state.clear()
            core.apply(block, plan, mask, options)
            # A backward pass through a graph of the earlier plan would be silently incomplete: let autograd refuse it.
            torch.autograd.graph.increment_version(list(mask.parameters.values()))

        with torch.no_grad():
            snapshot = collect_state(core.state())
            run_on_all_ranks(change, core.control)
            sent = load_state(snapshot, core.state(), core.device)
        del snapshot
        costs = gather_objects((sent, time.monotonic() - begin), core.control)
        return Replanned(*map(max, zip(*costs, strict=True)))


@contextmanager
def _prefixed_errors(path: str) -> Iterator[None]:
    """Prefix error messages with a path in the config."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        kind = ValueError if isinstance(error, ValueError) else RuntimeError
        raise kind(f"{path}: {error}") from error
