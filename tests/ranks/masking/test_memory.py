"""Lacking units have no storage, in no form, for the whole run: all live tensors of a rank are walked.

And within a step nothing is there twice: the peak is weights, gradients, optimizer state and two buckets.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common.measured_step import measured_step
from sdp_deepspeed.config import MODES
from sdp_deepspeed.engine import apply_plan
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.units import Unit
from tests.helpers.live_tensors import Watch, present_lacking, stepped_elements, stored_bytes, unit_bytes
from tests.helpers.models import config, loss_of
from tests.helpers.ranks import Check, Rank
from tests.helpers.training import engine_of

BUCKET = 512  # elements; two buckets are a third of the smallest unit (a head in bf16), so that one kept unit is seen
VOCABULARY = 97


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
    evaluation: str = "prefetch"

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.precision == "fp32" else torch.bfloat16

    def settings(self) -> dict[str, Any]:
        forward = {"evaluation": self.evaluation} if self.regime == "forward" else {}
        result = config(coverage=0.5, regime=self.regime, strategy=self.strategy, **forward)
        limits = dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), BUCKET)
        result["zero_optimization"] = {"stage": self.stage, **limits}
        if self.precision != "fp32":
            result["bf16"] = {"enabled": True}
        if self.precision == "bf16+fp32":
            result["data_types"] = {"grad_accum_dtype": "fp32"}
        if self.client:
            del result["optimizer"]
        return result

    def __call__(self, rank: Rank) -> None:
        with Watch() as watch:
            walk(self, watch)


def walk(case: Memory, watch: Watch) -> None:
    """Start, step, evaluation in all its forms: never more than held, owned and two buckets."""
    engine = start(case)
    check = Allowance(case, engine, watch)
    check("start", moments=0)
    train(engine)
    check("a step")
    train(engine)
    check("another step")
    evaluate(engine, check)
    check("an evaluation")
    engine.train()
    check("the return to training")
    with engine.dense():
        evaluate(engine, check)
    check("engine.dense()")
    with engine.dense(resident=True):
        assert check.watch.num_bytes() >= sum(check.units), "a resident model is not all there"
    check("engine.dense(resident=True)")
    engine.train()
    train(engine)
    check("a step after evaluations")


def start(case: Memory) -> Any:
    model = model_of_units()
    options: dict[str, Any] = {}
    if case.client:
        options["optimizer"] = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return engine_of(case.settings(), model, **options)


def train(engine: Any) -> None:
    batch = torch.randint(0, VOCABULARY, (2, 8))
    loss = loss_of(engine, batch)
    engine.backward(loss)
    engine.step()


class Allowance:
    """What the plan lets this rank hold and own, and what the exchange keeps for what travels."""

    def __init__(self, case: Memory, engine: Any, watch: Watch) -> None:
        dense = model_of_units(case.dtype)
        self.watch = watch
        self.units = unit_bytes(dense, engine.plan)
        self.branches = branch_bytes(dense, engine.plan)
        self._stored = stored_bytes(dense, engine.plan, engine.dp_group.rank)
        self._stepped = stepped_elements(dense, engine.plan, engine.dp_group.rank, stage=case.stage)
        self._master = 0 if case.precision == "fp32" else 4
        self._engine = engine
        self._num_parts = 2 if case.regime == "forward" and case.evaluation == "prefetch" else 1
        self.slack = 2 * BUCKET * 4
        assert self.slack < min(self.units) // 2

    def __call__(self, when: str, *, moments: int = 8) -> None:
        assert not present_lacking(self._engine), f"after {when}: {present_lacking(self._engine)} are there"
        allowed = self._state(moments)
        live = self.watch.settled_bytes(allowed + self.slack)
        assert live <= allowed + self.slack, f"after {when}: {live} bytes live, {allowed} + {self.slack} allowed"
        assert live >= allowed - self.slack, f"after {when}: {live} bytes live, {allowed} expected: the walk is blind"
        kept = torch.empty(min(self.units), dtype=torch.uint8)
        assert self.watch.num_bytes() > allowed + self.slack, f"after {when}: {len(kept)} bytes would not be seen"

    def streamed(self, activations: int) -> int:
        """In evaluation: one block that is lacking, or a second copy of one branch that is put together, and the next
        one under way."""
        extra = self._num_parts * max(self.branches.values(), default=0)
        return self._state(moments=8) + extra + self.slack + activations

    def _state(self, moments: int) -> int:
        buffers = self._engine.optimizer.exchange.buffers.num_bytes
        assert buffers <= 4 * BUCKET * 4  # for what leaves, for what arrives, for averages
        return self._stored + self._stepped * (moments + self._master) + buffers


def branch_bytes(dense: nn.Module, plan: Plan) -> dict[str, int]:
    """Bytes of what becomes dense together, by name; frozen blocks always are."""
    result: dict[str, int] = {}
    for unit, size in zip(plan.units, unit_bytes(dense, plan), strict=True):
        if plan.regime == "forward" or is_cut(unit):
            result[branch_of(unit)] = result.get(branch_of(unit), 0) + size
    return result


def is_cut(unit: Unit) -> bool:
    return any(piece.dim is not None for piece in unit.pieces)


def branch_of(unit: Unit) -> str:
    """A head's or group's branch; a block is one."""
    return unit.name.rpartition(".")[0] if is_cut(unit) else unit.name


def evaluate(engine: Any, check: Allowance) -> None:
    """What is lacking is there for one branch at a time, and nothing else that would matter."""
    seen: set[str] = set()
    plan, rank = engine.plan, engine.dp_group.rank
    units = {unit.name: unit for unit in plan.units}

    def look(*_: Any) -> None:
        present = present_lacking(engine)
        assert len({branch_of(units[name]) for name in present}) <= 1, present
        seen.update(present)
        limit = check.streamed(activations=4 * 4096)  # 4 tokens, some twenty vectors of 64 to 97 floats
        assert check.watch.settled_bytes(limit) <= limit

    layers = [module for module in engine.module.modules() if type(module).__name__ in ("LlamaAttention", "LlamaMLP")]
    hooks = [module.register_forward_pre_hook(look) for module in layers]
    engine.eval()
    with torch.no_grad():
        engine(input_ids=torch.zeros(1, 4, dtype=torch.long))
    for hook in hooks:
        hook.remove()
    lacking = [unit for index, unit in enumerate(plan.units) if not plan.holds_rank(index, rank)]
    assert lacking
    assert seen == {unit.name for unit in lacking if branch_of(unit) in check.branches}


def given_back_before_the_optimizer(rank: Rank) -> None:
    """When free memory is given back, all that this rank lacks is free, and nothing of the optimizer is there."""
    for case in (Memory(precision="bf16"), Memory(strategy="neuron"), Memory(regime="backward")):
        stored = stored_bytes(model_of_units(case.dtype), start(case).plan, rank.rank)
        allowed, seen = stored + 2 * BUCKET, list[int]()
        with Watch() as watch, mock.patch.object(apply_plan, "give_back") as give_back:
            give_back.side_effect = lambda _, watch=watch: seen.append(watch.settled_bytes(allowed))  # noqa: B023
            engine = start(case)
        give_back.assert_called_once_with(engine.device)
        assert stored <= seen[0] <= allowed, (case, stored, seen)


CASES = {
    "stage1-fp32": Memory(),
    "streamed": Memory(evaluation="stream"),
    "neuron-streamed": Memory(strategy="neuron", evaluation="stream"),
    "stage0-fp32": Memory(stage=0),
    "stage1-fp32-client": Memory(client=True),
    "stage1-bf16": Memory(precision="bf16"),
    "stage1-bf16+fp32": Memory(precision="bf16+fp32"),
    "stage2-fp32": Memory(stage=2),
    "stage2-neuron-bf16": Memory(stage=2, precision="bf16", strategy="neuron"),
    "stage2-backward-bf16+fp32": Memory(stage=2, precision="bf16+fp32", regime="backward"),
    "backward": Memory(regime="backward"),
    "backward-stage0-bf16": Memory(stage=0, precision="bf16", regime="backward"),
    "neuron": Memory(strategy="neuron"),
    "neuron-stage0-bf16": Memory(stage=0, precision="bf16", strategy="neuron"),
    "neuron-client-bf16+fp32": Memory(client=True, precision="bf16+fp32", strategy="neuron"),
    "backward-neuron": Memory(regime="backward", strategy="neuron"),
    "backward-neuron-bf16": Memory(precision="bf16", regime="backward", strategy="neuron"),
    "mixed": Memory(strategy={"attention": "neuron", "mlp": "block"}),
    "backward-mixed": Memory(stage=0, regime="backward", strategy={"attention": "block", "mlp": "neuron"}),
}


PEAK_LAYERS = 6  # at stage 2 what waits for its bucket, most of a layer, is a small part of all
PEAK_BUCKET = 8192  # elements: two are 4% of the state


@dataclass(frozen=True)
class Peak:
    """One step's largest sum of live tensors, whoever holds them, with an optimizer that needs no scratch memory."""

    case: Memory
    accumulation: int = 1
    overlap: bool = False

    def __call__(self, rank: Rank) -> None:
        settings = self.case.settings() | {"gradient_accumulation_steps": self.accumulation}
        zero = {"reduce_bucket_size": PEAK_BUCKET, "allgather_bucket_size": PEAK_BUCKET, "overlap_comm": self.overlap}
        settings["zero_optimization"] |= zero
        settings["optimizer"]["params"] |= {"fused": True}
        with Watch():
            engine = engine_of(settings, model_of_units(num_layers=PEAK_LAYERS))
            for _ in range(2):
                self.step(engine)
            gc.collect()
            alive = [thing for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor)]
            with measured_step(engine, others=alive) as figures:
                self.step(engine)
        state = figures.weights + figures.gradients + figures.optimizer
        if self.case.precision != "fp32":  # the master's gradient: a third of master and two moments
            state += figures.optimizer // 3
        buckets = (4 if self.overlap else 2) * PEAK_BUCKET * 4
        assert state - PEAK_BUCKET * 4 <= figures.peak, "the tracker is blind"  # stage 2 sums what it has sent
        assert figures.peak - figures.activations <= 1.1 * (state + buckets), (figures, state)
        copy = min(figures.weights, figures.gradients)
        assert figures.peak - figures.activations + copy > 1.1 * (state + buckets), "a second copy would not be seen"

    def step(self, engine: Any) -> None:
        """A batch so small that activations hardly count."""
        for _ in range(self.accumulation):
            batch = torch.randint(0, VOCABULARY, (1, 2))
            engine.backward(loss_of(engine, batch))
            engine.step()


PEAKS = {
    f"peak-stage{stage}-{regime}-{strategy}": Peak(Memory(stage=stage, regime=regime, strategy=strategy))
    for stage in (0, 1, 2)
    for regime, strategy in MODES
}
PEAKS["peak-stage2-overlap"] = Peak(Memory(stage=2), accumulation=3, overlap=True)
PEAKS["peak-stage1-overlap"] = Peak(Memory(stage=1), accumulation=3, overlap=True)
PEAKS["peak-stage2-accumulation"] = Peak(Memory(stage=2, regime="backward"), accumulation=3)


SAMPLED = (  # all pairs of stage, regime and strategy
    *("stage0-forward-block", "stage0-backward-neuron"),
    *("stage1-forward-block", "stage1-backward-neuron", "stage1-overlap"),
    *("stage2-forward-neuron", "stage2-backward-block", "stage2-overlap", "stage2-accumulation"),
)


def _checks(size: int, config: pytest.Config) -> list[tuple[str, Check]]:
    """Peaks take long, as a tracker sees every tensor; all of them if the whole grid is asked for."""
    full = config.getoption("--full")
    given_back = (given_back_before_the_optimizer.__name__, given_back_before_the_optimizer)
    return [given_back, *CASES.items(), *((name, peak) for name, peak in PEAKS.items() if full or name[5:] in SAMPLED)]


@pytest.mark.checks(
    2,
    _checks,
    slow=[
        "2-peak-stage0*",
        "2-peak-stage2-forward*",
        "2-peak-*neuron",
        "2-*stage0*",
        "2-*client*",
        "2-stage2*",
        "2-*mixed",
        "2-*streamed",
        "2-*fp32",
    ],
)
def test_live_tensors(outcome: str | None) -> None:
    assert outcome is None, outcome
