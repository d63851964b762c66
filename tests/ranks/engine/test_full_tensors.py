"""DeepSpeed's safe_get_full_* and safe_set_full_*: the dense model's values, judged by the reference's optimizer."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from deepspeed.utils import (
    safe_get_full_fp32_param,
    safe_get_full_grad,
    safe_get_full_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_grad,
    safe_set_full_optimizer_state,
)

from benchmarks.common.traffic_counter import TrafficCounter
from tests.helpers.models import batches, config, llama, loss_of
from tests.helpers.ranks import Rank
from tests.helpers.training import dense_state, engine_of, own_batches, refusal, sgd, train
from tests.reference.virtual_workers import Reference

pytestmark = pytest.mark.world(2)

NUM_STEPS = 2
# With so large an eps a step is about proportional to the gradient; else rounding could turn steps around where
# gradients are small.
ADAM: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.99), "eps": 1e-2, "weight_decay": 0.0}
BF16 = {"bf16": {"enabled": True}}
OFFLOAD = {"zero_optimization": {"stage": 1, "offload_optimizer": {"device": "cpu"}, "reduce_bucket_size": 700}}
OVERLAP = {"zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 700}}
CASES: tuple[tuple[int, Mapping[str, Any], Mapping[str, Any]], ...] = (
    (0, {"strategy": "neuron"}, {}),
    (1, {"regime": "backward", "strategy": {"attention": "neuron", "mlp": "block"}}, {}),
    (2, {}, BF16),
    (1, {"strategy": "neuron"}, OFFLOAD),
    (2, {"regime": "backward", "strategy": "neuron"}, OVERLAP),
)


def started(stage: int, block: Mapping[str, Any], more: Mapping[str, Any]) -> Any:
    settings = config(holders=1, **block) | {"zero_optimization": {"stage": stage}, "gradient_clipping": 0.0, **more}
    settings["optimizer"] = {"type": "Adam", "params": {**ADAM, "torch_adam": True}}
    model = llama()
    model.get_parameter("model.norm.weight").requires_grad_(False)
    return engine_of(settings, model)


def parameters(engine: Any) -> dict[str, torch.nn.Parameter]:
    return dict(engine.module.named_parameters())


@pytest.mark.parametrize(("stage", "block", "more"), CASES)
def test_are_the_references(stage: int, block: Mapping[str, Any], more: Mapping[str, Any], rank: Rank) -> None:
    engine, dense = started(stage, block, more), llama()
    dense.get_parameter("model.norm.weight").requires_grad_(False)
    dense.to(torch.bfloat16 if "bf16" in more else torch.float32)
    reference = Reference(dense, engine.plan, lambda named: torch.optim.Adam(named.values(), **ADAM), loss_of)
    for step in itertools.islice(batches(rank.size, 1), NUM_STEPS):
        reference.step(step)
    train(engine, num_steps=NUM_STEPS)
    weights = dense_state(engine)
    # fp32: torch's own tolerance, for sums of two ranks in another order. bf16: gradients have 8 bits, and a step
    # moves a weight by the learning rate at most.
    close: dict[str, Any] = {"rtol": 2**-7, "atol": NUM_STEPS * ADAM["lr"] / 10} if "bf16" in more else {}
    for name, parameter in parameters(engine).items():
        found = safe_get_full_fp32_param(parameter)
        if name == "model.norm.weight":  # nobody steps it: nothing, as from plain DeepSpeed
            assert found is None
            continue
        assert found.dtype == torch.float32
        assert torch.equal(found.to(weights[name].dtype), weights[name]), name
        torch.testing.assert_close(found, reference.masters[name].detach(), **close)
        for key in ("exp_avg", "exp_avg_sq"):
            state = safe_get_full_optimizer_state(parameter, key)
            expected = reference.optimizer.state[reference.masters[name]][key]
            assert state.shape == expected.shape
            rough: dict[str, Any] = {"rtol": 0.1, "atol": 1e-3} if "bf16" in more else {}
            torch.testing.assert_close(state, expected, **rough)
    if "bf16" in more:  # masters, not weights that were rounded
        finer = safe_get_full_fp32_param(parameters(engine)["model.embed_tokens.weight"])
        assert not torch.equal(finer, finer.bfloat16().float())

    what_is_set_is_trained(engine)


def what_is_set_is_trained(engine: Any) -> None:
    name, generator = "model.layers.1.mlp.down_proj.weight", torch.Generator().manual_seed(0)
    parameter = parameters(engine)[name]
    shape = llama().get_parameter(name).shape
    value, moment = torch.randn(shape, generator=generator), torch.rand(shape, generator=generator)
    safe_set_full_fp32_param(parameter, value)
    safe_set_full_optimizer_state(parameter, moment, "exp_avg")
    assert torch.equal(safe_get_full_fp32_param(parameter), value)
    assert torch.equal(safe_get_full_optimizer_state(parameter, "exp_avg"), moment)
    now = dense_state(engine)[name]
    assert torch.equal(now, value.to(now.dtype))
    train(engine, num_steps=1, first=NUM_STEPS)
    after = safe_get_full_fp32_param(parameter)
    assert not torch.equal(after, value)
    # Adam moves a weight by at most lr * m / sqrt(v); m and v are the engine's own, of this step.
    m, v = (safe_get_full_optimizer_state(parameter, key) for key in ("exp_avg", "exp_avg_sq"))
    step = ADAM["lr"] / (1 - 0.9**3) * m / ((v / (1 - 0.99**3)).sqrt() + ADAM["eps"])
    torch.testing.assert_close(after, value - step)


def test_gradients_are_the_averages(rank: Rank) -> None:
    """Before the step, of what a rank lacks too; what is set is stepped. Not between two micro-steps at stage 2."""
    engine = started(2, {}, {})
    engine.set_gradient_accumulation_boundary(False)
    engine.backward(loss_of(engine, own_batches(rank, 1)[0]))
    refusal(RuntimeError, lambda: safe_get_full_grad(parameters(engine)["lm_head.weight"]), "last micro-step")
    engine = started(1, {}, {})
    dense, name = llama(), "model.layers.0.mlp.up_proj.weight"
    engine.backward(loss_of(engine, own_batches(rank, 1)[0]))
    trained = parameters(engine)
    del trained["model.norm.weight"]
    found = {key: safe_get_full_grad(each) for key, each in trained.items()}
    assert all(value.any() and value.shape == dense.get_parameter(key).shape for key, value in found.items())
    assert engine.optimizer.sharded.reducer.is_averaged, "only all ranks together can drop them"
    safe_set_full_grad(parameters(engine)[name], torch.zeros_like(found[name]))
    before = dense_state(engine)[name]
    engine.step()
    assert torch.equal(dense_state(engine)[name], before)
    assert engine.get_global_grad_norm() > 0


@pytest.mark.parametrize(("stage", "holders", "more"), [(0, 2, {}), (1, 1, BF16), (1, 2, OVERLAP), (2, 1, BF16)])
def test_gradients_before_the_last_micro_step_are_this_ranks(
    stage: int, holders: int, more: dict[str, Any], rank: Rank
) -> None:
    """As in plain DeepSpeed, also under `no_sync` and, at each stage, in passes whose averages are sent together; zeros
    of what the rank lacks. They are in the dtype of accumulation, and reading them sends nothing."""
    settings = sgd(3, stage=stage, holders=holders, strategy="neuron") | dict(more)
    engine, alone = engine_of(settings), llama().to(torch.bfloat16 if more == BF16 else torch.float32)
    with TrafficCounter() as traffic, engine.no_sync() if stage < 2 and not more else engine.coalesce_grad_reduction():
        assert not any(safe_get_full_grad(parameter).any() for parameter in engine.module.parameters())
        for batch in own_batches(rank, 2):
            engine.backward(loss_of(engine, batch))
            (loss_of(alone, batch) / 3).backward()
            found = {name: safe_get_full_grad(parameter) for name, parameter in parameters(engine).items()}
        assert traffic.total == 0
    for name, parameter in alone.named_parameters():
        assert (found[name].shape, found[name].dtype) == (parameter.shape, parameter.dtype)
        if holders == 2:
            torch.testing.assert_close(found[name], parameter.grad)
    assert found["lm_head.weight"].any()
    lacks = [
        piece
        for piece, holders in engine._core.mask.pieces["model.layers.0.mlp.up_proj.weight"]
        if rank.rank not in holders
    ]
    assert len(lacks) == (holders == 1)
    for piece in lacks:
        gradient = found[piece.parameter]
        assert not piece.narrow(gradient).any()
        assert gradient.any()


def test_what_cannot_be_answered_is_refused(rank: Rank) -> None:
    engine = started(1, {}, {})
    parameter = parameters(engine)["model.layers.0.mlp.up_proj.weight"]
    refusal(ValueError, lambda: safe_get_full_optimizer_state(parameter, "exp_avg"), "before the first step")
    train(engine, num_steps=1)
    words = ("'momentum'", "exp_avg, exp_avg_sq")
    refusal(ValueError, lambda: safe_get_full_optimizer_state(parameter, "momentum"), *words)
    refusal(ValueError, lambda: safe_set_full_fp32_param(parameter, torch.zeros(3)), "shape (24, 16)", "(3,)")
    refusal(RuntimeError, lambda: pickle.dumps(parameter), "model.layers.0.mlp.up_proj.weight", "cannot be pickled")
    with engine.dense():
        copied = pickle.loads(pickle.dumps(parameter))
    with pytest.raises(RuntimeError, match=r"engine that trained 'model.layers.0.mlp.up_proj.weight' no longer exists"):
        safe_get_full_fp32_param(copied)
