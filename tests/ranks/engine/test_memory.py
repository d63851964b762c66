"""Absent units have no storage but in evaluation: all live tensors of a rank are walked.

And within a step nothing is there twice: the peak is weights, gradients, optimizer state and two buckets.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common.measured_step import live_tensors, measured_step
from tests.helpers.live_tensors import Watch, stepped_elements, stored_absent, stored_bytes, unit_bytes
from tests.helpers.models import config, loss_of
from tests.helpers.oracle_grid import PRECISIONS
from tests.helpers.ranks import Rank
from tests.helpers.training import engine_of, without_optimizer

pytestmark = pytest.mark.world(2)

BUCKET = 512  # elements; two buckets are a third of the smallest unit (a head in bf16), so that one kept unit is seen
VOCABULARY = 97


def slow(name: str, *values: Any) -> Any:
    return pytest.param(*values, id=name, marks=pytest.mark.slow)


def model_of_units(dtype: torch.dtype = torch.float32, num_layers: int = 3) -> nn.Module:
    """Blocks of 12,352 and 18,496 elements, heads of 6,144, half an MLP of 9,216."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": num_layers}
    shape["vocab_size"] = VOCABULARY
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads)).to(dtype)


@dataclass(frozen=True)
class Memory:
    """One precision and stage: bytes per stepped element are two moments, and a master where weights are bf16."""

    stage: int = 1
    precision: str = "fp32"
    client: bool = False
    regime: str = "forward"
    strategy: Any = "block"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.precision == "fp32" else torch.bfloat16

    def settings(self) -> dict[str, Any]:
        result = config(coverage=0.5, regime=self.regime, strategy=self.strategy) | PRECISIONS[self.precision]
        limits = dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), BUCKET)
        result["zero_optimization"] = {"stage": self.stage, **limits}
        return without_optimizer(result) if self.client else result


def walk(case: Memory, watch: Watch) -> None:
    """Start, step, evaluation: never more than held, owned and buckets; in evaluation the dense model."""
    engine = start(case)
    check = Allowance(case, engine, watch)
    check("start", moments=0)
    step(engine)
    check("a step")
    step(engine)
    check("another step")
    evaluate(engine, check)
    engine.train()
    check("the return to training")
    with engine.dense():
        evaluate(engine, check)
    check("engine.dense()")
    engine.train()
    step(engine)
    check("a step after evaluations")


def start(case: Memory) -> Any:
    model = model_of_units()
    options: dict[str, Any] = {}
    if case.client:
        options["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return engine_of(case.settings(), model, **options)


def step(engine: Any, *, rows: int = 2, length: int = 8, accumulation: int = 1) -> None:
    for _ in range(accumulation):
        engine.backward(loss_of(engine, torch.randint(0, VOCABULARY, (rows, length))))
        engine.step()


class Allowance:
    """What the plan lets this rank hold and own, and the buffers for what travels."""

    def __init__(self, case: Memory, engine: Any, watch: Watch) -> None:
        dense = model_of_units(case.dtype)
        rank, self._dtype = engine._core.groups.rank, case.dtype
        self.watch = watch
        self.units = unit_bytes(dense, engine.plan)
        absent = [size for index, size in enumerate(self.units) if not engine.plan.holds_rank(index, rank)]
        self.absent = 0 if case.regime == "backward" else sum(absent)
        self._stored = stored_bytes(dense, engine.plan, rank)
        self._stepped = stepped_elements(dense, engine.plan, rank)
        self._engine = engine
        self.slack = 2 * BUCKET * 4
        assert self.slack < min(self.units) // 2

    def __call__(self, when: str, *, moments: int = 8) -> None:
        assert not stored_absent(self._engine), f"after {when}: {stored_absent(self._engine)} are there"
        allowed = self._state(moments)
        live = self.watch.settled_bytes(allowed + self.slack)
        assert live <= allowed + self.slack, f"after {when}: {live} bytes live, {allowed} + {self.slack} allowed"
        assert live >= allowed - self.slack, f"after {when}: {live} bytes live, {allowed} expected: the walk is blind"
        kept = torch.empty(min(self.units), dtype=torch.uint8)
        assert self.watch.num_bytes() > allowed + self.slack, f"after {when}: {len(kept)} bytes would not be seen"

    def in_evaluation(self, activations: int) -> int:
        return self._state(moments=8) + self.absent + self.slack + activations

    def _state(self, moments: int) -> int:
        sharded = self._engine.optimizer.sharded
        masters = sum(bucket.shard.nbytes for bucket in sharded.held if not bucket.steps_in_place)
        assert masters <= 4 * self._stepped + self.slack
        assert masters >= 4 * self._stepped * (self._dtype != torch.float32)
        return self._stored + self._stepped * moments + masters  # no buffer outlives its step


def evaluate(engine: Any, check: Allowance) -> None:
    """What is absent is there once, and nothing else that would matter."""
    engine.eval()
    with torch.no_grad():
        engine(input_ids=torch.zeros(1, 4, dtype=torch.long))
    plan, rank = engine.plan, engine._core.groups.rank
    absent = {unit.name for index, unit in enumerate(plan.units) if not plan.holds_rank(index, rank)}
    assert absent
    if plan.regime == "forward":
        assert stored_absent(engine) == absent
    limit = check.in_evaluation(activations=4 * 4096)  # 4 tokens, some twenty vectors of 64 to 97 floats
    assert check.watch.settled_bytes(limit) <= limit


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(Memory(), id="stage1-fp32"),
        pytest.param(Memory(precision="bf16"), id="stage1-bf16"),
        slow("stage1-bf16+fp32-client", Memory(precision="bf16+fp32", client=True)),
        slow("stage2-neuron-bf16", Memory(stage=2, precision="bf16", strategy="neuron")),
        pytest.param(Memory(regime="backward"), id="backward"),
        pytest.param(Memory(strategy="neuron"), id="neuron"),
        pytest.param(Memory(precision="bf16", regime="backward", strategy="neuron"), id="backward-neuron-bf16"),
        slow("backward-mixed", Memory(regime="backward", strategy={"attention": "block", "mlp": "neuron"})),
    ],
)
def test_absent_units_have_no_storage(rank: Rank, case: Memory) -> None:
    with Watch() as watch:
        walk(case, watch)


PEAK_LAYERS = 6  # at stage 2 what waits for its bucket, most of a layer, is a small part of all
PEAK_BUCKET = 8192  # elements: two are 4% of the state


@pytest.mark.parametrize(
    ("case", "accumulation", "overlap"),
    [  # all pairs of stage, regime and strategy
        pytest.param(Memory(), 1, False, id="stage1-forward-block"),
        slow("stage1-backward-neuron", Memory(regime="backward", strategy="neuron"), 1, False),
        slow("stage2-forward-neuron", Memory(stage=2, strategy="neuron"), 1, False),
        pytest.param(Memory(stage=2, regime="backward"), 1, False, id="stage2-backward-block"),
        pytest.param(Memory(stage=1), 3, True, id="stage1-overlap"),
        pytest.param(Memory(stage=2), 3, True, id="stage2-overlap"),
        pytest.param(Memory(stage=2, regime="backward"), 3, False, id="stage2-accumulation"),
    ],
)
def test_nothing_is_there_twice_within_a_step(rank: Rank, case: Memory, accumulation: int, overlap: bool) -> None:
    """One step's largest sum of live tensors, whoever holds them, with an optimizer that needs no scratch memory."""
    settings = case.settings() | {"gradient_accumulation_steps": accumulation}
    zero = {"reduce_bucket_size": PEAK_BUCKET, "allgather_bucket_size": PEAK_BUCKET, "overlap_comm": overlap}
    settings["zero_optimization"] |= zero
    settings["optimizer"]["params"] |= {"fused": True}
    small_step = partial(step, rows=1, length=2, accumulation=accumulation)  # so that activations hardly count
    with Watch():
        engine = engine_of(settings, model_of_units(num_layers=PEAK_LAYERS))
        for _ in range(2):
            small_step(engine)
        with measured_step(engine, others=live_tensors()) as figures:
            small_step(engine)
    state = figures.weights + figures.gradients + figures.optimizer
    if case.precision != "fp32":  # the master's gradient: a third of master and two moments
        state += figures.optimizer // 3
    buckets = (4 if overlap else 3) * PEAK_BUCKET * 4  # packed, received, in fp32
    assert state - PEAK_BUCKET * 4 <= figures.peak, "the tracker is blind"  # stage 2 sums what it has sent
    assert figures.peak - figures.activations <= 1.1 * (state + buckets), (figures, state)
    copy = min(figures.weights, figures.gradients)
    assert figures.peak - figures.activations + copy > 1.1 * (state + buckets), "a second copy would not be seen"
