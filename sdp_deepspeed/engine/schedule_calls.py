"""Follows the config's schedule: the engine re-plans itself at the end of a step, and before a checkpoint of another
phase is restored. All that could refuse a later phase is asked when the engine is built.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, ValuesView
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from deepspeed.utils import log_dist, logger

from sdp_deepspeed.config import KEY, SubnetworkConfig, parse
from sdp_deepspeed.distributed.agreement import run_on_all_ranks
from sdp_deepspeed.distributed.monitored_barrier import Phase as Meeting
from sdp_deepspeed.engine.apply_plan import ChosenPlan, announce
from sdp_deepspeed.engine.deepspeed_settings import optimizer_settings
from sdp_deepspeed.engine.replan_calls import ReplanCalls
from sdp_deepspeed.engine.replan_refusals import frozen_since_start, refuse_run
from sdp_deepspeed.engine.schedule_table import PhaseRow, schedule_table, setup_of
from sdp_deepspeed.messages import quoted
from sdp_deepspeed.optimizer.settings import OptimizerSettings
from sdp_deepspeed.schedule import Schedule

_BY_CALLER = (
    "a phase has a train_micro_batch_size_per_gpu of its own, but the caller accumulates gradients "
    "(managed_gradient_accumulation, set_gradient_accumulation_boundary, Accelerate, the Trainer), in batches that "
    "no phase changes; remove it"
)
_BY_LOADER = (
    "a phase has a train_micro_batch_size_per_gpu of its own, but deepspeed.initialize was given training_data, of "
    "which it makes batches of one size; remove the key, or make batches by engine.train_micro_batch_size_per_gpu()"
)


class ScheduleCalls(ReplanCalls):
    """The part of `SubnetworkEngine` that changes the plan by itself.

    Attributes:
        schedule: None if nothing changes over time.
    """

    schedule: Schedule | None
    _now: tuple[int, int]  # phase and draw that the engine is laid out for
    _first: tuple[int, int]  # stage and micro-batch of the config
    _num_looks = 0  # at steps of this phase, in this process
    _most_rows = 0  # of its micro-steps

    @property
    def phase(self) -> int:
        """Index of the phase that the next step belongs to; 0 without a schedule."""
        return 0 if self.schedule is None else self._now[0]

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """As DeepSpeed's."""
        if self.schedule is not None and self.module.training:
            self._most_rows = max(self._most_rows, num_rows([*inputs, *options.values()]))
        return super().forward(*inputs, **options)  # type: ignore[safe-super]  # DeepSpeed's has a body

    def load_checkpoint(self, *args: Any, **options: Any) -> tuple[str | None, dict[str, Any] | None]:
        """As DeepSpeed's, on the layout that wrote it or on another one; all ranks call it. With a schedule the engine
        is in the phase of the checkpoint's step afterward, after an error where it was.

        Raises:
            ValueError: as DeepSpeed's; nothing was loaded.
            RuntimeError: on all ranks: a file could not be read, and weights may be loaded in part.
        """
        try:
            result = super().load_checkpoint(*args, **options)
        except Exception:  # on all ranks; of a file that cannot be read some may be loaded
            if not self._is_half_replanned:
                self._follow_schedule(self.global_steps)
            raise
        self._follow_schedule(self.global_steps)  # also from formats that do not say it before
        return result

    def before_restore(self, steps: int) -> None:
        """A checkpoint of so many steps comes next: under its plan all that it has of each rank can be restored. A step
        that has begun belongs to the run that is left."""
        if self.schedule is not None:
            self.optimizer.zero_grad()
            self._follow_schedule(steps)

    def _new_config(self, block: Mapping[str, Any], stage: int | None) -> dict[str, Any]:
        if self.schedule is not None:
            raise ValueError(
                f"engine.replan: {KEY}.schedule or redraw_interval of the config decides; add a phase there"
            )
        return super()._new_config(block, stage)

    def _follow_schedule(self, steps: int) -> None:
        """Be laid out for the step after so many; every rank calls it."""
        if self.schedule is None:
            return
        now = self.schedule.phase_after(steps), self.schedule.draw_after(steps)
        is_other_phase = now[0] != self._now[0]
        is_other = is_other_phase or (now[1] != self._now[1] and not self._applied.plan.is_whole)
        if is_other:
            self._applied.dense_view.meet(Meeting.REPLAN)
            self.wait_for_checkpoint()
            stage, micro_batch = self._settings_of(now[0])
            with self._named(now[0]), self._in_micro_batches(micro_batch, steps):
                self._replan(self.schedule.config_after(steps), stage, tells=is_other_phase)
            if not is_other_phase and self.world.rank == 0:
                announce(f"{KEY}: draw {now[1]}, after step {steps}: plan {self._applied.plan.hash[:12]}")
        if is_other_phase:
            self._num_looks = self._most_rows = 0
        self._now = now

    @contextmanager
    def _named(self, phase: int) -> Iterator[None]:
        assert self.schedule is not None
        try:
            yield
        except (ValueError, RuntimeError) as error:
            kind = ValueError if isinstance(error, ValueError) else RuntimeError
            raise kind(f"{self.schedule.path_of(phase)}: {error}") from error

    def _settings_of(self, phase: int) -> tuple[int, int]:
        """Stage and micro-batch."""
        assert self.schedule is not None
        own, (stage, micro_batch) = self.schedule.phases[phase], self._first
        return (stage if own.stage is None else own.stage), own.micro_batch or micro_batch

    @contextmanager
    def _in_micro_batches(self, micro_batch: int, steps: int) -> Iterator[None]:
        """Steps take as many samples as before; an error takes it back."""
        before = self.train_micro_batch_size_per_gpu()
        self._set_micro_batch(micro_batch, steps)
        try:
            yield
        except BaseException:
            self._set_micro_batch(before, steps)
            raise

    def _set_micro_batch(self, micro_batch: int, steps: int) -> None:
        if micro_batch != self.train_micro_batch_size_per_gpu():
            batch = self.train_batch_size()
            if batch % (micro_batch * self.dp_group.size):
                raise ValueError(
                    f"train_micro_batch_size_per_gpu: got {micro_batch}, but {self.dp_group.size} ranks cannot take "
                    f"batches of it in a step of {batch} samples (set_train_batch_size); use sizes that divide them"
                )
            self.set_train_micro_batch_size(micro_batch)
            self.set_train_batch_size(batch)
            self.micro_steps = steps * self.gradient_accumulation_steps()  # whose multiples end a step

    def _later_blocks(self) -> list[SubnetworkConfig]:
        configs = [] if self.schedule is None else map(self.schedule.config_after, self.schedule.turns[1:])
        return [block for block in map(parse, configs) if block is not None]

    def _begin_schedule(self) -> None:
        """Refuse on all ranks what no later phase can be, and show all phases; the end of the engine's constructor.

        Raises:
            ValueError, RuntimeError: by phase.
        """
        if self.schedule is None:
            return
        self._now = 0, 0
        self._first = int(self.zero_optimization_stage()), self.train_micro_batch_size_per_gpu()
        run_on_all_ranks(self.world, self._check_micro_batches)
        rows, memory = dict[int, PhaseRow](), _memory(self.device)
        for steps in self.schedule.turns:
            index = self.schedule.phase_after(steps)
            with self._named(index):
                settings, chosen = self._settings_after(steps)
                if index not in rows:  # another draw takes what the first one does
                    rows[index] = self._row(index, settings, chosen)
                    run_on_all_ranks(self.world, partial(rows[index].refuse_too_large, memory))
        if self.schedule.redraw_interval and all(row.plan.is_whole for row in rows.values()):
            log_dist(
                f"{KEY}.redraw_interval: no effect: every worker holds everything", ranks=[0], level=logging.WARNING
            )
        if self.world.rank == 0:
            announce(f"{KEY}: {schedule_table(list(rows.values()), self.schedule.redraw_interval, memory)}")

    def _settings_after(self, steps: int) -> tuple[OptimizerSettings, ChosenPlan]:
        """What the engine would be after so many steps; nothing is changed."""
        assert self.schedule is not None
        stage, micro_batch = self._settings_of(self.schedule.phase_after(steps))
        with self._at_stage(stage), self._in_micro_batches(micro_batch, 0):
            config, chosen = self._agree(self.schedule.config_after(steps))
            settings = optimizer_settings(self, config)
        self._set_stage(self._first[0])
        self._set_micro_batch(self._first[1], 0)
        return settings, chosen

    def _row(self, index: int, settings: OptimizerSettings, chosen: ChosenPlan) -> PhaseRow:
        assert self.schedule is not None
        _, micro_batch = self._settings_of(index)
        samples = self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps()
        batches = micro_batch, samples // micro_batch
        setup = setup_of(settings, self.get_data_types()[0], self.optimizer.optimizer, batches[1])
        local = replace(chosen, plan=self._applied.parallel.shards.local_plan(chosen.plan))
        return PhaseRow.of(self.schedule.phases[index], local, self.optimizer.model.tensors, setup, batches)

    def _check_micro_batches(self) -> None:
        """
        Raises:
            ValueError: a phase's micro-batch does not divide a rank's samples of a step, or the caller accumulates.
        """
        assert self.schedule is not None
        samples = self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps()
        for index, phase in enumerate(self.schedule.phases):
            if samples % (phase.micro_batch or 1):
                raise ValueError(
                    f"{KEY}.schedule[{index}].train_micro_batch_size_per_gpu: got {phase.micro_batch}, expected a "
                    f"divisor of {samples}, the samples that a rank takes in each step"
                )
        if self.schedule.has_micro_batches and not self.managed_gradient_accumulation():
            raise ValueError(f"{KEY}.schedule: {_BY_CALLER}")
        sizes = {phase.micro_batch for phase in self.schedule.phases} - {None, self.train_micro_batch_size_per_gpu()}
        if sizes and self.training_dataloader is not None:
            raise ValueError(f"{KEY}.schedule: {_BY_LOADER}")

    def _look_at_caller(self) -> None:
        """Before the first two steps of a phase all ranks look whether the caller follows, and could go on: what is
        learned of it there would else end the run at the phase's end. Every rank calls it before a step.

        Raises:
            ValueError, RuntimeError: on all ranks.
        """
        ends_step = self.is_gradient_accumulation_boundary() or not self.managed_gradient_accumulation()
        if self.schedule is None or self._num_looks == 2 or not ends_step:
            return
        self._num_looks += 1
        with self._named(self._now[0]):
            run_on_all_ranks(self.world, self._check_caller)
        if self._num_looks == 1 and self._will_change:
            self._warn_of_frozen()

    @property
    def _will_change(self) -> bool:
        """Whether this plan is followed by another."""
        assert self.schedule is not None
        is_last = self._now[0] == len(self.schedule.phases) - 1
        return not is_last or (self.schedule.redraw_interval is not None and not self._applied.plan.is_whole)

    def _warn_of_frozen(self) -> None:
        of_ranks = self.world.gather_objects(list(frozen_since_start(self._applied.mask)))
        if self.world.rank == 0 and (frozen := sorted({name for names in of_ranks for name in names})):
            logger.warning(
                f"{KEY}: {quoted(frozen)} were frozen after deepspeed.initialize: the run ends where the plan changes "
                "if they still are then"
            )

    def _check_caller(self) -> None:
        assert self.schedule is not None
        if self._will_change:
            refuse_run(self, self._applied)
        if not self.schedule.has_micro_batches:
            return
        if self._is_gradient_accumulation_boundary is not None:
            raise ValueError(_BY_CALLER)
        expected = self.train_micro_batch_size_per_gpu()
        is_short = 0 < self._most_rows < expected and self._num_looks == 2  # the first may be an epoch's last
        if self._most_rows > expected or is_short:
            raise ValueError(
                f"got a batch of {self._most_rows} samples (the first dimension of its tensors) in a phase whose "
                f"micro-batch is {expected}: ask engine.train_micro_batch_size_per_gpu() and "
                "engine.gradient_accumulation_steps() before each step"
            )


def num_rows(given: Any) -> int:
    """Samples of a batch: of its tensors with two dimensions or more, however nested, the most; 0 without any."""
    if isinstance(given, torch.Tensor):
        return len(given) if given.dim() > 1 else 0
    if isinstance(given, Mapping):
        given = given.values()
    elif not isinstance(given, (list, tuple, ValuesView)):
        return 0
    return max(map(num_rows, given), default=0)


def _memory(device: torch.device) -> int | None:
    """Bytes of a GPU; of a host nobody knows how many share it."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
