"""The sharded optimizer against a literal single process: each slice's mean over its holders, then `torch.optim`."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sdp_deepspeed.masking.mask import Mask
from sdp_deepspeed.parallel import groups as process_groups
from sdp_deepspeed.parallel.groups import Groups
from sdp_deepspeed.parallel.optimizer import ShardedOptimizer
from sdp_deepspeed.units import Piece
from tests.helpers.collective_log import Issued, check_order
from tests.helpers.ranks import Rank
from tests.helpers.sliced_models import (
    Reference,
    Regime,
    SlicedMask,
    SlicedModel,
    param_groups,
    random_model,
    sliced_model,
)

NUM_STEPS = 2
REGIMES: tuple[Regime, ...] = ("forward", "backward")
STAGES: tuple[Literal[1, 2], ...] = (1, 2)

pytestmark = pytest.mark.world(3)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "num_plans" in metafunc.fixturenames:
        metafunc.parametrize("num_plans", [200 if metafunc.config.getoption("--full") else 15])


class Case(NamedTuple):
    stage: Literal[1, 2] = 1
    num_micro_steps: int = 1
    clip: float = 0.0
    dtype: torch.dtype = torch.float32
    optimizer: str = "sgd"
    overlap: bool = False
    bucket_size: int = 40
    offload: bool = False


def make_optimizer(name: str) -> Callable[[Any], torch.optim.Optimizer]:
    if name == "sgd":
        return lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.01)
    # Its update is lr * m / (sqrt(v) + eps): a great eps keeps rounding errors of small gradients small.
    return lambda groups: torch.optim.AdamW(groups, lr=0.01, eps=1e-2, weight_decay=0.1)


def sharded_optimizer(client: torch.optim.Optimizer, mask: SlicedMask, *args: Any, **options: Any) -> ShardedOptimizer:
    return ShardedOptimizer(client, cast(Mask, mask), *args, **options)


def sharded(
    model: SlicedModel, rank: Rank, regime: Regime, case: Case, groups: Groups, **options: Any
) -> tuple[SlicedMask, ShardedOptimizer]:
    mask = SlicedMask(model, rank.rank, regime, case.dtype)
    optimizer = sharded_optimizer(
        make_optimizer(case.optimizer)(param_groups(model, mask.parameters)),
        mask,
        groups,
        model.groups,
        regime=regime,
        stage=case.stage,
        clip=case.clip,
        bucket_size=case.bucket_size,
        overlap=case.overlap,
        offload=case.offload,
        **options,
    )
    return mask, optimizer


def train_step(mask: SlicedMask, optimizer: ShardedOptimizer, case: Case, step: int) -> None:
    for micro_step in range(case.num_micro_steps):
        optimizer.reducer.is_last_micro_step = micro_step == case.num_micro_steps - 1
        mask.loss(micro_step, step).backward()
        optimizer.reducer.finish_backward()
    assert optimizer.step()


def assert_equal_weights(mask: SlicedMask, reference: Reference, case: Case, regime: Regime) -> None:
    """All slices that this rank stores.

    fp32: sums of at most 4 ranks and 3 micro-steps in another order, 1e-6 of gradients of up to 10; the optimizers
    multiply that by at most lr / eps = 1. bf16: a gradient of up to 10 is rounded to 2^-9 of itself a few times on the
    way, and weights by lr 0.05 and momentum 0.9 over two steps.
    """
    tolerance = 1e-5 if case.dtype == torch.float32 else 0.02
    for name, dense in reference.weights():
        for piece, holders in mask.pieces[name]:
            assert mask.is_stored(piece) == (regime == "backward" or mask.rank in holders)
            if mask.is_stored(piece):
                found, expected = mask.view(piece).float(), piece.narrow(dense).float()
                difference = float(((found - expected).abs() / expected.abs().clamp(min=1)).max())
                assert difference < tolerance, f"{piece}: {difference}"


def drawn_case(draw: random.Random) -> tuple[Case, dict[str, Any]]:
    """A case, and further options of the optimizer."""
    case = Case(
        stage=draw.choice(STAGES),
        num_micro_steps=draw.choice((1, 2, 3)),
        clip=draw.choice((0.0, 0.5)),
        dtype=draw.choice((torch.float32, torch.bfloat16)),
        optimizer=draw.choice(("sgd", "adamw")),
        overlap=draw.choice((False, True)),
        bucket_size=draw.choice((1, 10, 40, 10**6)),
        offload=draw.choice((False, True)),
    )
    if case.dtype == torch.float32 or draw.choice((False, True)):
        return case, {}
    return case, {"gradient_dtype": torch.float32, "wire_dtype": draw.choice((None, torch.bfloat16))}


@pytest.mark.world(2, 3, 4, slow=(2,))
def test_random_plans(rank: Rank, num_plans: int) -> None:
    """Any plan and settings, on ranks that are late at random and on one node or two: norm and weights are the
    reference's, there is no hang, and all ranks have one order of collectives."""
    for seed in range(num_plans):
        model, draw = random_model(rank.size, seed), random.Random(seed)
        groups = Groups(model.holder_sets, nodes=[draw.randrange(2) for _ in range(rank.size)])
        regime, (case, options) = draw.choice(REGIMES), drawn_case(draw)
        mask, optimizer = sharded(model, rank, regime, case, groups, **options)
        reference = Reference(model, rank.size, make_optimizer(case.optimizer), case.dtype, case.clip)
        delays = random.Random(seed * 100 + rank.rank)
        hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, delays=delays: time.sleep(delays.random() * 0.002))
            for parameter in mask.parameters.values()
            if parameter.requires_grad
        ]
        with Traffic() as traffic:
            for step in range(NUM_STEPS):
                train_step(mask, optimizer, case, step)
                reference.step(case.num_micro_steps, step)
                tolerance = 1e-5 if case.dtype == torch.float32 else 0.01
                assert float(optimizer.norm) == pytest.approx(reference.norm, rel=tolerance), (seed, case, step)  # type: ignore[arg-type]
                assert_equal_weights(mask, reference, case, regime)
        assert all(parameter.grad is None for parameter in mask.parameters.values())
        logs: list[Any] = [None] * rank.size
        dist.all_gather_object(logs, traffic.log)
        check_order(logs)
        for hook in hooks:
            hook.remove()
        optimizer.close()
        groups.close()


def test_replaced_data_and_kept_gradients(rank: Rank) -> None:
    """`zero_grad(set_to_none=False)` of the user, and `.data` that the user replaced, leave everything true."""
    model = sliced_model(rank.size, "block")
    groups = Groups(model.holder_sets)
    for stage in (1, 2):
        case = Case(stage)
        mask, optimizer = sharded(model, rank, "forward", case, groups)
        reference = Reference(model, rank.size, make_optimizer("sgd"), case.dtype, 0.0)
        mask.loss(0, 7).backward()
        optimizer.reducer.finish_backward()
        if stage < 2:
            for parameter in mask.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.zero_()
        else:
            optimizer.reducer.zero_grad()
            for parameter in mask.parameters.values():
                parameter.data = parameter.data.clone()
        for step in range(2):
            train_step(mask, optimizer, case, step)
            reference.step(1, step)
        assert_equal_weights(mask, reference, case, "forward")
        with torch.no_grad():
            for parameter in mask.parameters.values():
                parameter.mul_(2)
            for master in reference.masters.values():
                master.mul_(2)
        optimizer.refresh_shards()
        train_step(mask, optimizer, case, 2)
        reference.step(1, 2)
        assert_equal_weights(mask, reference, case, "forward")
    groups.close()


def test_refreshed_shards_keep_what_was_not_changed(rank: Rank) -> None:
    """fp32 shards go on from where they were, in bits, unless a weight is not their rounding any more."""
    model = sliced_model(rank.size, "neuron")
    groups = Groups(model.holder_sets)
    for offload in (False, True):
        case = Case(dtype=torch.bfloat16, offload=offload)
        runs = [sharded(model, rank, "backward", case, groups) for _ in range(2)]
        for run in runs:
            train_step(*run, case, 0)
        runs[1][1].refresh_shards()
        for run in runs:
            train_step(*run, case, 1)
        shards = [[bucket.shard for bucket in optimizer.buckets if bucket.shard is not None] for _, optimizer in runs]
        for shard, expected in zip(*reversed(shards), strict=True):
            assert torch.equal(shard, expected)
            assert shard.numel() < 4 or not torch.equal(shard, shard.bfloat16().float())
        with torch.no_grad():
            runs[1][0].view(model.pieces["embed"][0][0])[0] = 8.0
        runs[1][1].refresh_shards()
        case = case._replace(optimizer="sgd", num_micro_steps=0)
        runs[1][1].optimizer.param_groups[0] |= {"lr": 0.0}
        assert runs[1][1].step()
        assert torch.equal(runs[1][0].parameters["embed"][0], torch.full((3,), 8.0, dtype=torch.bfloat16))
        assert torch.equal(runs[1][0].parameters["embed"][1:], runs[0][0].parameters["embed"][1:])
    groups.close()


def test_muon(rank: Rank) -> None:
    """DeepSpeed's, which has Adam for other tensors: matrices are stepped whole, by one holder each. It iterates in
    fp32 here, so that its update is about as exact as the gradient."""
    from deepspeed.runtime.zero.muon.muon_optimizer import MuonWithAuxAdam

    def make(groups: Any) -> torch.optim.Optimizer:
        matrices, others = groups
        made: torch.optim.Optimizer = MuonWithAuxAdam(
            [{**matrices, "use_muon": True, "lr": 0.02}, {**others, "use_muon": False, "lr": 1e-2, "eps": 1e-2}],
            adam_optimizer=torch.optim.AdamW,
        )
        return made

    model = sliced_model(rank.size, "block", num_layers=5)
    groups = Groups(model.holder_sets)
    in_fp32 = mock.patch("deepspeed.runtime.zero.muon.original_muon.ns_compute_dtype", return_value=torch.float32)
    cases: tuple[tuple[Regime, Literal[1, 2], bool], ...] = (
        ("forward", 1, False),
        ("forward", 2, True),
        ("backward", 1, True),
        ("backward", 2, False),
    )
    for regime, stage, offload in cases:
        case = Case(stage, 2, overlap=True, offload=offload, bucket_size=40)
        mask = SlicedMask(model, rank.rank, regime, torch.float32)
        options: dict[str, Any] = {"regime": regime, "stage": stage, "bucket_size": 40, "overlap": True, "clip": 1.0}
        client = make(param_groups(model, mask.parameters))
        optimizer = sharded_optimizer(client, mask, groups, model.groups, offload=offload, **options)
        reference = Reference(model, rank.size, make, torch.float32, 1.0)
        with torch.compiler.set_stance("force_eager"), in_fp32:
            for step in range(NUM_STEPS):
                train_step(mask, optimizer, case, step)
                reference.step(2, step)
        assert float(optimizer.norm) == pytest.approx(reference.norm, rel=1e-5)  # type: ignore[arg-type]
        assert_equal_weights(mask, reference, case, regime)
        owned: list[Any] = [None] * rank.size
        dist.all_gather_object(owned, sum(p.numel() for p in client.param_groups[0]["params"]))
        total = sum(shape.numel() for name, shape in model.shapes.items() if model.groups[name] == 0)
        assert sum(owned) == total
        assert max(owned) <= total / rank.size + max(shape.numel() for shape in model.shapes.values())
        optimizer.close()
    groups.close()


def test_whole_tensors_that_no_rank_has(rank: Rank) -> None:
    """Errors on all ranks, by name."""
    for strategy, last, words in (
        ("neuron", "layer0.up", "'layer0.up' is cut into neurons"),
        ("block", "layer0.norm", "'layer0.norm' is not a matrix"),
    ):
        model = sliced_model(rank.size, strategy)  # type: ignore[arg-type]
        groups = Groups(model.holder_sets)
        mask = SlicedMask(model, rank.rank, "forward", torch.float32)
        client = torch.optim.Muon([torch.nn.Parameter(torch.zeros(1, 1))], lr=0.1)
        client.param_groups[0]["params"] = [*mask.parameters.values()]  # past PyTorch's own check
        with pytest.raises(ValueError, match=words):
            sharded_optimizer(client, mask, groups, {"embed": 0, last: 0}, regime="forward", stage=1)
        groups.close()


_exchange = process_groups.exchange


class Traffic:
    """Collectives that this rank issues, and the elements that it sends in them at least."""

    def __init__(self) -> None:
        self.log: list[Issued] = []
        self.sent = 0.0

    def __enter__(self) -> Traffic:
        self._patches = [
            mock.patch.object(dist, name, self._logged(name, getattr(dist, name)))
            for name in ("reduce_scatter_single", "all_gather_single", "all_reduce")
        ]
        self._patches.append(mock.patch.object(process_groups, "exchange", self._exchange))
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()

    def _exchange(self, messages: Sequence[process_groups.Messages]) -> None:
        for _, leaving, group in messages:
            ranks = tuple(dist.get_process_group_ranks(group.process_group))
            self.log.append((ranks, "exchange", leaving[0].numel()))
            self.sent += sum(part.numel() for position, part in enumerate(leaving) if position != group.position)
        _exchange(messages)

    def _logged(self, name: str, original: Any) -> Any:
        def call(*tensors: torch.Tensor, group: Any = None) -> Any:
            ranks = tuple(dist.get_process_group_ranks(group or dist.group.WORLD))
            self.log.append((ranks, name, tensors[0].numel()))
            share = 1 - 1 / len(ranks)
            if tensors[0].dim():  # the norm is a scalar
                self.sent += tensors[0].numel() * share * (2 if name == "all_reduce" else 1)
            return original(*tensors, group=group)

        return call


def test_sends_the_least(rank: Rank) -> None:
    """Elements that a rank sends in one step, as the bounds of the method say, where shards divide."""
    size = rank.size
    rounded = math.lcm(size, size - 1 or 1)  # of elements: no bucket is padded
    for regime, stage, overlap in itertools.product(REGIMES, STAGES, (False, True)):
        model = SlicedModel({}, {}, {})
        for index in range(size):
            for kind, holders in (("own", tuple(sorted((index + j) % size for j in range(size - 1)))), ("all", None)):
                name = f"{kind}{index}"
                model.shapes[name], model.groups[name] = torch.Size((rounded, 4)), 0
                ranks = tuple(range(size)) if holders is None else holders
                model.pieces[name] = [(Piece(name, None, 0, 4 * rounded), ranks)]
        groups = Groups(model.holder_sets)
        case = Case(stage, overlap=overlap, bucket_size=10**6)
        mask, optimizer = sharded(model, rank, regime, case, groups)
        with Traffic() as traffic:
            train_step(mask, optimizer, case, 0)
        total, h = 4 * rounded * size, size - 1
        to_holders = h / size * (h - 1) / h * total
        to_all = (size - 1) / size * total
        bound = 2 * to_all + (2 * to_holders if regime == "forward" else to_holders + to_all)
        assert traffic.sent == pytest.approx(bound), (regime, stage)
        optimizer.close()
        groups.close()
