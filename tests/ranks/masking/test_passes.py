"""Evaluation in every way: resident, prefetched, streamed. The same bits, whatever ranks run, skip or change."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.helpers.dense_views import batch_of, engine_with, logits, whole_copy
from tests.helpers.evaluations import LITTLE, PLENTY, Delaying, memory_of, num_collectives, running_layer
from tests.helpers.live_tensors import Watch, present_lacking
from tests.helpers.models import MIXED, family, llama
from tests.helpers.ranks import Check, Rank
from tests.helpers.training import Recording, refusal, train

pytestmark = pytest.mark.slow

SIZE = 3
WAYS = ("auto", "resident", "prefetch", "stream")


def all_ways_give_the_same_bits(rank: Rank) -> None:
    """Three batches before and after training. What is resident is fetched with the first of them, once. Each model and
    each way is tried with scaled branches, and without."""
    models = (("llama", "block"), ("gpt2", "neuron"), ("gpt_neox_parallel", MIXED))
    for number, (name, strategy) in enumerate(models):
        for index, way in enumerate(WAYS):
            scale = ("none", "coverage")[(number + index) % 2]
            engine = engine_with(family(name), strategy=strategy, evaluation=way, dense_branch_scale=scale)
            for _ in range(2):
                with engine.dense(resident=True):
                    whole = deepcopy(engine.module).eval()
                expected = logits(whole, batch_of(rank))
                engine.eval()
                for inside in (False, True):
                    assert_passes(rank, engine, way, expected, inside=inside)
                engine.train()
                train(engine, num_steps=1)


def assert_passes(rank: Rank, engine: Any, way: str, expected: torch.Tensor, *, inside: bool) -> None:
    def forward() -> None:
        assert torch.equal(logits(engine, batch_of(rank)), expected), (way, inside)

    def three() -> None:
        counts.extend(num_collectives(engine, forward) for _ in range(3))

    counts: list[int] = []
    with memory_of(PLENTY):
        if inside:
            with engine.dense():
                three()
        else:
            three()
    assert counts[0] > 0
    assert counts[1:] == ([0, 0] if way in ("auto", "resident") else [counts[0]] * 2), (way, counts)
    assert not present_lacking(engine)


def changed_weights_are_seen(rank: Rank) -> None:
    """Between two batches, behind our back: all of them, or one element; a moving average that takes their place."""
    for strategy in ("block", "neuron"):
        engine, dense = engine_with(llama(3), strategy=strategy, evaluation="resident"), llama(3)
        engine.eval()
        batch, average = batch_of(rank), deepcopy(engine.module)
        logits(engine, batch)
        for change in (lambda tensor: tensor.mul_(-1), lambda tensor: tensor[(0,) * tensor.dim()].add_(1)):
            for name, tensor in engine.held_tensors().items():
                if ".layers." in name:
                    change(tensor.data)
            found = logits(engine, batch)
            assert torch.equal(found, logits(whole_copy(engine, dense), batch)), strategy
            logits(engine, batch)
        with engine.dense(weights=average):
            assert torch.equal(logits(engine, batch), logits(llama(3).eval(), batch)), strategy
        assert torch.equal(logits(engine, batch), found), strategy


def one_changed_unit_is_enough(rank: Rank) -> None:
    """Its holders alone see it, and all ranks fetch anew."""
    engine = engine_with(llama(3), holders=1, evaluation="resident")
    engine.eval()
    batch = batch_of(rank)
    before = logits(engine, batch)
    name = "model.layers.1.mlp.down_proj.weight"
    if name in engine.held_tensors():
        engine.held_tensors()[name].data.mul_(2)
    assert not torch.equal(logits(engine, batch), before)
    assert torch.equal(logits(engine, batch), logits(whole_copy(engine, llama(3)), batch))


def the_next_part_is_under_way(rank: Rank) -> None:
    """When a part computes, the collectives of the one after it have begun; never of a third."""
    for way in ("prefetch", "stream"):
        engine, events = engine_with(llama(3), holders=2, evaluation=way), Recording()
        modules = [module for part in engine._applied.mask.parts for module in part.modules[-1:]]
        for module in modules:
            module.register_forward_pre_hook(lambda *_, events=events: events.events.append("runs"))
        engine.eval()
        logits(engine, batch_of(rank))
        events.events.clear()
        events.watch(engine)
        logits(engine, batch_of(rank))
        engine.dp_group._dist = dist
        counts = [len(list(group)) for runs, group in itertools.groupby(events.events, "runs".__eq__) if not runs]
        assert len(modules) == 6
        each = 2  # rounds of a part
        assert counts == ([2 * each] + [each] * 4 if way == "prefetch" else [each] * 6), (way, events.events)


def nothing_is_used_before_it_has_come(rank: Rank) -> None:
    for way, strategy in itertools.product(WAYS[1:], ("block", "neuron")):
        engine = engine_with(llama(3), strategy=strategy, evaluation=way)
        engine.eval()
        delaying = engine.dp_group._dist = Delaying()
        for _ in range(2):
            assert torch.equal(logits(engine, batch_of(rank)), logits(llama(3).eval(), batch_of(rank))), way
            assert not delaying.num_running
        assert delaying.most_running == (1 if way == "stream" else 2)
        with engine.dense(resident=True):
            pass
        engine.dp_group._dist = dist


def ranks_may_leave_parts_out(rank: Rank) -> None:
    """Rank 1 skips a layer in one batch, in the middle or at the end; all ranks run one twice."""
    batch = batch_of(rank)
    for way, strategy in itertools.product(WAYS[1:], ("block", "neuron")):
        engine, dense = engine_with(llama(3), strategy=strategy, evaluation=way), llama(3).eval()
        engine.eval()
        for number, times in ((1, int(rank.rank != 1)), (2, int(rank.rank != 1)), (1, 2), (2, 2), (0, 1)):
            with running_layer(engine.module, number, times), running_layer(dense, number, times):
                for _ in range(2):
                    assert torch.equal(logits(engine, batch), logits(dense, batch)), (way, strategy, number, times)


def two_passes(engine: Any, batch: torch.Tensor) -> None:
    for _ in range(2):
        logits(engine, batch)


def ranks_may_not_repeat_parts_alone(rank: Rank) -> None:
    """Where they travel. A resident model has them."""
    batch = batch_of(rank)
    for way in WAYS[1:]:
        engine = engine_with(llama(2), evaluation=way)
        engine.eval()
        logits(engine, batch)
        with running_layer(engine.module, 1, 1 + int(rank.rank == 1)):
            evaluate = partial(two_passes, engine, batch)
            if way == "resident":
                evaluate()
            else:
                refusal(RuntimeError, evaluate, "rank 1 ran a part of the model again", "rank 0, 2 began a forward")
        assert torch.equal(logits(engine, batch), logits(llama().eval(), batch)), way


def a_rank_that_fails_alone_holds_nobody_up(rank: Rank) -> None:
    """Its parts still come, and the next batch is right."""
    batch = batch_of(rank)
    for way in WAYS[1:]:
        engine = engine_with(llama(3), evaluation=way)
        engine.eval()
        for number in (0, 2):
            layer = engine.module.model.layers[number].mlp.down_proj
            if rank.rank == 1:
                hook = layer.register_forward_pre_hook(mock.Mock(side_effect=KeyError("mine")))
                with pytest.raises(KeyError, match="mine"):
                    logits(engine, batch)
                hook.remove()
            else:
                logits(engine, batch)
            assert torch.equal(logits(engine, batch), logits(llama(3).eval(), batch)), way
        engine.train()
        train(engine, num_steps=1)


def a_rank_without_room_for_all_holds_nobody_up(rank: Rank) -> None:
    """The others have the whole model, and learn when they leave it that one of them has not."""
    engine, batch = engine_with(llama(3)), batch_of(rank)
    part = engine._applied.mask.parts[1]

    def whole() -> None:
        with engine.dense(resident=True):
            pass

    def without_room() -> None:
        with mock.patch.object(part, "show", side_effect=MemoryError("mine")), pytest.raises(MemoryError, match="mine"):
            whole()
        logits(engine.eval() or engine, batch)

    refusal(RuntimeError, without_room if rank.rank == 1 else whole, "rank 1 began a forward")
    whole()
    engine.eval()
    assert torch.equal(logits(engine, batch), logits(llama(3).eval(), batch))


def uneven_batches_end_with_an_error(rank: Rank) -> None:
    batch = batch_of(rank)
    for way in WAYS[1:]:
        engine = engine_with(llama(), evaluation=way)
        engine.eval()
        for _ in range(2):
            logits(engine, batch)
        uneven = engine.train if rank.rank == 1 else lambda engine=engine: logits(engine, batch)
        refusal(RuntimeError, uneven, "after 2 evaluation batches", "rank 1 ended its evaluation")


def memory_decides_for_all(rank: Rank) -> None:
    """Least is left on rank 1, or one does not know; later it becomes short, and what stayed is given back."""
    batch = batch_of(rank)
    expected = logits(llama().eval(), batch)
    for found in (LITTLE, None):
        engine = engine_with(llama())
        engine.eval()
        forward = partial(logits, engine, batch)
        with memory_of(found if rank.rank == 1 else PLENTY):
            assert all(num_collectives(engine, forward) for _ in range(2))
    counts: list[int] = []
    said: list[str] = []
    engine._applied.dense_view._passes._report = said.append
    for memory in (PLENTY, PLENTY, LITTLE, PLENTY):
        with memory_of(memory if rank.rank == 1 else PLENTY):
            counts.append(num_collectives(engine, forward))
            assert torch.equal(forward(), expected)
    assert [count > 0 for count in counts] == [True, False, True, True], counts
    assert [" stays on every rank" in text for text in said] == [True, False], said
    engine.train()
    engine.eval()
    with memory_of(PLENTY):
        counts = [num_collectives(engine, forward) for _ in range(2)]
    assert [count > 0 for count in counts] == [True, False], "short of memory in another evaluation"


def one_rank_may_ask_for_less(rank: Rank) -> None:
    engine, batch = engine_with(llama()), batch_of(rank)
    engine.eval()
    with memory_of(PLENTY), engine.dense(resident=False if rank.rank == 1 else None):
        for _ in range(2):
            assert num_collectives(engine, lambda: logits(engine, batch))
            assert torch.equal(logits(engine, batch), logits(llama().eval(), batch))


def what_stays_is_given_back(rank: Rank) -> None:
    """At the end of an evaluation, however it ends."""

    def save(engine: Any) -> None:
        engine.save_checkpoint(str(rank.folder / "saved"))

    def leave_context(engine: Any) -> None:
        with engine.dense():
            logits(engine, batch_of(rank))

    ends: tuple[Callable[[Any], Any], ...] = (lambda engine: engine.train(), save, leave_context)
    for strategy, end in itertools.product(("block", "neuron"), ends):
        engine = engine_with(llama(3), strategy=strategy, evaluation="resident")
        needs = sum(part.num_bytes for part in engine._applied.mask.parts)
        logits(engine.eval() or engine, batch_of(rank))
        engine.train()
        engine.eval()
        with Watch() as watch:
            logits(engine, batch_of(rank))
            assert watch.num_bytes() >= needs
            end(engine)
            assert watch.settled_bytes(0) < needs / 4


CHECKS: list[Check] = [
    all_ways_give_the_same_bits,
    changed_weights_are_seen,
    one_changed_unit_is_enough,
    the_next_part_is_under_way,
    nothing_is_used_before_it_has_come,
    ranks_may_leave_parts_out,
    ranks_may_not_repeat_parts_alone,
    a_rank_that_fails_alone_holds_nobody_up,
    a_rank_without_room_for_all_holds_nobody_up,
    uneven_batches_end_with_an_error,
    memory_decides_for_all,
    one_rank_may_ask_for_less,
    what_stays_is_given_back,
]


def _checks(size: int, config: pytest.Config) -> list[tuple[str, Check]]:
    return [(check.__name__, check) for check in CHECKS]


@pytest.mark.checks(SIZE, _checks, slow=["3-what_stays*", "3-ranks_may*", "3-a_rank_that_fails*"])
def test_evaluation(outcome: str | None) -> None:
    assert outcome is None, outcome
