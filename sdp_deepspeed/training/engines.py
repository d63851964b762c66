"""What differs between engines: a stock one of DeepSpeed's (the baseline), ours, and FSDP2's; the rest of the program
does not ask."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sdp_deepspeed.checkpoint.interop.hugging_face_names import new_model
from sdp_deepspeed.config import MODES
from sdp_deepspeed.distributed.agreement import Gatherer, run_on_rank_0
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.training.user_errors import RunFolderError

_CANNOT_EXPORT = "save_pretrained: cannot write"  # how our engine's error begins, too


def plan_of(engine: Any) -> Plan | None:
    """Who holds what; None without the block."""
    return getattr(engine, "plan", None)


def is_stock(engine: Any) -> bool:
    """Whether it is DeepSpeed's own."""
    return not hasattr(engine, "wait_for_checkpoint")


def trains_subnetwork(engine: Any) -> bool:
    """Whether a training loss is that of a subnetwork and not of the dense model."""
    plan = plan_of(engine)
    return plan is not None and plan.trains_subnetworks


def save_pretrained(engine: Any, folder: Path, tokenizer: Any, world: Gatherer) -> None:
    """Write the dense model and its tokenizer in Hugging Face's format; every rank calls it.

    Raises:
        RunFolderError: on every rank, when it cannot be written; nothing that looks like a model is left then.
    """
    with _as_run_folder_error():
        if is_stock(engine):
            run_on_rank_0(world, partial(_save_stock, engine, folder, tokenizer))
        else:
            engine.save_pretrained(str(folder), tokenizer=tokenizer)


def _save_stock(engine: Any, folder: Path, tokenizer: Any) -> None:
    try:
        with new_model(folder) as staging:
            engine.module.save_pretrained(staging)
            tokenizer.save_pretrained(staging)
    except Exception as problem:  # of any kind, such as those of safetensors on a full disk
        raise RuntimeError(f"{_CANNOT_EXPORT} {folder}: {problem}") from problem


def save_checkpoint(engine: Any, folder: Path, *, tag: str, client_state: dict[str, Any]) -> None:
    """As the engine's; every rank calls it.

    Raises:
        RunFolderError: on every rank, when it cannot be written.
    """
    with _as_run_folder_error():
        engine.save_checkpoint(str(folder), tag=tag, client_state=client_state)


def step(engine: Any) -> None:
    """As the engine's, which waits for a checkpoint in the background where the plan changes: it raises as
    `save_checkpoint`."""
    with _as_run_folder_error():
        engine.step()


def wait_for_checkpoint(engine: Any) -> None:
    """Until a checkpoint that is written in the background is complete; every rank calls it, and it raises as
    `save_checkpoint`."""
    if not is_stock(engine):
        with _as_run_folder_error():
            engine.wait_for_checkpoint()


@contextmanager
def _as_run_folder_error() -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        if not str(error).startswith(("checkpoint:", _CANNOT_EXPORT)):
            raise
        raise RunFolderError(f"{error}; start the same command again when there is space and permission") from None


@dataclass(frozen=True)
class Present:
    """What the next step is made with; the same on every rank. Two that are equal take as long, and cost as much.

    Args:
        micro_batch: of a rank.
        stage: ZeRO's; None under FSDP2.
        method: a short name of what is trained.
        coverage: C, units weighted by their FLOPs.
        plan_hash: of our engine's plan.
        phase: of a schedule, beginning with 0; None without one.
        num_phases: of the schedule, 0 without one.
        last_step: of the phase; None where it has no end.
    """

    micro_batch: int
    stage: int | None
    method: str
    coverage: float = 1.0
    plan_hash: str | None = None
    phase: int | None = None
    num_phases: int = 0
    last_step: int | None = None

    @property
    def label(self) -> str:
        """For tables."""
        sharding = "FSDP2" if self.stage is None else f"ZeRO-{self.stage}"
        return f"{self.method} + {sharding}" if self.plan_hash else sharding

    @property
    def where(self) -> str:
        """In the schedule, for people."""
        return "" if self.phase is None or self.num_phases == 1 else f"phase {self.phase + 1} of {self.num_phases}"


def present(engine: Any) -> Present:
    """Of the step that comes next."""
    plan, schedule = plan_of(engine), getattr(engine, "schedule", None)
    stage = None if getattr(engine, "is_fsdp", False) else int(engine.zero_optimization_stage())
    micro_batch = int(engine.train_micro_batch_size_per_gpu())
    if plan is None:
        return Present(micro_batch, stage, "dense")
    now = Present(micro_batch, stage, _method(plan, engine.coverage), engine.coverage, plan.hash)
    if schedule is None:
        return now
    method = "dense" if plan.is_whole else now.method
    phase, phases = int(engine.phase), schedule.phases
    return replace(now, method=method, phase=phase, num_phases=len(phases), last_step=phases[phase].until_step)


def has_changed(engine: Any, before: Present) -> bool:
    """Whether the next step is made in another way than those before."""
    plan = plan_of(engine)
    is_same = plan is None or plan.hash == before.plan_hash
    return not is_same or (before.phase is not None and before.phase != int(engine.phase))


def replan_seconds(engine: Any) -> float:
    """That the last re-plan took."""
    return 0.0 if engine.last_replan is None else float(engine.last_replan.seconds)


def label(engine: Any) -> str:
    """A short name of the method, for tables."""
    return present(engine).label


def micro_batches(engine: Any) -> list[int]:
    """Of all phases of a schedule, in their order, where they have their own."""
    schedule = getattr(engine, "schedule", None)
    given = [] if schedule is None else [phase.micro_batch for phase in schedule.phases]
    return [size for size in given if size is not None]


def _method(plan: Plan, coverage: float) -> str:
    mode = f"{plan.regime} x {plan.strategy if isinstance(plan.strategy, str) else 'mixed'}"
    words = "" if mode == str(MODES[0]) else f" {mode}"  # the usual one goes without saying
    numbers = sorted({*map(len, plan.holders)})
    holders = "-".join(map(str, dict.fromkeys((numbers[0], numbers[-1]))))
    # Many rules have one range.
    mean = "" if len(numbers) == 1 else f" (mean {coverage * plan.num_subnetworks:.3g})"
    return f"SDP {holders}/{plan.num_subnetworks}{mean}{words}"
