"""Torch autocast, and DeepSpeed's tools: flops profiler, comms logger, timers, what it prints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.comm import comm as deepspeed_comm
from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler, get_module_flops
from torch import nn

from sdp_deepspeed.config import MODES
from tests.helpers.models import SPECIMENS, batches, config, loss_of, without_block
from tests.helpers.ranks import Rank
from tests.helpers.training import SGD, assert_identical, dense_state, engine_of, sgd, train

AUTOCAST = {"torch_autocast": {"enabled": True, "dtype": "bfloat16"}}


def plain(settings: dict[str, Any]) -> dict[str, Any]:
    """The same without our block."""
    settings = without_block(settings)
    return settings | {"zero_allow_untested_optimizer": True}


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
    """`deepspeed.comm.log_summary()` has the collectives of each step's buckets."""
    logger = deepspeed_comm.comms_logger
    try:
        for stage, kind, calls in ((0, "all_reduce", 1), (1, "isend", 2)):
            logger.comms_dict = {}
            settings = sgd(holders=2, stage=stage) | {"comms_logger": {"enabled": True}}
            engine = engine_of(settings, SPECIMENS["llama"].build())
            train(engine, num_steps=3)
            sizes = logger.comms_dict[kind]
            assert sum(count for count, *_ in sizes.values()) == calls * 3 * len(engine.optimizer.sharded.held)
            assert kind in str(deepspeed.comm.log_summary(return_dict=True))
    finally:
        logger.enabled, logger.comms_dict = False, {}


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


def states_on_the_host_between_steps(rank: Rank) -> None:
    """As for a generation between two steps: in evaluation nobody needs them, and a step says who does."""
    states = []
    for moves in (False, True):
        engine = engine_of(config(holders=1) | {"bf16": {"enabled": True}})
        train(engine, num_steps=1)
        if moves:
            engine.offload_states()
            with engine.dense():
                pass
            with pytest.raises(RuntimeError, match=r"call reload_states\(\)"):
                train(engine, num_steps=1)
            engine.zero_grad()
            engine.reload_states()
        train(engine, num_steps=1)
        states.append(dense_state(engine))
    assert_identical(*states)


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    for check in (
        autocast_at_full_coverage,
        flops_are_the_subnetworks,
        flops_profiler_by_config,
        comms_logger,
        timers_and_prints,
        states_on_the_host_between_steps,
    ):
        yield check.__name__, check


@pytest.mark.checks(2, _cases, slow=["2-autocast_at*", "2-flops*"])
def test_two_ranks(outcome: str | None) -> None:
    assert outcome is None, outcome
