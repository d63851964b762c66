"""Models that tensor-parallel ranks divide, by AutoTP or by their author, and their training next to the reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.module_inject.layers import ColumnParallel, RowParallel
from torch import nn

from sdp_deepspeed import architectures
from tests.helpers.models import SPECIMENS, Specimen
from tests.helpers.oracle import Run, reference_of, start, steps_of
from tests.helpers.oracle_grid import EVEN, INDIVISIBLE, Case
from tests.helpers.ranks import Rank

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

    def __init__(self) -> None:
        rank, size = dist.get_rank(), dist.get_world_size()
        self._groups: dict[str, Any] = {}
        for name, lists in {
            "model": [list(range(first, first + TP)) for first in range(0, size, TP)],
            "data": [list(range(first, size, TP)) for first in range(TP)],
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
class Divided(Case):
    """A case of two workers of two tensor-parallel ranks.

    Args:
        model: of MODELS, or "own" for the one that its author divides.
        own_specs: OWN_SPECS are the plan of AutoTP.
    """

    ranks: int = 2 * TP
    holders: int = 1
    optimizer: str = "SGD"
    tensor_parallel: int = TP
    buckets: str = "many"
    own_specs: bool = False

    @property
    def specimen(self) -> Specimen:
        return MODELS[self.model]

    @property
    def config(self) -> dict[str, Any]:
        settings = super().config
        if self.model == "own":
            del settings["tensor_parallel"]
        elif self.own_specs:
            settings["tensor_parallel"] |= OWN_SPECS["tensor_parallel"]
        return settings

    def check(self, rank: Rank) -> None:
        """The same losses, norms and clipped steps, and the same dense model, as the oracle compares them."""
        engine = self.start()
        worker = engine._core.groups.rank
        assert (engine._core.groups.data_parallel.size, worker) == (rank.size // TP, rank.rank // TP)
        run = Run(self, engine, reference_of(self, build(self.model), engine.plan), worker)
        for number, step in enumerate(steps_of(self)):
            run.train_step(number, step)
        run.compare_dense(step)

    def start(self) -> Any:
        if self.model != "own":
            return start(self, build(self.model), check_agreement=True)
        describe_own()
        return start(self, OwnModel(mpu().get_model_parallel_group()), mpu=mpu(), check_agreement=True)


# Qwen3's per-head norms, of which a plan of the user's does not say that their gradients are to be summed.
OWN_SPECS: dict[str, Any] = {
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


CASES = (  # what the oracle has not: uneven vocabularies, a plan of the user's, a model that its author divides
    Divided(regime="backward", strategy="neuron", model="qwen3", own_specs=True),
    Divided(regime="backward", strategy="mixed", model="qwen2_61", accumulation=2),
    Divided(holders=2, strategy="neuron", model="llama_tied_61"),
    Divided(strategy="neuron", model="own", optimizer="AdamW"),
    Divided(regime="backward", model="own", stage=2),
)
