"""`engine.replan`: as if a checkpoint were saved and loaded under the new block, bit for bit, in the same engine."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import nn

from sdp_deepspeed import Init
from sdp_deepspeed.plan.strategies import unit_costs
from tests.helpers.checkpointed_runs import Branch
from tests.helpers.mixtures import mixture
from tests.helpers.models import MIXED, TOKENS, llama
from tests.helpers.ranks import Rank
from tests.helpers.replanned_runs import Phase, Sequence_, assert_same_run, check_sequence, tokens_loss
from tests.helpers.tensor_parallel_models import OWN_SPECS, TP, build
from tests.helpers.training import assert_identical, dense_state, refusal

pytestmark = pytest.mark.world(2)
NEURON, BACKWARD, LAYERS = {"strategy": "neuron"}, {"regime": "backward"}, {"granularity": "layer"}
CUT: dict[str, Any] = BACKWARD | NEURON
DEPTH: dict[str, Any] = {"coverage": [{"units": r"layers\.0\.", "coverage": 1.0}, {"coverage": 0.3333}]}
UNSCALED = {"branch_scale": "none"}
CHECKED = {"check_agreement": True}
RUN = Sequence_(2, [Phase({}, 1)])


def statistics() -> nn.Module:
    """Norms have statistics of the batches that their rank has seen, and bodies have a table of their own."""
    torch.manual_seed(0)
    branches = [Branch(nn.BatchNorm1d(6)) for _ in range(3)]
    for branch in branches:
        branch.body.register_buffer("table", torch.linspace(1, 2, 6), persistent=False)
    model = nn.Sequential(nn.BatchNorm1d(6), *branches, nn.Linear(6, 2))
    model[4].bias.requires_grad_(False)
    return model


def statistics_loss(engine: Any, generator: torch.Generator) -> torch.Tensor:
    loss: torch.Tensor = engine(torch.randn(5, 6, generator=generator)).square().mean()
    return loss


def checkpointed() -> nn.Module:
    """Only a part of it trains."""
    model: Any = llama()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("k_proj" not in name)
    return model


def divided(model: str, *phases: Phase, precision: str = "fp32", **settings: Any) -> Sequence_:
    """On two workers of two tensor-parallel ranks."""
    tensor_parallel = {"autotp_size": TP, **settings.get("tensor_parallel", {})}
    return Sequence_(4, phases, precision, model=partial(build, model), config={"tensor_parallel": tensor_parallel})


ALL_MODES = [
    *(Phase({}, 1), Phase(NEURON, 2), Phase(CUT), Phase(LAYERS, 0), Phase(BACKWARD), Phase({"holders": 2}, 2)),
    Phase(NEURON, 1),
]
AROUND = [Phase({}, 1), Phase(CUT), Phase(NEURON, 2)]
OFFLOAD: dict[str, Any] = {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}
OFFLOAD |= {"zero_force_ds_cpu_optimizer": False}
SEQUENCES = {
    "modes": Sequence_(2, ALL_MODES),
    "modes_bf16": Sequence_(2, ALL_MODES, "bf16"),
    "statistics": Sequence_(
        2,
        [Phase({}, 1), Phase({"seed": 3}), Phase(BACKWARD), Phase({"holders": 2})],
        model=statistics,
        loss=statistics_loss,
    ),
    "checkpointed": Sequence_(2, AROUND, "bf16", model=checkpointed, config={"gradient_accumulation_steps": 2}),
    "mixture": Sequence_(2, [Phase({}, 1), Phase(CUT, 2), Phase(NEURON, 0)], model=partial(mixture, "qwen2_moe")),
    "scaled_or_not": Sequence_(2, [Phase({}, 1), Phase(UNSCALED), Phase(NEURON)]),
    "offload": Sequence_(2, [Phase({}, 1), Phase(CUT, 2), Phase(NEURON | {"holders": 2})], "bf16", config=OFFLOAD),
    "saved_in_the_background": Sequence_(2, [Phase({"checkpoint": {"asynchronous": True}}, 1), Phase(CUT)]),
    "three": Sequence_(
        3,
        [Phase({"holders": 2} | NEURON, 1), Phase({"strategy": MIXED}), Phase(DEPTH | BACKWARD, 2), Phase(DEPTH)],
        "bf16+fp32",
    ),
    "replicas_and_draws": Sequence_(
        4,
        [
            Phase({"subnetworks": 2}, 1),
            Phase({"holders": 2, "seed": 1}),
            Phase({"subnetworks": 2} | NEURON),
            Phase({"holders": 2, "neuron_groups": 8} | CUT, 0),
        ],
    ),
    "divided": divided("llama_biases", Phase(CHECKED, 1), Phase(NEURON, 2), Phase(CUT, 0)),
    "divided_sums_of_partial_gradients": divided(
        "qwen3", Phase(NEURON | CHECKED, 1), Phase({"holders": 2}), Phase(CUT, 2), precision="bf16", **OWN_SPECS
    ),
}
SLOW = ("modes_bf16", "offload", "saved_in_the_background", "three", "divided_sums_of_partial_gradients")


@pytest.mark.parametrize(
    ("rank", "name"),
    [pytest.param(run.size, name, marks=[pytest.mark.slow] * (name in SLOW)) for name, run in SEQUENCES.items()],
)
def test_as_saved_and_loaded(rank: Rank, name: str) -> None:
    """Divided ones come last: DeepSpeed never forgets the groups of AutoTP. State goes in several exchanges."""
    with mock.patch("sdp_deepspeed.checkpoint.box_exchange._BYTES", 10_000):
        check_sequence(SEQUENCES[name], rank)


def test_coverage_is_by_flops(rank: Rank) -> None:
    """Of the plan that is there."""
    engine = RUN.engine(Phase({}), 1)
    assert engine.coverage == 0.5
    engine.replan({"coverage": [{"units": "mlp", "coverage": 1.0}, {"coverage": 0.5}]})
    units = engine.plan.units
    flops = {unit.name: c.flops for unit, c in zip(units, unit_costs(RUN.model(), units), strict=True)}
    mlps = sum(count for name, count in flops.items() if "mlp" in name)
    assert engine.coverage == pytest.approx(0.5 + 0.5 * mlps / sum(flops.values()))
    assert engine.coverage != engine.plan.coverage == 0.75


def without_storage() -> nn.Module:
    with Init():
        return llama()


def test_before_the_first_step(rank: Rank) -> None:
    """There are no moments yet; of a model that started without storage."""
    run = Sequence_(2, [Phase({}, 1)], model=without_storage)
    engine, other = run.engine(Phase({}), 1), run.engine(Phase(NEURON), 1)
    engine.replan(NEURON)
    assert run.train(engine, 2) == run.train(other, 2)
    assert_same_run(engine, other)


def test_the_dense_model_at_once(rank: Rank) -> None:
    """Evaluation, DeepSpeed's functions and hooks know the new plan, also where nobody went back to training; a loss of
    before does not disturb, and what is loaded in between stays."""
    engine, plain, seen = RUN.engine(Phase({}), 1), RUN.model().eval(), list[int]()
    engine.module.register_forward_hook(lambda *_: seen.append(1))
    engine.module.get_parameter("model.norm.weight").register_hook(lambda gradient: seen.append(2))
    named = dict(engine.module.named_parameters())

    def of_the_optimizer() -> dict[str, torch.Tensor]:
        masters = {name: safe_get_full_fp32_param(parameter).clone() for name, parameter in named.items()}
        return masters | {f"{n}.m": safe_get_full_optimizer_state(p, "exp_avg").clone() for n, p in named.items()}

    asked = {"regime": "forward", "strategy": "block"}
    for block in (NEURON, BACKWARD, {"strategy": "block"}, {"regime": "forward"}):
        asked |= block
        last = engine(input_ids=TOKENS, labels=TOKENS).loss  # as a user's loop keeps it
        engine.backward(last)
        engine.step()
        expected = of_the_optimizer()
        engine.eval()
        with torch.no_grad():
            engine(TOKENS)
            engine.replan(block)
            assert {"regime": engine.plan.regime, "strategy": engine.plan.strategy} == asked
            plain.load_state_dict(dense_state(engine))
            torch.testing.assert_close(engine(TOKENS).logits, plain(TOKENS).logits, rtol=1e-5, atol=1e-5)
        assert_identical(of_the_optimizer(), expected)
        engine.train()
        seen.clear()
        RUN.train(engine, 1)
        assert seen == [1, 2]
        del last
    given = {name: value + 1 for name, value in dense_state(engine).items()}
    with engine.dense():
        engine.module.load_state_dict(given)
    engine.replan(CUT)
    assert_identical(dense_state(engine), given)


def test_a_loss_of_the_plan_before(rank: Rank) -> None:
    """Its graph knows nothing of units that came since: backward is an error, whatever changed."""
    for before, after in (({}, {"holders": 2}), (CUT, {"seed": 1}), ({}, NEURON), (BACKWARD, {"regime": "forward"})):
        engine = RUN.engine(Phase(before), 1)
        last = engine(input_ids=TOKENS, labels=TOKENS).loss
        engine.replan(after)
        refusal(RuntimeError, lambda: engine.backward(last), "modified by an inplace operation")  # noqa: B023


def test_what_is_refused_leaves_no_trace(rank: Rank) -> None:
    """By name, on all ranks; the run is that of an engine that was never asked, and may still change its plan."""
    run = Sequence_(2, [Phase({}, 1)], config={"gradient_accumulation_steps": 2})
    engine, other = (run.engine(Phase({}), 2) for _ in range(2))
    for each in (engine, other):
        run.train(each, 2)
    refused = partial(refusal, ValueError)
    refused(lambda: engine.replan({"holders": 3}), "holders")
    refused(lambda: engine.replan({"colour": 3}), "colour")
    refused(lambda: engine.replan({"colour" if rank.rank else "seed": 3}), "colour", "[on rank 1]")
    refused(lambda: engine.replan({"strategy": "neuron", "neuron_groups": 1000}), "neuron_groups")
    refused(lambda: engine.replan({"assignment": "nowhere.json", "holders": None}), "nowhere.json")
    refused(lambda: engine.replan({"checkpoint": {"keep_last": 1}}), "cannot change in a run")
    refused(lambda: engine.replan({}, stage=3), "stage", "3")
    refusal((ValueError, RuntimeError), lambda: engine.replan({"seed": rank.rank}), "rank 1")
    refusal((ValueError, RuntimeError), lambda: engine.replan({}, stage=rank.rank), "rank 1")
    for _ in range(2):
        with engine.dense():
            refusal(RuntimeError, lambda: engine.replan({"holders": 2}), "inside engine.dense()")
    engine.backward(tokens_loss(engine, torch.Generator().manual_seed(0)))
    refusal(RuntimeError, lambda: engine.replan({"holders": 2}), "gradients of an unfinished step")
    engine.zero_grad()
    norm = engine.module.get_submodule("model.norm")
    norm.weight.requires_grad_(False)
    refused(lambda: engine.replan({"holders": 2}), "'model.norm.weight' required gradients")
    norm.weight.requires_grad_(True)
    own, norm.weight = norm.weight, nn.Parameter(norm.weight.detach().clone())
    refusal(RuntimeError, lambda: engine.replan({"holders": 2}), "model.norm.weight")
    norm.weight = own
    assert engine.block == other.block
    assert engine.zero_optimization_stage() == 2
    assert run.train(engine, 1) == run.train(other, 1)
    refusal(RuntimeError, lambda: engine.replan({"holders": 2}), "gradients of an unfinished step")
    assert run.train(engine, 1) == run.train(other, 1)
    assert_same_run(engine, other)
    assert engine.optimizer.skips_overflow
    engine.replan(NEURON, stage=0)
    assert not engine.optimizer.skips_overflow, "fp32 without ZeRO"


@pytest.mark.world(4)
def test_a_stage_that_shards_cannot_have(rank: Rank) -> None:
    """As at start."""
    run = divided("qwen2_61", Phase({}, 1))
    engine = run.engine(Phase({}), 1)
    refusal(ValueError, lambda: engine.replan({}, stage=2), "zero_optimization.stage: got 2", "do not divide")
    assert engine.zero_optimization_stage() == 1
    run.train(engine, 1)
