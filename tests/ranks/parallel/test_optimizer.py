"""The sharded optimizer against a literal single process: each slice's mean over its holders, then `torch.optim`."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sdp_deepspeed.masking.mask import Mask
from sdp_deepspeed.parallel import groups as process_groups
from sdp_deepspeed.parallel.groups import Groups
from sdp_deepspeed.parallel.optimizer import ShardedOptimizer
from sdp_deepspeed.parallel.param_groups import param_group_indices
from sdp_deepspeed.units import Piece
from tests.helpers.collective_log import Issued, check_order
from tests.helpers.ranks import Rank
from tests.helpers.sliced_models import (
    Reference,
    Regime,
    SlicedMask,
    SlicedModel,
    Strategy,
    param_groups,
    random_model,
    sliced_model,
)

MODES: list[tuple[Regime, Strategy]] = [
    ("forward", "block"),
    ("forward", "neuron"),
    ("backward", "block"),
    ("backward", "neuron"),
]
NUM_STEPS = 2


class Case(NamedTuple):
    stage: Any = 1
    num_micro_steps: int = 1
    clip: float = 0.0
    dtype: torch.dtype = torch.float32
    optimizer: str = "sgd"
    overlap: bool = False
    bucket_size: int = 40
    offload: bool = False


AXES: tuple[tuple[Any, ...], ...] = (
    (1, 2),
    (1, 3),
    (0.0, 1.0),
    (torch.float32, torch.bfloat16),
    ("sgd", "adamw"),
    (False, True),
    (1, 40, 10**6),
    (False, True),
)


def pairwise(*axes: Sequence[Any], seed: int = 0) -> list[tuple[Any, ...]]:
    """Few combinations in which every pair of values of two axes occurs, greedily chosen."""
    left, seen, chosen = list(itertools.product(*axes)), set[Any](), list[tuple[Any, ...]]()
    random.Random(seed).shuffle(left)
    pairs = {case: set(itertools.combinations(enumerate(case), 2)) for case in left}
    while True:
        best = max(left, key=lambda case: len(pairs[case] - seen))
        if pairs[best] <= seen:
            return chosen
        seen |= pairs[best]
        chosen.append(best)


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
            assert mask.stored(piece) == (regime == "backward" or mask.rank in holders)
            if mask.stored(piece):
                found, expected = mask.view(piece).float(), piece.narrow(dense).float()
                difference = float(((found - expected).abs() / expected.abs().clamp(min=1)).max())
                assert difference < tolerance, f"{piece}: {difference}"


def check_case(rank: Rank, model: SlicedModel, regime: Regime, case: Case, groups: Groups, **options: Any) -> None:
    mask, optimizer = sharded(model, rank, regime, case, groups, **options)
    reference = Reference(model, rank.size, make_optimizer(case.optimizer), case.dtype, case.clip)
    for step in range(NUM_STEPS):
        train_step(mask, optimizer, case, step)
        reference.step(case.num_micro_steps, step)
        assert optimizer.norm is not None
        assert float(optimizer.norm) == pytest.approx(
            reference.norm, rel=1e-5 if case.dtype == torch.float32 else 0.01
        ), (case, step)
        try:
            assert_equal_weights(mask, reference, case, regime)
        except AssertionError as difference:
            raise AssertionError(f"{case}, step {step}: {difference}") from None
    assert all(parameter.grad is None for parameter in mask.parameters.values())
    optimizer.close()


def agrees(rank: Rank, regime: Regime, strategy: Strategy, cases: list[Case]) -> None:
    model = sliced_model(rank.size, strategy)
    groups = Groups(model.holder_sets)
    for case in cases:
        check_case(rank, model, regime, case, groups)
    groups.close()


def odd_sizes(rank: Rank) -> None:
    """One holder for each unit; all; a single slice; buckets smaller than the number of holders; nothing held."""
    models = [sliced_model(rank.size, "neuron", held=held) for held in (1, rank.size)]
    models += [sliced_model(rank.size, "block", num_layers=1, held=1), sliced_model(rank.size, "block", num_layers=0)]
    for model, regime, stage in itertools.product(models, ("forward", "backward"), (1, 2)):
        groups = Groups(model.holder_sets)
        check_case(rank, model, regime, Case(stage, 2, 0.5, overlap=True, bucket_size=9), groups)  # type: ignore[arg-type]
        groups.close()


def sums_in_fp32(rank: Rank) -> None:
    """bf16 gradients that are summed, sent, or both in fp32 are rounded once each."""
    model = sliced_model(rank.size, "neuron")
    groups = Groups(model.holder_sets)
    for stage, regime, wire in pairwise((1, 2), ("forward", "backward"), (None, torch.bfloat16)):
        case = Case(stage, 3, 1.0, torch.bfloat16, overlap=True)
        options = {"gradient_dtype": torch.float32, "wire_dtype": wire}
        check_case(rank, model, regime, case, groups, **options)
    groups.close()


def overflow_skips_the_step(rank: Rank) -> None:
    """An infinite gradient on one rank: no rank updates anything, and the next step is as if it had not been."""
    model = sliced_model(rank.size, "block")
    groups = Groups(model.holder_sets)
    for stage, wire in itertools.product((1, 2), (None, torch.float16)):
        case = Case(stage, clip=1.0)
        mask, optimizer = sharded(model, rank, "forward", case, groups, wire_dtype=wire)
        reference = Reference(model, rank.size, make_optimizer("sgd"), case.dtype, case.clip)
        (mask.loss(0) * (math.inf if rank.rank == 1 else 1)).backward()
        optimizer.reducer.finish_backward()
        assert not optimizer.step(8.0, check_overflow=True)
        assert_equal_weights(mask, reference, case, "forward")
        (mask.loss(0) * 8).backward()
        optimizer.reducer.finish_backward()
        assert optimizer.step(8.0, check_overflow=True)
        reference.step(1, 0)
        assert float(optimizer.norm) == pytest.approx(reference.norm, rel=1e-5 if wire is None else 1e-3)  # type: ignore[arg-type]
        # fp16 rounds clipped gradients of at most 1 to 2^-11, times a learning rate of 0.05
        assert_equal_weights(
            mask, reference, case._replace(dtype=case.dtype if wire is None else torch.bfloat16), "forward"
        )
    groups.close()


def replaced_data_and_kept_gradients(rank: Rank) -> None:
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


def refreshed_shards_keep_what_was_not_changed(rank: Rank) -> None:
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


def clients_optimizer(rank: Rank) -> None:
    """Built from the dense model before masking, with groups and a schedule; Adagrad creates its state at once."""
    model = sliced_model(rank.size, "neuron")
    # of the last group rank 0 has nothing
    unit = Piece("spare", None, 0, 12), tuple(range(1, rank.size))
    shapes, pieces = {**model.shapes, "spare": torch.Size((4, 3))}, {**model.pieces, "spare": [unit]}
    frozen = {"layer1.norm", "layer2.up"}
    sliced = SlicedModel(shapes, pieces, {**model.groups, "spare": 0}, model.used_twice, model.missing)
    groups = Groups(sliced.holder_sets)

    def adagrad(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(params, lr=0.01, initial_accumulator_value=0.5)

    def adam(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam(params, lr=0.01, eps=1e-2)

    def make(kind: Any, parameters: dict[str, torch.nn.Parameter]) -> tuple[torch.optim.Optimizer, Any]:
        names = [name for name in parameters if name not in ("spare", "scale", "layer0.norm")]
        optimizer = kind([{"params": [parameters[n] for n in names if "bias" in n], "weight_decay": 0.0}])
        optimizer.add_param_group({"params": [p for n, p in parameters.items() if n in names and "bias" not in n]})
        optimizer.param_groups[1] |= {"lr": 0.02, "weight_decay": 0.1}
        optimizer.add_param_group({"params": [parameters["spare"]], "lr": 0.03})
        return optimizer, torch.optim.lr_scheduler.LambdaLR(
            optimizer, [lambda s: 1.0, lambda s: 0.5**s, lambda s: s + 1]
        )

    for kind, stage, regime in pairwise((adagrad, adam), (1, 2), ("forward", "backward")):
        parameters = {name: torch.nn.Parameter(dense) for name, dense in sliced.dense().items()}
        trainable = {name: name not in frozen for name in parameters}
        optimizer, schedule = make(kind, parameters)
        mask = SlicedMask(sliced, rank.rank, regime, torch.float32, parameters)
        for name in frozen:
            parameters[name].requires_grad_(False)
        indices = param_group_indices(optimizer, parameters, trainable)
        assert indices == {
            name: 2 if name == "spare" else 0 if "bias" in name else 1
            for name in parameters
            if name not in (*frozen, "scale", "layer0.norm")
        }
        options: dict[str, Any] = {"regime": regime, "stage": stage, "bucket_size": 40}
        engine = sharded_optimizer(optimizer, mask, groups, indices, **options)
        assert len(optimizer.param_groups[2]["params"]) == (0 if rank.rank == 0 else 1)
        reference = Reference(sliced, rank.size, adam, torch.float32, 0.0)
        reference.optimizer, reference_schedule = make(kind, reference.masters)
        reference.untrained = sliced.shapes.keys() - indices.keys()
        for step in range(3):
            train_step(mask, engine, Case(stage), step)
            schedule.step()
            reference.step(1, step)
            reference_schedule.step()
            assert float(engine.norm) == pytest.approx(reference.norm, rel=1e-5)  # type: ignore[arg-type]
        assert_equal_weights(mask, reference, Case(), regime)
        engine.close()
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.zeros(1))]})
    with pytest.raises(RuntimeError, match="4 param groups, but had 3"):
        engine.step()
    groups.close()


def muon(rank: Rank) -> None:
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
    for regime, stage, offload in pairwise(("forward", "backward"), (1, 2), (False, True)):
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


def whole_tensors_that_no_rank_has(rank: Rank) -> None:
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


def between_nodes(rank: Rank) -> None:
    """Three ranks on one node and one on another, so that holders use the backend's collectives, or exchange shards
    directly in some or all of theirs."""
    model = sliced_model(rank.size, "neuron")
    groups = Groups(model.holder_sets, nodes=[0, 0, 0, 1])
    for holders, directly in ((0, 1, 2), (True, True)), ((0, 1, 3), (True, False)), ((0, 1, 2, 3), (False, False)):
        if group := groups.of(holders):
            assert (group.scatters_directly, group.gathers_directly) == directly
    for regime, stage, dtype in pairwise(("forward", "backward"), (1, 2), (torch.float32, torch.bfloat16)):
        check_case(rank, model, regime, Case(stage, 2, 1.0, dtype), groups)
    groups.close()


def tensor_parallel_ranks(rank: Rank) -> None:
    """2 data-parallel times 2 tensor-parallel ranks: the norm counts what these have in common once, and that stays
    equal, in bits."""
    base = sliced_model(2, "neuron")
    divided = [name for name in base.shapes if name.partition(".")[2] in ("up", "bias", "down")]
    names = {name: (f"0/{name}", f"1/{name}") if name in divided else (name,) for name in base.shapes}
    whole, own = SlicedModel({}, {}, {}, "embed"), SlicedModel({}, {}, {}, "embed")
    tensor_parallel_rank = rank.rank % 2
    for name, parts in names.items():
        for index, part in enumerate(parts):
            pieces = [(replace(piece, parameter=part), holders) for piece, holders in base.pieces[name]]
            for model in (whole, own) if len(parts) == 1 or index == tensor_parallel_rank else (whole,):
                model.shapes[part], model.groups[part], model.pieces[part] = (
                    base.shapes[name],
                    base.groups[name],
                    pieces,
                )
    groups = Groups(own.holder_sets, ranks=[[0, 2], [1, 3]])
    assert (groups.rank, groups.tensor_parallel_rank) == divmod(rank.rank, 2)
    for stage, regime, overlap in pairwise((1, 2), ("forward", "backward"), (False, True)):
        case = Case(stage, 2, clip=1.0, overlap=overlap)
        mask = SlicedMask(own, groups.rank, regime, case.dtype)
        options: dict[str, Any] = {"regime": regime, "stage": stage, "overlap": overlap, "clip": 1.0, "bucket_size": 40}
        optimizer = sharded_optimizer(
            make_optimizer("sgd")(param_groups(own, mask.parameters)),
            mask,
            groups,
            own.groups,
            replicated=[name for name in own.shapes if "/" not in name],
            **options,
        )
        reference = Reference(whole, 2, make_optimizer("sgd"), case.dtype, case.clip)
        for step in range(NUM_STEPS):
            train_step(mask, optimizer, case, step)
            reference.step(2, step)
            assert float(optimizer.norm) == pytest.approx(reference.norm, rel=1e-5)  # type: ignore[arg-type]
        reference.masters = {name: master for name, master in reference.masters.items() if name in own.shapes}
        assert_equal_weights(mask, reference, case, regime)
        replicated = [mask.parameters[name].tolist() for name in own.shapes if "/" not in name]
        every: list[Any] = [None] * rank.size
        dist.all_gather_object(every, replicated)
        assert every == [replicated] * rank.size
        optimizer.close()
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


def sends_the_least(rank: Rank) -> None:
    """Elements that a rank sends in one step, as the bounds of the method say, where shards divide."""
    size = rank.size
    rounded = math.lcm(size, size - 1 or 1)  # of elements: no bucket is padded
    for (regime, _), stage, overlap in itertools.product(MODES[::2], (1, 2), (False, True)):
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


def random_plans(rank: Rank, seeds: range) -> None:
    """Ranks that are late at random, in any plan, with overlap: no hang, one order of collectives."""
    for seed in seeds:
        model = random_model(rank.size, seed)
        groups = Groups(model.holder_sets)
        draw = random.Random(seed)
        regime: Regime = draw.choice(("forward", "backward"))
        case = Case(draw.choice((1, 2)), draw.choice((1, 2)), overlap=True, bucket_size=draw.choice((1, 10, 40)))
        mask, optimizer = sharded(model, rank, regime, case, groups)
        delays = random.Random(seed * 100 + rank.rank)
        hooks = [
            parameter.register_post_accumulate_grad_hook(lambda _, delays=delays: time.sleep(delays.random() * 0.002))
            for parameter in mask.parameters.values()
            if parameter.requires_grad
        ]
        reference = Reference(model, rank.size, make_optimizer("sgd"), case.dtype, 0.0)
        with Traffic() as traffic:
            for step in range(2):
                train_step(mask, optimizer, case, step)
        for step in range(2):
            reference.step(case.num_micro_steps, step)
        assert_equal_weights(mask, reference, case, regime)
        logs: list[Any] = [None] * rank.size
        dist.all_gather_object(logs, traffic.log)
        check_order(logs)
        for hook in hooks:
            hook.remove()
        optimizer.close()
        groups.close()


def _checks(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    for index, (regime, strategy) in enumerate(MODES):
        cases = [Case(*values) for values in pairwise(*AXES, seed=4 * size + index)]
        yield f"{regime}-{strategy}", partial(agrees, regime=regime, strategy=strategy, cases=cases)
    yield "random_plans", partial(random_plans, seeds=range(200 if options.getoption("--full") else 10))
    if size == 4:
        yield "tensor_parallel_ranks", tensor_parallel_ranks
        yield "between_nodes", between_nodes
    if size == 3:
        for function in (
            odd_sizes,
            sums_in_fp32,
            overflow_skips_the_step,
            replaced_data_and_kept_gradients,
            refreshed_shards_keep_what_was_not_changed,
            clients_optimizer,
            muon,
            whole_tensors_that_no_rank_has,
            sends_the_least,
        ):
            yield function.__name__, function


@pytest.mark.checks((2, 3, 4), _checks, slow=["2-*", "4-forward-*", "4-backward-*", "4-random_plans"])
def test_ranks(outcome: str | None) -> None:
    assert outcome is None, outcome
