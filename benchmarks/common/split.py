"""Where the time of a step goes: a step of its own, in which nothing overlaps.

Every collective is waited for at once, and on a GPU every clock waits for the device. The parts add up to this step,
which takes longer than a timed one by what overlaps there.

- exchange: c10d's operators with the wait for them, which is also the wait for slower ranks.
- optimizer: the step of torch's optimizer, the innermost where optimizers wrap each other.
- forward, backward: these calls, less the exchange within them.
- host: the rest of the `step` call: norm, clipping, packing, casts, copies, Python.
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
    """Runs every collective to its end at once. Messages between two ranks end where the host waits for them, since a
    receive alone would wait for a send that nobody has started.

    Attributes:
        total: seconds in collectives so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0.0
        self._wait = dist.Work.wait

    def __enter__(self) -> ExchangeClock:
        def timed(work: Any, *arguments: Any) -> Any:
            start = seconds()
            result = self._wait(work, *arguments)
            self.total += seconds() - start
            return result

        setattr(dist.Work, "wait", timed)  # noqa: B010  mypy takes no other way
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        setattr(dist.Work, "wait", self._wait)  # noqa: B010
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace not in _COLLECTIVES:
            return func(*args, **(kwargs or {}))
        start = seconds()
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ not in ("send", "recv_"):
            for part in result if isinstance(result, tuple | list) else (result,):
                if isinstance(part, torch.ScriptObject):
                    self._wait(dist.Work.unbox(part))
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
