"""The oracle's cases: a table of axes, what cannot be combined, and the samples of it that are run.

The gate runs the sample: each pair of values of two axes that can be combined is in some case of it. `--full` runs a
thousand cases more.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import operator
import random
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

from tests.helpers.mixtures import Mixture
from tests.helpers.models import Specimen
from tests.helpers.more_models import ALL_SPECIMENS

KEY = "subnetwork_data_parallel"
SIZES = (2, 3, 4)
BUCKETS = {"one": 10**6, "many": 700}  # elements; the models have some 4,000 to 10,000
NUM_CASES = 1500  # of the grid, from which the sample is chosen
NUM_FULL = 1000
NUM_MICRO_BATCHES = 3  # of a step with accumulation: a first, one between, a last
STRATEGIES: dict[str, Any] = {
    "block": "block",
    "neuron": "neuron",
    "mixed": {"attention": "neuron", "mlp": "block"},
    "opposite": {"attention": "block", "mlp": "neuron"},
}
PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"bf16": {"enabled": True}},
    "bf16+fp32": {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}},
    "autocast": {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}},
    "fp16": {"fp16": {"enabled": True, "initial_scale_power": 7, "loss_scale_window": 1, "hysteresis": 1}},
}
MODELS: dict[str, Specimen] = {
    **ALL_SPECIMENS,
    "mixtral": replace(Mixture.of("mixtral"), options={"intermediate_size": 16}),  # grouped products take fours
}
# One of each kind of architecture; all others run in every mode in one process: tests/unit/architectures.
ARCHITECTURES = (
    "llama_odd",  # 3 heads and 29 neurons: 2 and 4 do not divide them
    "llama_one_layer",
    "gpt2",  # tied embeddings, biases, Conv1D
    "gpt_neox_parallel",  # both branches read the same input
    "t5",  # two stacks, cross attention, a bias that the first layer computes for all
    "mixtral",  # experts
    "resnet_bottleneck",  # batch norms
)
AXES: dict[str, tuple[Any, ...]] = {
    "model": ARCHITECTURES,
    "regime": ("forward", "backward"),
    "strategy": tuple(STRATEGIES),
    "granularity": ("sublayer", "layer"),
    "ranks": SIZES,
    "tensor_parallel": (1, 2),
    "replicas": (1, 2),
    "holders": (1, 2, 3, 4),
    "rules": ("none", "parts", "depth"),
    "units": ("all", "shared", "groups", "mlp"),
    "seed": (0, 5),
    "stage": (1, 2),
    "overlap": (False, True),
    "accumulation": (1, NUM_MICRO_BATCHES),
    "by_caller": (False, True),
    "buckets": tuple(BUCKETS),
    "precision": tuple(PRECISIONS),
    "wire": ("weights", "fp32"),
    "offload": ("none", "cpu"),
    "clip": (0.0, 0.5),
    "optimizer": ("SGD", "AdamW"),
    "groups": (1, 2),
    "scheduler": ("none", "warmup"),
    "checkpointing": ("none", "reentrant", "non-reentrant"),
    "branch_scale": ("training", "none"),
}


@dataclass(frozen=True)
class Case:
    """A value of each axis. What a case has that its name does not say is the default.

    Args:
        ranks: n; data-parallel ranks are D = n / tensor_parallel, subnetworks k = D / replicas.
        holders: p.
        model: of MODELS.
        stage: of ZeRO.
        accumulation: micro-batches of a step.
        optimizer: "SGD" (with momentum) or "AdamW".
        precision: of PRECISIONS.
        clip: `gradient_clipping`.
        overlap: `overlap_comm`.
        by_caller: the caller ends a step of several micro-batches, not the engine.
        buckets: "one" has room for all, "many" are small.
        wire: dtype of gradients on it, "weights" for theirs.
        rules: "parts": MLPs have p holders and other units one more; "depth": from k in the first layer to p in the
            last one.
        units: "shared": the MLP of the first layer is in none; "groups": more groups of neurons than subnetworks;
            "mlp": the strategy is that of MLPs, attention is in none.
        groups: param groups of the optimizer.
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
    rules: str = "none"
    units: str = "all"
    seed: int = 0
    groups: int = 2
    scheduler: str = "none"
    checkpointing: str = "none"
    branch_scale: str = "training"

    def __str__(self) -> str:
        given = {field.name: getattr(self, field.name) for field in fields(self)}
        others = [(field.name, given[field.name]) for field in fields(self) if given[field.name] != field.default]
        return "-".join(value if isinstance(value, str) else f"{name}{value}" for name, value in others)

    @property
    def num_workers(self) -> int:
        """D, the data-parallel ranks."""
        return self.ranks // self.tensor_parallel

    @property
    def num_subnetworks(self) -> int:
        """k."""
        return self.num_workers // self.replicas

    @property
    def is_whole(self) -> bool:
        """Whether all units have all holders."""
        return self.holders == self.num_subnetworks

    @property
    def specimen(self) -> Specimen:
        specimen = MODELS[self.model]
        if self.tensor_parallel == 1:
            return specimen
        even = EVEN if self.model != "t5" else {"vocab_size": 62, "num_heads": 4, "d_ff": 28}
        return replace(specimen, num_heads=4, options={**specimen.options, **even})

    @property
    def block(self) -> dict[str, Any]:
        """The config block. What has its default value is left out."""
        holders: Any = self.holders
        if self.rules == "parts":
            holders = [{"units": "mlp", "holders": self.holders}, {"holders": self.holders + 1}]
        elif self.rules == "depth":
            holders = [{"profile": "linear", "first": self.num_subnetworks, "last": self.holders}]
        block = {"holders": holders, "regime": self.regime, "strategy": STRATEGIES[self.strategy]}
        block |= {"strategy": {"mlp": self.strategy}} if self.units == "mlp" else {}
        block |= {"subnetworks": self.num_subnetworks} if self.replicas > 1 else {}
        block |= {"shared": [r"0\.mlp"]} if self.units == "shared" else {}
        block |= {"neuron_groups": self.num_subnetworks + 2} if self.units == "groups" else {}
        for name in ("granularity", "seed", "branch_scale"):
            if getattr(self, name) != type(self).__dataclass_fields__[name].default:
                block[name] = getattr(self, name)
        return block

    @property
    def config(self) -> dict[str, Any]:
        """The DeepSpeed config, without an optimizer and a scheduler, which the caller makes."""
        zero: dict[str, Any] = {"stage": self.stage, "overlap_comm": self.overlap}
        zero |= dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), BUCKETS[self.buckets])
        zero |= {"offload_optimizer": {"device": self.offload}} if self.offload != "none" else {}
        result = {
            "train_micro_batch_size_per_gpu": 2,
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": self.clip,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            KEY: self.block,
            **PRECISIONS[self.precision],
        }
        result |= {"managed_gradient_accumulation": False} if self.by_caller else {}
        result |= {"tensor_parallel": {"autotp_size": self.tensor_parallel}} if self.tensor_parallel > 1 else {}
        result |= {"communication_data_type": self.wire} if self.wire != "weights" else {}
        result |= {"zero_force_ds_cpu_optimizer": False} if self.offload != "none" else {}  # PyTorch's step there too
        return result


# Of models that two tensor-parallel ranks divide; AutoTP does not list GPT-2, and llama_odd has three heads.
EVEN = {"vocab_size": 62, "intermediate_size": 28}
INDIVISIBLE = ("gpt2", "llama_odd")
_DIVISIBLE = ("llama", "llama_one_layer", "gpt_neox_parallel", "t5")  # of ARCHITECTURES


def why_not(case: Case) -> str | None:
    """What keeps a case from being run, or its result from being compared tightly; None if nothing does.

    The names of axes that are to blame begin the text, so that a reader finds which pairs are missing.
    """
    is_resnet = case.model.startswith("resnet")
    reasons = {
        # One is a part of the other.
        "ranks, tensor_parallel, replicas: no integer number of subnetworks": case.ranks
        % (case.tensor_parallel * case.replicas),
        "holders: more than subnetworks": case.holders > case.num_subnetworks,
        "by_caller, overlap, stage: DeepSpeed refuses it too": case.by_caller and case.overlap and case.stage < 2,
        "by_caller, accumulation: one micro-batch": case.by_caller and case.accumulation == 1,
        "wire, precision: gradients are fp32 already": case.wire == "fp32" and case.precision == "fp32",
        # Refused at start, since it would have no effect or DeepSpeed has it not.
        "granularity, strategy: a layer is one block": case.granularity == "layer" and case.strategy != "block",
        "units, strategy: no groups of neurons": case.units == "groups" and case.strategy in ("block", "mixed"),
        "units, strategy: one strategy of one part": case.units == "mlp" and case.strategy not in ("block", "neuron"),
        "granularity, units: a layer has both parts": case.granularity == "layer" and case.units != "all",
        "rules, holders: one more than there are": case.rules != "none" and case.is_whole,
        "rules, granularity: layers have no parts": case.rules == "parts" and case.granularity == "layer",
        "rules, units: one part": case.rules == "parts" and case.units == "mlp",
        "rules, units, model: no MLP is left": case.rules == "parts"
        and (case.units, case.model) == ("shared", "llama_one_layer"),
        # Architectures.
        "tensor_parallel, model": case.tensor_parallel > 1 and case.model not in _DIVISIBLE,
        "checkpointing, model: not in Transformers": case.checkpointing != "none" and is_resnet,
        "strategy, model: a ResNet has no attention": is_resnet and case.strategy not in ("block", "neuron"),
        "rules, units, model: nor an MLP": is_resnet and (case.rules == "parts" or case.units in ("shared", "mlp")),
        "rules, model: one layer has no depth": case.rules == "depth" and case.model == "llama_one_layer",
        "rules, model: experts have a multiple of 4 neurons": case.rules == "depth"
        and case.model == "mixtral"
        and case.strategy in ("neuron", "opposite"),
        "units, model: experts have a multiple of 4 neurons, a bottleneck has 3": case.units == "groups"
        and (is_resnet or case.model == "mixtral"),
        "granularity, model: an image model's layers": case.granularity == "layer" and is_resnet,
        # Rounding.
        "optimizer, precision: Adam turns signs of rounding into steps": case.precision != "fp32"
        and case.optimizer != "SGD",
        "optimizer, model: batch norms of few numbers": case.optimizer == "AdamW" and is_resnet,
        "precision, model: few numbers to normalize, or an expert that rounding chooses": case.precision != "fp32"
        and (is_resnet or case.model == "mixtral"),
        "precision, model, tensor_parallel: T5's loss is in 16 bits, of sums in two halves": case.model == "t5"
        and case.tensor_parallel > 1
        and case.precision in ("bf16", "bf16+fp32", "fp16"),
    }
    for reason, applies in reasons.items():
        if applies:
            return reason
    if num_scarce_units(case) * case.holders < case.num_subnetworks:
        return "too few units for each subnetwork to have one"
    return None


def possible(case: Case) -> bool:
    return why_not(case) is None


def num_scarce_units(case: Case) -> int:
    """Units that must go round: each worker needs one of them. Neurons have `ranks` groups, so they always do."""
    specimen = case.specimen
    if case.strategy == "block":
        blocks = specimen.num_layers * (2 if case.granularity == "sublayer" and case.units != "mlp" else 1)
        blocks = blocks if specimen.num_blocks is None else specimen.num_blocks // (1 + (case.units == "mlp"))
        return blocks - (case.units == "shared")
    if (case.strategy, case.units, specimen.num_layers) == ("opposite", "shared", 1):
        return 1  # attention
    if case.strategy == "opposite" or case.units == "mlp":
        return case.num_subnetworks
    return specimen.num_heads // case.tensor_parallel or case.num_subnetworks


@cache
def grid() -> tuple[Case, ...]:
    """Cases that can be run, with a seed: of each architecture and layout of ranks by turns, where a random walk ends
    along cases that can be run."""
    draw = random.Random(0)
    layouts = ((2, 1, 1), (3, 1, 1), (4, 1, 1), (4, 1, 2), (4, 2, 1))
    starts = [
        Case(ranks, 1 if ranks == 2 else 2, model=model, tensor_parallel=parallel, replicas=replicas, optimizer="SGD")
        for model in ARCHITECTURES
        for ranks, parallel, replicas in layouts
    ]
    others = [name for name in AXES if name not in ("model", "ranks", "tensor_parallel", "replicas")]
    found = dict[Case, None]()
    for case in itertools.cycle(filter(possible, starts)):
        for name in draw.choices(others, k=2 * len(others)):
            other = replace(case, **{name: draw.choice(AXES[name])})
            case = other if possible(other) else case
        found[case] = None
        if len(found) == NUM_CASES:
            return tuple(found)
    raise AssertionError("a cycle never ends")


def traits(case: Case) -> list[tuple[str, Any]]:
    """Values of the axes; holders as one, some or all, since 3 of 3 has more in common with 4 of 4 than with 3 of 4."""
    holders = "all" if case.is_whole else "one" if case.holders == 1 else "some"
    return [(name, holders if name == "holders" else getattr(case, name)) for name in AXES]


def pairs_of(case: Case) -> set[Any]:
    """Pairs of traits that count as met by a case: where nothing is absent only those with that, since C = 1 would be
    the easy way to meet all others."""
    pairs = itertools.combinations(traits(case), 2)
    return {pair for pair in pairs if not case.is_whole or ("holders", "all") in pair}


@cache
def sample() -> tuple[Case, ...]:
    """A small subset of the grid in which every pair occurs that occurs there: greedy, next is the first case that adds
    most. What a case adds never grows, so a count from before is a bound."""
    numbers: dict[Any, int] = {}
    masks = [sum(1 << numbers.setdefault(pair, len(numbers)) for pair in pairs_of(case)) for case in grid()]
    wanted = functools.reduce(operator.or_, masks)
    bounds = [(-mask.bit_count(), index) for index, mask in enumerate(masks)]
    heapq.heapify(bounds)
    chosen = []
    while wanted:
        bound, index = bounds[0]
        if (masks[index] & wanted).bit_count() == -bound:
            chosen.append(grid()[index])
            wanted &= ~masks[index]
        heapq.heapreplace(bounds, (-(masks[index] & wanted).bit_count(), index))
    return tuple(chosen)


def cases(*, full: bool) -> tuple[Case, ...]:
    """What is run: the sample, or with `--full` a part of the grid too."""
    stage_0 = Case(2, 1, stage=0), Case(4, 2, "backward", "neuron", stage=0, precision="bf16", optimizer="SGD")
    more = grid()[:NUM_FULL] if full else ()
    return tuple(dict.fromkeys((*stage_0, *sample(), *more)))
