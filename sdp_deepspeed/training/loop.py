"""The training loop: step, agree, record, evaluate, save, stop."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.common.measured_step import measured_step
from sdp_deepspeed.distributed.agreement import Gatherer, run_on_rank_0
from sdp_deepspeed.engine.step_events import StepEvents
from sdp_deepspeed.total_steps import never_begins
from sdp_deepspeed.training import engines, monitors
from sdp_deepspeed.training.evaluate import to_device
from sdp_deepspeed.training.options import Options
from sdp_deepspeed.training.phases import Phases
from sdp_deepspeed.training.progress import Progress, memory_bytes
from sdp_deepspeed.training.run_folder import RunFolder
from sdp_deepspeed.training.stopping import StopRequest, reduce_outcome
from sdp_deepspeed.training.task import RunData, Task


@dataclass
class Run:
    """Everything that a run consists of on one rank.

    Args:
        engine: DeepSpeed's, ours or its own.
        world: all ranks.
        events: what writes steps to DeepSpeed's monitors; None without one.
        step: optimizer steps done, those before a resume included.
        evaluated_at: step of the last recorded evaluation, also of an earlier process; None before the first.
        phases: where it is in its schedule.
    """

    options: Options
    engine: Any
    data: RunData
    folder: RunFolder
    world: Gatherer
    task: Task
    events: StepEvents | None = None
    step: int = field(default=0, init=False)
    evaluated_at: int | None = field(default=None, init=False)
    phases: Phases = field(init=False)

    def __post_init__(self) -> None:
        self.phases = Phases(self.engine, self.data.train, self.folder, self.world)

    @property
    def items_per_step(self) -> int:
        """Tokens, or images, that all ranks together take in one optimizer step."""
        return self.engine.train_batch_size() * self.data.train.sequence_length


def resume(run: Run) -> None:
    """Load the last checkpoint, if there is one, and forget what was recorded after it; every rank calls it."""
    if run.folder.has_checkpoint:
        path, state = run.engine.load_checkpoint(str(run.folder.checkpoints))
        if path is None:
            raise ValueError(f"{run.folder.checkpoints} has no complete checkpoint; remove it to start anew")
        run.step = state["step"]
        run.data.train.load_state_dict(state["data"])
    run.evaluated_at = run_on_rank_0(run.world, lambda: _forget_after(run.folder, run.step))


def _forget_after(folder: RunFolder, step: int) -> int | None:
    """Drop records after `step`. Returns the step of the last evaluation that stays."""
    folder.metrics.drop_after(step)
    return max((record["step"] for record in folder.metrics.read() if record["kind"] == "evaluation"), default=None)


def save(run: Run) -> None:
    """Write a checkpoint of this step; every rank calls it."""
    state = {"step": run.step, "data": run.data.train.state_dict()}
    engines.save_checkpoint(run.engine, run.folder.checkpoints, tag=f"step_{run.step:08d}", client_state=state)
    run.world.gather_objects(None)  # nothing is removed before all have written
    run_on_rank_0(run.world, lambda: run.folder.prune_checkpoints(run.options.keep_checkpoints))
    run_on_rank_0(run.world, run.folder.metrics.raise_problem)


def train(run: Run, progress: Progress) -> bool:
    """Train up to `options.steps`; every rank calls it. False when a signal ended it early, after saving.

    Raises:
        RunFolderError: on every rank, when the run's records cannot be written.
    """
    options = run.options
    if text := never_begins(options.deepspeed_config, options.steps):
        progress.say(f"warning: {text}")
    run.phases.follow(run.step, options.steps)
    if run.step == 0 and run.evaluated_at is None:
        evaluate(run, progress)
    with StopRequest() as stop:
        while run.step < options.steps:
            stopping = _one_step(run, progress, stop)
            done = run.step == options.steps
            if stopping and not done:
                progress.say(f"stopping after step {run.step}: saving")
            if stopping or done or run.step % options.save_interval == 0:
                save(run)
            if stopping and not done:
                progress.say(f"saved in {run.folder.checkpoints}: the same command resumes")
                return False
            if not done and run.step % options.eval_interval == 0:
                evaluate(run, progress)
        # Outside the loop: a process that was killed after its last save left this to the next one.
        if run.evaluated_at != run.step:
            evaluate(run, progress)
    return True


def _one_step(run: Run, progress: Progress, stop: StopRequest) -> bool:
    """One optimizer step with its record. Returns whether any rank was asked to stop."""
    phases, next_step = run.phases, run.step + 1
    timed = next_step not in (phases.first_step, phases.measured)
    loss_of = "subnetwork" if engines.trains_subnetwork(run.engine) else "dense"  # the step may end with another plan
    start = time.perf_counter()
    with _measuring(run) if next_step == phases.measured else contextlib.nullcontext():
        local_loss = _micro_steps(run)
    outcome = reduce_outcome(local_loss, stop_requested=stop.requested, failed=run.folder.metrics.failed)
    if outcome.failed:
        run_on_rank_0(run.world, run.folder.metrics.raise_problem)
    seconds = time.perf_counter() - start
    run.step = next_step
    new_phase = phases.follow(run.step, run.options.steps)
    seconds -= phases.replan_seconds
    items_per_second = run.items_per_step / seconds
    run.folder.metrics.append(
        {
            "kind": "train",
            "step": run.step,
            "loss": outcome.loss,
            "loss_of": loss_of,
            "learning_rate": run.engine.get_lr()[0],
            "gradient_norm": _float_or_none(run.engine.get_global_grad_norm()),
            "seconds": seconds,
            "timed": timed,
            f"{run.task.items}_per_second": items_per_second,
            "memory_bytes": memory_bytes(),
            "epoch": run.data.train.epoch,
        }
    )
    monitors.write_throughput(run.engine, run.events, run.task.items, items_per_second)
    progress.step(outcome.loss, items_per_second)
    if new_phase is not None:
        progress.say(new_phase)
    return outcome.stop_requested


@contextlib.contextmanager
def _measuring(run: Run) -> Iterator[None]:
    """Measure the step that is made inside, and record every rank's figures at once, so that a later process of the run
    can report them; a collective."""
    step, first_step = run.phases.measured, run.phases.first_step
    with measured_step(run.engine) as figures:
        yield
    monitors.count_sent(run.events, figures.to_json())
    ranks = run.world.gather_objects(figures.to_json())
    run.folder.metrics.append({"kind": "figures", "step": step, "first_step": first_step, "ranks": ranks})


def _micro_steps(run: Run) -> torch.Tensor:
    """Forward, backward and step of all micro-steps; the mean of this rank's losses."""
    engine = run.engine
    accumulation = engine.gradient_accumulation_steps()
    total = torch.zeros((), dtype=torch.float32, device=engine.device)
    for _ in range(accumulation):
        batch = to_device(next(run.data.train), engine.device)
        loss = run.task.loss(engine, batch)
        engine.backward(loss)
        engines.step(engine)
        total += loss.detach().float()
    return total / accumulation


def evaluate(run: Run, progress: Progress) -> None:
    """Record and show what the dense model is worth; a collective. Nothing when nothing is held out."""
    if run.data.validation is None:
        return
    record = run.task.evaluate(run.engine, run.data)
    run.folder.metrics.append({"kind": "evaluation", "step": run.step, **record})
    run.evaluated_at = run.step
    monitors.write_evaluation(run.engine, run.events, record["dense_validation_loss"])
    progress.say(f"step {run.step}: {run.task.words(record)}")


def _float_or_none(value: Any) -> float | None:
    return None if value is None else float(value)
