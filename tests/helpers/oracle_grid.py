"""The oracle grid: what is compared with `reference/`, and the small sample of it that every run takes.

It is made of the support matrix: every allowed combination, on every number of holders that it can have.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import operator
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from sdp_deepspeed.support.combinations import Combination, all_combinations, refusals_of
from tests.helpers import more_models
from tests.helpers.models import SPECIMENS, Specimen
from tests.helpers.more_models import ALL_SPECIMENS

SIZES = (2, 3, 4)
BUCKETS = {"one": 10**6, "many": 700}  # elements; a model of SPECIMENS has some 4,000 to 10,000
# Of models that two tensor-parallel ranks divide; AutoTP does not list GPT-2, and llama_odd has three heads.
EVEN = {"vocab_size": 62, "intermediate_size": 28}
INDIVISIBLE = ("gpt2", "llama_odd")
FIELDS = ("regime", "strategy", "stage", "precision", "tensor_parallel", "offload", "replicas", "overlap")


@dataclass(frozen=True)
class Case:
    """A combination of the support matrix with what it is tried on.

    Args:
        holders: p, of `num_subnetworks`.
        model: of ALL_SPECIMENS.
        accumulation: micro-batches of a step.
        by_caller: who ends a step of several micro-batches.
        buckets: "one" has room for all, "many" are small.
        wire: dtype of gradients on it, "weights" for theirs.
        lr_by_coverage: of the block.
        by_rules: MLPs have `holders`, other units one holder more.
    """

    ranks: int
    holders: int
    regime: str = "forward"
    strategy: str = "block"
    model: str = "llama"
    granularity: str = "sublayer"
    stage: int = 1
    accumulation: int = 1
    optimizer: str = "AdamW"
    precision: str = "fp32"
    clip: float = 0.5
    tensor_parallel: int = 1
    offload: str = "none"
    replicas: int = 1
    overlap: bool = False
    by_caller: bool = False
    buckets: str = "one"
    wire: str = "weights"
    by_rules: bool = False
    lr_by_coverage: str = "none"

    def __str__(self) -> str:
        words = [f"{self.holders}of{self.num_subnetworks}", self.regime, self.strategy, self.model, self.granularity]
        words += [f"zero{self.stage}", f"x{self.accumulation}", self.optimizer, self.precision, f"clip{self.clip}"]
        words += [f"tp{self.tensor_parallel}"] * (self.tensor_parallel > 1) + [f"r{self.replicas}"] * (
            self.replicas > 1
        )
        words += ["offload"] * (self.offload != "none") + ["overlap"] * self.overlap + ["caller"] * self.by_caller
        words += ["rules"] * self.by_rules + [f"lr_{self.lr_by_coverage}"] * (self.lr_by_coverage != "none")
        words += ["buckets"] * (self.buckets == "many") + [f"wire_{self.wire}"] * (self.wire != "weights")
        return "-".join(words)

    @property
    def combination(self) -> Combination:
        accumulation = "none" if self.accumulation == 1 else "caller" if self.by_caller else "engine"
        return Combination(**{name: getattr(self, name) for name in FIELDS}, accumulation=accumulation)

    @property
    def num_workers(self) -> int:
        """D, the data-parallel ranks."""
        return self.ranks // self.tensor_parallel

    @property
    def num_subnetworks(self) -> int:
        return self.num_workers // self.replicas

    @property
    def specimen(self) -> Specimen:
        specimen = ALL_SPECIMENS[self.model]
        if self.tensor_parallel == 1:
            return specimen
        if self.model in more_models.SPECIMENS:
            return more_models.even(self.model)
        return replace(specimen, options={**specimen.options, **EVEN})

    @property
    def block(self) -> dict[str, Any]:
        """The config block. Granularity is said where it has an effect only."""
        rules = [{"units": "mlp", "holders": self.holders}, {"holders": self.holders + 1}]
        block = {"holders": rules if self.by_rules else self.holders} | self.combination.block(self.ranks)
        block |= {"granularity": self.granularity} if self.granularity != "sublayer" else {}
        return block | ({"lr_by_coverage": self.lr_by_coverage} if self.lr_by_coverage != "none" else {})


@cache
def full_grid(size: int) -> tuple[Case, ...]:
    """Every allowed combination with each number of holders, and every model in every mode under two typical settings.

    What a combination leaves open (model, optimizer, clipping, buckets, wire) is drawn, with a seed.
    """
    draw = random.Random(size)
    grid = [
        _drawn(draw, size, holders, combination)
        for combination in allowed_combinations()
        if size % (combination.tensor_parallel * combination.replicas) == 0
        for holders in range(1, combination.num_subnetworks(size) + 1)
    ]
    modes = itertools.product(range(1, size + 1), ("forward", "backward"), ("block", "neuron", "mixed"))
    for mode, model, granularity in itertools.product(modes, SPECIMENS, ("sublayer", "layer")):
        plain = Case(size, *mode, model, granularity)
        grid += [plain, replace(plain, stage=0, accumulation=3, optimizer="SGD", clip=0.0)]
    return tuple(case for case in dict.fromkeys(grid) if possible(case))


# In which AdamW blows rounding up: gradients that are nothing else, norms that start at 0 (1.5e-5 of their way), batch
# norms of few numbers, and scores of 10 to 26 before the softmax (cosines times 10, a bias of up to 16), which are
# rounded more than those of 1.
_BLOWN_UP = (*more_models.KEY_BIASES, "gemma3", "resnet_bottleneck", "swinv2")


@cache
def other_families(*, full: bool = False) -> tuple[Case, ...]:
    """The families of `more_models`, each in one regime, by turns, with neurons where its heads can be cut; some with
    tensor parallelism. In full every mode of each."""
    found = []
    for number, name in enumerate(name for name in more_models.SPECIMENS if full or name not in more_models.TWINS):
        strategies = ("block",) if name in more_models.UNCUT else ("neuron", "block")
        modes = list(itertools.product(strategies, ("forward", "backward")))
        for strategy, regime in modes if full else [modes[number % 2]]:
            optimizer = "SGD" if name in _BLOWN_UP else "AdamW"
            case = Case(2, 1, regime, strategy, name, stage=number % 3, optimizer=optimizer)
            found.append(replace(case, ranks=3, holders=2) if number % 8 == 0 else case)
    # Norms and factors after a branch; arguments by head; several bodies.
    for name, regime, strategy, optimizer in (
        ("granite", "forward", "neuron", "AdamW"),
        ("gemma2", "backward", "block", "AdamW"),
        ("t5", "forward", "neuron", "AdamW"),
        ("opt", "backward", "neuron", "SGD"),
    ):
        found.append(Case(4, 1, regime, strategy, name, tensor_parallel=2, optimizer=optimizer))
    return tuple(found)


@cache
def by_rules() -> tuple[Case, ...]:
    """Units with different numbers of holders: every mode, stage and precision, replicas, tensor parallelism; some with
    learning rates of their own."""
    found = [
        Case(3, 1, "forward", "block", buckets="many", lr_by_coverage="sqrt"),
        Case(3, 2, "forward", "neuron", stage=2, accumulation=3, lr_by_coverage="linear"),
        Case(3, 1, "backward", "block", stage=2, optimizer="SGD", precision="bf16", lr_by_coverage="sqrt"),
        Case(3, 1, "backward", "neuron", "gpt2", stage=0),
        Case(4, 2, "forward", "neuron", optimizer="SGD", precision="bf16", overlap=True, lr_by_coverage="linear"),
        Case(4, 1, "backward", "mixed", stage=1, accumulation=3),
        Case(4, 1, "forward", "mixed", stage=0, replicas=2, lr_by_coverage="sqrt"),
        Case(4, 1, "forward", "neuron", tensor_parallel=2, lr_by_coverage="linear"),
    ]
    return tuple(replace(case, by_rules=True) for case in found)


@cache
def allowed_combinations() -> tuple[Combination, ...]:
    """What start-up does not refuse."""
    return tuple(combination for combination in all_combinations() if not refusals_of(combination))


def _drawn(draw: random.Random, size: int, holders: int, combination: Combination) -> Case:
    """The combination on a model that it can run with; the last draw stays if none of many can."""
    known = {name: getattr(combination, name) for name in FIELDS}
    accumulation: dict[str, Any] = {
        "accumulation": 1 if combination.accumulation == "none" else 3,
        "by_caller": combination.accumulation == "caller",
    }
    for _ in range(100):
        case = Case(
            size,
            holders,
            **known,
            **accumulation,
            model=draw.choice(list(SPECIMENS)),
            granularity=draw.choice(("sublayer", "layer")),
            optimizer=draw.choice(("AdamW", "SGD")),
            clip=draw.choice((0.0, 0.5)),
            buckets=draw.choice(list(BUCKETS)),
            wire=draw.choice(("weights", "fp32")),
        )
        if possible(case):
            break
    return case


def possible(case: Case) -> bool:
    """Whether the case is one that can run, or whose result can be compared tightly."""
    if case.precision != "fp32" and case.optimizer != "SGD":  # bf16 drifts under AdamW, between stock stages too
        return False
    if case.granularity == "layer" and case.strategy != "block":  # a layer is one unit of the block strategy only
        return False
    if case.precision == "fp32" and case.wire == "fp32":  # the same as "weights"
        return False
    if case.tensor_parallel > 1 and case.model in INDIVISIBLE:
        return False
    return num_scarce_units(case) * case.holders >= case.num_subnetworks


def num_scarce_units(case: Case) -> int:
    """Units that must go round: each worker needs one of them. Neurons have `ranks` groups, so they always do."""
    specimen = case.specimen
    if case.strategy == "block":
        if specimen.num_blocks is not None:
            return specimen.num_blocks
        return specimen.num_layers * (2 if case.granularity == "sublayer" else 1)
    return specimen.num_heads // case.tensor_parallel or case.num_subnetworks


def pairwise(cases: Sequence[Case]) -> list[Case]:
    """A small subset in which every pair of traits that the cases have occurs; greedy and deterministic: next is the
    first case that adds most. What a case adds never grows, so a count from before is a bound."""
    _, masks = pair_masks(cases)
    wanted = functools.reduce(operator.or_, masks)
    bounds = [(-mask.bit_count(), index) for index, mask in enumerate(masks)]
    heapq.heapify(bounds)
    chosen: list[Case] = []
    while wanted:
        bound, index = bounds[0]
        added = (masks[index] & wanted).bit_count()
        if added == -bound:
            chosen.append(cases[index])
            wanted &= ~masks[index]
        heapq.heapreplace(bounds, (-(masks[index] & wanted).bit_count(), index))
    return chosen


def pairs_of(cases: Sequence[Case]) -> set[Any]:
    """Pairs of traits that occur, and counts of ranks and holders; where units are lacking, the pairs once more, since
    C = 1 would be the easy way to meet them."""
    meanings, masks = pair_masks(cases)
    found = functools.reduce(operator.or_, masks)
    return {meaning for bit, meaning in enumerate(meanings) if found >> bit & 1}


def pair_masks(cases: Sequence[Case]) -> tuple[list[Any], list[int]]:
    """What `pairs_of` gives, and some that do not occur, in a fixed order; and per case a mask of its own."""
    traits = [_traits(case) for case in cases]
    trait_of = list(dict.fromkeys(itertools.chain(*traits)))
    numbers = {trait: number for number, trait in enumerate(trait_of)}
    width = len(trait_of)
    counts = list(dict.fromkeys((case.ranks, case.holders) for case in cases))
    masks = []
    for case, names in zip(cases, traits, strict=True):
        mask = later = 0
        for number in reversed([numbers[name] for name in names]):
            mask |= later << number * width
            later |= 1 << number
        if case.holders < case.num_subnetworks:
            mask |= mask << width * width
        masks.append(mask | 1 << 2 * width * width + counts.index((case.ranks, case.holders)))
    named = list(itertools.product(trait_of, repeat=2))
    return [*named, *(("lacking", pair) for pair in named), *counts], masks


def _traits(case: Case) -> list[tuple[str, Any]]:
    """By name. A mode is one trait, so that every model meets every mode; holders are one, some, or all, since
    p = 3 of 3 has more in common with 4 of 4 than with 3 of 4."""
    traits = dict(vars(case))
    traits["mode"] = f"{traits.pop('regime')} {traits.pop('strategy')}"
    traits["holders"] = {case.num_subnetworks: "all", 1: "one"}.get(case.holders, "some")
    return sorted(traits.items())


@cache
def sample() -> tuple[Case, ...]:
    """The default cases of all world sizes together: a pair need not occur on each. Where there is a choice it falls on
    2 holders of 3: several holders, something lacking, and shards of uneven length."""
    grid = [case for size in SIZES for case in full_grid(size)]
    return tuple(pairwise(sorted(grid, key=lambda case: (case.ranks, case.holders) != (3, 2))))
