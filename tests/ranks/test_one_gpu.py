"""What one GPU can be asked without peers: an engine of one rank, over NCCL there; and rank 3 of eight.

With k = 1 and C = 1 the exchange has nobody to send to: NCCL serves the hosts' own collectives only, and every value
must be the reference's. What the rank of eight computes means nothing, but it must store what the plan says,
in the bytes that `sdp estimate` says.
"""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sdp_deepspeed
from benchmarks.common.fake_world import fake_world
from benchmarks.common.held_bytes import optimizer_tensors
from benchmarks.common.measured_step import measured_step
from sdp_deepspeed.config import MODES, Mode
from sdp_deepspeed.estimate.deepspeed_bytes import DeepSpeedRun, DeepSpeedSetup, Precision
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.tensors import dense_tensors
from tests.helpers.checkpointed_runs import settings_of, stepped
from tests.helpers.models import batches, config, llama
from tests.helpers.oracle import check_case
from tests.helpers.oracle_grid import AXES, Case, possible
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical, dense_state, engine_of, micro_step, train

# One rank may have a GPU's own collectives.
pytestmark = [pytest.mark.slow, pytest.mark.gpu, pytest.mark.world(1, gpu_backend="nccl")]

BF16 = {"bf16": {"enabled": True}}
FAKE_RANK, FAKE_SIZE = 3, 8
BUCKET = 100_000


def settings_of_one_rank() -> Iterator[Case]:
    """Modes x stages x precisions x places of the optimizer, and overlap with several micro-steps."""
    for mode, stage, precision, offload in itertools.product(MODES, AXES["stage"], AXES["precision"], AXES["offload"]):
        optimizer = "AdamW" if precision == "fp32" else "SGD"
        yield Case(1, 1, *mode, stage=stage, precision=precision, offload=offload, optimizer=optimizer)
    for mode in MODES:
        yield Case(1, 1, *mode, stage=2, overlap=True, accumulation=3, buckets="many")


def cases_of_one_rank() -> list[Case]:
    """Without those that start-up refuses."""
    return [case for case in settings_of_one_rank() if possible(case)]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """On the CPU some of them."""
    on_gpu, cases = metafunc.config.getoption("--gpu"), cases_of_one_rank()
    if "case" in metafunc.fixturenames:
        metafunc.parametrize("case", cases if on_gpu else cases[:: len(cases) // 3], ids=str)
    if "mode" in metafunc.fixturenames:
        metafunc.parametrize("mode", MODES if on_gpu else MODES[3:], ids="-".join)


def test_agrees_with_the_reference(rank: Rank, case: Case) -> None:
    check_case(case, rank)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_resumes(rank: Rank, mode: Mode, stage: int) -> None:
    """Saved and loaded by another engine, bit for bit, which goes on as the first one does."""
    settings = settings_of(stage, "bf16+fp32" if stage else "fp32", **mode._asdict())
    engines = [engine_of(settings) for _ in range(2)]
    train(engines[0], num_steps=2)
    engines[0].save_checkpoint(str(rank.folder))
    assert not torch.equal(*(dense_state(engine)["lm_head.weight"] for engine in engines))
    engines[1].load_checkpoint(str(rank.folder))
    assert_identical(*(dense_state(engine) | stepped(engine) for engine in engines))
    losses = [train(engine, num_steps=2, first=2) for engine in engines]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)  # a GPU may add up in another order


def alike(settings: dict[str, Any], build: Callable[[], nn.Module]) -> tuple[Any, Any]:
    """Two engines of a model that is built under Init: the same bits, and on a GPU at no time more than 1.05 of what is
    stored in the end, and a layer that is whole before it is cut."""
    models = []
    for _ in range(2):
        with sdp_deepspeed.Init():
            models.append(build())
    layer = sum(4 * parameter.numel() for parameter in models[0].get_submodule("model.layers.0").parameters())
    other = engine_of(settings, models[0])
    on_gpu = other.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated() if on_gpu else 0
    engine = engine_of(settings, models[1])
    peak = torch.cuda.max_memory_allocated() - before if on_gpu else 0
    assert_identical(engine.held_tensors(), other.held_tensors())
    assert {tensor.device for tensor in engine.held_tensors().values()} == {torch.device(engine.device)}
    stored = [*engine.held_tensors().values(), *optimizer_tensors(engine)]
    own = sum(tensor.nbytes for tensor in stored)
    assert peak <= 1.05 * own + layer + 2**20, (peak, own, layer)  # each tensor takes a multiple of 512 bytes
    return engine, other


def test_models_built_under_init_train_alike(rank: Rank, mode: Mode) -> None:
    engines = alike(config(coverage=1.0, **mode._asdict()) | BF16, llama)
    losses = [train(engine, num_steps=1) for engine in engines]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_compiled(rank: Rank) -> None:
    """By inductor: the values of an engine that is not."""
    for stage, mode in zip((0, 1, 2, 2), MODES, strict=True):
        settings = settings_of(stage, **mode._asdict())
        engines = [engine_of(settings) for _ in range(2)]
        engines[0].compile()
        losses = [train(engine, num_steps=3) for engine in engines]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def stores_what_the_plan_says(engine: Any, dense: nn.Module) -> None:
    """Elements of each parameter: all but those of pieces that the rank lacks."""
    plan: Plan = engine.plan
    stored = {name: tensor.numel() for name, tensor in engine.held_tensors().items()}
    subnetwork = plan.subnetwork_of_rank[FAKE_RANK]
    for name, parameter in dense.named_parameters():
        absent = sum(
            piece.num_elements(tuple(parameter.shape))
            for index, unit in enumerate(plan.units)
            for piece in unit.pieces
            if piece.parameter == name and not plan.holds(index, subnetwork)
        )
        kept = stored.get(name, 0)
        if plan.regime == "forward":
            assert kept == parameter.numel() - absent, name
        else:
            assert kept in (parameter.numel(), parameter.numel() - absent), name  # the rest is frozen
    assert not plan.is_dense


def as_estimated(mode: Mode, stage: int, precision: str) -> weakref.ref[Any]:
    """A rank's bytes, as the formulas have them from the plan and shapes alone; its engine after
    `destroy`, if it lives on."""
    zero = {"stage": stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    settings = config(coverage=0.5, **mode._asdict()) | {"zero_optimization": zero}
    engine = engine_of(settings | (BF16 if precision == "bf16" else {}), llama(4))
    assert (dist.get_rank(), len(engine.plan.subnetwork_of_rank)) == (FAKE_RANK, FAKE_SIZE)
    stores_what_the_plan_says(engine, llama(4))
    batch = next(batches(1, 1))[0][0]
    micro_step(engine, batch)
    with measured_step(engine) as figures:
        micro_step(engine, batch)
    tensors = dense_tensors(llama(4))
    setup = DeepSpeedSetup(stage, Precision.of(precision), bucket_elements=BUCKET)  # type: ignore[arg-type]
    expected = DeepSpeedRun(engine.plan, tensors, setup).estimate(FAKE_RANK)
    counters = sum(tensor.nbytes for tensor in optimizer_tensors(engine) if tensor.dim() == 0)
    found = (figures.weights, figures.gradients, figures.optimizer - counters)
    assert found == (expected.weights, expected.gradients, expected.optimizer), (mode, stage, precision)
    assert figures.peak >= expected.state
    engine.destroy()  # DeepSpeed's own engines stay without it too
    return weakref.ref(engine)


def test_a_rank_of_a_world_that_is_not_there(rank: Rank) -> None:
    """All modes in one world: DeepSpeed never forgets its groups."""
    dist.destroy_process_group()
    try:
        with fake_world(FAKE_RANK, FAKE_SIZE):
            engines = [as_estimated(mode, stage, "bf16") for mode, stage in zip(MODES, (1, 2, 1, 2), strict=True)]
            engines.append(as_estimated(MODES[1], 1, "fp32"))
            for mode in MODES[:2]:  # elsewhere all weights stay
                alike(config(coverage=0.5, **mode._asdict()), partial(llama, 4))
            gc.collect()
            assert [engine() for engine in engines] == [None] * 5, "who measures several ranks has the memory of one"
    finally:  # for whoever started this rank
        dist.init_process_group("gloo", init_method=f"file://{rank.folder}/again", rank=0, world_size=1)
