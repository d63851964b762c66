"""What a live engine holds and sends on one rank: bytes by kind, peak of live tensors, traffic of one step.

The same code looks at every host, so that a table may set them side by side. Everything is measured in one step that
runs slower for it; do not time that step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from benchmarks.common.held_bytes import gradient_tensors, optimizer_tensors, storage_bytes, weight_tensors
from benchmarks.common.traffic_counter import TrafficCounter
from sdp_deepspeed.estimate.flop_counter import FlopCounter


@dataclass
class StepFigures:
    """Figures of one step on one rank, in bytes.

    Args:
        weights: parameters of the module in the training dtype, padding of flat buffers included.
        gradients: the largest sum of gradients held at one time; at stage 2 that is when a backward pass is over, since
            what is on its way during it is a matter of the bucket.
        optimizer: moments, and a master copy where one is kept apart from the weights.
        peak: the largest sum of live tensors.
        activations: what the forward pass left for the backward pass, most of all micro-steps.
        flops: of the step's matrix products and attention.
        sent: bytes sent during the step.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    peak: int = 0
    activations: int = 0
    flops: int = 0
    sent: int = 0


class LiveTensors(MemTracker):
    """Bytes of tensors with data that come to life in a block, or are given to `track_external`.

    Without hooks on gradients, which only tell kinds of memory apart, and which frozen parameters refuse.
    """

    def _track_module_params_and_buffers(self, module: torch.nn.Module, install_grad_hooks: bool = True) -> Any:
        return super()._track_module_params_and_buffers(module, install_grad_hooks=False)

    def current(self) -> int:
        """Bytes now."""
        return self._num_bytes("current")

    def peak(self) -> int:
        """Largest number of bytes so far."""
        return self._num_bytes("peak")

    def _num_bytes(self, when: str) -> int:
        kinds = self.get_tracker_snapshot(when)
        return sum(kinds[device]["Total"] for device in kinds if device.type != "meta")


class _Phases:
    """Follows what forward passes leave, and the largest sum of gradients."""

    def __init__(self, engine: Any, tracker: LiveTensors, figures: StepFigures) -> None:
        self.engine, self.tracker, self.figures = engine, tracker, figures
        self.before = 0
        # Before the tracker's own hooks, which are global too, so that these run before them.
        self.handles: list[Any] = [
            register_module_forward_pre_hook(self.forward_begins),
            register_module_forward_hook(self.forward_ends),
        ]
        if engine.zero_optimization_stage() < 2:
            trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
            self.handles += [parameter.register_post_accumulate_grad_hook(self.look) for parameter in trained]
        self.replaced = vars(engine).get("step")  # by someone else, who gets it back; the class's otherwise
        engine.step = partial(self.run_step, engine.step)

    def look(self, _parameter: torch.Tensor | None = None) -> None:
        self.figures.gradients = max(self.figures.gradients, storage_bytes(gradient_tensors(self.engine)))

    def forward_begins(self, module: torch.nn.Module, _inputs: Any) -> None:
        if module is self.engine:
            self.tracker.reset_mod_stats()  # it refuses a second forward otherwise
            self.before = self.tracker.current()

    def forward_ends(self, module: torch.nn.Module, _inputs: Any, _outputs: Any) -> None:
        if module is self.engine:
            self.figures.activations = max(self.figures.activations, self.tracker.current() - self.before)

    def run_step(self, step: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.look()
        return step(*arguments, **options)

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        if self.replaced is None:
            del self.engine.step
        else:
            self.engine.step = self.replaced


@contextmanager
def measured_step(engine: Any, *, others: Iterable[torch.Tensor] = ()) -> Iterator[StepFigures]:
    """Measure the step that runs inside the block; the figures are filled in when it ends.

    On every rank that is to be measured; no collective of its own. Run it on a step after the first, when the
    optimizer's moments exist, and not on one that ends with a re-plan. The block holds forward, backward and step of
    all micro-steps.

    Args:
        others: tensors that live already and count for the peak, besides those of module and optimizer.
    """
    figures, tracker, traffic, operations = StepFigures(), LiveTensors(), TrafficCounter(), FlopCounter()
    tracker.track_external(
        engine.module, *weight_tensors(engine), *optimizer_tensors(engine), *gradient_tensors(engine), *others
    )
    phases = _Phases(engine, tracker, figures)
    try:
        with operations, traffic, tracker:
            yield figures
            figures.peak = tracker.peak()
    finally:
        phases.remove()
    seen = set[int]()
    figures.weights = storage_bytes(weight_tensors(engine), seen)
    figures.optimizer = storage_bytes(optimizer_tensors(engine), seen)
    figures.flops, figures.sent = operations.total, traffic.total


def live_tensors() -> list[torch.Tensor]:
    """All tensors with memory, however they are reached; what was there before `gc.freeze()` is not found."""
    gc.collect()
    found = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
    return [tensor for tensor in found if tensor.device.type != "meta" and not isinstance(tensor, FakeTensor)]
