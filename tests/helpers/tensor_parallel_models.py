"""Models that tensor-parallel ranks divide, by AutoTP or by their author, and their training next to the reference."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import ColumnParallel, RowParallel
from torch import nn

from sdp_deepspeed import architectures
from tests.helpers.models import MIXED, SPECIMENS, Specimen, config, two_groups
from tests.helpers.oracle import Run, loss_of, make_optimizer, steps_of
from tests.helpers.oracle_grid import EVEN, INDIVISIBLE, Case
from tests.helpers.ranks import Rank
from tests.reference.virtual_workers import Reference

TP = 2
MODELS: dict[str, Specimen] = {
    name: replace(specimen, options={**specimen.options, **EVEN})
    for name, specimen in SPECIMENS.items()
    if name not in INDIVISIBLE
} | {"llama_tied_61": SPECIMENS["llama_tied"], "qwen2_61": SPECIMENS["qwen2"]}


def build(name: str) -> nn.Module:
    if name == "own":
        return OwnModel(None)
    return MODELS[name].build()


class OwnMLP(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.group = group
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16, bias=False)
        self.bias = nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.down(torch.tanh(self.up(ColumnParallel.apply(self.group, x))))
        return RowParallel.apply(self.group, x, False) + self.bias


class OwnLayer(nn.Module):
    def __init__(self, group: Any) -> None:
        super().__init__()
        self.norm1, self.one = nn.LayerNorm(16), OwnMLP(group)
        self.norm2, self.two = nn.LayerNorm(16), OwnMLP(group)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.one(self.norm1(x))
        return x + self.two(self.norm2(x))


class OwnModel(nn.Module):
    """Its author divides it: `group` None makes the dense model, else what a rank of the group has of that."""

    def __init__(self, group: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(62, 16), nn.Linear(16, 62)
        self.layers = nn.Sequential(OwnLayer(group), OwnLayer(group))
        if group is not None:
            for module in self.modules():
                if isinstance(module, OwnMLP):
                    for p, dim in ((module.up.weight, 0), (module.up.bias, 0), (module.down.weight, 1)):
                        p.data = p.data.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)].contiguous()
                        setattr(p, "model_parallel", True)  # noqa: B010 (what ZeRO-1 looks for)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.head(self.layers(self.embedding(input_ids)))
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss, logits=logits)


def describe_own() -> None:
    inner = architectures.InnerLayers((architectures.Cut("up", 0), architectures.Cut("down", 1, is_output=True)))
    branches = [
        architectures.Branch(name, norm=norm, body=name, inner=inner)
        for name, norm in (("one", "norm1"), ("two", "norm2"))
    ]
    architectures.register(OwnLayer, *branches)


class Mpu:
    """The object that `deepspeed.initialize` takes, in the words of old Megatron."""

    def __init__(self, tp: int = TP) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        self._groups: dict[str, Any] = {}
        for name, lists in {
            "model": [list(range(first, first + tp)) for first in range(0, size, tp)],
            "data": [list(range(first, size, tp)) for first in range(tp)],
        }.items():
            for ranks in lists:
                group = dist.new_group(ranks)
                if rank in ranks:
                    self._groups[name] = group

    def __getattr__(self, name: str) -> Callable[[], Any]:
        for kind, group in self.__dict__["_groups"].items():
            answers = {
                f"get_{kind}_parallel_group": partial(lambda own: own, group),
                f"get_{kind}_parallel_rank": partial(dist.get_rank, group),
                f"get_{kind}_parallel_world_size": partial(dist.get_world_size, group),
            }
            if name in answers:
                return answers[name]
        raise AttributeError(name)


@cache
def mpu() -> Mpu:
    """One for all engines: groups cost time."""
    return Mpu()


@dataclass(frozen=True)
class Divided:
    """One training next to the reference.

    Args:
        model: of MODELS, or "own" for the one that its author divides.
        settings: of the DeepSpeed config.
        block: keys of our block.
    """

    model: str
    block: Mapping[str, Any]
    stage: int = 1
    optimizer: str = "SGD"
    accumulation: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        strategy = self.block["strategy"] if isinstance(self.block["strategy"], str) else "mixed"
        more = ["own-specs"] * ("tensor_parallel" in self.settings)
        return "-".join([self.model, self.block["regime"], strategy, f"zero{self.stage}", *more])

    def check(self, rank: Rank) -> None:
        """The same losses, norms and clipped steps, and the same dense model, as the oracle compares them."""
        dense, engine = build(self.model), self.start()
        assert (engine._core.groups.data_parallel.size, engine._core.groups.rank) == (rank.size // TP, rank.rank // TP)
        case = Case(
            rank.size,
            self.block["holders"],
            stage=self.stage,
            accumulation=self.accumulation,
            optimizer=self.optimizer,
            tensor_parallel=TP,
        )
        make = partial(make_optimizer, self.optimizer)
        reference = Reference(
            dense, engine.plan, lambda named: make(two_groups(named)), partial(loss_of, case), clip=0.5
        )
        run = Run(case, engine, reference, engine._core.groups.rank)
        for number, step in enumerate(steps_of(case)):
            run.train_step(number, step)
        run.compare_dense(step)

    def start(self, **options: Any) -> Any:
        settings = config(**self.block, check_agreement=True)
        del settings["optimizer"]
        settings |= {
            "gradient_accumulation_steps": self.accumulation,
            "gradient_clipping": 0.5,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": self.stage, "reduce_bucket_size": 900},
        }
        settings |= self.settings.get("top", {})
        if self.model == "own":
            describe_own()
            model: nn.Module = OwnModel(mpu().get_model_parallel_group())
            options["mpu"] = mpu()
        else:
            model = build(self.model)
            settings["tensor_parallel"] = {"autotp_size": TP, **self.settings.get("tensor_parallel", {})}
        optimizer = make_optimizer(self.optimizer, two_groups(dict(model.named_parameters())))
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings, **options)
        return engine


# Qwen3's per-head norms, of which a plan of the user's does not say that their gradients are to be summed.
OWN_SPECS = {
    "tensor_parallel": {
        "partition_config": {
            "use_default_specs": False,
            "layer_specs": [
                {"patterns": [r".*\.(o|down)_proj\.weight$"], "partition_type": "row"},
                {"patterns": [r".*\.(q|k|v|gate|up)_proj\.weight$"], "partition_type": "column"},
            ],
        }
    }
}


def forward(strategy: Any, **more: Any) -> dict[str, Any]:
    return {"regime": "forward", "strategy": strategy, "holders": 1, **more}


def backward(strategy: Any, **more: Any) -> dict[str, Any]:
    return {"regime": "backward", "strategy": strategy, "holders": 1, **more}


CASES = (  # what the oracle has not: uneven vocabularies, a plan of the user's, a model that its author divides
    Divided("qwen3", backward("neuron"), stage=1, settings=OWN_SPECS),
    Divided("qwen2_61", backward(MIXED), stage=1, accumulation=2),
    Divided("llama_tied_61", forward("neuron", holders=2), stage=1),
    Divided("own", forward("neuron"), stage=1, optimizer="AdamW"),
    Divided("own", backward("block"), stage=2),
)
