"""launch/train_vision.py's program: the training program with images as its task."""

from __future__ import annotations

from collections.abc import Sequence

from sdp_deepspeed.training.main import run_program
from sdp_deepspeed.training.task import Task
from sdp_deepspeed.vision.options import VisionOptions, parse_options, settle


def main(arguments: Sequence[str] | None = None) -> int:
    """Train an image classifier on this rank; returns the exit code (0 also after a stop that was asked for)."""
    return run_program("train_vision.py", lambda: parse_options(arguments), _task, settle)


def _task(options: VisionOptions) -> Task:
    from sdp_deepspeed.vision.task import VisionTask

    return VisionTask(options)
