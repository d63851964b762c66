"""Where the time of a step goes: one more step, not the one that is timed, in which nothing overlaps.

Every collective is waited for at once, and on a GPU every clock waits for the device. So the parts add up to this step,
which takes longer than the timed one by what overlaps there.

- exchange: calls of c10d's operators with the wait for them, which is also the wait for slower ranks.
- optimizer: the step of torch's optimizer, innermost where optimizers wrap each other.
- forward, backward: these calls, less the exchange within them.
- host: what is left: norm, clipping, packing, casts, copies and Python of the `step` call.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.common.contestants import Batch, inputs_of
from benchmarks.common.device import seconds

PARTS = ("forward", "backward", "exchange", "optimizer", "host")
_COLLECTIVES = ("c10d", "_c10d_functional")  # the second are what DTensors call


class ExchangeClock(TorchDispatchMode):
    """Runs every collective to its end; receives and sends once there are as many of both, since a receive alone would
    wait for a send that nobody has begun.

    Attributes:
        total: seconds in collectives so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0
        self._works: list[Any] = []
        self._num_open = 0  # receives without a send

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in _COLLECTIVES:
            return func(*args, **(kwargs or {}))
        start = seconds()
        result = func(*args, **(kwargs or {}))
        parts = result if isinstance(result, tuple | list) else (result,)
        self._works += [dist.Work.unbox(part) for part in parts if isinstance(part, torch.ScriptObject)]
        self._num_open += {"recv_": 1, "send": -1}.get(func.overloadpacket.__name__, 0)
        if not self._num_open:
            for work in self._works:
                work.wait()
            self._works.clear()
        self.total += seconds() - start
        return result


@dataclass
class OptimizerClock:
    """Seconds in steps of torch's optimizers; of those that wrap each other the innermost's."""

    total: float = 0.0
    _start: float | None = field(default=None, repr=False)

    def begins(self, *_: Any) -> None:
        self._start = seconds()

    def ends(self, *_: Any) -> None:
        if self._start is not None:
            self.total += seconds() - self._start
        self._start = None

    @contextmanager
    def running(self) -> Iterator[None]:
        handles = [register_optimizer_step_pre_hook(self.begins), register_optimizer_step_post_hook(self.ends)]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def split_step(engine: Any, batch: Batch) -> dict[str, float]:
    """Seconds of each of PARTS on this rank in one step of one micro-step; all ranks call it.

    Args:
        batch: on the device.
    """
    exchange, optimizer, inputs = ExchangeClock(), OptimizerClock(), inputs_of(batch)
    dist.barrier()
    marks = [(seconds(), 0.0)]
    with exchange, optimizer.running():
        loss = engine(**inputs).loss
        marks.append((seconds(), exchange.total))
        engine.backward(loss)
        marks.append((seconds(), exchange.total))
        engine.step()
        marks.append((seconds(), exchange.total))
    (begin, _), (forward, in_forward), (backward, in_backward), (end, in_all) = marks
    parts = {
        "forward": forward - begin - in_forward,
        "backward": backward - forward - (in_backward - in_forward),
        "exchange": in_all,
        "optimizer": optimizer.total,
    }
    return parts | {"host": end - begin - sum(parts.values())}
