"""What a live engine holds and sends on one rank: bytes by kind, peak of live tensors, traffic of one step.

The same code looks at our engine and at stock DeepSpeed's, so that a table may set them side by side. Everything is
measured in one step that runs slower for it; do not time that step.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from benchmarks.common.held_bytes import (
    gradient_tensors,
    optimizer_tensors,
    resident_bytes,
    storage_bytes,
    weight_tensors,
)
from benchmarks.common.traffic_counter import TrafficCounter
from sdp_deepspeed.estimate.flops import FlopCounter


@dataclass
class StepFigures:
    """Figures of one step on one rank, in bytes.

    Args:
        weights: parameters of the module in the training dtype, padding of flat buffers included.
        gradients: the largest sum of gradients held at one time; at stage 2 that is when a backward pass is over, since
            what is on its way during it is a matter of the bucket.
        optimizer: moments, and a master copy where one is kept apart from the weights.
        peak: the largest sum of live tensors during the step; the larger one of the next two.
        peak_backward: the same in forward and backward passes.
        peak_step: the same in the engine's `step`.
        activations: what the forward pass left for the backward pass, most of all micro-steps.
        flops: of the step's matrix products and attention.
        sent: bytes sent during the step.
        sent_by_operator: the same by c10d operator.
        process: the process's largest resident set since its start; context only.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    peak: int = 0
    peak_backward: int = 0
    peak_step: int = 0
    activations: int = 0
    flops: int = 0
    sent: int = 0
    sent_by_operator: dict[str, int] | None = None
    process: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


class _GradientWatch:
    """Follows the largest sum of gradients while a backward pass fills them in and the host takes them away."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.largest = 0
        self.handles: list[Any] = []

    def install(self) -> None:
        if self.engine.zero_optimization_stage() < 2:
            trained = [parameter for parameter in self.engine.module.parameters() if parameter.requires_grad]
            self.handles = [parameter.register_post_accumulate_grad_hook(self.look) for parameter in trained]

    def look(self, _parameter: torch.Tensor | None = None) -> None:
        self.largest = max(self.largest, storage_bytes(gradient_tensors(self.engine)))

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


class _LiveTensors(MemTracker):
    """Without hooks on gradients, which only tell kinds of memory apart, and which frozen parameters refuse."""

    def _track_module_params_and_buffers(self, module: torch.nn.Module, install_grad_hooks: bool = True) -> Any:
        return super()._track_module_params_and_buffers(module, install_grad_hooks=False)

    def current(self) -> int:
        """Bytes now, on all devices."""
        return sum(device["Total"] for device in self.get_tracker_snapshot("current").values())

    def take_peak(self) -> int:
        """Largest number of bytes since the last call, on all devices."""
        peak = sum(device["Total"] for device in self.get_tracker_snapshot("peak").values())
        self._peak_mem_snap = self.get_tracker_snapshot("current")
        self._peak_mem = {device: snapshot["Total"] for device, snapshot in self._peak_mem_snap.items()}
        return peak


@dataclass
class LiveBytes:
    """Bytes of tensors in host memory that came to life in a block: the largest sum, and the sum at its end."""

    peak: int = 0
    at_end: int = 0


@contextmanager
def watched_host_memory() -> Iterator[LiveBytes]:
    """What tensors take inside the block, however they are made; filled in at its end. Tensors without data do not
    count, nor does what lived before."""
    figures, tracker = LiveBytes(), _LiveTensors()
    with tracker:
        yield figures
        peak, current = tracker.get_tracker_snapshot("peak"), tracker.get_tracker_snapshot("current")
        cpu = torch.device("cpu")
        figures.peak, figures.at_end = (int(kinds[cpu]["Total"]) if cpu in kinds else 0 for kinds in (peak, current))


class _Phases:
    """Tells forward and backward passes from `engine.step`, and both from a re-plan at its end."""

    def __init__(self, engine: Any, tracker: _LiveTensors, watch: _GradientWatch, figures: StepFigures) -> None:
        self.engine, self.tracker, self.watch, self.figures = engine, tracker, watch, figures
        self.traffic, self.operations = TrafficCounter(), FlopCounter()
        self.before = 0
        self.handles: list[Any] = []
        self.replaced: dict[str, Any] = {}  # by us; by someone else, who gets it back, if it is no class's
        self.is_over = False

    def install(self) -> None:
        """Before the tracker's own hooks, which are global too, so that these run before them."""
        self.handles = [
            register_module_forward_pre_hook(self.forward_begins),
            register_module_forward_hook(self.forward_ends),
        ]
        for name, method in (("step", self.run_step), ("_replan", self.run_replan)):
            if hasattr(self.engine, name):
                self.replaced[name] = vars(self.engine).get(name)
                setattr(self.engine, name, partial(method, getattr(self.engine, name)))

    def forward_begins(self, module: torch.nn.Module, _inputs: Any) -> None:
        if module is self.engine:
            self.tracker.reset_mod_stats()  # it refuses a second forward otherwise
            self.before = self.tracker.current()

    def forward_ends(self, module: torch.nn.Module, _inputs: Any, _outputs: Any) -> None:
        if module is self.engine:
            self.figures.activations = max(self.figures.activations, self.tracker.current() - self.before)

    def run_step(self, step: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.watch.look()
        self.figures.peak_backward = max(self.figures.peak_backward, self.tracker.take_peak())
        result = step(*arguments, **options)
        if not self.is_over:
            self.figures.peak_step = max(self.figures.peak_step, self.tracker.take_peak())
        return result

    def run_replan(self, replan: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        self.figures.peak_step = max(self.figures.peak_step, self.tracker.take_peak())
        self.finish()  # what comes now is no part of a step
        return replan(*arguments, **options)

    def finish(self) -> None:
        """Fill in what the step was, once."""
        if self.is_over:
            return
        self.is_over, figures, seen = True, self.figures, set[int]()
        figures.weights = storage_bytes(weight_tensors(self.engine), seen)
        figures.optimizer = storage_bytes(optimizer_tensors(self.engine), seen)
        figures.gradients = self.watch.largest
        figures.peak = max(figures.peak_backward, figures.peak_step)
        figures.flops = self.operations.total
        figures.sent = self.traffic.total
        figures.sent_by_operator = dict(self.traffic.bytes_by_operator)
        figures.process = resident_bytes()

    def remove(self) -> None:
        for name, method in self.replaced.items():
            if method is None:
                delattr(self.engine, name)  # the class's own again
            else:
                setattr(self.engine, name, method)
        for handle in self.handles:
            handle.remove()


@contextmanager
def measured_step(engine: Any, *, others: Iterable[torch.Tensor] = ()) -> Iterator[StepFigures]:
    """Measure the step that runs inside the block; the figures are filled in when it ends.

    On every rank that is to be measured; no collective of its own. Run it on a step after the first, when the
    optimizer's moments exist. The block holds forward, backward and step of all micro-steps. If that ends with a
    re-plan, the figures are those of before.

    Args:
        others: tensors that live already and count for the peak, besides those of module and optimizer.
    """
    figures, tracker, watch = StepFigures(), _LiveTensors(), _GradientWatch(engine)
    tracker.track_external(
        engine.module, *weight_tensors(engine), *optimizer_tensors(engine), *gradient_tensors(engine), *others
    )
    phases = _Phases(engine, tracker, watch, figures)
    watch.install()
    phases.install()
    try:
        with phases.operations, phases.traffic, tracker:
            yield figures
    finally:
        phases.remove()
        watch.remove()
    phases.finish()


def live_tensors() -> list[torch.Tensor]:
    """All tensors, however they are reached; what was there before `gc.freeze()` is not found."""
    gc.collect()
    found = (thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))
    return [tensor for tensor in found if tensor.device.type != "meta"]  # which takes no memory
