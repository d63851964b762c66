"""The oracle grid: what is compared with `reference.py`, and the small sample of it that every run takes."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from models import SPECIMENS

SIZES = (2, 3, 4)
MIXED = {"attention": "neuron", "mlp": "block"}


@dataclass(frozen=True)
class Case:
    """One cell of the oracle grid."""

    ranks: int
    holders: int
    regime: str = "forward"
    strategy: str = "block"  # "block", "neuron", "mixed" (neurons of attention, blocks of MLPs)
    model: str = "llama"  # of SPECIMENS
    granularity: str = "sublayer"
    stage: int = 1
    accumulation: int = 1
    optimizer: str = "AdamW"
    precision: str = "fp32"  # "fp32", "bf16", "bf16+fp32" (accumulated in fp32)
    clip: float = 0.5

    def __str__(self) -> str:
        words = [f"{self.holders}of{self.ranks}", self.regime, self.strategy, self.model, self.granularity]
        words += [f"zero{self.stage}", f"x{self.accumulation}", self.optimizer, self.precision, f"clip{self.clip}"]
        return "-".join(words)

    @property
    def block(self) -> dict[str, Any]:
        """The config block. Granularity is said where it has an effect only."""
        strategy = MIXED if self.strategy == "mixed" else self.strategy
        block = {"holders": self.holders, "regime": self.regime, "strategy": strategy}
        return block | ({"granularity": self.granularity} if self.granularity != "sublayer" else {})


def full_grid(size: int) -> list[Case]:
    """All settings on every corner of one model, and every model on every corner under two typical settings."""
    corners = list(itertools.product(range(1, size + 1), ("forward", "backward"), ("block", "neuron", "mixed")))
    grid = []
    for corner, stage, accumulation in itertools.product(corners, (0, 1), (1, 3)):
        for optimizer, precision, clip in itertools.product(
            ("AdamW", "SGD"), ("fp32", "bf16", "bf16+fp32"), (0.0, 0.5)
        ):
            grid.append(Case(size, *corner, "llama", "sublayer", stage, accumulation, optimizer, precision, clip))
    for corner, model, granularity in itertools.product(corners, SPECIMENS, ("sublayer", "layer")):
        plain = Case(size, *corner, model, granularity)
        grid += [plain, replace(plain, stage=0, accumulation=3, optimizer="SGD", clip=0.0)]
    return [case for case in dict.fromkeys(grid) if possible(case)]


def possible(case: Case) -> bool:
    """Whether the case is one that can run, or whose result can be compared tightly."""
    if case.precision != "fp32" and case.optimizer != "SGD":  # bf16 drifts under AdamW (DESIGN.md section 5)
        return False
    if case.precision == "bf16+fp32" and case.stage == 0:  # stock DeepSpeed refuses it
        return False
    if case.granularity == "layer" and case.strategy != "block":  # a layer is one unit of the block strategy only
        return False
    return num_scarce_units(case) * case.holders >= case.ranks


def num_scarce_units(case: Case) -> int:
    """Units that must go round: each worker needs one of them. Neurons have `ranks` groups, so they always do."""
    specimen = SPECIMENS[case.model]
    if case.strategy == "block":
        return specimen.num_layers * (2 if case.granularity == "sublayer" else 1)
    return specimen.num_heads


def pairwise(cases: Sequence[Case]) -> list[Case]:
    """A small subset in which every pair of traits that the cases have occurs; greedy and deterministic."""
    bits: dict[Any, int] = {}
    masks = [sum(1 << bits.setdefault(pair, len(bits)) for pair in pairs(case)) for case in cases]
    wanted = (1 << len(bits)) - 1
    chosen: list[Case] = []
    while wanted:
        best = max(range(len(cases)), key=lambda index: (masks[index] & wanted).bit_count())
        chosen.append(cases[best])
        wanted &= ~masks[best]
    return chosen


def pairs(case: Case) -> Iterable[Any]:
    """Pairs of traits, and the counts of ranks and holders. A corner is one trait, so that every model meets every
    corner; holders are one, some, or all, since p = 3 of 3 has more in common with 4 of 4 than with 3 of 4."""
    traits = asdict(case)
    traits["corner"] = f"{traits.pop('regime')} {traits.pop('strategy')}"
    traits["holders"] = {1: "one", case.ranks: "all"}.get(case.holders, "some")
    return {*itertools.combinations(sorted(traits.items()), 2), (case.ranks, case.holders)}


@cache
def sample() -> tuple[Case, ...]:
    """The default cases of all world sizes together: a pair need not occur on each. Where there is a choice it falls on
    2 holders of 3: several holders, something lacking, and shards of uneven length."""
    grid = [case for size in SIZES for case in full_grid(size)]
    return tuple(pairwise(sorted(grid, key=lambda case: (case.ranks, case.holders) != (3, 2))))
