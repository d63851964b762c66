"""Makes report.json at the end of a run; every number comes from the run's own records."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib import metadata

import torch

from sdp_deepspeed.distributed.agreement import run_on_rank_0
from sdp_deepspeed.training import engines
from sdp_deepspeed.training.curves import flops_until
from sdp_deepspeed.training.loop import Run
from sdp_deepspeed.training.metrics_log import Record, of_kind
from sdp_deepspeed.training.phase_records import label_of, mean_coverage, phase_reports, spread
from sdp_deepspeed.training.report_table import REPORT_VERSION
from sdp_deepspeed.version import __version__

_HOST_PACKAGES: dict[str, tuple[str, ...]] = {"deepspeed": ("deepspeed",), "fsdp2": ()}


def write_report(run: Run) -> None:
    """Write report.json from the run's records; every rank calls it.

    Raises:
        RunFolderError: on every rank, when it, or an earlier record, cannot be written.
    """
    run_on_rank_0(run.world, run.folder.metrics.raise_problem)
    run_on_rank_0(run.world, lambda: _write(run))


def _write(run: Run) -> None:
    records = run.folder.metrics.read()
    steps, evaluations, figures = (of_kind(records, kind) for kind in ("train", "evaluation", "figures"))
    plan, phases = engines.plan_of(run.engine), phase_reports(records)
    run.folder.write_json(
        "report.json",
        {
            "version": REPORT_VERSION,
            "label": label_of(records, run.step) or engines.label(run.engine),
            "num_ranks": run.world.size,
            "steps": run.step,
            f"{run.task.items}_per_step": run.items_per_step,
            "coverage": mean_coverage(phases or []) or engines.present(run.engine).coverage,  # C, over steps
            "plan_hash": None if plan is None else plan.hash,
            **_of_dense_model(evaluations),
            "step_seconds": spread([r["seconds"] for r in steps if r["timed"]]),
            "ranks": figures[-1]["ranks"] if figures else None,  # of the last phase; null: no step was measured
            "flops": flops_until(records, run.step),  # of all ranks, in all steps
            "phases": phases,  # null: no schedule
            "hardware": _hardware(run.engine.device),
            "versions": {"sdp_deepspeed": __version__}
            | {name: metadata.version(name) for name in (*_HOST_PACKAGES[run.options.host], "torch", "transformers")},
        },
    )


def _of_dense_model(evaluations: Sequence[Record]) -> dict[str, float | None]:
    """What the last evaluation found: the loss, and of images the top-1 accuracy."""
    last = evaluations[-1] if evaluations else {"dense_validation_loss": None}
    return {name: value for name, value in last.items() if name.startswith("dense_")}


def _hardware(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} thread(s) per rank"
