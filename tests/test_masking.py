"""Lacking units have no storage, in no form, for the whole run: all live tensors of a rank are walked."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from live import Watch, held_bytes, present_lacking, stepped_elements, unit_bytes
from models import config, loss_of
from ranks import Check, Rank
from torch import nn
from training import engine_of
from transformers import LlamaConfig, LlamaForCausalLM

from sdp_deepspeed.architectures import find_sites
from sdp_deepspeed.masking import BlockMask
from sdp_deepspeed.masking.block import NOTHING
from sdp_deepspeed.plan import Plan
from sdp_deepspeed.units import Piece, Unit

BUCKET = 1024  # elements; two buckets are a sixth of the smallest unit, so that one kept unit is seen
VOCABULARY = 97


def model_of_units(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Units of 12,352 and 18,496 elements."""
    torch.manual_seed(0)
    shape: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3}
    shape["vocab_size"] = VOCABULARY
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**shape, **heads)).to(dtype)


@dataclass(frozen=True)
class Memory:
    """One precision and stage: bytes per stepped element are two moments, and a master where weights are bf16."""

    stage: int = 1
    precision: str = "fp32"
    client: bool = False

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.precision == "fp32" else torch.bfloat16

    def settings(self) -> dict[str, Any]:
        result = config(coverage=0.5)
        result["zero_optimization"] = {"stage": self.stage, "reduce_bucket_size": BUCKET}
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
    """What the plan lets this rank hold and own."""

    def __init__(self, case: Memory, engine: Any, watch: Watch) -> None:
        dense = model_of_units(case.dtype)
        self.watch = watch
        self.units = unit_bytes(dense, engine.plan)
        self._held = held_bytes(dense, engine.plan, engine.communicator.rank)
        self._stepped = stepped_elements(dense, engine.plan, engine.communicator.rank, stage=case.stage)
        self._master = 0 if case.precision == "fp32" else 4
        self._engine = engine
        self.slack = 2 * BUCKET * 4
        assert self.slack < min(self.units) // 2

    def __call__(self, when: str, *, moments: int = 8) -> None:
        assert not present_lacking(self._engine), f"after {when}: {present_lacking(self._engine)} are there"
        allowed = self._held + self._stepped * (moments + self._master)
        live = self.watch.settled_bytes(allowed + self.slack)
        assert live <= allowed + self.slack, f"after {when}: {live} bytes live, {allowed} + {self.slack} allowed"
        assert live >= allowed - self.slack, f"after {when}: {live} bytes live, {allowed} expected: the walk is blind"
        kept = [torch.empty(min(self.units), dtype=torch.uint8)]
        assert self.watch.num_bytes() > allowed + self.slack, (
            f"after {when}: a kept unit would not be seen ({len(kept)})"
        )

    def streamed(self, activations: int) -> int:
        return self._held + self._stepped * (8 + self._master) + max(self.units) + self.slack + activations


def evaluate(engine: Any, check: Allowance) -> None:
    """At most one lacking unit is there at a time, and nothing else that would matter."""
    seen: set[str] = set()

    def look(*_: Any) -> None:
        present = present_lacking(engine)
        assert len(present) <= 1, present
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
    plan, rank = engine.plan, engine.communicator.rank
    assert seen == {unit.name for index, unit in enumerate(plan.units) if not plan.holds_rank(index, rank)}


CASES = {
    "stage1-fp32": Memory(),
    "stage0-fp32": Memory(stage=0),
    "stage1-fp32-client": Memory(client=True),
    "stage1-bf16": Memory(precision="bf16"),
    "stage1-bf16+fp32": Memory(precision="bf16+fp32"),
}


def _checks(size: int, config: pytest.Config) -> list[tuple[str, Check]]:
    return list(CASES.items())


@pytest.mark.ranks(2, _checks)
def test_live_tensors(outcome: str | None) -> None:
    assert outcome is None, outcome


def plan_of(model: nn.Module) -> Plan:
    units = tuple(Unit(site.name, site.pieces) for site in find_sites(model))
    holders = tuple((index % 2,) for index in range(len(units)))
    return Plan("forward", "block", 2, 1, 0, units, holders, (0, 1))


def test_nothing_is_neutral() -> None:
    tensor = torch.randn(3, requires_grad=True)
    assert tensor + NOTHING is tensor
    assert NOTHING + tensor is tensor
    assert NOTHING + NOTHING is NOTHING
    total = tensor.detach()
    total += NOTHING
    assert torch.equal(total, tensor)


def test_a_lacking_module_keeps_its_name_and_ancestry() -> None:
    model, whole = model_of_units(), model_of_units()
    BlockMask(model, find_sites(model), plan_of(model), rank=1)
    for (name, module), other in zip(model.named_modules(), whole.modules(), strict=True):
        assert isinstance(module, type(other)), name
        assert type(module).__name__ == type(other).__name__


def test_fill_and_release() -> None:
    model, batch = model_of_units(), torch.zeros(1, 4, dtype=torch.long)
    dense = deepcopy(model)
    tensors = dict(dense.named_parameters())
    mask = BlockMask(model, find_sites(model), plan_of(model), rank=0)
    subnetwork = loss_of(model, batch)
    for state in mask.units:
        if not state.held:
            mask.fill(state, [tensors[piece.parameter].detach().clone().view(-1) for piece in state.unit.pieces])
    assert torch.equal(loss_of(model, batch), loss_of(dense, batch))
    for state in mask.units:
        if not state.held:
            mask.release(state)
    assert torch.equal(loss_of(model, batch), subnetwork)
    assert not torch.equal(subnetwork, loss_of(dense, batch))


@pytest.mark.parametrize("cut", ["slice", "part"])
def test_units_that_are_not_whole_branches_are_refused(cut: str) -> None:
    model = model_of_units()
    name = "model.layers.0.mlp.up_proj.weight"
    piece = Piece(name, 0, 0, 48) if cut == "slice" else Piece(name, None, 0, 96 * 64)
    rest = Unit("rest", find_sites(model)[0].pieces)
    plan = Plan("forward", "block", 2, 1, 0, (Unit("u", (piece,)), rest), ((0,), (1,)), (0, 1))
    with pytest.raises(ValueError, match=r"unit 'u' is not made of whole residual branches.*up_proj"):
        BlockMask(model, find_sites(model), plan, rank=0)
