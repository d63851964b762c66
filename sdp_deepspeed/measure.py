"""What a live engine holds and sends on one rank: bytes by kind, peak of live tensors, traffic of one step.

The same code looks at our engine and at stock DeepSpeed's, so that a table may set them side by side. Everything is
measured in one step that runs slower for it; do not time that step.
"""

from __future__ import annotations

import resource
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.modules.module import register_module_forward_pre_hook

from sdp_deepspeed.traffic import TrafficCounter

# Where DeepSpeed 0.19.8's optimizers keep gradients besides `parameter.grad` (private names).
HOST_GRADIENT_ATTRIBUTES = ("averaged_gradients", "all_grad_tensors", "fp32_groups_gradients_flat")


@dataclass
class StepFigures:
    """Figures of one step on one rank, in bytes.

    Args:
        weights: parameters of the module in the training dtype, padding of flat buffers included.
        gradients: the largest sum of gradients held at one time.
        optimizer: moments, and a master copy where one is kept apart from the weights.
        peak: the largest sum of live tensors during the step.
        sent: bytes sent during the step (`sdp_deepspeed.traffic`).
        sent_by_operator: the same by c10d operator.
        process: the process's largest resident set since its start; context only.
    """

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    peak: int = 0
    sent: int = 0
    sent_by_operator: dict[str, int] | None = None
    process: int = 0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def tensors_in(tree: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested dicts, lists and tuples; whatever else is there is passed over."""
    if isinstance(tree, torch.Tensor):
        yield tree
    elif isinstance(tree, dict):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, list | tuple):
        for value in tree:
            yield from tensors_in(value)


def storage_bytes(tensors: Iterable[torch.Tensor], seen: set[int] | None = None) -> int:
    """Bytes of the storages behind `tensors`, each storage once; `seen` carries those that were counted before."""
    seen = set() if seen is None else seen
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def weight_tensors(engine: Any) -> list[torch.Tensor]:
    """The module's parameters as they lie in memory, and what a rank stores beside them (backward regime)."""
    own = getattr(engine, "lacking_tensors", None)  # our engine tells by itself
    return [parameter.data for parameter in engine.module.parameters()] + (own() if own else [])


def inner_optimizer(engine: Any) -> Any:
    """The torch optimizer that steps, below DeepSpeed's wrappers."""
    optimizer = engine.optimizer
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    return optimizer


def optimizer_tensors(engine: Any) -> list[torch.Tensor]:
    """Moments, and the tensors that are stepped (the master copy, unless they are the weights themselves)."""
    optimizer = inner_optimizer(engine)
    stepped = [parameter.data for group in optimizer.param_groups for parameter in group["params"]]
    return stepped + [tensor for state in list(optimizer.state.values()) for tensor in tensors_in(state)]


def gradient_tensors(engine: Any) -> list[torch.Tensor]:
    """Gradients that are alive now: of the module, of the tensors that are stepped, and in the host's own buffers."""
    parameters = list(engine.module.parameters())
    parameters += [p for group in inner_optimizer(engine).param_groups for p in group["params"]]
    held = [parameter.grad for parameter in parameters if parameter.grad is not None]
    own = getattr(engine.optimizer, "gradient_tensors", None)  # our optimizer tells by itself
    for source in [own()] if own else [getattr(engine.optimizer, name, None) for name in HOST_GRADIENT_ATTRIBUTES]:
        held += tensors_in(source)
    return held


def resident_bytes() -> int:
    """Largest resident set of this process since its start."""
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


class _GradientWatch:
    """Follows the largest sum of gradients while a backward pass fills them in and the host takes them away."""

    def __init__(self, engine: Any) -> None:
        self.engine = engine
        self.peak = 0
        trained = [parameter for parameter in engine.module.parameters() if parameter.requires_grad]
        self.handles = [parameter.register_post_accumulate_grad_hook(self.look) for parameter in trained]

    def look(self, _parameter: torch.Tensor | None = None) -> None:
        self.peak = max(self.peak, storage_bytes(gradient_tensors(self.engine)))

    def close(self) -> None:
        for handle in self.handles:
            handle.remove()


class _LiveTensors(MemTracker):
    """Without hooks on gradients, which only tell kinds of memory apart, and which frozen parameters refuse."""

    def _track_module_params_and_buffers(self, module: torch.nn.Module, install_grad_hooks: bool = True) -> Any:
        return super()._track_module_params_and_buffers(module, install_grad_hooks=False)


@contextmanager
def measured_step(engine: Any) -> Iterator[StepFigures]:
    """Measure the step that runs inside the block; the figures are filled in when it ends.

    On every rank that is to be measured; no collective of its own. Run it on a step after the first, when the
    optimizer's moments exist. The block holds forward, backward and step of all micro-steps.
    """
    figures = StepFigures()
    tracker, watch, traffic = _LiveTensors(), _GradientWatch(engine), TrafficCounter()
    tracker.track_external(engine.module, *optimizer_tensors(engine), *gradient_tensors(engine))

    def new_micro_step(module: torch.nn.Module, _inputs: Any) -> None:
        if module is engine:
            tracker.reset_mod_stats()  # it refuses a second forward otherwise; the peak stays

    # A global hook registered before the tracker's own, which are global too, so that it runs before them.
    handle = register_module_forward_pre_hook(new_micro_step)
    try:
        with traffic, tracker:
            yield figures
        watch.look()
    finally:
        handle.remove()
        watch.close()
    seen: set[int] = set()
    figures.weights = storage_bytes(weight_tensors(engine), seen)
    figures.optimizer = storage_bytes(optimizer_tensors(engine), seen)
    figures.gradients = watch.peak
    figures.peak = sum(device["Total"] for device in tracker.get_tracker_snapshot("peak").values())
    figures.sent = traffic.total
    figures.sent_by_operator = dict(traffic.bytes_by_operator)
    figures.process = resident_bytes()
