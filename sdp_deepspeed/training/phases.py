"""A run keeps up with its engine's plan, which a schedule changes between two steps: batches, files, measurements."""

from __future__ import annotations

from typing import Any

from sdp_deepspeed.data import PackedBatches
from sdp_deepspeed.distributed.agreement import Gatherer, run_on_rank_0
from sdp_deepspeed.training import engines
from sdp_deepspeed.training.engines import Present
from sdp_deepspeed.training.metrics_log import of_kind
from sdp_deepspeed.training.run_folder import RunFolder
from sdp_deepspeed.training.user_errors import writing


class Phases:
    """Where a run is in its schedule; without one it is in the same phase all the time, which nothing tells.

    Args:
        engine: DeepSpeed's, ours or its own.
        world: all ranks.

    Attributes:
        now: what the next step is made with; None before the first `follow`.
        first_step: the first of this phase in this process. What is measured in the phase holds from there.
        measured: the step that is measured: the second one, when the optimizer's moments exist. New draws of a phase
            cost what its first one did.
        replan_seconds: that the last step took for another plan, 0 if that stayed.
    """

    def __init__(self, engine: Any, batches: PackedBatches, folder: RunFolder, world: Gatherer) -> None:
        self._engine, self._batches, self._folder, self._world = engine, batches, folder, world
        self.now: Present | None = None
        self.first_step = self.measured = 1
        self.replan_seconds = 0.0

    def follow(self, step: int, num_steps: int) -> str | None:
        """After `step` steps of `num_steps`, before the first one of a process too; every rank calls it.

        Returns:
            What to tell when a phase has begun.

        Raises:
            RunFolderError: on every rank, when plan.json cannot be written.
        """
        before, self.replan_seconds = self.now, 0.0
        if before is not None and not engines.has_changed(self._engine, before):
            return None
        self.now = now = engines.present(self._engine)
        self._batches.micro_batch = now.micro_batch
        if before is not None:
            self.replan_seconds = engines.replan_seconds(self._engine)
        if before is None or now.phase != before.phase:
            self.first_step = step + 1
            self.measured = min(step + 2, now.last_step or num_steps, num_steps)
        if now.phase is not None:
            run_on_rank_0(self._world, lambda: self._record(step, now, is_start=before is None))
        return self._words(step, before, now)

    def _record(self, step: int, now: Present, *, is_start: bool) -> None:
        if (plan := engines.plan_of(self._engine)) is not None:
            with writing(self._folder.plan):
                plan.save(self._folder.plan)
        names = ("phase", "method", "stage", "coverage", "plan_hash")
        record = {"kind": "phase", **{name: getattr(now, name) for name in names}}
        known = of_kind(self._folder.metrics.read(), "phase")[-1:] if is_start else []
        # A process that goes on in a phase finds its record.
        if not any(record.items() <= last.items() for last in known):
            self._folder.metrics.append(record | {"step": step, "seconds": self.replan_seconds})

    def _words(self, step: int, before: Present | None, now: Present) -> str | None:
        if before is None or now.phase == before.phase:
            return None
        size = "" if now.micro_batch == before.micro_batch else f", micro-batches of {now.micro_batch}"
        return f"step {step}: {now.where}, {now.label}{size} (re-planned in {self.replan_seconds:.2f} s)"
