"""Run launch/pretrain.py with one step measured; quickstart_table.py sets two such runs side by side.

    deepspeed --num_gpus 4 benchmarks/quickstart.py configs/recipes/quickstart.yaml

The measured step is slower; nothing is timed. The maximum over all ranks is in `measured.json` of the run.
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
from recipe import fail, read_recipe  # noqa: E402

FILE = "measured.json"


class MeasureStep(TrainerCallback):
    """Measures the third step of a process."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.num_steps = trainer, 0
        self.figures: StepFigures | None = None
        self.measuring = ExitStack()

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.num_steps += 1
        if self.num_steps == 3:
            self.figures = self.measuring.enter_context(measured_step(self.trainer.model_wrapped))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.measuring.close()
        if self.num_steps != 3:
            return
        everyone: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(everyone, self.figures)
        if dist.get_rank() == 0:
            figures = {
                "steps": state.max_steps,
                "state": max(one.weights + one.gradients + one.optimizer for one in everyone),
                **{name: max(getattr(one, name) for one in everyone) for name in ("peak", "sent", "flops")},
            }
            Path(args.output_dir, FILE).write_text(json.dumps(figures, indent=1))


def main() -> None:
    assert __doc__ is not None
    recipe = read_recipe(__doc__, pretrain.SECTIONS)
    if recipe.has_subnetworks and recipe.block.get("schedule"):
        fail("sdp.schedule: got phases, but one step is measured for all; use launch/pretrain.py")
    trainer = pretrain.build_trainer(recipe)
    trainer.add_callback(MeasureStep(trainer))
    pretrain.run(trainer)


if __name__ == "__main__":
    main()
