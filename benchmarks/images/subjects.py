"""Who is compared in the image study. A subject of SDP has a config's block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

Block = Mapping[str, Any]
DEEP = 18


@dataclass(frozen=True)
class Subject:
    """
    Args:
        num_blocks: residual blocks of the dense model, a third of them in each stage.
        block: `subnetwork_data_parallel`; None for data parallelism.
        dropped: share of the steps in which a worker leaves out the last block (stochastic depth); it grows with depth.
        dropout: share of the elements between the two convolutions of a block that are zero.
    """

    num_blocks: int = DEEP
    block: Block | None = None
    dropped: float = 0.0
    dropout: float = 0.0

    def described(self) -> dict[str, Any]:
        """As JSON, without defaults; cells of a subject that has changed are done again."""
        usual = asdict(Subject())
        return {key: value for key, value in asdict(self).items() if key == "num_blocks" or value != usual[key]}


def _coverages() -> dict[str, Any]:
    by_stage = zip((1.0, 0.75, 0.5), range(3), strict=True)
    return {
        "C = 1/2": 0.5,
        "C = 3/4": 0.75,
        "C by depth": [{"units": rf"stages\.{stage}\.", "coverage": coverage} for coverage, stage in by_stage],
    }


def _subjects() -> dict[str, Subject]:
    found = {}
    for num_blocks in (DEEP, 9, 6):
        name = f"{num_blocks} blocks"
        found[name] = Subject(num_blocks)
        found |= {f"{name}, stochastic depth {share:g}": Subject(num_blocks, dropped=share) for share in (0.2, 0.5)}
        found |= {f"{name}, dropout {share:g}": Subject(num_blocks, dropout=share) for share in (0.1, 0.3)}
    for name, coverage in _coverages().items():
        found[name] = Subject(block={"coverage": coverage})
        for every in (5, 20, 100):
            found[f"{name}, re-drawn {every}"] = Subject(block={"coverage": coverage, "redraw_interval": every})
        found[f"{name}, backward"] = Subject(block={"coverage": coverage, "regime": "backward"})
    found["C = 1/2, neurons"] = Subject(block={"coverage": 0.5, "strategy": "neuron"})
    return found


SUBJECTS = _subjects()


@dataclass(frozen=True)
class Stage:
    """Cells that answer a question.

    Args:
        epochs: the budget.
        seeds: after the learning rates are chosen.
    """

    subjects: tuple[str, ...]
    images: int
    epochs: int
    seeds: tuple[int, ...]


_FIRST = (
    "18 blocks",
    "C = 1/2, re-drawn 20",
    "9 blocks",
    "18 blocks, stochastic depth 0.5",
    "C by depth, re-drawn 20",
    "C = 1/2",
    "9 blocks, stochastic depth 0.2",
)
_REST = (
    "C = 3/4, re-drawn 20",
    "9 blocks, dropout 0.1",
    "6 blocks",
    "C by depth",
    "18 blocks, stochastic depth 0.2",
    "18 blocks, dropout 0.1",
    "C = 1/2, re-drawn 5",
    "C = 1/2, re-drawn 100",
    "C = 1/2, backward",
    "6 blocks, dropout 0.1",
    "C = 1/2, neurons",
)
# In the order in which they answer most. A cell of 4,000 images and 120 epochs takes five minutes of a core.
STAGES = [
    Stage(_FIRST, 4_000, 120, (0, 1, 2)),
    Stage(_FIRST, 4_000, 30, (0, 1, 2)),
    Stage(_REST, 4_000, 120, (0,)),
    Stage(_FIRST[:6], 4_000, 240, (0,)),
    Stage(_FIRST[:6], 20_000, 60, (0,)),
]
