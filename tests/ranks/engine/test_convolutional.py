"""Convolutional models in the engine: beside the oracle in all modes and stages, and what becomes of their buffers."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from transformers import ResNetForImageClassification

import sdp_deepspeed
from tests.helpers.models import batches, images_of, loss_of
from tests.helpers.more_models import SPECIMENS
from tests.helpers.oracle import CaseCheck
from tests.helpers.oracle_grid import Case
from tests.helpers.ranks import Check, Rank
from tests.helpers.training import assert_identical, dense_state, engine_of, gathered, sgd, train

MODES = tuple(itertools.product(("forward", "backward"), ("block", "neuron")))


def start(regime: str, strategy: str, name: str = "resnet", **block: Any) -> Any:
    return engine_of(sgd(regime=regime, strategy=strategy, **block), SPECIMENS[name].build())


@torch.no_grad()
def logits(model: Any, rank: Rank) -> torch.Tensor:
    images = images_of(next(batches(rank.size, 1))[rank.rank][0], 32)
    model.eval()
    found: torch.Tensor = model(pixel_values=images).logits
    model.train()
    return found


def stored(engine: Any) -> dict[str, torch.Tensor]:
    """All that this rank stores, buffers too, by the pieces of the plan."""
    mask = engine.mask
    pieces = [piece for name in mask.shapes for piece, _ in mask.pieces_of(name) if mask.stored(piece)]
    return {f"{piece.parameter}[{piece.dim}, {piece.start}]": mask.view(piece).clone() for piece in pieces}


def resumes_bit_for_bit_or_in_another_mode(rank: Rank) -> None:
    """On the same layout bit for bit, on another one with the dense model, running statistics included."""
    for number, (regime, strategy) in enumerate(MODES[1:3]):
        engine = start(regime, strategy, holders=1 + number % 2, subnetworks=2)
        train(engine, num_steps=2)
        folder = rank.folder / f"{regime}_{strategy}"
        engine.save_checkpoint(str(folder))
        own, dense = stored(engine), dense_state(engine)
        resumed = start(regime, strategy, holders=1 + number % 2, subnetworks=2)
        resumed.load_checkpoint(str(folder))
        assert_identical(stored(resumed), own)
        assert train(engine, num_steps=1, first=2) == train(resumed, num_steps=1, first=2)
        assert_identical(stored(resumed), stored(engine))
        other = start(*MODES[3 * number])
        other.load_checkpoint(str(folder))
        assert_identical(dense_state(other), dense)


def the_dense_model_is_whole_and_loads_without_us(rank: Rank) -> None:
    for regime, strategy in MODES:
        folder = rank.folder / f"{regime}_{strategy}"
        engine = start(regime, strategy, "resnet_bottleneck")
        train(engine, num_steps=2)
        expected = logits(engine, rank)
        with engine.dense():
            assert torch.equal(logits(engine.module, rank), expected)
        engine.save_pretrained(folder)
        dist.barrier()
        loaded = ResNetForImageClassification.from_pretrained(folder)
        assert torch.equal(logits(loaded, rank), expected)
        assert {n: v.shape for n, v in dense_state(engine).items()} == shapes(SPECIMENS["resnet_bottleneck"].build())


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: value.shape for name, value in model.state_dict().items()}


def statistics_of_a_dense_pass_in_training_mode_stay(rank: Rank) -> None:
    """As a user estimates them anew: resident in all modes, and in the backward regime without a context too."""
    for regime, strategy in MODES:
        engine = start(regime, strategy)
        before = stored(engine)
        with engine.dense(), torch.no_grad():
            engine.module.train()
            loss_of(engine.module, next(batches(1, 1))[0][0])
            expected = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
        changed = {name for name, value in stored(engine).items() if not torch.equal(value, before[name])}
        assert changed == {name for name in before if name.partition("[")[0] in expected}
        state = dense_state(engine)
        assert_identical(expected, {name: state[name] for name in expected})
    engine = start("backward", "neuron")
    before = stored(engine)
    with torch.no_grad():
        loss_of(engine, next(batches(1, 1))[0][0])
    changed = {name for name, value in stored(engine).items() if not torch.equal(value, before[name])}
    assert {name.partition("[")[0] for name in changed} == expected.keys()


def starts_without_the_dense_model(rank: Rank) -> None:
    """With the same weights in every layout, and the buffers that a constructor makes."""
    specimen, states = SPECIMENS["resnet"], []
    buffers = dict(specimen.build().named_buffers())
    for regime, strategy in MODES:
        torch.manual_seed(3)
        with sdp_deepspeed.Init():
            model = specimen.model(specimen.config(**specimen.options))
        torch.manual_seed(3)
        engine = engine_of(sgd(regime=regime, strategy=strategy), model)
        states.append(dense_state(engine))
        assert_identical({name: states[-1][name] for name in buffers}, buffers)
        assert_identical(states[-1], states[0])
        train(engine, num_steps=2)


def plans_change(rank: Rank) -> None:
    engine = start(*MODES[0])
    for regime, strategy in (*MODES[1:], MODES[1], MODES[0]):
        train(engine, num_steps=1)
        before = dense_state(engine)
        engine.replan({"regime": regime, "strategy": strategy})
        assert_identical(dense_state(engine), before)


def channels_last() -> nn.Module:
    model = SPECIMENS["resnet_bottleneck"].build()
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def channels_last_trains_alike(rank: Rank) -> None:
    """Results are those of the same model in rows; what lies how in memory may change."""
    for (regime, strategy), precision in itertools.product(MODES, ("fp32", "bf16")):
        settings = sgd(regime=regime, strategy=strategy)
        if precision == "bf16":
            settings |= {"bf16": {"enabled": True}, "data_types": {"buffer_dtype": "bf16"}}
        found = []
        for build in (channels_last, SPECIMENS["resnet_bottleneck"].build):
            engine = engine_of(settings, build())
            found.append(train(engine, num_steps=2))
        assert found[0] == pytest.approx(found[1], rel=1e-5 if precision == "fp32" else 2**-6)


def scales_are_refused(rank: Rank) -> None:
    for strategy in ("block", "neuron"):
        with pytest.raises(ValueError, match=r"dense_branch_scale: .*normalization \(BatchNorm2d\) normalizes"):
            start("forward", strategy, dense_branch_scale="coverage")
    assert len(gathered(0)) == rank.size


CHECKS: tuple[Check, ...] = (
    resumes_bit_for_bit_or_in_another_mode,
    the_dense_model_is_whole_and_loads_without_us,
    statistics_of_a_dense_pass_in_training_mode_stay,
    starts_without_the_dense_model,
    plans_change,
    channels_last_trains_alike,
    scales_are_refused,
)


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    for regime, strategy in MODES:  # small steps: batch norms of few numbers; in fp32 it is in the oracle's sample
        case = Case(2, 1, regime, strategy, "resnet", optimizer="SGD", precision="bf16", clip=0.1)
        yield str(case), CaseCheck(case)
    for check in CHECKS:
        yield check.__name__, check


@pytest.mark.checks(
    2, _cases, slow=["2-channels*", "2-plans*", "2-the_dense*", "2-starts*", "2-1of2*", "2-statistics*"]
)
def test_engine(outcome: str | None) -> None:
    assert outcome is None, outcome
