"""The sharded optimizer against a literal single process: each slice's mean over its holders, then `torch.optim`."""

from __future__ import annotations

import itertools
import math
import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from sdp_deepspeed.core.parallel.groups import Groups
from sdp_deepspeed.core.parallel.optimizer import ShardedOptimizer
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

pytestmark = pytest.mark.slow  # until this is the core that an engine trains with

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


AXES: tuple[tuple[Any, ...], ...] = (
    (0, 1, 2),
    (1, 3),
    (0.0, 1.0),
    (torch.float32, torch.bfloat16),
    ("sgd", "adamw"),
    (False, True),
    (1, 40, 10**6),
)
EVERY_CASE = [Case(*values) for values in itertools.product(*AXES)]


def _sample(seed: int) -> list[Case]:
    """Few cases in which every pair of values of two axes occurs, greedily chosen."""
    left, seen, chosen = list(EVERY_CASE), set[Any](), list[Case]()
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


def sharded(
    model: SlicedModel, rank: Rank, regime: Regime, case: Case, groups: Groups, **options: Any
) -> tuple[SlicedMask, ShardedOptimizer]:
    mask = SlicedMask(model, rank.rank, regime, case.dtype)
    optimizer = ShardedOptimizer(
        make_optimizer(case.optimizer)(param_groups(model, mask.parameters)),
        mask,
        groups,
        model.groups,
        regime=regime,
        stage=case.stage,
        clip=case.clip,
        bucket_size=case.bucket_size,
        overlap=case.overlap,
        **options,
    )
    return mask, optimizer


def train_step(mask: SlicedMask, optimizer: ShardedOptimizer, case: Case, step: int, **options: Any) -> None:
    for micro_step in range(case.num_micro_steps):
        optimizer.is_last_micro_step = micro_step == case.num_micro_steps - 1
        mask.loss(micro_step, step, **options).backward()
        optimizer.finish_backward()
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
    mask, optimizer = sharded(model, rank, regime, case, groups, **options.pop("optimizer_options", {}))
    reference = Reference(model, rank.size, make_optimizer(case.optimizer), case.dtype, case.clip)
    for step in range(NUM_STEPS):
        train_step(mask, optimizer, case, step, **options)
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
    models += [random_model(rank.size, seed) for seed in range(4)]
    for model, regime, stage in itertools.product(models, ("forward", "backward"), (0, 1, 2)):
        groups = Groups(model.holder_sets)
        check_case(rank, model, regime, Case(stage, 2, 0.5, overlap=True, bucket_size=9), groups)  # type: ignore[arg-type]
        groups.close()


def sums_in_fp32(rank: Rank) -> None:
    """bf16 gradients that are summed, sent, or both in fp32 are rounded once each."""
    model = sliced_model(rank.size, "neuron")
    groups = Groups(model.holder_sets)
    for stage, regime, wire in itertools.product((0, 1, 2), ("forward", "backward"), (None, torch.bfloat16)):
        case = Case(stage, 3, 1.0, torch.bfloat16, overlap=stage > 0)
        options = {"gradient_dtype": torch.float32, "wire_dtype": wire}
        check_case(rank, model, regime, case, groups, optimizer_options=options)  # type: ignore[arg-type]
    groups.close()


def several_gradients(rank: Rank) -> None:
    """Reentrant checkpointing gives a tensor that two segments use two gradients: it is reduced at the end."""
    model = sliced_model(rank.size, "block")
    groups = Groups(model.holder_sets)
    for stage in (0, 1, 2):
        case = Case(stage, 2, overlap=True, bucket_size=1)
        check_case(rank, model, "forward", case, groups, is_reentrant=True)
        check_case(rank, model, "forward", case._replace(overlap=False), groups, is_reentrant=True)
    groups.close()


def overflow_skips_the_step(rank: Rank) -> None:
    """An infinite gradient on one rank: no rank updates anything, and the next step is as if it had not been."""
    model = sliced_model(rank.size, "block")
    groups = Groups(model.holder_sets)
    for stage, wire in itertools.product((0, 1, 2), (None, torch.float16)):
        case = Case(stage, clip=1.0)
        mask, optimizer = sharded(model, rank, "forward", case, groups, wire_dtype=wire)
        reference = Reference(model, rank.size, make_optimizer("sgd"), case.dtype, case.clip)
        (mask.loss(0) * (math.inf if rank.rank == 1 else 1)).backward()
        optimizer.finish_backward()
        assert not optimizer.step(8.0, check_overflow=True)
        assert_equal_weights(mask, reference, case, "forward")
        (mask.loss(0) * 8).backward()
        optimizer.finish_backward()
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
    for stage in (0, 1, 2):
        case = Case(stage)
        mask, optimizer = sharded(model, rank, "forward", case, groups)
        reference = Reference(model, rank.size, make_optimizer("sgd"), case.dtype, 0.0)
        mask.loss(0, 7).backward()
        if stage < 2:
            for parameter in mask.parameters.values():
                if parameter.grad is not None:
                    parameter.grad.zero_()
        else:
            optimizer.zero_grad()
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


def optimizers_with_initial_state(rank: Rank) -> None:
    """Adagrad creates its state in its constructor."""
    model = sliced_model(rank.size, "neuron")
    groups = Groups(model.holder_sets)

    def make(params: Any) -> torch.optim.Optimizer:
        return torch.optim.Adagrad(params, lr=0.01, initial_accumulator_value=0.5)

    mask = SlicedMask(model, rank.rank, "forward", torch.float32)
    optimizer = ShardedOptimizer(
        make(param_groups(model, mask.parameters)), mask, groups, model.groups, regime="forward", stage=1
    )
    reference = Reference(model, rank.size, make, torch.float32, 0.0)
    for step in range(NUM_STEPS):
        train_step(mask, optimizer, Case(), step)
        reference.step(1, step)
    assert_equal_weights(mask, reference, Case(), "forward")
    groups.close()


def between_nodes(rank: Rank) -> None:
    """Every rank on a node of its own: collectives of the backend in place of all-to-alls."""
    model = sliced_model(rank.size, "neuron")
    groups = Groups(model.holder_sets, nodes=range(rank.size))
    for stage, dtype in itertools.product((1, 2), (torch.float32, torch.bfloat16)):
        check_case(rank, model, "backward", Case(stage, 2, 1.0, dtype), groups)
    groups.close()


class Traffic:
    """Collectives that this rank issues, and the elements that it sends in them at least."""

    def __init__(self) -> None:
        self.log: list[Issued] = []
        self.sent = 0.0

    def __enter__(self) -> Traffic:
        self._patches = [
            mock.patch.object(dist, name, self._logged(name, getattr(dist, name)))
            for name in ("all_to_all_single", "all_gather_single", "all_reduce")
        ]
        for patch in self._patches:
            patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        for patch in self._patches:
            patch.stop()

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
    for (regime, _), stage, overlap in itertools.product(MODES[::2], (0, 1, 2), (False, True)):
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
        if regime == "backward" and stage == 0:  # holders get averages besides
            bound += to_holders
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
        case = Case(draw.choice((0, 1, 2)), draw.choice((1, 2)), overlap=True, bucket_size=draw.choice((1, 10, 40)))
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
    is_full = options.getoption("--full")
    for index, (regime, strategy) in enumerate(MODES):
        cases = EVERY_CASE if is_full else _sample(4 * size + index)
        yield f"{regime}-{strategy}", partial(agrees, regime=regime, strategy=strategy, cases=cases)
    yield "random_plans", partial(random_plans, seeds=range(200 if is_full else 10))
    if size == 3:
        for function in (
            odd_sizes,
            sums_in_fp32,
            several_gradients,
            overflow_skips_the_step,
            replaced_data_and_kept_gradients,
            optimizers_with_initial_state,
            between_nodes,
            sends_the_least,
        ):
            yield function.__name__, function


@pytest.mark.checks((2, 3, 4), _checks)
def test_ranks(outcome: str | None) -> None:
    assert outcome is None, outcome
