"""What is measured on a live engine: against figures that can be worked out by hand, and against the estimate."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.common.held_bytes import optimizer_tensors
from benchmarks.common.measured_step import StepFigures, measured_step
from benchmarks.common.traffic_counter import TrafficCounter
from sdp_deepspeed.config import KEY
from sdp_deepspeed.estimate.per_rank import Setup, estimate, plain
from sdp_deepspeed.estimate.precision import Precision
from sdp_deepspeed.estimate.settings import setup_of, with_groups
from sdp_deepspeed.plan.tensors import TensorInfo, dense_tensors
from tests.helpers.models import batches, config, llama, loss_of
from tests.helpers.ranks import Rank
from tests.helpers.training import engine_of, micro_step

pytestmark = pytest.mark.slow

ELEMENTS = 12  # of the vectors that the traffic checks send
BYTES = 4 * ELEMENTS


def _collectives(rank: Rank) -> dict[str, tuple[Any, int]]:
    """Calls and the bytes that this rank must send in them: written out, not computed by what is tested."""
    others, share, vector = rank.size - 1, ELEMENTS // rank.size, torch.ones(ELEMENTS)
    own_shares = [torch.empty(ELEMENTS) for _ in range(rank.size)]
    uneven = [2 * destination + 1 for destination in range(rank.size)]  # elements to each destination
    received = [2 * rank.rank + 1] * rank.size
    outgoing = torch.ones(sum(uneven), 3)
    return {
        "allreduce_": (lambda: dist.all_reduce(vector), 2 * BYTES * others // rank.size),
        "allgather_": (lambda: dist.all_gather(own_shares, vector), BYTES * others),
        "_allgather_base_": (
            lambda: dist.all_gather_into_tensor(torch.empty(ELEMENTS * rank.size), vector),
            BYTES * others,
        ),
        "_reduce_scatter_base_": (
            lambda: dist.reduce_scatter_tensor(torch.empty(share), vector),
            BYTES * others // rank.size,
        ),
        "alltoall_base_": (
            lambda: dist.all_to_all_single(torch.empty(sum(received), 3), outgoing, received, uneven),
            3 * 4 * (sum(uneven) - uneven[rank.rank]),
        ),
        "broadcast_": (lambda: dist.broadcast(vector, 0), BYTES * others // rank.size),
        "reduce_": (lambda: dist.reduce(vector, 1), 0 if rank.rank == 1 else BYTES),
        "barrier": (dist.barrier, 0),
    }


def collectives_are_counted(rank: Rank) -> None:
    for operator, (call, expected) in _collectives(rank).items():
        with TrafficCounter() as counter:
            call()
        assert dict(counter.bytes_by_operator) == {operator: expected}, operator
        assert counter.calls_by_operator[operator] == 1


def _measured(engine: Any, rank: Rank, num_steps: int = 2) -> StepFigures:
    """Figures of the last of `num_steps` steps."""
    for step, batch in enumerate(batches(rank.size, 1)):
        if step + 1 < num_steps:
            micro_step(engine, batch[rank.rank][0])
            continue
        with measured_step(engine) as figures:
            micro_step(engine, batch[rank.rank][0])
        return figures
    raise AssertionError("batches never end")


def _infos() -> list[TensorInfo]:
    return [TensorInfo(name, tuple(p.shape), p.dtype, group=0) for name, p in llama().named_parameters()]


def _largest(size: int) -> int:
    return size * max(parameter.numel() for parameter in llama().parameters())


def _counters(engine: Any) -> int:
    """Bytes of optimizers' scalar step counters, which the estimate leaves out."""
    return sum(tensor.nbytes for tensor in optimizer_tensors(engine) if tensor.dim() == 0)


def _settings(stage: int, extra: dict[str, Any], **block: Any) -> dict[str, Any]:
    return config(**block) | {"zero_optimization": {"stage": stage, "reduce_bucket_size": 100_000}} | extra


def subnetwork_as_estimated(
    stage: int, extra: dict[str, Any], precision: Precision, rank: Rank, block: Mapping[str, Any] | None = None
) -> None:
    engine = engine_of(_settings(stage, extra, holders=1, **(block or {})))
    figures = _measured(engine, rank)
    setup = Setup(stage, precision, bucket_elements=100_000)  # type: ignore[arg-type]
    expected = estimate(engine.plan, _infos(), setup)[rank.rank]
    assert figures.weights == expected.weights
    assert figures.gradients == expected.gradients
    assert figures.optimizer - _counters(engine) == expected.optimizer
    exchanged = (figures.sent_by_operator or {}).get("alltoall_base_", 0)
    padding = 63 * 4 * 3 * len(engine.optimizer.exchange.buckets) * (rank.size - 1)  # of large messages, at most
    assert expected.sent_bytes <= exchanged <= expected.sent_bytes + padding
    assert figures.sent - exchanged < 100, "beside the exchange only scalars travel"
    assert figures.peak >= figures.weights + figures.gradients + figures.optimizer
    assert 0.4 * expected.buffers <= engine.optimizer.exchange.buffers.num_bytes <= expected.buffers


@torch.compiler.set_stance("force_eager")
def muon_as_estimated(rank: Rank) -> None:
    """From the JSON that a user gives `sdp estimate`: matrices have one owner and one moment, the rest has two."""
    for stage in (0, 1, 2):
        settings = _settings(
            stage, {"optimizer": {"type": "Muon", "params": {"lr": 1e-3, "torch_adam": True}}}, holders=1
        )
        engine = engine_of(settings)
        figures = _measured(engine, rank)
        tensors = with_groups(dense_tensors(llama()), "muon")
        expected = estimate(engine.plan, tensors, setup_of(settings, 1))[rank.rank]
        assert (figures.weights, figures.gradients) == (expected.weights, expected.gradients), stage
        assert figures.optimizer - _counters(engine) == expected.optimizer, stage


def plain_as_estimated(stage: int, extra: dict[str, Any], precision: Precision, rank: Rank) -> None:
    settings = _settings(stage, extra, holders=1)
    settings.pop(KEY)
    engine = engine_of(settings)
    figures = _measured(engine, rank)
    expected = plain(_infos(), Setup(stage, precision), num_ranks=rank.size)  # type: ignore[arg-type]
    assert figures.weights == expected.weights
    if stage == 2:  # a gradient that straddles the two shards is kept whole by both
        assert expected.gradients <= figures.gradients <= expected.gradients + _largest(precision.gradients)
    else:
        assert figures.gradients == expected.gradients
    assert figures.optimizer - _counters(engine) == expected.optimizer


def peak_follows_activations(rank: Rank) -> None:
    """Twice the batch needs more; recomputing activations needs less: the peak is measured, not guessed."""
    peaks = []
    for size, recompute in ((8, False), (16, False), (16, True)):
        model = llama(num_layers=4)
        if recompute:
            model.gradient_checkpointing_enable()  # type: ignore[operator]
        engine = engine_of(_settings(1, {"train_micro_batch_size_per_gpu": size}, holders=1), model)
        stream = batches(rank.size, 1, size=size)
        micro_step(engine, next(stream)[rank.rank][0])
        with measured_step(engine) as figures:
            micro_step(engine, next(stream)[rank.rank][0])
        peaks.append(figures.peak)
    small, large, recomputed = peaks
    assert small < large, peaks
    assert recomputed < large, peaks


def phases_are_told_apart(rank: Rank) -> None:
    """A large batch has its peak in backward, a tiny one in the step; what a forward pass leaves grows with it."""
    found = []
    for size in (1, 64):
        engine = engine_of(_settings(1, {"train_micro_batch_size_per_gpu": size}, holders=1), llama(num_layers=4))
        stream = batches(rank.size, 1, size=size)
        micro_step(engine, next(stream)[rank.rank][0])
        with measured_step(engine) as figures:
            micro_step(engine, next(stream)[rank.rank][0])
        assert "step" not in vars(engine), "the engine's own method is back"
        found.append(figures)
    tiny, large = found
    assert large.peak == large.peak_backward > large.peak_step
    assert large.activations > 32 * tiny.activations > 0
    assert tiny.peak == max(tiny.peak_backward, tiny.peak_step)


def accumulation_is_one_step(rank: Rank) -> None:
    """Several micro-steps in one measured step: one exchange, and no more gradients than in one micro-step."""
    figures = []
    for accumulation in (1, 3):
        settings = _settings(1, {"gradient_accumulation_steps": accumulation}, holders=1)
        engine, stream = engine_of(settings), batches(rank.size, accumulation)
        for batch in next(stream)[rank.rank]:
            micro_step(engine, batch)
        with measured_step(engine) as measured:
            for batch in next(stream)[rank.rank]:
                micro_step(engine, batch)
        figures.append(measured)
    assert figures[0].sent == figures[1].sent
    assert figures[0].gradients == figures[1].gradients


def collectives_do_not_follow_units(rank: Rank) -> None:
    """One bucket or, of each model, an eighth: four times the units, as many calls, by operator."""
    for stage, strategy, share in itertools.product((0, 1, 2), ("block", "neuron"), (None, 8)):
        calls = []
        for num_layers in (2, 8):
            model = llama(num_layers)
            size = 10**6 if share is None else sum(p.numel() for p in model.parameters()) // share
            zero = {"stage": stage, "reduce_bucket_size": size, "allgather_bucket_size": size}
            engine = engine_of(config(holders=1, strategy=strategy) | {"zero_optimization": zero}, model)
            batch = next(batches(rank.size, 1))[rank.rank][0]
            micro_step(engine, batch)
            with TrafficCounter() as counter:
                micro_step(engine, batch)
            calls.append(counter.calls_by_operator)
        few, many = calls
        assert few.keys() == many.keys()
        assert all(many[name] <= few[name] for name in few), (stage, strategy, share, calls)
        if share is None:
            assert many["alltoall_base_"] == 2, calls


def measuring_changes_nothing(rank: Rank) -> None:
    losses = []
    for measured in (False, True):
        engine = engine_of(_settings(1, {}, holders=1))
        stream = batches(rank.size, 1)
        micro_step(engine, next(stream)[rank.rank][0])
        if measured:
            with measured_step(engine):
                micro_step(engine, next(stream)[rank.rank][0])
        else:
            micro_step(engine, next(stream)[rank.rank][0])
        losses.append(loss_of(engine, next(stream)[rank.rank][0]).item())
    assert losses[0] == losses[1]


MODES: dict[str, dict[str, Any]] = {
    "backward-block": {"regime": "backward"},
    "forward-neuron": {"strategy": "neuron", "neuron_groups": 3},
    "backward-neuron": {"regime": "backward", "strategy": "neuron", "neuron_groups": 3},
    "backward-mixed": {"regime": "backward", "strategy": {"attention": "block", "mlp": "neuron"}},
}


def _cases(_size: int, _options: pytest.Config) -> Iterator[tuple[str, Any]]:
    yield "collectives", collectives_are_counted
    bf16 = {"bf16": {"enabled": True}}
    summed = bf16 | {"data_types": {"grad_accum_dtype": "fp32"}}
    for name, check in (("subnetwork", subnetwork_as_estimated), ("plain", plain_as_estimated)):
        yield f"{name}-stage0-fp32", partial(check, 0, {}, Precision.of("fp32"))
        for stage in (1, 2):
            yield f"{name}-stage{stage}-fp32", partial(check, stage, {}, Precision.of("fp32"))
            yield f"{name}-stage{stage}-bf16", partial(check, stage, bf16, Precision.of("bf16"))
    for stage in (1, 2):
        yield (
            f"subnetwork-stage{stage}-bf16-summed-in-fp32",
            partial(subnetwork_as_estimated, stage, summed, Precision.of("bf16", accumulate_in_fp32=True)),
        )
    for name, block in MODES.items():
        for stage in (0, 1, 2):
            yield (
                f"{name}-stage{stage}-fp32",
                partial(subnetwork_as_estimated, stage, {}, Precision.of("fp32"), block=block),
            )
            if stage:
                check = partial(subnetwork_as_estimated, stage, bf16, Precision.of("bf16"), block=block)
                yield f"{name}-stage{stage}-bf16", check
    for other in (
        peak_follows_activations,
        phases_are_told_apart,
        accumulation_is_one_step,
        collectives_do_not_follow_units,
        measuring_changes_nothing,
        muon_as_estimated,
    ):
        yield other.__name__, other


@pytest.mark.checks(2, _cases, slow=["2-*-stage[02]-*", "2-backward-*", "2-muon*"])
def test_two_ranks(outcome: str | None) -> None:
    assert outcome is None, outcome
