"""Who is compared in the learning study, and what all of them have in common. A subject of SDP has a config's block."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from benchmarks.learning.dropping import Dropping
from sdp_deepspeed.config import MODES

Block = Mapping[str, Any]
HEAD_WIDTH = 16
UNSCALED = {"branch_scale": "none"}  # the paper's method


@dataclass(frozen=True)
class Size:
    """Of a Llama.

    Args:
        width: of the residual stream.
        depth: layers.
        length: bytes of a row.
        head_width: of an attention head.
    """

    width: int
    depth: int
    length: int = 128
    head_width: int = HEAD_WIDTH

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
LARGER = Size(128, 8)  # 1.6M
ON_A_GPU = Size(384, 16, length=512, head_width=48)  # 28.4M, and as many heads as there are workers


@dataclass(frozen=True)
class Subject:
    """
    Args:
        size: of the dense model.
        block: `subnetwork_data_parallel`; None for data parallelism.
        dropping: of branches, without a block.
        dropout: of elements.
        weight_decay: of matrices.
        rows: of a worker in a step; None for the study's.
        small_outputs: whether weights of output projections start C times smaller.
        grown_from: layers at each end that train alone in the first half of the steps; 0 for all layers throughout.
        is_banded: whether each subnetwork has one layer's unit of each kind in every band of 1/C adjacent layers.
        decay: share of the steps, at the end, in which the learning rate falls to zero; None for all after the warm-up.
    """

    size: Size = REFERENCE
    block: Block | None = None
    dropping: Dropping | None = None
    dropout: float = 0.0
    weight_decay: float = 0.1
    rows: int | None = None
    small_outputs: bool = False
    grown_from: int = 0
    is_banded: bool = False
    decay: float | None = None

    @property
    def ends(self) -> Size:
        """The size of the ends alone."""
        return replace(self.size, depth=2 * self.grown_from)

    def described(self) -> dict[str, Any]:
        """As JSON, without defaults; cells of a subject that has changed are done again."""
        usual = {item: value for item, value in asdict(Subject()).items() if item != "size"}
        found = {key: value for key, value in asdict(self).items() if key not in usual or value != usual[key]}
        if self.size.head_width == HEAD_WIDTH:
            del found["size"]["head_width"]
        if self.block is not None:  # cells from before the key existed are of "none"
            found["block"] = {
                key: value for key, value in self.block.items() if (key, value) != ("branch_scale", "none")
            }
        found["size"]["initial_deviation"] = round(self.size.initial_deviation, 6)
        return found


def _whole_ends(coverage: float) -> list[dict[str, float]]:
    """First and last layer are in all subnetworks: with 8 layers C = 1/2 has 0.64 of the operations, not 0.51."""
    return [{"coverage": coverage, "whole_ends": 1}]


def _dense_tail(coverage: float | list[dict[str, float]], share: float, **block: Any) -> Block:
    """Dense for the last `share` of the steps."""
    return {"schedule": [{"until": round(1 - share, 4), "coverage": coverage}, {"coverage": 1.0}], **block}


def _sizes() -> dict[str, Subject]:
    shapes = [(32, 2), (48, 2), (64, 2), (32, 4), (32, 8), (64, 4), (96, 4), (128, 4), (64, 8), (128, 8)]
    return {f"dense {width}x{depth}": Subject(Size(width, depth)) for width, depth in shapes}


def _modes() -> dict[str, Subject]:
    static = {
        f"{mode}, C={coverage:g}": Subject(block={**mode._asdict(), "coverage": coverage, **UNSCALED})
        for mode in MODES
        for coverage in (0.75, 0.5, 0.25)
    }
    tails = {
        f"{mode}, C={coverage:g}, dense tail {share:.0%}": Subject(
            block=_dense_tail(coverage, share, **mode._asdict(), **UNSCALED)
        )
        for mode in MODES
        for coverage, share in ((0.5, 0.3), (0.5, 0.5), (0.25, 0.5))
    }
    return static | tails


def _whole_end_variants() -> dict[str, Subject]:
    found = {}
    for size, prefix in ((REFERENCE, ""), (LARGER, "128x8, ")):
        for name, coverage in (("C=1/2", 0.5), ("C=1/4", 0.25)):
            ends = _whole_ends(coverage)
            found[f"{prefix}{name}, whole ends"] = Subject(size, {"coverage": ends, **UNSCALED})
            found[f"{prefix}{name}, dense tail 50%, whole ends"] = Subject(size, _dense_tail(ends, 0.5, **UNSCALED))
    return found


def _scales() -> dict[str, Subject]:
    """Each branch times 1/C in training, with output projections that start as usual or C times smaller."""
    found = {}
    for size, prefix in ((REFERENCE, ""), (Size(32, 8), "32x8, ")):
        for name, coverage in (("C=1/2", 0.5), ("C=1/4", 0.25)):
            block = {"coverage": _whole_ends(coverage), "branch_scale": "training"}
            found[f"{prefix}{name}, whole ends, scaled in training"] = Subject(size, block, small_outputs=True)
            found[f"{prefix}{name}, whole ends, scaled in training, usual start"] = Subject(size, block)
    return found


def _axes() -> dict[str, Subject]:
    """Whole ends, scaled in training with output projections that start C times smaller, and one thing changed."""
    named: dict[str, tuple[float, Block, dict[str, Any]]] = {
        "C=3/4": (0.75, {}, {}),
        "C=1/2, no whole ends": (0.5, {"coverage": 0.5}, {}),
        "C=1/4, no whole ends": (0.25, {"coverage": 0.25}, {}),
        "C=1/4, two whole ends": (0.25, {"coverage": [{"coverage": 0.25, "whole_ends": 2}]}, {}),
        "C=1/4, re-drawn every 10 steps": (0.25, {"redraw_interval": 10}, {}),
        "C=1/4, re-drawn every 100 steps": (0.25, {"redraw_interval": 100}, {}),
        "C=1/2, re-drawn every 10 steps": (0.5, {"redraw_interval": 10}, {}),
        "C=1/4, four subnetworks": (0.25, {"subnetworks": 4}, {}),
        "C=1/2, by depth bands": (0.5, {}, {"is_banded": True}),
        "C=1/4, 2 rows": (0.25, {}, {"rows": 2}),
        "C=1/4, 1 row": (0.25, {}, {"rows": 1}),
        "C=1/2, 2 rows": (0.5, {}, {"rows": 2}),
        "C=1/4, late decay": (0.25, {}, {"decay": 0.2}),
        "C=1/2, neurons": (0.5, {"strategy": "neuron", "coverage": 0.5}, {}),
    }
    found = {}
    for name, (coverage, block, other) in named.items():
        block = {"coverage": _whole_ends(coverage), "branch_scale": "training", **block}
        found[f"{name}, scaled"] = Subject(block=block, small_outputs=True, **other)
    for name, coverage in (("C=1/2", 0.5), ("C=1/4", 0.25)):
        for share in (0.1, 0.25, 0.5):
            block = _dense_tail(_whole_ends(coverage), share, branch_scale="training")
            found[f"{name}, dense tail {share:.0%}, whole ends, scaled"] = Subject(block=block, small_outputs=True)
    return found


def _rivals() -> dict[str, Subject]:
    """Data parallelism with other rows or learning rates, and layers that are added between the ends halfway."""
    return {
        "dense 64x8, 1 row": Subject(rows=1),
        "dense 64x8, 2 rows": Subject(rows=2),
        "dense 64x8, 8 rows": Subject(rows=8),
        "dense 64x8, late decay": Subject(decay=0.2),
        "64x8, grown from the ends": Subject(grown_from=1),
        "64x8, grown from the ends, late decay": Subject(grown_from=1, decay=0.2),
    }


def _for_few_data() -> dict[str, Subject]:
    """SDP scaled in training, and what else holds a model back."""
    drawn = {"coverage": 0.75, "branch_scale": "training", "redraw_interval": 10}
    return {
        "C=3/4, scaled in training, drawn every 10 steps": Subject(block=drawn, small_outputs=True),
        "stochastic depth 0.2": Subject(dropping=Dropping(0.2, "depth")),
        "branch dropout 0.2": Subject(dropping=Dropping(0.2)),
        "dense 64x4, branch dropout 0.2": Subject(Size(64, 4), dropping=Dropping(0.2)),
        "dropout 0.1": Subject(dropout=0.1),
        "weight decay 1": Subject(weight_decay=1.0),
    }


SUBJECTS = _sizes() | _modes() | _whole_end_variants() | _scales() | _axes() | _rivals() | _for_few_data()

# For `study.py --set`: budgets in dense steps of 0.41M, subjects, seeds. On two cores "recipes"
# takes about five hours.
_RECIPES = (
    "dense 64x8",
    "C=1/4, whole ends, scaled in training",
    "C=1/2, whole ends, scaled in training",
    "dense 64x4",
    "64x8, grown from the ends",
    "dense 64x8, 2 rows",
    "C=1/4, whole ends",
    "C=1/4, whole ends, scaled in training, usual start",
)
SETS: dict[str, list[tuple[int, str, int]]] = {
    "recipes": [(budget, name, seed) for seed in (0, 1) for budget in (1000, 2000) for name in _RECIPES],
    "narrow": [
        (budget, name, seed)
        for seed in (0, 1)
        for budget in (1000, 2000)
        for name in ("dense 32x8", "32x8, C=1/4, whole ends, scaled in training", "dense 32x4")
    ],
    "tiny": [(2, "dense 64x8", 0), (2, "C=1/4, whole ends", 0)],
}


@dataclass(frozen=True)
class Study:
    """What all of its cells have in common.

    Args:
        corpus: of `text.read_corpus`.
        train_bytes: of its start; None for all of the training text.
        num_workers: k.
        rows: of a worker in a step.
        num_validation_rows: at each point of the curve.
        points: of the curve of validation losses, the last after the last step.
        reference: the size by whose dense steps budgets are counted.
        learning_rate: the highest, after `warm_up` of the steps; from there it falls to zero in a line.
        warm_up: a share of the steps.
        betas: of AdamW.
        clip: the norm to which gradients are cut.
        times: what the widths and depths of all subjects are multiplied by.
        precision: "bf16" is autocast, with weights and everything else in fp32.
    """

    corpus: str = "stdlib"
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
    times: tuple[int, int] = (1, 1)
    precision: Literal["fp32", "bf16"] = "fp32"

    def scaled(self, subject: Subject) -> Subject:
        """At this study's sizes, with rows and heads as its reference has them."""
        if self.times == (1, 1):
            return subject
        width, depth = subject.size.width * self.times[0], subject.size.depth * self.times[1]
        return replace(subject, size=replace(self.reference, width=width, depth=depth))

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
    "headers": Study(corpus="headers", learning_rate=3e-3),
    "few data": Study(train_bytes=200_000, points=20),
    # For a GPU: 9,155 dense steps are 600M bytes, four epochs or fewer where Transformers and its like are installed.
    "text 30M": Study(
        corpus="python",
        rows=16,
        num_validation_rows=1024,
        points=10,
        reference=ON_A_GPU,
        learning_rate=2e-3,
        times=(6, 2),
        precision="bf16",
    ),
}
