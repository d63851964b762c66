"""Run launch/pretrain.py with one step of each phase measured, and set two such runs side by side.

    deepspeed --num_gpus 4 benchmarks/quickstart.py configs/recipes/quickstart.yaml
    python benchmarks/quickstart.py --table runs/quickstart runs/quickstart_zero1

Measured steps are slower; nothing is timed. The figures, the most of all ranks, are in `measured.json` of the run.
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch.distributed as dist
from transformers import Trainer, TrainerCallback

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "launch")]
import pretrain  # noqa: E402
from benchmarks.common.measured_step import StepFigures, measured_step  # noqa: E402
from recipe import read_recipe  # noqa: E402

FILE = "measured.json"


class MeasureSteps(TrainerCallback):
    """Measures the third step of each phase; a run without a schedule is one phase."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.num_steps: dict[int, int] = {}  # of each phase, in this process
        self.figures: dict[int, StepFigures] = {}
        self.measuring = ExitStack()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        engine: Any = self.trainer.model_wrapped
        phase = getattr(engine, "phase", 0)
        self.num_steps[phase] = self.num_steps.get(phase, 0) + 1
        if self.num_steps[phase] == 3:
            self.figures[phase] = self.measuring.enter_context(measured_step(engine))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Written at once: a run that is killed later resumes without another measured step of this phase."""
        self.measuring.close()
        engine: Any = self.trainer.model_wrapped
        schedule = getattr(engine, "schedule", None)
        phases = [schedule.phase_after(step) if schedule else 0 for step in range(state.max_steps)]
        for phase, own in self.figures.items():
            everyone: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(everyone, own)
            figures = {
                "steps": phases.count(phase),
                "state": max(one.weights + one.gradients + one.optimizer for one in everyone),
                "peak": max(one.peak for one in everyone),
                "sent": max(one.sent for one in everyone),
                "flops": max(one.flops for one in everyone),
            }
            if dist.get_rank() == 0:
                path = Path(args.output_dir, FILE)
                known = json.loads(path.read_text()) if path.exists() else {}
                path.write_text(json.dumps(known | {str(phase): figures}, indent=1))
        self.figures.clear()


def table(subject: Path, plain: Path) -> str:
    """What a worker holds, computes and sends in each phase and in the whole run, beside the plain run."""
    columns: dict[str, list[str]] = {"": ["steps", "model state", "peak memory", "TFLOPs", "sent", "dense loss"]}
    for folder in (subject, plain):
        phases = [*json.loads((folder / FILE).read_text()).values()]
        loss = json.loads((folder / "eval_results.json").read_text())["eval_loss"]
        if len(phases) > 1:
            columns |= {f"phase {number}": _column([one], "") for number, one in enumerate(phases, 1)}
        columns[folder.name] = _column(phases, f"{loss:.3f}")
    widths = [max(map(len, (name, *cells))) for name, cells in columns.items()]
    rows = [[*columns], *map(list, zip(*columns.values(), strict=True))]
    return "\n".join("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows)


def _column(phases: list[dict[str, int]], loss: str) -> list[str]:
    total = {name: sum(one["steps"] * one[name] for one in phases) for name in ("flops", "sent")}
    state, peak = (max(one[name] for one in phases) / 2**20 for name in ("state", "peak"))
    steps = sum(one["steps"] for one in phases)
    return [
        f"{steps}",
        f"{state:.1f} MiB",
        f"{peak:.1f} MiB",
        f"{total['flops'] / 1e12:.2f}",
        f"{total['sent'] / 1e6:.0f} MB",
        loss,
    ]


def main() -> None:
    assert __doc__ is not None
    if sys.argv[1:2] == ["--table"]:
        print(table(*map(Path, sys.argv[2:])))
        return
    trainer = pretrain.build_trainer(read_recipe(__doc__, pretrain.SECTIONS))
    trainer.add_callback(MeasureSteps(trainer))
    pretrain.run(trainer)


if __name__ == "__main__":
    main()
