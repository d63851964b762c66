"""Runs that are saved and resumed, with a schedule, and what must be the same afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from sdp_deepspeed import architectures
from sdp_deepspeed.checkpoint.atomic_folder import LOCK
from sdp_deepspeed.checkpoint.dcp_planners import LoadPlanner, State, add_box
from sdp_deepspeed.checkpoint.files import Reader
from tests.helpers.models import config
from tests.helpers.oracle_grid import PRECISIONS
from tests.helpers.ranks import Check, run_ranks

WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 6}}


class Branch(nn.Module):
    """`x + body(norm(x))` with features [..., 6]."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.body = norm, nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(self.norm(x))


architectures.register(Branch, architectures.Branch("mlp", norm="norm", body="body"))


def settings_of(stage: int = 1, precision: str = "fp32", **block: Any) -> dict[str, Any]:
    result = config(**({"holders": 1} | block)) | {"zero_optimization": {"stage": stage}, "scheduler": WARMUP}
    return result | PRECISIONS[precision]


def stepped(engine: Any) -> dict[str, torch.Tensor]:
    """Masters, or views of the weights, and the optimizer's state: what this rank steps."""
    optimizer = engine.optimizer.optimizer
    tensors = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    result = {f"stepped.{i}": tensor.detach().clone() for i, tensor in enumerate(tensors)}
    for i, tensor in enumerate(tensors):
        result |= {f"{i}.{key}": torch.as_tensor(value).clone() for key, value in optimizer.state[tensor].items()}
    return result


def names_in(folder: Path) -> list[str]:
    """All but the lock, which is there while the process is."""
    return sorted(path.name for path in folder.iterdir() if path.name != LOCK)


def dense_tensors(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint but those of ranks, whole."""
    reader, state = Reader(path), dict[str, Any]()
    for key, stored in reader.read_metadata().state_dict_metadata.items():
        if "/" in key and not key.startswith("rank/"):
            values = torch.full(stored.size, float("nan")).to(stored.properties.dtype)  # type: ignore[union-attr]
            add_box(state, key, values.shape, [0] * values.dim(), values)
    reader.read(LoadPlanner(), state)
    return {key: next(iter(boxes.parts.values())) for key, boxes in state.items()}


def dense_of(parts: list[State]) -> dict[str, torch.Tensor]:
    """All tensors that some ranks have boxes of, each element once."""
    whole: dict[str, torch.Tensor] = {}
    times: dict[str, torch.Tensor] = {}
    for state in parts:
        for key, boxes in state.items():
            dense = whole.setdefault(key, torch.empty(boxes.shape, dtype=boxes.dtype))
            written = times.setdefault(key, torch.zeros(boxes.shape, dtype=torch.int32))
            for offsets, values in boxes.parts.items():
                place = tuple(slice(o, o + n) for o, n in zip(offsets, values.shape, strict=True))
                dense[place].copy_(values)
                written[place] += 1
    wrong = [key for key, written in times.items() if not bool((written == 1).all())]
    assert not wrong, f"not written once: {wrong}"
    return whole


def outcomes_of(*stages: Sequence[tuple[int, str, Check]]) -> dict[str, str | None]:
    """Of checks on numbers of ranks, by name; each stage before the next, with one set of ranks for each number."""
    result: dict[str, str | None] = {}
    for stage in stages:
        for size in sorted({size for size, _, _ in stage}):
            result |= run_ranks(size, [(name, check) for number, name, check in stage if number == size])
    return result
