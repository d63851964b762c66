"""A plain model, a plan of row and column slices written by hand, and its training through optimizer and exchange.

The layers stay whole on every rank, also in the forward regime, where lacking slices are zeros. So nothing is stored
side by side: column slices are strided, and even fp32 keeps a master of them.
"""

from __future__ import annotations

import itertools
import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from sdp_deepspeed.distributed.agreement import run_on_rank_0
from sdp_deepspeed.distributed.communicator import Communicator
from sdp_deepspeed.engine.consistency import check_holders_agree
from sdp_deepspeed.exchange.unit_fetcher import UnitFetcher
from sdp_deepspeed.layout.places import PieceViews
from sdp_deepspeed.layout.rank_model import RankModel
from sdp_deepspeed.optimizer.optimizer import SubnetworkOptimizer
from sdp_deepspeed.optimizer.settings import OptimizerSettings
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import TensorInfo
from sdp_deepspeed.reference.virtual_workers import Reference, zero_lacking
from sdp_deepspeed.units import check_pieces
from tests.helpers.rank_models import optimizer_of
from tests.helpers.ranks import Rank

WIDTH, HIDDEN = 6, 11


class Sliced(nn.Module):
    """Two matrices whose hidden neurons are cut, a norm that is shared, and an embedding that nothing reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.rise = nn.Linear(WIDTH, HIDDEN)
        self.fall = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)
        self.unused = nn.Parameter(torch.ones(3, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fall(torch.tanh(self.rise(self.norm(x)))) * self.frozen


def model_of(dtype: torch.dtype) -> Sliced:
    torch.manual_seed(0)
    return Sliced().to(dtype)


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    return (model(batch).float() - 1).square().mean()


def batches(num_ranks: int, num_micro: int, dtype: torch.dtype) -> Iterator[list[list[torch.Tensor]]]:
    generator = torch.Generator().manual_seed(5)
    while True:
        yield [
            [torch.randn(4, WIDTH, generator=generator).to(dtype) for _ in range(num_micro)] for _ in range(num_ranks)
        ]


def unit(name: str, holders: tuple[int, ...], *ranges: tuple[int, int]) -> dict[str, Any]:
    """Neurons [start, start + length) of each range: rows of `rise` with their biases, columns of `fall`."""
    cuts = [("rise.weight", 0), ("rise.bias", 0), ("fall.weight", 1)]
    pieces = [
        {"parameter": parameter, "kind": "parameter", "dim": dim, "start": start, "length": length}
        for start, length in ranges
        for parameter, dim in cuts
    ]
    return {"name": name, "pieces": pieces, "holders": list(holders)}


def write_plan(path: Path, *, regime: str, num_ranks: int, num_holders: int) -> None:
    """Four units of unequal size, the second in two stretches; neuron 10 is in no unit, so shared."""
    holders = [tuple(sorted((i + j) % num_ranks for j in range(num_holders))) for i in range(4)]
    units = [
        unit("first", holders[0], (0, 3)),
        unit("torn", holders[1], (3, 1), (8, 2)),
        unit("third", holders[2], (4, 2)),
        unit("fourth", holders[3], (6, 2)),
    ]
    content = {"version": 1, "regime": regime, "strategy": "neuron", "num_subnetworks": num_ranks}
    content |= {"num_holders": num_holders, "seed": 0, "subnetwork_of_rank": list(range(num_ranks)), "units": units}
    path.write_text(json.dumps(content))


@dataclass(frozen=True)
class SliceCase:
    """One training with sliced units against the reference, as a check."""

    regime: str
    holders: int
    stage: int
    optimizer: str = "AdamW"
    precision: str = "fp32"
    accumulation: int = 1
    bucket: int = 10**9
    clip: float = 0.5

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.precision == "fp32" else torch.bfloat16

    def __str__(self) -> str:
        words = (self.regime, f"p{self.holders}", f"zero{self.stage}", self.optimizer, self.precision)
        return "-".join((*words, f"x{self.accumulation}", f"bucket{self.bucket}", f"clip{self.clip}"))

    def __call__(self, rank: Rank) -> None:
        communicator = Communicator(dist)
        plan = self.plan(rank, communicator)
        model = model_of(self.dtype)
        tensors = [TensorInfo(n, tuple(p.shape), p.dtype, trainable=p.requires_grad) for n, p in named(model).items()]
        check_pieces(plan.units, lambda piece: tuple(named(model)[piece.parameter].shape))
        if self.regime == "forward":
            zero_lacking(model, plan, rank.rank)
        optimizer = self.start(model, tensors, plan, communicator)
        reference = Reference(model_of(self.dtype), plan, self.make, loss_of, self.clip)
        for step in itertools.islice(batches(rank.size, self.accumulation, self.dtype), 6):
            losses, norm = reference.step(step)
            for batch, expected in zip(step[rank.rank], losses[rank.rank], strict=True):
                loss = loss_of(model, batch)
                assert abs(loss.item() - expected) <= (1e-5 if self.precision == "fp32" else 2**-6), (loss, expected)
                (loss / self.accumulation).backward()
            optimizer.step()
            relative = 1e-5 if self.precision == "fp32" else 3 * 2**-8
            measured = optimizer._global_grad_norm
            assert measured is not None and abs(measured - norm) <= relative * norm, (measured, norm)  # noqa: PT018
            check_holders_agree(optimizer.model, communicator)
            self.compare(model, reference.model, plan, rank.rank)
        self.assemble_dense(model, reference.model, plan, communicator)

    def assemble_dense(self, model: nn.Module, dense: nn.Module, plan: Plan, communicator: Communicator) -> None:
        """Every rank gets the slices that it lacks from their holders, and has the reference's dense model."""
        tensors = {name: parameter.data for name, parameter in named(model).items()}
        views, rank = PieceViews(tensors), communicator.rank
        sets = [[index] for index in range(len(plan.units))]
        fetcher = UnitFetcher(RankModel(plan, (), views, rank), sets, communicator, device=torch.device("cpu"))
        for index, each in enumerate(plan.units):
            lacking = () if plan.holds_rank(index, rank) else each.pieces
            targets = {piece: views.weight_view(piece) for piece in lacking}
            deque(fetcher.fetch(index, views.weight_view, partial(dict, targets)), maxlen=0)
        for name, expected in named(dense).items():
            tolerance = self.tolerance(expected)
            assert torch.allclose(tensors[name].float(), expected.detach().float(), rtol=0, atol=tolerance), name

    def plan(self, rank: Rank, communicator: Communicator) -> Plan:
        """Written by rank 0, loaded by all, saved and loaded again."""
        path = rank.folder / "plan.json"
        write = partial(write_plan, path, regime=self.regime, num_ranks=rank.size, num_holders=self.holders)
        run_on_rank_0(communicator, write)
        plan = Plan.load(path)
        again = rank.folder / f"again{rank.rank}.json"
        plan.save(again)
        assert Plan.load(again) == plan
        return plan

    def make(self, parameters: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        """Two groups without what is frozen: the reference's masters do not say that it is."""
        chosen = [parameter for name, parameter in parameters.items() if name != "frozen"]
        groups: list[dict[str, Any]] = [
            {"params": [p for p in chosen if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in chosen if p.dim() == 1], "weight_decay": 0.0},
        ]
        if self.optimizer == "AdamW":
            return torch.optim.AdamW(groups, lr=1e-2)
        return torch.optim.SGD(groups, lr=0.1, momentum=0.9)

    def start(
        self, model: nn.Module, tensors: list[TensorInfo], plan: Plan, communicator: Communicator
    ) -> SubnetworkOptimizer:
        settings = OptimizerSettings(
            stage=self.stage,
            clip=self.clip,
            bucket_elements=self.bucket,
            wire_dtype=self.dtype,
            accumulate_in_fp32=self.precision == "bf16+fp32",
        )
        parameters = named(model)
        return optimizer_of(
            self.make(parameters),
            parameters=parameters,
            tensors=tensors,
            plan=plan,
            dp_group=communicator,
            settings=settings,
        )

    def compare(self, model: nn.Module, dense: nn.Module, plan: Plan, rank: int) -> None:
        """All that this rank holds (backward regime: everything) against the reference; the rest stays zero."""
        expected = {name: p.detach().clone() for name, p in dense.named_parameters()}
        if self.regime == "forward":
            for index, each in enumerate(plan.units):
                for piece in each.pieces if not plan.holds_rank(index, rank) else ():
                    piece.narrow(expected[piece.parameter]).zero_()
        for name, parameter in named(model).items():
            tolerance = self.tolerance(expected[name])
            assert torch.allclose(parameter.detach().float(), expected[name].float(), rtol=0, atol=tolerance), name
            lacking = expected[name] == 0
            assert not parameter.detach()[lacking].any(), name

    def tolerance(self, expected: torch.Tensor) -> float:
        """fp32: AdamW moves a weight by lr = 1e-2 a step; six steps to 1e-5 of that, and six roundings (2**-24) of the
        weight. bf16: two units in the last place (2**-8) of the largest weight, one for the rounding of the weight and
        one for the loss that differs by it."""
        largest = float(expected.float().abs().max())
        if self.precision == "fp32":
            return 6 * (1e-5 * 1e-2 + 2**-24 * largest)
        return 2 * 2**-8 * largest


def named(model: nn.Module) -> dict[str, nn.Parameter]:
    return dict(model.named_parameters())
