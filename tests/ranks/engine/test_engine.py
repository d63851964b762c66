"""The engine's surface as DeepSpeed's users know it: accumulation, collectives, what freezes in mid-run."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common.traffic_counter import TrafficCounter
from tests.helpers.models import config, llama, loss_of, without_block
from tests.helpers.ranks import Rank
from tests.helpers.training import (
    assert_identical,
    dense_state,
    engine_of,
    micro_step,
    own_batches,
    refusal,
    sgd,
    train,
)

pytestmark = pytest.mark.world(2)


def in_buckets(settings: dict[str, Any]) -> dict[str, Any]:
    """About ten of the small Llama."""
    return settings | {"zero_optimization": settings["zero_optimization"] | {"reduce_bucket_size": 900}}


def test_the_callers_boundary(rank: Rank) -> None:
    """`set_gradient_accumulation_boundary` at every stage: step() on the way does nothing; `no_sync` too, but at stage
    2, where it is refused as DeepSpeed does."""
    *first, last = own_batches(rank, 3)
    for stage in (0, 1, 2):
        engines = [engine_of(sgd(3, stage=stage, regime="backward", strategy="neuron")) for _ in range(2)]
        for batch in (*first, last):
            micro_step(engines[0], batch)
        engines[1].set_gradient_accumulation_boundary(False)
        with engines[1].no_sync() if stage == 1 else nullcontext():
            for batch in first:
                engines[1].backward(loss_of(engines[1], batch))
                if stage != 1:
                    engines[1].step()
        assert engines[1].global_steps == 0
        engines[1].set_gradient_accumulation_boundary(True)
        micro_step(engines[1], last)
        assert [engine.global_steps for engine in engines] == [1, 1]
        assert_identical(*map(dense_state, engines))
    with pytest.raises(AssertionError, match="no_sync context manager is incompatible"), engines[1].no_sync():
        pass


def test_coalesced_passes(rank: Rank) -> None:
    """`coalesce_grad_reduction`: several passes of one step send nothing, and are one pass of the sum of their losses;
    at C = 1 as in plain DeepSpeed."""
    passes = own_batches(rank, 2)
    for stage, overlap, holders, strategy in ((1, False, 1, "neuron"), (1, True, 1, "block"), (2, True, 2, "neuron")):
        settings = sgd(stage=stage, holders=holders, strategy=strategy) | {"zero_allow_untested_optimizer": True}
        settings["zero_optimization"] |= {"overlap_comm": overlap}
        ours, expected = engine_of(settings), engine_of(without_block(settings) if holders == 2 else settings)
        for step in range(2):
            with TrafficCounter() as traffic, ours.coalesce_grad_reduction():
                for batch in passes:
                    ours.backward(loss_of(ours, batch))
                assert traffic.total == 0
                refusal(AssertionError, ours.step)
            ours.step()
            expected.backward(sum(loss_of(expected, batch) for batch in passes))
            expected.step()
            assert ours.global_steps == step + 1
            norms = [float(engine.get_global_grad_norm()) for engine in (ours, expected)]
            assert norms[0] == pytest.approx(norms[1], rel=1e-5)
        torch.testing.assert_close(dense_state(ours), dense_state(expected))
    with pytest.raises(NotImplementedError), engine_of(sgd(stage=0)).coalesce_grad_reduction():
        pass


def test_overlap_after_no_sync(rank: Rank) -> None:
    """Passes in `no_sync` send nothing. The last pass sends gradients before it reaches the embeddings, whether or not
    there were such passes."""
    for strategy in ("block", "neuron"):
        settings = in_buckets(sgd(holders=2, strategy=strategy))
        overlapping = settings | {"zero_optimization": settings["zero_optimization"] | {"overlap_comm": True}}
        engines = [engine_of(overlapping), engine_of(settings)]
        sent: list[int] = []
        with TrafficCounter() as traffic:
            embedding = engines[0].module.get_input_embeddings().weight
            embedding.register_hook(lambda _, sent=sent, traffic=traffic: sent.append(traffic.total))
            for num_without in (0, 2, 2, 0):
                *first, last = own_batches(rank, num_without + 1)
                for engine in engines:
                    with engine.no_sync():
                        before = traffic.total
                        for batch in first:
                            engine.backward(loss_of(engine, batch))
                        assert traffic.total == before
                    engine.backward(loss_of(engine, last))
                    if engine is engines[0]:
                        assert sent[-1] > before, (strategy, num_without)
                    engine.step()
        assert_identical(*map(dense_state, engines))


def test_two_gradients_in_one_pass(rank: Rank) -> None:
    """Are refused where something is sent during a backward pass, as in plain ZeRO-2; elsewhere the oracle has them."""
    (batch,) = own_batches(rank, 1)
    for stage, overlap in ((1, True), (2, False)):
        settings = in_buckets(sgd(stage=stage))
        settings["zero_optimization"] |= {"overlap_comm": overlap}
        engine = engine_of(settings)
        head = engine.module.lm_head
        run = partial(torch.utils.checkpoint.checkpoint, head.forward, use_reentrant=True)
        head.forward = lambda hidden, run=run: torch.cat([run(half) for half in hidden.chunk(2)])
        backward = partial(engine.backward, loss_of(engine, batch))
        refusal(RuntimeError, backward, "'lm_head.weight'", "use_reentrant=False")


ZERO_GRADS: dict[str, Callable[[Any], Any]] = {
    "engine": lambda engine: engine.zero_grad(),
    "optimizer": lambda engine: engine.optimizer.zero_grad(),
}


@pytest.mark.parametrize("strategy", ["block", "neuron"])
@pytest.mark.parametrize("regime", ["forward", "backward"])
def test_dropped_gradients(rank: Rank, regime: str, strategy: str) -> None:
    """Are gone, whichever `zero_grad` drops them; that of the optimizer that was passed drops none."""
    first, second = own_batches(rank, 2)
    for stage, overlap in ((0, True), (1, False), (1, True), (2, True)):
        settings = sgd(stage=stage, clip=0.1, regime=regime, strategy=strategy)
        settings["zero_optimization"] |= {"overlap_comm": overlap}
        client: Any = torch.optim.SGD((model := llama()).parameters(), lr=0.1)
        engine, other = engine_of(settings, model, optimizer=client), engine_of(settings)
        for drop in ZERO_GRADS.values():
            engine.backward(loss_of(engine, first) * 3)
            drop(engine)
            engine.backward(loss_of(engine, second))
            client.zero_grad()
            engine.step()
            micro_step(other, second)
        assert_identical(dense_state(engine), dense_state(other))


def test_averaged_gradients_dropped_by_one_rank(rank: Rank) -> None:
    """Cannot be; that rank is told which one continues. Nothing is dropped."""
    first, second = own_batches(rank, 2)
    engine, other = engine_of(sgd(stage=2)), engine_of(sgd(stage=2))
    engine.backward(loss_of(engine, first))
    if rank.rank == 1:
        with pytest.raises(RuntimeError, match="zero_grad: rank 0 continued training"):
            engine.zero_grad()
    engine.backward(loss_of(engine, second))
    for batch in (first, second):
        other.backward(loss_of(other, batch))
    engine.step()
    other.step()
    assert_identical(dense_state(engine), dense_state(other))


def test_gradients_set_to_none(rank: Rank) -> None:
    """By hand: where those of cut tensors would stay, the step is an error, and the engine's method helps."""
    first, second = own_batches(rank, 2)
    for stage, strategy in ((0, "block"), (1, "neuron")):
        engine, other = (engine_of(sgd(stage=stage, strategy=strategy)) for _ in range(2))
        engine.backward(loss_of(engine, first))
        for parameter in engine.module.parameters():
            parameter.grad = None
        if strategy == "neuron":
            refusal(RuntimeError, engine.step, "call engine.zero_grad()")
            engine.zero_grad()
        engine.backward(loss_of(engine, second))
        kept = [p.grad for p in engine.module.parameters() if p.grad is not None]
        engine.step()
        assert all(gradient.untyped_storage().nbytes() for gradient in kept), "a user may keep them"
        micro_step(other, second)
        assert_identical(dense_state(engine), dense_state(other))


def test_graphs_of_gradients(rank: Rank) -> None:
    """`create_graph=True` accumulates the same gradients up to rounding, in all or some micro-steps."""
    batches = own_batches(rank, 2)
    for stage, strategy in ((0, "block"), (1, "neuron"), (2, "neuron")):
        states = []
        for graphs in ((False, False), (True, True), (False, True), (True, False)):
            engine = engine_of(sgd(stage=stage, strategy=strategy))
            for number, (batch, has_graph) in enumerate(zip(batches, graphs, strict=True)):
                engine.set_gradient_accumulation_boundary(number == 1)
                loss_of(engine, batch).backward(create_graph=has_graph)
            engine.step()
            states.append(dense_state(engine))
        for state in states[1:]:
            torch.testing.assert_close(state, states[0], rtol=1e-5, atol=1e-6)


def test_torch_style_backward(rank: Rank) -> None:
    """`loss.backward()` does what it does in plain ZeRO, which on Transformers outputs divides more than once."""
    start = llama().state_dict()
    for stage in (1, 2):
        settings = in_buckets(sgd(2, stage=stage, holders=2))
        plain = without_block(settings)
        engines = [engine_of(settings), engine_of(plain | {"zero_allow_untested_optimizer": True})]
        for engine in engines:
            for batch in own_batches(rank, 2):
                loss_of(engine, batch).backward()
                engine.step()
            assert engine.global_steps == 1
        ours, expected = (dense_state(engine) for engine in engines)
        for name, value in expected.items():
            moved = (value - start[name]).norm()
            assert (ours[name] - value).norm() <= 1e-5 * moved + 2**-24 * value.norm(), (stage, name)


def test_frozen_in_mid_run(rank: Rank) -> None:
    """As in plain DeepSpeed momentum and decay go on moving it, but at stage 0 in fp32, where that leaves it alone:
    there it is an error."""
    name = "model.layers.0.mlp.up_proj.weight"
    adamw = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True, "weight_decay": 0.1}}}
    for stage, half in ((0, False), (0, True), (1, False), (2, True)):
        settings = config(holders=2) | adamw | {"zero_optimization": {"stage": stage}, "bf16": {"enabled": half}}
        moved, states = [], []
        for engine in map(engine_of, (settings, without_block(settings))):
            parameter = engine.module.get_parameter(name)
            train(engine, num_steps=2)
            before = parameter.detach().clone()
            parameter.requires_grad_(False)
            if (stage, half) == (0, False) and hasattr(engine, "plan"):
                refusal(RuntimeError, partial(train, engine, num_steps=1), f"'{name}'", "after deepspeed.initialize")
                break
            train(engine, num_steps=2, first=2)
            moved.append(not torch.equal(parameter, before))
            parameter.requires_grad_(True)
            train(engine, num_steps=1, first=4)
            states.append(dense_state(engine))
        assert all(moved)
        if len(states) == 2 and not half:
            for name_, value in states[1].items():
                torch.testing.assert_close(states[0][name_], value, rtol=1e-3, atol=1e-5)


def test_unfrozen_in_mid_run(rank: Rank) -> None:
    """Refused by name: there is no room for it in the exchange. What the optimizer never got is nobody's concern."""
    name = "model.norm.weight"
    for stage, given in itertools.product((0, 1), (True, False)):
        model = llama()
        model.get_parameter(name).requires_grad_(False)
        parameters = [parameter for parameter in model.parameters() if given or parameter.requires_grad]
        engine = engine_of(
            config(holders=2) | {"zero_optimization": {"stage": stage}}, model, model_parameters=parameters
        )
        train(engine, num_steps=1)
        engine.module.get_parameter(name).requires_grad_(True)
        if given:
            refusal(RuntimeError, partial(train, engine, num_steps=1), f"'{name}'", "would not be trained", "freeze it")
        else:
            train(engine, num_steps=1)


def test_collectives_of_a_step(rank: Rank) -> None:
    """Each averaged element is sent once on its way and once on its way back, of two ranks' halves, and one number for
    the norm; nothing in a micro-step. Stage 2 has a test of its own. No operator is loaded: DeepSpeed's all-reduce for
    inference on CPUs, which each environment would compile for minutes."""
    for stage, layers, size in ((0, 2, 2000), (1, 2, int(5e8)), (1, 6, 2000)):
        settings = sgd(2, stage=stage, holders=2)  # so that each bucket has something to send
        settings["zero_optimization"] |= {"reduce_bucket_size": size}
        engine = engine_of(settings, llama(layers))
        for index, batch in enumerate(own_batches(rank, 2)):
            with TrafficCounter() as traffic:
                micro_step(engine, batch)
            assert index or not traffic.total
        buckets = len(engine.optimizer.sharded.held)
        assert (buckets == 1) == (size > 2000)
        num_bytes = 4 * sum(parameter.numel() for parameter in engine.module.parameters())
        assert 0 <= traffic.total - num_bytes <= 8 * buckets + 8  # padding of both ways, and the norm
        collectives = {"allreduce_": 1, "send": 2 * buckets}
        assert {name: traffic.calls_by_operator[name] for name in collectives} == collectives
    assert "shm_comm" not in Path("/proc/self/maps").read_text()
