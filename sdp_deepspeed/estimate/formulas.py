"""DESIGN.md's table: bytes of model state, and bytes sent, per parameter of maskable units.

`python -m sdp_deepspeed.estimate --ranks 8 --coverage 0.5` prints it.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from sdp_deepspeed.estimate.per_rank import Precision

SHARDED = ("ZeRO-1", "ZeRO-2", "SDP + ZeRO-1", "SDP + ZeRO-2")  # whose optimizer state may be offloaded


def bytes_per_parameter(
    num_ranks: int, coverage: float, precision: Precision, *, regime: str = "forward", offload: bool = False
) -> dict[str, tuple[float, float, float]]:
    """Weights, gradients and optimizer state per parameter of maskable units (DESIGN.md section 1).

    Replicas of subnetworks change nothing here: n ranks share, whatever the number of subnetworks.

    Args:
        num_ranks: n.
        coverage: C.
        precision: an fp32 master is counted unless the weights are fp32.
        regime: in the "backward" regime every rank has all weights.
        offload: the optimizer's state is in host memory, with a master in any precision; only `SHARDED`.
    """
    n, c = num_ranks, coverage
    w, g, o = precision.weights, precision.gradients, precision.optimizer(offload=offload)
    weights_here = w if regime == "backward" else w * c
    rows = {
        "DDP / ZeRO-0": (w, g, o),
        "ZeRO-1": (w, g, o / n),
        "ZeRO-2": (w, g / n, o / n),
        "ZeRO-3, FSDP": (w / n, g / n, o / n),
        "SDP, stage 0": (weights_here, g * c, o * c),
        "SDP + ZeRO-1": (weights_here, g * c, o / n),
        "SDP + ZeRO-2": (weights_here, g / n, o / n),
        "SDP + FSDP2": (w / n, g / n, o / n),
    }
    return {name: row for name, row in rows.items() if name in SHARDED or not offload}


def sent_per_parameter(
    num_ranks: int, coverage: float, precision: Precision, *, regime: str = "forward", accumulation: int = 1
) -> dict[str, float]:
    """Bytes that a rank sends in one optimizer step per parameter of maskable units: DESIGN.md's lower bounds.

    Replicas change nothing here either: a unit has h = p r = C D holders.

    Args:
        accumulation: micro-steps; at stage 2 gradients are sent in each.
        num_ranks, coverage, precision, regime: as in `bytes_per_parameter`.
    """
    to_all_others, h = (num_ranks - 1) / num_ranks, coverage * num_ranks
    towards = coverage * max(0.0, h - 1) / h
    back = to_all_others if regime == "backward" else towards
    rounds = {"0": 1, "1": 1, "2": accumulation}
    names = {"0": "SDP, stage 0", "1": "SDP + ZeRO-1", "2": "SDP + ZeRO-2"}
    dense = {"0": "DDP / ZeRO-0", "1": "ZeRO-1", "2": "ZeRO-2"}
    wire, weights = precision.wire, precision.weights
    return {dense[s]: to_all_others * (wire * m + weights) for s, m in rounds.items()} | {
        names[s]: towards * wire * m + back * weights for s, m in rounds.items()
    }


def table(rows: Mapping[str, tuple[float, float, float]], sent: Mapping[str, float], *, offload: bool = False) -> str:
    """Both as markdown; the sum is that of the device's memory."""
    state = "optimizer, host memory" if offload else "optimizer"
    lines = [f"| bytes per parameter | weights | gradients | {state} | sum on device | sent per step |"]
    lines.append("|---|---|---|---|---|---|")
    for name, (weights, gradients, optimizer) in rows.items():
        total = weights + gradients + (0 if offload else optimizer)
        cells = " | ".join(f"{figure:.4g}" for figure in (weights, gradients, optimizer, total))
        lines.append(f"| {name} | {cells} | {f'{sent[name]:.4g}' if name in sent else ''} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m sdp_deepspeed.estimate",
        description="bytes of model state and bytes sent per parameter of maskable units",
    )
    parser.add_argument("--ranks", type=int, default=8, help="data-parallel ranks, replicas of subnetworks included")
    parser.add_argument("--coverage", type=float, default=0.5)
    parser.add_argument("--regime", choices=["forward", "backward"], default="forward")
    parser.add_argument("--dtype", choices=["fp32", "bf16", "fp16"], default="bf16")
    parser.add_argument("--accumulate-in-fp32", action="store_true", help="data_types.grad_accum_dtype: fp32")
    parser.add_argument("--accumulation", type=int, default=1, help="gradient_accumulation_steps")
    parser.add_argument("--offload", action="store_true", help="zero_optimization.offload_optimizer: cpu")
    options = parser.parse_args(arguments)
    n, c, micro_steps = options.ranks, options.coverage, options.accumulation
    if n < 1 or not 0 < c <= 1 or micro_steps < 1:
        parser.error(
            "needs --ranks and --accumulation of 1 or more and 0 < --coverage <= 1, "
            f"got --ranks {n} --accumulation {micro_steps} --coverage {c:g}"
        )
    if c * n < 1:
        parser.error(f"--coverage {c:g} of {n} ranks leaves units without a holder: needs 1/{n} or more")
    precision = Precision.of(options.dtype, accumulate_in_fp32=options.accumulate_in_fp32)
    rows = bytes_per_parameter(n, c, precision, regime=options.regime, offload=options.offload)
    sent = sent_per_parameter(n, c, precision, regime=options.regime, accumulation=micro_steps)
    print(f"{n} ranks, C = {c:g}, {options.regime} regime, {options.dtype}, {micro_steps} micro-steps\n")
    print(table(rows, sent, offload=options.offload))
