"""Who is compared: one table. A subject of the method has a real block of a config."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from benchmarks.study.dropping import Dropping
from benchmarks.study.model import HEAD_WIDTH, Size
from sdp_deepspeed.config import MODES

Block = Mapping[str, Any]
_TAIL = "forward x block, C=0.5, dense tail 50%"
REFERENCE = Size(64, 8)  # 0.42M parameters, of which each budget is a number of dense steps
LARGE = Size(384, 16, length=512, head_width=48)  # 28.4M, and as many heads as there are workers


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
    """

    size: Size = REFERENCE
    block: Block | None = None
    dropping: Dropping | None = None
    dropout: float = 0.0
    weight_decay: float = 0.1
    rows: int | None = None

    def described(self) -> dict[str, Any]:
        """As JSON, without what is as usual; cells of a subject that was changed since are done again."""
        usual = {item: value for item, value in asdict(Subject()).items() if item != "size"}
        found = {key: value for key, value in asdict(self).items() if key not in usual or value != usual[key]}
        if self.size.head_width == HEAD_WIDTH:
            del found["size"]["head_width"]
        if self.dropping is not None and self.dropping.until == 1:
            del found["dropping"]["until"]
        return found


def _whole_ends(coverage: float) -> list[dict[str, float]]:
    """First and last layer are in all subnetworks: with 8 layers C = 1/2 has 0.64 of the operations, not 0.51."""
    return [{"coverage": coverage, "whole_ends": 1}]


def _dense_tail(coverage: float | list[dict[str, float]], share: float, **block: Any) -> Block:
    """Static, and dense for the last `share` of the steps."""
    return {"schedule": [{"until": round(1 - share, 4), "coverage": coverage}, {"coverage": 1.0}], **block}


def _growing(*coverages: float | list[dict[str, float]], **block: Any) -> Block:
    """Equal shares of the steps at each coverage."""
    phases: list[dict[str, Any]] = [{"coverage": coverage} for coverage in coverages]
    for index, phase in enumerate(phases[:-1]):
        phase["until"] = round((index + 1) / len(phases), 4)
    return {"schedule": phases, **block}


def _sizes() -> dict[str, Subject]:
    shapes = [(32, 1), (32, 2), (48, 2), (64, 2), (32, 4), (64, 4), (96, 4), (128, 4), (64, 8), (128, 8), (64, 16)]
    return {f"dense {width}x{depth}": Subject(Size(width, depth)) for width, depth in shapes}


def _dropping() -> dict[str, Subject]:
    subjects = {f"stochastic depth {rate:g}": Subject(dropping=Dropping(rate, "depth")) for rate in (0.2, 0.5)}
    subjects |= {f"progressive layer drop {rate:g}": Subject(dropping=Dropping(rate, "progressive")) for rate in (0.5,)}
    subjects |= {f"branch dropout {rate:g}": Subject(dropping=Dropping(rate)) for rate in (0.1, 0.2, 0.3)}
    return subjects | {f"dropout {rate:g}": Subject(dropout=rate) for rate in (0.1, 0.2)}


def _static() -> dict[str, Subject]:
    subjects = {}
    for mode in MODES:
        for coverage in (0.75, 0.5, 0.25):
            subjects[f"{mode}, C={coverage:g}"] = Subject(block={**mode._asdict(), "coverage": coverage})
    return subjects


def _in_time() -> dict[str, Subject]:
    subjects = {}
    for mode in MODES:
        for coverage, share in ((0.5, 0.1), (0.5, 0.3), (0.5, 0.5), (0.5, 0.7), (0.25, 0.5), (0.25, 0.7), (0.75, 0.3)):
            name = f"{mode}, C={coverage:g}, dense tail {share:.0%}"
            subjects[name] = Subject(block=_dense_tail(coverage, share, **mode._asdict()))
    subjects["C=1/2, 3/4, 1 in turn"] = Subject(block=_growing(0.5, 0.75, 1.0))
    subjects["C=1/4, 1/2, 3/4, 1 in turn"] = Subject(block=_growing(0.25, 0.5, 0.75, 1.0))
    subjects["C=1/2, 3/4, 1 in turn, whole ends"] = Subject(block=_growing(_whole_ends(0.5), _whole_ends(0.75), 1.0))
    return subjects


_HALF: Block = {"coverage": 0.5}
_VARIANTS: dict[str, Block] = {
    "whole ends": {"coverage": _whole_ends(0.5)},
    "drawn every step": {**_HALF, "redraw_interval": 1},
    "drawn every 10 steps": {**_HALF, "redraw_interval": 10},
    "scaled": {**_HALF, "dense_branch_scale": "coverage"},
    "scaled, drawn every step": {**_HALF, "redraw_interval": 1, "dense_branch_scale": "coverage"},
    "layers": {**_HALF, "granularity": "layer"},
}


def _variants() -> dict[str, Subject]:
    subjects = {f"C=1/2, {name}": Subject(block=block) for name, block in _VARIANTS.items()}
    subjects["C=1/2, dense tail 50%, scaled"] = Subject(block=_dense_tail(0.5, 0.5, dense_branch_scale="coverage"))
    subjects["C=1/2, dense tail 50%, drawn every 10 steps"] = Subject(block=_dense_tail(0.5, 0.5, redraw_interval=10))
    for name, coverage in (("1/2", 0.5), ("1/4", 0.25)):
        subjects[f"C={name}, dense tail 50%, whole ends"] = Subject(block=_dense_tail(_whole_ends(coverage), 0.5))
        scaled: Block = {"coverage": _whole_ends(coverage), "dense_branch_scale": "coverage"}
        subjects[f"C={name}, scaled, whole ends"] = Subject(block=scaled)
        drawn: Block = {**scaled, "redraw_interval": 10}
        subjects[f"C={name}, scaled, whole ends, drawn every 10 steps"] = Subject(block=drawn)
    subjects["C=1/4, whole ends"] = Subject(block={"coverage": _whole_ends(0.25)})
    for name, redrawn in (("", {}), (", drawn every 10 steps", {"redraw_interval": 10})):
        block = {"coverage": 0.75, "dense_branch_scale": "coverage", **redrawn}
        subjects[f"C=3/4, scaled{name}"] = Subject(block=block)
    subjects["forward x neuron, C=1/2, scaled"] = Subject(
        block={**_HALF, "strategy": "neuron", "dense_branch_scale": "coverage"}
    )
    return subjects


def _other_sizes() -> dict[str, Subject]:
    """The same recipe at other sizes of the dense model, and others at one that is near the best."""
    shapes = [(64, 2), (64, 4), (64, 16), (96, 4), (128, 8)]
    subjects = {
        f"{width}x{depth}, C=1/2, dense tail 50%": Subject(Size(width, depth), _dense_tail(0.5, 0.5))
        for width, depth in shapes
    }
    blocks = {
        "C=1/2, whole ends": {"coverage": _whole_ends(0.5)},
        "C=1/2, dense tail 50%, whole ends": _dense_tail(_whole_ends(0.5), 0.5),
        "C=1/2, dense tail 70%": _dense_tail(0.5, 0.7),
        "C=3/4, dense tail 50%": _dense_tail(0.75, 0.5),
        "C=1/2, 3/4, 1 in turn": _growing(0.5, 0.75, 1.0),
        "C=1/2, dense tail 50%, scaled": _dense_tail(0.5, 0.5, dense_branch_scale="coverage"),
        "C=1/2, dense tail 50%, layers": _dense_tail(0.5, 0.5, granularity="layer"),
        "C=1/2, dense tail 50%, drawn every 10 steps": _dense_tail(0.5, 0.5, redraw_interval=10),
    }
    near = Size(64, 4)
    subjects |= {f"64x4, {name}": Subject(near, block) for name, block in blocks.items()}
    subjects["64x4, stochastic depth 0.2"] = Subject(near, dropping=Dropping(0.2, "depth"))
    return subjects


def _small_steps() -> dict[str, Subject]:
    """Half or a quarter of the tokens a step, so twice or four times the steps: what more steps alone bring. And branch
    dropout that spares as many operations as half of the coverage in half of the run."""
    subjects = {
        f"{name}, {rows} row{'s' * (rows > 1)}": replace(subject, rows=rows)
        for name, subject in (*_sizes().items(), (_TAIL, Subject(block=_dense_tail(0.5, 0.5, **MODES[0]._asdict()))))
        for rows in (2, 1)
    }
    return subjects | {"branch dropout 0.5 in the first half": Subject(dropping=Dropping(0.5, until=0.5))}


def _regularized() -> dict[str, Subject]:
    """For few data: what else holds a model back."""
    return {
        "weight decay 0.5": Subject(weight_decay=0.5),
        "weight decay 1": Subject(weight_decay=1.0),
        "dense 64x4, dropout 0.1": Subject(Size(64, 4), dropout=0.1),
        "dense 64x4, branch dropout 0.2": Subject(Size(64, 4), dropping=Dropping(0.2)),
    }


SUBJECTS: dict[str, Subject] = {
    **_sizes(),
    **_dropping(),
    **_static(),
    **_in_time(),
    **_variants(),
    **_other_sizes(),
    **_small_steps(),
    **_regularized(),
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
        """At this study's sizes, and with rows and heads as its reference has them."""
        if self.times == (1, 1):
            return subject
        (width, depth), (times_width, times_depth) = (subject.size.width, subject.size.depth), self.times
        return replace(subject, size=replace(self.reference, width=width * times_width, depth=depth * times_depth))

    def tokens(self, subject: Subject | None = None) -> int:
        """Of a step of a subject, or as the study has it."""
        rows = self.rows if subject is None or subject.rows is None else subject.rows
        return self.num_workers * rows * self.reference.length

    def described(self) -> dict[str, Any]:
        """As JSON, without what is as usual, and without the learning rate, which each cell has."""
        usual = asdict(Study())
        found = {key: value for key, value in asdict(self).items() if value != usual[key] and key != "learning_rate"}
        described: dict[str, Any] = json.loads(json.dumps(found))
        return described


STUDIES: dict[str, Study] = {
    "text": Study(learning_rate=3e-3),
    "headers": Study(corpus="headers", learning_rate=3e-3),
    "few data": Study(train_bytes=200_000, points=20),
    "fewer data": Study(train_bytes=50_000, points=20, learning_rate=3e-3),
    # For a GPU: 9,155 dense steps are 600M bytes, four epochs or fewer where Transformers and its like are installed.
    "text 30M": Study(
        corpus="python",
        rows=16,
        num_validation_rows=1024,
        points=10,
        reference=LARGE,
        learning_rate=2e-3,
        times=(6, 2),
        precision="bf16",
    ),
}
