"""Reports and records of runs that nobody ran."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sdp_deepspeed.training.report_table import REPORT_VERSION

MIB = 2**20


def report(label: str, *, scale: int, **changes: Any) -> dict[str, Any]:
    """A report whose second rank is the larger one: `scale` MiB of each kind there."""
    kinds = ("weights", "gradients", "optimizer", "peak", "sent")
    return {
        "version": REPORT_VERSION,
        "label": label,
        "num_ranks": 2,
        "steps": 10,
        "tokens_per_step": 200,
        "dense_validation_loss": 1.25,
        "step_seconds": {"median": 0.1 * scale, "p10": 0.05, "p90": 0.5, "num_steps": 8},
        "ranks": [dict.fromkeys(kinds, MIB // 2), dict.fromkeys(kinds, scale * MIB)],
        "flops": None,
        "phases": None,
        "hardware": "a CPU",
    } | changes


def figures(step: int, *, first_step: int | None = None, flops: int | None = 50) -> dict[str, Any]:
    """Of two ranks, with so many FLOPs each; without `first_step` as older runs wrote it."""
    ranks = [rank | ({} if flops is None else {"flops": flops}) for rank in report("", scale=2)["ranks"]]
    first = {} if first_step is None else {"first_step": first_step}
    return {"kind": "figures", "step": step, "ranks": ranks} | first


def phase(step: int, index: int, method: str = "SDP 1/2", **changes: Any) -> dict[str, Any]:
    """The beginning of a phase after `step` steps."""
    record = {"kind": "phase", "step": step, "phase": index, "method": method, "stage": 1, "plan_hash": method}
    return record | {"coverage": 1.0 if method == "dense" else 0.5, "seconds": 0.0} | changes


def write_metrics(folder: Path, *, flops: int | None = 50, losses: tuple[float | None, ...] = (6.0, 5.0, 4.0)) -> None:
    """Six steps of 200 tokens on two ranks: the first two take longer and are not timed, the others one second. The
    dense model is evaluated every third step, from before the first."""
    records: list[dict[str, Any]] = [{"kind": "evaluation", "step": 0, "dense_validation_loss": losses[0]}]
    for step in range(1, 7):
        seconds, timed = (40.0, False) if step < 3 else (1.0, True)
        records.append({"kind": "train", "step": step, "seconds": seconds, "timed": timed, "loss": 99.0})
        records[-1]["tokens_per_second"] = 200 / seconds
        if step == 2:
            records.append(figures(2, first_step=1, flops=flops))
        if step % 3 == 0 and step // 3 < len(losses):
            records.append({"kind": "evaluation", "step": step, "dense_validation_loss": losses[step // 3]})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
