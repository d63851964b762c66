"""Run launch/pretrain.py with one step of each phase measured; quickstart_table.py sets two such runs side by side.

    deepspeed --num_gpus 4 benchmarks/quickstart.py configs/recipes/quickstart.yaml

Measured steps are slower; nothing is timed. The maximum over all ranks is in `measured.json` of the run.
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
        """Write at once, so that a resumed run does not measure this phase again."""
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
                known = json.loads(path.read_text())["phases"] if path.exists() else {}
                path.write_text(json.dumps({"phases": known | {str(phase): figures}}, indent=1))
        self.figures.clear()


def main() -> None:
    assert __doc__ is not None
    trainer = pretrain.build_trainer(read_recipe(__doc__, pretrain.SECTIONS))
    trainer.add_callback(MeasureSteps(trainer))
    pretrain.run(trainer)


if __name__ == "__main__":
    main()
