"""What is wrong at start is one error on all ranks, never a hang; and what went wrong later is noticed."""

from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sdp_deepspeed
from sdp_deepspeed.parallel.consistency import check_agreement
from tests.helpers.models import config, llama
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical, engine_of, gathered, refusal, train

pytestmark = pytest.mark.world(2)


def test_what_is_not_possible(rank: Rank) -> None:
    """Of the block, of what it is combined with, and of the model."""
    odd = {"stage": 2, "allgather_bucket_size": 1001}  # as DeepSpeed refuses it
    refusal(AssertionError, lambda: engine_of(config(holders=1) | {"zero_optimization": odd}), "allgather_bucket_size")
    refusal(ValueError, lambda: engine_of(config(holders=1, local_steps={"every": 2})), "SDP_TEAM", "`sdp teams K")
    replan = engine_of(config(holders=1)).replan
    refusal(ValueError, lambda: replan({"local_steps": {"teams": 2, "every": 2}}), "local_steps", "cannot change")
    refusal(ValueError, lambda: engine_of(config(holders=1, granularity="layer"), llama(1)), "unit")
    refusal(ValueError, lambda: engine_of(config(holders=1), nn.Sequential(nn.Linear(3, 3))), "Sequential", ".trace(")
    unknown = nn.Sequential(*(nn.Sequential(nn.LayerNorm(3), nn.Linear(3, 3)) for _ in range(2)))
    sdp_deepspeed.trace(unknown, torch.randn(2, 3))
    text = refusal(ValueError, lambda: engine_of(config(holders=1), unknown), "Sequential has no residual branch")
    assert ("register(" in text) == (rank.rank == 0), "rank 0 has all lines"


def test_a_scale_of_groups_that_differ(rank: Rank) -> None:
    """Refused before anything is dropped: the model can be given again."""
    model, other = llama(), llama()
    block = {"holders": 1, "strategy": "neuron", "shared": [r"layers\.0\.mlp\.group_0"]}
    words = ("branch_scale", "layers.0.mlp' have coverage [0.5, 1.0]")
    refusal(ValueError, lambda: engine_of(config(**block), model), *words)
    assert_identical(dict(model.named_parameters()), dict(other.named_parameters()))
    engines = [engine_of(config(**block, branch_scale="none"), each) for each in (model, other)]
    assert train(engines[0], num_steps=2) == train(engines[1], num_steps=2)


def written_plan(rank: Rank, name: str, change: Any = None) -> str:
    """A plan of a small Llama, changed by rank 0."""
    path = rank.folder / f"{name}.json"
    engine = engine_of(config(holders=1))
    if rank.rank == 0:
        content = engine.plan.to_json()
        del content["hash"]
        if change is not None:
            change(content)
        path.write_text(json.dumps(content))
    dist.barrier()
    return str(path)


def swap(content: dict[str, Any]) -> None:
    for unit in content["units"]:
        unit["holders"] = [1 - unit["holders"][0]]


def test_a_plan_is_given_back(rank: Rank) -> None:
    path = written_plan(rank, "swapped", swap)
    engine, plain = engine_of(config(assignment=path, check_agreement=True)), engine_of(config(holders=1))
    assert engine.plan.holders == tuple((1 - holders[0],) for holders in plain.plan.holders)
    held, other = set(engine.held_tensors()), gathered(sorted(plain.held_tensors()))[1 - rank.rank]
    assert held == set(other)
    train(engine, num_steps=1)


def test_a_plan_that_one_rank_lacks(rank: Rank) -> None:
    path = written_plan(rank, "mine")
    own = path if rank.rank == 0 else str(rank.folder / "lost.json")
    refusal(ValueError, lambda: engine_of(config(assignment=own)), "lost.json", "[on rank 1]")


def test_another_plan_on_one_rank(rank: Rank) -> None:
    """The same config, and another plan behind a path of the same name."""
    paths = written_plan(rank, "ours"), written_plan(rank, "theirs", swap)
    own = config(assignment=paths[rank.rank])
    refusal(RuntimeError, lambda: engine_of(own), "rank 1 computed a different plan from rank 0")


def test_another_layout_on_one_rank(rank: Rank) -> None:
    """A frozen tensor on one rank would abort both in the first exchange."""
    model = llama()
    model.get_parameter("model.embed_tokens.weight").requires_grad_(rank.rank == 0)
    refusal(RuntimeError, lambda: engine_of(config(holders=1), model), "rank 1", "embed_tokens", "requires_grad")


def test_other_options_on_one_rank(rank: Rank) -> None:
    model, settings = llama(), config(holders=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2 * (1 + rank.rank))
    refusal(RuntimeError, lambda: engine_of(settings, model, optimizer=optimizer), "rank 1", "AdamW", "lr")


def test_a_wrong_optimizer_on_one_rank(rank: Rank) -> None:
    model = llama()
    parameters = [nn.Parameter(torch.ones(2))] if rank.rank == 1 else list(model.parameters())
    optimizer = torch.optim.AdamW(parameters)
    settings = {key: value for key, value in config(holders=1).items() if key != "optimizer"}
    refusal(ValueError, lambda: engine_of(settings, model, optimizer=optimizer), "does not have", "[on rank 1]")
    model = llama()
    kind = torch.optim.Adafactor if rank.rank == 1 else torch.optim.AdamW
    words = ("Adafactor", "[on rank 1]")
    refusal(ValueError, lambda: engine_of(settings, model, optimizer=kind(model.parameters())), *words)
    refusal(ValueError, lambda: engine_of(settings, llama(), optimizer=kind), *words)  # called by DeepSpeed


def test_a_tampered_holder_is_noticed(rank: Rank) -> None:
    """Each rank steps its own half of a tensor from what it has, so a wrong half spreads: tamper with the copy of the
    other's half, which the returning exchange would repair, and switch that off."""
    for name in ("lm_head.weight", "model.layers.0.mlp.up_proj.weight"):
        engine = engine_of(config(holders=2, check_agreement=True))
        train(engine, num_steps=1)
        if rank.rank == 1:
            with torch.no_grad():
                engine.module.get_parameter(name).view(-1)[0] += 1e-3
        engine.optimizer.sharded._gather = lambda **_: None
        refusal(RuntimeError, partial(train, engine, num_steps=1), "have different values", "diverged")


def test_a_stale_copy_is_noticed(rank: Rank) -> None:
    """Backward regime: who does not hold a unit must have its owners' weights all the same."""
    for strategy, name in (("block", "mlp.gate_proj.weight"), ("neuron", "mlp.gate_proj.weight [dim 0, 0:12]")):
        engine = engine_of(config(holders=1, regime="backward", strategy=strategy, check_agreement=True))
        train(engine, num_steps=1)
        index = next(index for index, unit in enumerate(engine.plan.units) if "0.mlp" in unit.name)
        if not engine.plan.holds_rank(index, rank.rank):
            piece = engine.plan.units[index].pieces[strategy == "block"]
            engine.mask.view(piece).add_(1e-3)
        said = refusal(RuntimeError, partial(check_agreement, engine.mask, engine.groups))
        assert said == f"ranks 0, 1 have different values of model.layers.0.{name}: training has diverged"


def mpu() -> SimpleNamespace:
    """What a model-parallel user hands in, with two groups of all ranks."""
    found: dict[str, Any] = {}
    for kind, rank, size in (("model", dist.get_rank(), dist.get_world_size()), ("data", 0, 1)):
        answers = {"rank": rank, "world_size": size, "group": dist.group.WORLD}
        found |= {f"get_{kind}_parallel_{name}": partial(lambda own: own, value) for name, value in answers.items()}
    found |= {name.replace("model", "tensor_model"): answer for name, answer in found.items() if "model" in name}
    return SimpleNamespace(**found)


def test_other_parallelism_is_refused(rank: Rank) -> None:
    """Last, because DeepSpeed never forgets an mpu."""
    refusal(ValueError, lambda: engine_of(config(holders=1), mesh_param=(1, 2)), "mesh_param")
    refusal(ValueError, lambda: engine_of(config(holders=1), mpu=mpu()), "mpu: got 2 data-parallel x 2")
