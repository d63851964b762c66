"""Who is compared in the learning study, and what all of them have in common. A subject of SDP has a config's block."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

Block = Mapping[str, Any]
HEAD_WIDTH = 16  # of an attention head
UNSCALED = {"branch_scale": "none"}  # the paper's method


@dataclass(frozen=True)
class Size:
    """Of a Llama.

    Args:
        width: of the residual stream.
        depth: layers.
        length: bytes of a row.
    """

    width: int
    depth: int
    length: int = 128

    @property
    def num_neurons(self) -> int:
        """Of an MLP: eight thirds of the width, up to a multiple of 4."""
        return -(-self.width * 8 // 12) * 4

    @property
    def initial_deviation(self) -> float:
        """Of initial weights: sqrt(2 / (5 width)), as in arXiv 1910.05895. With Transformers' 0.02, which is for widths
        of a thousand, so narrow a model spends its first hundred steps on leaving the start."""
        return math.sqrt(2 / (5 * self.width))


REFERENCE = Size(64, 8)  # 0.41M parameters, of which each budget is a number of dense steps


@dataclass(frozen=True)
class Subject:
    """
    Args:
        size: of the dense model.
        block: `subnetwork_data_parallel`; None for data parallelism.
        branch_dropout: share of the rows for which each branch is dropped (stochastic depth), without a block.
        dropout: share of the elements of what each branch adds that are zero.
        rows: of a worker in a step; None for the study's.
        small_outputs: whether weights of output projections start multiplied by C.
    """

    size: Size = REFERENCE
    block: Block | None = None
    branch_dropout: float = 0.0
    dropout: float = 0.0
    rows: int | None = None
    small_outputs: bool = False

    def described(self) -> dict[str, Any]:
        """As JSON, without defaults; cells of a subject that has changed are done again."""
        usual = {item: value for item, value in asdict(Subject()).items() if item != "size"}
        found = {key: value for key, value in asdict(self).items() if key not in usual or value != usual[key]}
        if self.block is not None:  # cells from before the key existed are of "none"
            found["block"] = {
                key: value for key, value in self.block.items() if (key, value) != ("branch_scale", "none")
            }
        found["size"]["initial_deviation"] = round(self.size.initial_deviation, 6)
        return found


def _whole_ends(coverage: float) -> list[dict[str, float]]:
    """First and last layer are in all subnetworks: with 8 layers C = 1/2 has 0.64 of the operations, not 0.51."""
    return [{"coverage": coverage, "whole_ends": 1}]


def _sizes() -> dict[str, Subject]:
    shapes = [(32, 4), (32, 8), (64, 4), (64, 8)]
    sizes = {f"dense {width}x{depth}": Subject(Size(width, depth)) for width, depth in shapes}
    return sizes | {"dense 64x8, 2 rows": Subject(rows=2)}


def _unscaled() -> dict[str, Subject]:
    """The paper's method, and dense for the second half of the steps."""
    found = {}
    for name, coverage in (("C=1/2", 0.5), ("C=1/4", 0.25)):
        ends = _whole_ends(coverage)
        tail = [{"until": 0.5, "coverage": ends}, {"coverage": 1.0}]
        found[f"{name}, whole ends"] = Subject(block={"coverage": ends, **UNSCALED})
        found[f"{name}, dense tail 50%, whole ends"] = Subject(block={"schedule": tail, **UNSCALED})
    return found


def _scaled() -> dict[str, Subject]:
    """Each branch times 1/C in training, and output projections that start multiplied by C; all but the first two with
    one thing changed."""
    half, quarter = ({"coverage": _whole_ends(coverage)} for coverage in (0.5, 0.25))
    blocks: dict[str, dict[str, Any]] = {
        "C=1/2, whole ends, scaled in training": half,
        "C=1/4, whole ends, scaled in training": quarter,
        "C=3/4, scaled": {"coverage": _whole_ends(0.75)},
        "C=1/2, no whole ends, scaled": {"coverage": 0.5},
        "C=1/4, no whole ends, scaled": {"coverage": 0.25},
        "C=1/4, two whole ends, scaled": {"coverage": [{"coverage": 0.25, "whole_ends": 2}]},
        "C=1/4, re-drawn every 10 steps, scaled": quarter | {"redraw_interval": 10},
        "C=1/4, re-drawn every 100 steps, scaled": quarter | {"redraw_interval": 100},
        "C=1/2, re-drawn every 10 steps, scaled": half | {"redraw_interval": 10},
        "C=1/4, four subnetworks, scaled": quarter | {"subnetworks": 4},
        "C=1/2, neurons, scaled": {"strategy": "neuron", "coverage": 0.5},
    }
    scale: dict[str, Any] = {"branch_scale": "training"}
    found = {name: Subject(block=block | scale, small_outputs=True) for name, block in blocks.items()}
    found["C=1/4, whole ends, scaled in training, usual start"] = Subject(block=quarter | scale)
    found["32x8, C=1/2, whole ends, scaled in training"] = Subject(Size(32, 8), half | scale, small_outputs=True)
    return found


def _many_passes() -> dict[str, Subject]:
    """SDP scaled in training and re-drawn, and its rivals, at two depths."""
    found = {}
    for depth in (8, 16):
        size, half = Size(32, depth), Size(32, depth // 2)
        found[f"dense 32x{depth}"] = Subject(size)
        found[f"32x{depth}, stochastic depth 0.2"] = Subject(size, branch_dropout=0.2)
        found[f"32x{depth // 2}, dropout 0.1"] = Subject(half, dropout=0.1)
        for name, coverage in (("C=1/2", _whole_ends(0.5)), ("C by depth", _by_depth(depth))):
            block = {"coverage": coverage, "branch_scale": "training", "redraw_interval": 20}
            found[f"32x{depth}, {name}, re-drawn every 20 steps"] = Subject(size, block, small_outputs=True)
    return found


def _by_depth(depth: int) -> list[dict[str, Any]]:
    """C = 1, 3/4 and 1/2 in the first, second and last third of the layers."""
    ends = [0, *(round(depth * third / 3) for third in (1, 2, 3))]
    return [
        {"units": rf"layers\.({'|'.join(map(str, range(*places)))})\.", "coverage": coverage}
        for places, coverage in zip(pairwise(ends), (1.0, 0.75, 0.5), strict=True)
    ]


SUBJECTS = _sizes() | _unscaled() | _scaled() | _many_passes()


@dataclass(frozen=True)
class Study:
    """What all of its cells have in common.

    Args:
        train_bytes: of the start of the training text; None for all.
        num_workers: k.
        rows: of a worker in a step.
        num_validation_rows: at each point of the curve.
        points: of the curve of validation losses, the last after the last step.
        reference: the size by whose dense steps budgets are counted.
        learning_rate: the highest, after `warm_up` of the steps; from there it falls to zero in a line.
        warm_up: a share of the steps.
        betas: of AdamW.
        clip: the norm to which gradients are cut.
    """

    train_bytes: int | None = None
    num_workers: int = 8
    rows: int = 4
    num_validation_rows: int = 256
    points: int = 5
    reference: Size = REFERENCE
    learning_rate: float = 4e-3
    warm_up: float = 0.05
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0

    def tokens(self, subject: Subject | None = None) -> int:
        """Of a step of a subject, or as the study has it."""
        rows = self.rows if subject is None or subject.rows is None else subject.rows
        return self.num_workers * rows * self.reference.length

    def described(self) -> dict[str, Any]:
        """As JSON, without defaults and without the learning rate, which each cell has."""
        usual = asdict(Study())
        found = {key: value for key, value in asdict(self).items() if value != usual[key] and key != "learning_rate"}
        described: dict[str, Any] = json.loads(json.dumps(found))
        return described


STUDIES: dict[str, Study] = {
    "text": Study(learning_rate=3e-3),
    **{
        f"many passes, {depth} layers": Study(
            train_bytes=100_000, num_workers=4, rows=8, points=20, reference=Size(32, depth), learning_rate=8e-3
        )
        for depth in (8, 16)
    },
}
