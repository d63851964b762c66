"""A config for each row of the support table, and what it says of each combination."""

from __future__ import annotations

import json
from typing import Any

from sdp_deepspeed.config import KEY
from sdp_deepspeed.support.rows import Row
from sdp_deepspeed.support.table import TABLE

REFUSED = [row for row in TABLE if row.state == "refused" and row.applies is not None]
HINTS = [row for row in TABLE if row.state == "no effect"]
WORKS = [row for row in TABLE if row.state == "works"]
BF16 = {"bf16": {"enabled": True}}
# What a row's setting needs beside it to have an effect; ZeRO stage 1 and bf16 unless the row says otherwise.
BESIDE: dict[str, dict[str, Any]] = {
    "replicas of subnetworks": {KEY: {"coverage": 1.0}},
    "tensor parallelism (AutoTP)": {KEY: {"coverage": 1.0}},
    "groups of neurons": {KEY: {"strategy": "neuron"}},
    "scaled dense branches, backward regime": {KEY: {"regime": "backward"}},
    "ways of the dense model, backward regime": {KEY: {"regime": "backward"}},
    "fp16, dynamic loss scale": {"bf16": {}},
    "fp16, static loss scale": {"bf16": {}, "fp16": {"enabled": True}},
    "fp16 master weights": {"bf16": {}, "fp16": {"enabled": True}},
    "step without gradient norm": {"gradient_clipping": 0.0},
    "no gradient norm, with clipping": {"gradient_clipping": 0.5},
    "fp32 gradient sums, stage 0": {"zero_optimization": {"stage": 0}},
    "optimizer in host memory, stage 0": {"zero_optimization": {"stage": 0}},
    "accumulation by the caller, overlap, stages 0 and 1": {"zero_optimization": {"stage": 1, "overlap_comm": True}},
    "SuperOffload": {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
}


def ds_config(row: Row, value: Any) -> dict[str, Any]:
    """A config with `value` at the row's path, and what it needs beside it."""
    config: dict[str, Any] = {**BF16, "zero_optimization": {"stage": 1}, **BESIDE.get(row.what, {})}
    config = json.loads(json.dumps(config))  # a copy of its own, as read from a file
    config[KEY] = {"coverage": 0.5, **config.get(KEY, {})}
    if row.path:
        *parents, last = row.path.split(".")
        place = config
        for key in parents:
            place = place.setdefault(key, {})
        place[last] = value
    return config


def ids(rows: list[Row]) -> list[str]:
    return [row.what for row in rows]
