"""What one rank does in one step, counted instead of timed: floating-point operations and bytes sent.

Counts do not depend on the machine's noise. What operations are is in `sdp_deepspeed/estimate/flops.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.common.traffic_counter import TrafficCounter
from sdp_deepspeed.estimate.flops import FlopCounter


def count_work(step: Callable[[], object]) -> dict[str, Any]:
    """FLOPs and bytes sent by this rank while `step` runs, which is slower for it; no collective of its own. Calls and
    bytes by c10d operator too."""
    traffic, operations = TrafficCounter(), FlopCounter()
    with traffic, operations:
        step()
    by_operator = {name: [calls, traffic.bytes_by_operator[name]] for name, calls in traffic.calls_by_operator.items()}
    return {"flops": operations.total, "sent_bytes": traffic.total, "by_operator": by_operator}
