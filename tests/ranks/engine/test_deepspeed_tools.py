"""Torch autocast, and DeepSpeed's tools: flops profiler, comms logger, timers, what it prints."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.comm import comm as deepspeed_comm
from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler, get_module_flops
from torch import nn

from sdp_deepspeed.config import MODES
from sdp_deepspeed.reference.virtual_workers import Reference
from tests.helpers.models import SPECIMENS, batches, config, loss_of, without_block
from tests.helpers.ranks import Rank
from tests.helpers.training import SGD, assert_identical, dense_state, engine_of, gathered, micro_step, sgd, train

AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


def plain(settings: dict[str, Any]) -> dict[str, Any]:
    """The same without our block."""
    settings = without_block(settings)
    return settings | {"zero_allow_untested_optimizer": True}


def autocast_loss(model: Any, batch: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(model, batch)


def autocast(rank: Rank) -> None:
    """Against the oracle, in its own autocast. Weights, gradients and what is sent stay fp32, so agreement is to fp32
    rounding; but a body in two parts (backward, neuron) rounds each to bf16, and their sum once more."""
    for number, ((regime, strategy), name) in enumerate(zip(MODES, ("llama", "gpt2") * 2, strict=True)):
        tolerance = 2**-8 if (regime, strategy) == ("backward", "neuron") else 1e-5
        model = SPECIMENS[name].build()
        dense = deepcopy(model)
        settings = sgd(stage=number % 3, clip=0.5, regime=regime, strategy=strategy, check_agreement=True)
        engine = engine_of(settings | AUTOCAST, model)
        reference = Reference(dense, engine.plan, _sgd, autocast_loss, 0.5)
        start = deepcopy(dense.state_dict())
        for step in itertools.islice(batches(rank.size, 1), 3):
            losses, norm = reference.step(step)
            assert micro_step(engine, step[rank.rank][0]) == pytest.approx(losses[rank.rank][0], rel=tolerance)
            assert engine.get_global_grad_norm() == pytest.approx(norm, rel=tolerance)
        state = dense_state(engine)
        off = sum(float((state[key] - value).norm()) for key, value in dense.state_dict().items())
        moved = sum(float((start[key] - value).norm()) for key, value in dense.state_dict().items())
        assert off <= 4 * tolerance * moved
        assert {value.dtype for value in state.values()} == {torch.float32}
        with torch.no_grad():
            assert engine(step[0][0]).logits.dtype == torch.bfloat16


def _sgd(named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(named.values(), lr=0.1)


def autocast_at_full_coverage(rank: Rank) -> None:
    """Plain ZeRO-1 sends gradients of linear layers in bf16 (8 bits), which is all that may differ."""
    settings = sgd(holders=rank.size) | AUTOCAST
    engines = [engine_of(own, SPECIMENS["llama"].build()) for own in (settings, plain(settings))]
    for own, expected in zip(*[train(engine, num_steps=3) for engine in engines], strict=True):
        assert own == pytest.approx(expected, rel=2**-8)


def linear_flops(model: nn.Module, batch: torch.Tensor) -> tuple[dict[str, int], int]:
    """Of each linear layer and of the whole model, as the profiler counts them in a training forward pass."""
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    loss_of(model, batch)
    counts = {name: get_module_flops(m) for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    total = profiler.get_total_flops()
    profiler.end_profile()
    return counts, total


def flops_are_the_subnetworks(rank: Rank) -> None:
    """In the forward regime those of what this rank has; in the backward regime all, a body's two parts together."""
    batch = next(batches(1, 1))[0][0]
    dense, total = linear_flops(SPECIMENS["llama"].build(), batch)
    for regime, strategy in MODES:
        model = SPECIMENS["llama"].build()
        whole = {name: parameter.numel() for name, parameter in model.named_parameters()}
        engine = engine_of(sgd(regime=regime, strategy=strategy), model)
        for _ in range(2):  # the first leaves nothing behind
            counts, found = linear_flops(engine.module, batch)
        here = {name: parameter.numel() for name, parameter in engine.module.named_parameters()}
        for name, expected in dense.items():
            weight = f"{name}.weight"
            share = here[weight] / whole[weight] if regime == "forward" else 1
            assert counts[name] == share * expected, (regime, strategy, name)
        assert found < 0.6 * total if regime == "forward" else found == total
        train(engine, num_steps=1)


def flops_profiler_by_config(rank: Rank) -> None:
    """On rank 0, in the second step; the figure of full coverage is plain ZeRO-1's."""
    found = []
    for block in ({"holders": 2}, None, {"holders": 1, "regime": "backward", "strategy": "neuron"}):
        path = rank.folder / f"{block}.txt"
        profile = {"enabled": True, "profile_step": 1, "output_file": str(path)}
        settings = config(**(block or {})) | {"optimizer": SGD, "flops_profiler": profile}
        engine = engine_of(plain(settings) if block is None else settings, SPECIMENS["llama"].build())
        train(engine, num_steps=3)
        if rank.rank == 0:
            found.append([line for line in path.read_text().splitlines() if line.startswith("fwd flops per GPU")])
    assert all(lines and lines == found[0] for lines in found), found


def comms_logger(rank: Rank) -> None:
    """`deepspeed.comm.log_summary()` has the exchange's collectives, two a step and bucket, with what each rank sends:
    on two ranks together each averaged element once, and each weight once on its way back."""
    logger = deepspeed_comm.comms_logger
    try:
        for holders, strategy in ((1, "block"), (2, "block"), (1, "neuron")):
            logger.comms_dict = {}
            settings = sgd(holders=holders, strategy=strategy) | {"comms_logger": {"enabled": True}}
            engine = engine_of(settings, SPECIMENS["llama"].build())
            averaged = sum(p.numel() for p in SPECIMENS["llama"].build().parameters())
            if holders == 1:
                averaged -= sum(piece.length * width for piece, width in _pieces(engine))
            train(engine, num_steps=3)
            summary = deepspeed.comm.log_summary(return_dict=True)
            sizes = logger.comms_dict["all_to_all_single"]
            assert sum(count for count, *_ in sizes.values()) == 2 * 3
            sent = sum(gathered(sum(size * count for size, (count, *_) in sizes.items())))
            padding = sent - 3 * 2 * 4 * averaged  # of large messages, two a rank and step
            assert 0 <= padding <= 3 * 2 * 4 * 2 * 63, (holders, strategy, sent, averaged)
            assert "all_to_all_single" in str(summary)
    finally:
        logger.enabled, logger.comms_dict = False, {}


def _pieces(engine: Any) -> Iterator[tuple[Any, int]]:
    """Pieces of all units, each with the elements per step of its dimension; no rank shares them here."""
    shapes = {name: parameter.shape for name, parameter in SPECIMENS["llama"].build().named_parameters()}
    for unit in engine.plan.units:
        for piece in unit.pieces:
            shape = shapes[piece.parameter]
            yield piece, 1 if piece.dim is None else shape.numel() // shape[piece.dim]


def timers_and_prints(rank: Rank) -> None:
    """They change no bits; the timers that a caller can ask for are those of plain ZeRO-1."""
    tools = {"wall_clock_breakdown": True, "memory_breakdown": True, "dump_state": True, "steps_per_print": 1}
    states, timers = [], []
    for settings in (sgd(stage=2), sgd(stage=2) | tools, plain(sgd(stage=2)) | tools):
        engine = engine_of(settings)
        train(engine, num_steps=1)
        states.append(dense_state(engine))
        timers.append(engine.get_wall_clock_timers())
    assert_identical(*states[:2])
    assert timers[1].keys() == timers[2].keys() >= {"fwd", "bwd", "step"}
    assert all(value > 0 for value in (timers[1]["fwd"], timers[1]["bwd"], timers[1]["step"]))


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    for check in (
        autocast,
        autocast_at_full_coverage,
        flops_are_the_subnetworks,
        flops_profiler_by_config,
        comms_logger,
        timers_and_prints,
    ):
        yield check.__name__, check


@pytest.mark.checks(2, _cases, slow=["2-autocast_at*", "2-flops*"])
def test_two_ranks(outcome: str | None) -> None:
    assert outcome is None, outcome
