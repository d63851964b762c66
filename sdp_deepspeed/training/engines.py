"""What differs between a stock DeepSpeed engine (the baseline) and ours; the rest of the program does not ask."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.utils import logger

from sdp_deepspeed.checkpoint.interop.hugging_face_names import new_model
from sdp_deepspeed.config import MODES
from sdp_deepspeed.distributed.agreement import Gatherer, run_on_rank_0
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.distributed.host_group import Channel, make_host_group
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.training.user_errors import RunFolderError

_CANNOT_EXPORT = "save_pretrained: cannot write"  # how our engine's error begins, too


def unlink_shared_memory() -> None:
    """Unlink the buffers of DeepSpeed's operator for CPUs (66 MiB for each rank), which 0.19.8 leaves behind.

    Every rank has mapped them when `init_distributed` returns on all, and needs no name for them any more.
    """
    address, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    name = f"deepspeed_allreduce_buffer_{os.getuid()}_{address}_{port}_{dist.get_rank()}"
    if dist.get_backend() == "gloo":
        dist.barrier()
        Path("/dev/shm", name).unlink(missing_ok=True)


def check_deepspeed_reads(config: Mapping[str, Any]) -> None:
    """Have DeepSpeed read its config before a model is built.

    Raises:
        ValueError: it cannot.
    """
    try:
        DeepSpeedConfig(dict(config))
    except Exception as error:  # of any kind: DeepSpeed checks few values before it computes with them
        reason = textwrap.shorten(str(error), 300, placeholder=" ...")
        raise ValueError(f"--deepspeed_config: DeepSpeed cannot read it: {type(error).__name__}: {reason}") from None


def plan_of(engine: Any) -> Plan | None:
    """Our engine's plan; None for a stock engine."""
    return getattr(engine, "plan", None)


def trains_subnetwork(engine: Any) -> bool:
    """Whether a training loss is that of a subnetwork and not of the dense model."""
    plan = plan_of(engine)
    return plan is not None and plan.trains_subnetworks


def world_of(engine: Any) -> Gatherer:
    """All ranks, for waits that may be long; every rank calls it once."""
    if plan_of(engine) is not None:
        return engine.world
    return make_host_group(dist, Communicator(dist), logger.warning).channel(Channel.WORLD)


def save_pretrained(engine: Any, folder: Path, tokenizer: Any, world: Gatherer) -> None:
    """Write the dense model and its tokenizer in Hugging Face's format; every rank calls it.

    Raises:
        RunFolderError: on every rank, when it cannot be written; nothing that looks like a model is left then.
    """
    with _as_run_folder_error():
        if plan_of(engine) is not None:
            engine.save_pretrained(str(folder), tokenizer=tokenizer)
        else:
            run_on_rank_0(world, partial(_save_stock, engine, folder, tokenizer))


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
    if plan_of(engine) is not None:
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
        stage: ZeRO's.
        method: a short name of what is trained.
        coverage: C, units weighted by their FLOPs.
        plan_hash: of our engine's plan.
        phase: of a schedule, beginning with 0; None without one.
        num_phases: of the schedule, 0 without one.
        last_step: of the phase; None where it has no end.
    """

    micro_batch: int
    stage: int
    method: str
    coverage: float = 1.0
    plan_hash: str | None = None
    phase: int | None = None
    num_phases: int = 0
    last_step: int | None = None

    @property
    def label(self) -> str:
        """For tables."""
        return f"{self.method} + ZeRO-{self.stage}" if self.plan_hash else self.method

    @property
    def where(self) -> str:
        """In the schedule, for people."""
        return "" if self.phase is None or self.num_phases == 1 else f"phase {self.phase + 1} of {self.num_phases}"


def present(engine: Any) -> Present:
    """Of the step that comes next."""
    plan, schedule, stage = plan_of(engine), getattr(engine, "schedule", None), int(engine.zero_optimization_stage())
    micro_batch = int(engine.train_micro_batch_size_per_gpu())
    if plan is None:
        return Present(micro_batch, stage, f"ZeRO-{stage}")
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
