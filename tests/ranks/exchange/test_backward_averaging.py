"""ZeRO stage 2: gradients leave during backward, at each micro-step, and only owned shards stay."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.models import batches, config, llama, loss_of
from tests.helpers.ranks import Rank
from tests.helpers.training import (
    Recording,
    assert_identical,
    dense_state,
    engine_of,
    gathered,
    micro_step,
    own_batches,
    refusal,
    sgd,
    train,
)

BUCKET = 900  # elements: about ten buckets of the small Llama
SPARE = 5


def stage_2(accumulation: int = 1, *, bucket: int = BUCKET, **block: Any) -> dict[str, Any]:
    settings = sgd(accumulation, stage=2, **block)
    settings["zero_optimization"]["reduce_bucket_size"] = bucket
    return settings


def buckets_leave_during_backward(rank: Rank) -> None:
    """Some before the last gradient (of the embedding) is there, all when backward returns, at each micro-step; the
    step itself sends weights, and one reduction (whether anything is left, the norm)."""
    for overlap in (False, True):
        settings = stage_2(2, holders=2)
        settings["zero_optimization"]["overlap_comm"] = overlap
        engine, recording = engine_of(settings), Recording()
        recording.watch(engine, "lm_head.weight", "model.embed_tokens.weight")
        num_buckets = len(engine.optimizer.exchange.buckets)
        for index, batch in enumerate(own_batches(rank, 2)):
            loss = loss_of(engine, batch)
            recording.events.clear()
            engine.backward(loss)
            events = list(recording.events)
            assert events.count("all_to_all_single") == num_buckets > 5
            assert len(events) == num_buckets + 2, "nothing but buckets is sent"
            early = events[: events.index("model.embed_tokens.weight")]
            assert early.index("lm_head.weight") < early.index("all_to_all_single"), "a bucket left before its gradient"
            assert num_buckets // 2 <= early.count("all_to_all_single") < num_buckets
            engine.step()
            sent = recording.events[len(events) :]
            weights = len(engine.optimizer.weight_exchange.buckets)
            assert sorted(sent) == (["all_reduce"] + ["all_to_all_single"] * weights if index else [])


def only_owned_shards_stay(rank: Rank) -> None:
    """Between micro-steps there is no local gradient; sums have the weights' dtype, or fp32 when asked."""
    wishes: list[tuple[dict[str, Any], int]] = [
        ({}, 4),
        ({"bf16": {"enabled": True}}, 2),
        ({"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}, 4),
    ]
    for (wish, item_size), regime in itertools.product(wishes, ("forward", "backward")):
        engine = engine_of(stage_2(3, regime=regime) | wish)
        owned = sum(group.num_elements for group in engine.optimizer.groups)
        dense = sum(parameter.numel() for parameter in llama().parameters())
        assert sum(gathered(owned)) == dense
        for batch in own_batches(rank, 2):
            engine.backward(loss_of(engine, batch))
            assert all(parameter.grad is None for parameter in engine.module.parameters())
            assert sum(t.nbytes for t in engine.optimizer.gradient_tensors()) == owned * item_size
            engine.step()
        micro_step(engine, batch)
        assert engine.global_steps == 1
        assert engine.optimizer.gradient_tensors() == []


def same_bits(make: Callable[[int], dict[str, Any]], wishes: list[int], *, accumulation: int, num_steps: int) -> None:
    """Trainings with these configs end with the same weights and norms."""
    states, norms = [], []
    for wish in wishes:
        engine = engine_of(make(wish))
        train(engine, num_steps=num_steps, accumulation=accumulation)
        states.append(dense_state(engine))
        norms.append(engine.get_global_grad_norm())
    assert norms == norms[:1] * len(wishes)
    for state in states[1:]:
        assert_identical(states[0], state)


def with_overlap(overlap: int, **more: Any) -> dict[str, Any]:
    settings = config(holders=1, **more) | {"gradient_clipping": 0.5, "gradient_accumulation_steps": 2}
    settings["zero_optimization"] = {"overlap_comm": bool(overlap), "reduce_bucket_size": BUCKET}
    return settings


def overlap_changes_no_bit(rank: Rank) -> None:
    """Over gloo, with AdamW, clipping and accumulation, at every stage and in both regimes."""
    for stage, regime in itertools.product((0, 1, 2), ("forward", "backward")):

        def make(overlap: int, stage: int = stage, regime: str = regime) -> dict[str, Any]:
            settings = with_overlap(overlap, regime=regime)
            settings["zero_optimization"]["stage"] = stage
            return settings

        same_bits(make, [0, 1], accumulation=2, num_steps=3)


def as_stage_1(rank: Rank) -> None:
    """With one micro-batch the same bits, with overlap too: the same sums. (With several, stage 2 averages each before
    it adds.)"""

    def make(wish: int) -> dict[str, Any]:
        settings = sgd(stage=min(wish, 2), holders=2, check_agreement=True)
        settings["zero_optimization"] |= {"reduce_bucket_size": BUCKET, "overlap_comm": wish > 2}
        return settings

    same_bits(make, [1, 2, 3], accumulation=1, num_steps=3)


def torch_style_backward(rank: Rank) -> None:
    """`loss.backward()` through DeepSpeed's hooks is `engine.backward(loss)`. (More in test_engine.py.)"""
    states = []
    for direct in (False, True):
        engine = engine_of(stage_2())
        for step in itertools.islice(batches(rank.size, 1), 2):
            loss = loss_of(engine, step[rank.rank][0])
            if direct:
                loss.backward()
            else:
                engine.backward(loss)
            assert all(parameter.grad is None for parameter in engine.module.parameters())
            engine.step()
        states.append(dense_state(engine))
    assert_identical(*states)


def without_gradient_on_some_ranks(rank: Rank) -> None:
    """Zeros count where a rank has none: the average over two ranks is half of the one gradient, 2; 0 if none has."""
    for users, expected in (([0], 1 - 0.1), ([1], 1 - 0.1), ([0, 1], 1 - 0.2), ([], 1.0)):
        model = llama()
        model.spare = nn.Parameter(torch.ones(SPARE))
        engine = engine_of(stage_2(check_agreement=True), model)
        loss = loss_of(engine, own_batches(rank, 1)[0])
        engine.backward(loss + 2 * model.spare.sum() if rank.rank in users else loss)
        engine.step()
        assert model.spare.tolist() == pytest.approx([expected] * SPARE, rel=2**-23)


def a_backward_pass_that_fails(rank: Rank) -> None:
    """After an error in the middle of backward on one rank only, the ranks are not out of step: what was sent counts,
    and a next pass and a step go through."""
    engine = engine_of(stage_2(check_agreement=True))
    (batch,) = own_batches(rank, 1)
    if rank.rank == 1:
        fail_in_backward(engine, batch, "model.embed_tokens.weight")
        engine.optimizer.begin_backward()  # as the next pass would; the other rank waits for it
    else:
        engine.backward(loss_of(engine, batch))
    train(engine, num_steps=2)
    assert engine.global_steps == 2


def a_refused_backward_pass(rank: Rank) -> None:
    """One that one rank alone asked for at the wrong place was none: ranks are in step, and averages as without it."""
    engine, fresh = engine_of(stage_2(2, check_agreement=True)), engine_of(stage_2(2, check_agreement=True))
    first, second = own_batches(rank, 2)
    for trained in (engine, fresh):
        micro_step(trained, first)
        if trained is engine:
            with engine.dense(resident=True):
                if rank.rank == 1:
                    with pytest.raises(RuntimeError, match="leave it first, on all ranks"):
                        engine.backward(torch.zeros((), requires_grad=True))
        micro_step(trained, second)
    assert engine.global_steps == 1
    assert_identical(dense_state(engine), dense_state(fresh))


def double_precision(rank: Rank) -> None:
    """Averages are fp32, as at the other stages."""
    losses = []
    for stage in (1, 2):
        settings = stage_2()
        settings["zero_optimization"] = settings["zero_optimization"] | {"stage": stage}
        losses.append(train(engine_of(settings, llama().double()), num_steps=2))
    assert losses[1] == pytest.approx(losses[0], rel=2**-23)


def fail_in_backward(engine: Any, batch: torch.Tensor, name: str) -> None:
    """An error when the gradient of a parameter arrives."""

    def stop(gradient: torch.Tensor) -> None:
        raise ArithmeticError("on purpose")

    handle = engine.module.get_parameter(name).register_hook(stop)
    with pytest.raises(ArithmeticError, match="on purpose"):
        engine.backward(loss_of(engine, batch))
    handle.remove()


def a_failed_pass_that_is_dropped(rank: Rank) -> None:
    """The steps after `zero_grad` are those of an engine that has not seen it, wherever the pass failed on a rank."""
    half = {"bf16": {"enabled": True}, "data_types": {"grad_accum_dtype": "fp32"}}
    wishes = [(0, {}), (1, half), (2, {}), (2, half)]
    places = ("lm_head.weight", "model.embed_tokens.weight")  # of which gradients come first and last
    for (stage, wish), drop in itertools.product(wishes, ("engine", "optimizer")):
        settings = stage_2(regime="backward") | wish
        settings["zero_optimization"] = settings["zero_optimization"] | {"stage": stage}
        engine, fresh = engine_of(settings), engine_of(settings)
        for engine_of_both in (engine, fresh):
            train(engine_of_both, num_steps=1)
        *_, batch = own_batches(rank, 3)
        fail_in_backward(engine, batch, places[rank.rank])
        (engine if drop == "engine" else engine.optimizer).zero_grad()
        assert engine.optimizer.gradient_tensors() == []
        assert train(engine, num_steps=2, first=1) == train(fresh, num_steps=2, first=1)
        assert_identical(dense_state(engine), dense_state(fresh))


def gradients_dropped_on_one_rank(rank: Rank) -> None:
    engine = engine_of(stage_2(2))
    first, second = own_batches(rank, 2)
    micro_step(engine, first)
    if rank.rank == 1:
        engine.zero_grad()
    words = ("ranks ended", "backward passes, but rank 1 1.", "all must call zero_grad where one does")
    refusal(RuntimeError, lambda: micro_step(engine, second), *words)


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    if size == 3:
        yield as_stage_1.__name__, as_stage_1
        return
    for check in (
        buckets_leave_during_backward,
        only_owned_shards_stay,
        overlap_changes_no_bit,
        torch_style_backward,
        without_gradient_on_some_ranks,
        a_backward_pass_that_fails,
        a_refused_backward_pass,
        a_failed_pass_that_is_dropped,
        gradients_dropped_on_one_rank,
        double_precision,
    ):
        yield check.__name__, check


@pytest.mark.checks((2, 3), _cases)
def test_ranks(outcome: str | None) -> None:
    assert outcome is None, outcome
