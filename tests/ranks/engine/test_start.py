"""What is wrong at start, in the config, in the model, or between ranks, is one error on all, before anything waits for
anything; and what went wrong later is noticed."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import sdp_deepspeed
from sdp_deepspeed import Init
from sdp_deepspeed.config import KEY, MODES
from sdp_deepspeed.engine import compare_configs
from sdp_deepspeed.parallel.consistency import check_agreement
from tests.helpers.models import VOCABULARY, config, llama, without_block
from tests.helpers.ranks import COLLECTIVE_TIMEOUT, Rank
from tests.helpers.tensor_parallel_models import Mpu
from tests.helpers.training import (
    assert_identical,
    dense_state,
    engine_of,
    gathered,
    refusal,
    train,
    without_optimizer,
)

pytestmark = pytest.mark.world(2)


def test_what_is_not_possible(rank: Rank) -> None:
    """Of the block, of what it is combined with, and of the model."""
    odd = {"stage": 2, "allgather_bucket_size": 1001}  # as DeepSpeed refuses it
    refusal(AssertionError, lambda: engine_of(config(holders=1) | {"zero_optimization": odd}), "allgather_bucket_size")
    refusal(ValueError, lambda: engine_of(config(holders=1, local_steps={"every": 2})), "local_steps.teams: missing")
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


def test_plans_from_files(rank: Rank) -> None:
    """One that this config would not have is taken; one that a rank lacks is refused, and so are two different ones."""
    plain = engine_of(config(holders=1))
    paths = [rank.folder / name for name in ("ours.json", "theirs.json")]
    if rank.rank == 0:
        content = plain.plan.to_json()
        del content["hash"]
        paths[0].write_text(json.dumps(content))
        for unit in content["units"]:
            unit["holders"] = [1 - unit["holders"][0]]
        paths[1].write_text(json.dumps(content))
    dist.barrier()
    engine = engine_of(config(assignment=str(paths[1]), check_agreement=True))
    assert engine.plan.holders == tuple((1 - holders[0],) for holders in plain.plan.holders)
    held, other = set(engine.held_tensors()), gathered(sorted(plain.held_tensors()))[1 - rank.rank]
    assert held == set(other)
    train(engine, num_steps=1)
    lost = config(assignment=str((paths[0], rank.folder / "lost.json")[rank.rank]))
    refusal(ValueError, lambda: engine_of(lost), "lost.json", "[on rank 1]")
    own = config(assignment=str(paths[rank.rank]))
    refusal(RuntimeError, lambda: engine_of(own), "rank 1 computed a different plan from rank 0")


def test_optimizers_that_differ(rank: Rank) -> None:
    """In what they train, where a tensor that is frozen on one rank would abort both in the first exchange; in options;
    and those of one rank that are wrong."""
    model = llama()
    model.get_parameter("model.embed_tokens.weight").requires_grad_(rank.rank == 0)
    refusal(RuntimeError, lambda: engine_of(config(holders=1), model), "rank 1", "embed_tokens", "requires_grad")
    settings = without_optimizer(config(holders=1))
    kind = torch.optim.Adafactor if rank.rank == 1 else torch.optim.AdamW
    model = llama()
    parameters = [nn.Parameter(torch.ones(2))] if rank.rank == 1 else list(model.parameters())
    cases: list[tuple[type[Exception], Any, Sequence[str]]] = [
        (RuntimeError, torch.optim.AdamW(model.parameters(), lr=1e-2 * (1 + rank.rank)), ("rank 1", "AdamW", "lr")),
        (ValueError, torch.optim.AdamW(parameters), ("does not have", "[on rank 1]")),
        (ValueError, kind(model.parameters()), ("Adafactor", "[on rank 1]")),
        (ValueError, kind, ("Adafactor", "[on rank 1]")),  # called by DeepSpeed
    ]
    for error, optimizer, words in cases:
        refusal(error, partial(engine_of, settings, model, optimizer=optimizer), *words)


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
            engine._core.mask.view(piece).add_(1e-3)
        said = refusal(RuntimeError, partial(check_agreement, engine._core.mask, engine._core.groups))
        assert said == f"ranks 0, 1 have different values of model.layers.0.{name}: training has diverged"


OTHERS: tuple[tuple[Mapping[str, Any], Mapping[str, Any], str], ...] = (  # top level, block, what the message says
    ({"gradient_accumulation_steps": 4}, {}, "gradient_accumulation_steps is 1 on rank 0 and 4 on rank 1"),
    ({"gradient_clipping": 2.0}, {}, "gradient_clipping is absent on rank 0 and 2.0 on rank 1"),
    ({"zero_optimization": {"stage": 2}}, {}, "zero_optimization.stage is 1 on rank 0 and 2 on rank 1"),
    ({"bf16": {"enabled": True}}, {}, "bf16.enabled is absent on rank 0 and true on rank 1"),
    ({"communication_data_type": "bf16"}, {}, 'communication_data_type is absent on rank 0 and "bf16" on rank 1'),
    ({"scheduler": {"type": "WarmupLR", "params": {}}}, {}, 'scheduler.type is absent on rank 0 and "WarmupLR" on'),
    ({}, {"branch_scale": "none"}, f'{KEY}.branch_scale is "training" on rank 0 and "none" on rank 1'),
    ({}, {"check_agreement": True}, f"{KEY}.check_agreement is false on rank 0 and true on rank 1"),
    ({}, {"checkpoint": {"keep_last": 1}}, f"{KEY}.checkpoint.keep_last is null on rank 0 and 1 on rank 1"),
)


def test_values_that_one_rank_has(rank: Rank) -> None:
    """In the config, in an argument, and of a machine: a node whose driver torch cannot use trains on its CPU, and the
    first collective of the others waits for it."""
    for top, block, words in OTHERS:
        own = config(holders=1, **block) | dict(top) if rank.rank == 1 else config(holders=1)
        refusal(ValueError, lambda: engine_of(own), "different settings", words)  # noqa: B023 (runs at once)
    scheduler = lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)  # noqa: E731
    argument: dict[str, Any] = {"lr_scheduler": scheduler} if rank.rank == 1 else {}
    words = 'lr_scheduler (argument) is "NoneType" on rank 0 and "function" on rank 1'
    refusal(ValueError, lambda: engine_of(config(holders=1), **argument), words)
    there = mock.Mock(**{"device_name.return_value": ("cuda", "cpu")[rank.rank]})
    with mock.patch.object(compare_configs, "get_accelerator", return_value=there):
        refusal(ValueError, lambda: engine_of(config(holders=1)), 'accelerator is "cuda" on rank 0 and "cpu" on rank 1')


def test_groups_have_the_timeout_of_the_run(rank: Rank) -> None:
    """A rank that hangs must not be waited for longer in messages between all ranks, or by an asynchronous save."""
    engine = engine_of(config(holders=1, checkpoint={"asynchronous": True}))
    for group in (engine._control, engine._core.checkpoints._group):
        assert group._get_backend(torch.device("cpu")).options._timeout == COLLECTIVE_TIMEOUT


def test_mistakes_of_one_rank(rank: Rank) -> None:
    """In the block, in what it is combined with, in the model."""

    def start_with(wrong: dict[str, Any]) -> Any:
        return lambda: engine_of(wrong if rank.rank == 1 else config(holders=1))

    refusal(ValueError, start_with(config(holders=0)), "holders: got 0", "[on rank 1]")
    refusal(ValueError, start_with(config(holders=1) | {"sdp": {}}), "unknown top-level key 'sdp'", "[on rank 1]")
    refusal(
        ValueError, start_with(config(holders=1) | {"prescale_gradients": True}), "prescale_gradients", "[on rank 1]"
    )
    model: Any = llama()
    model.model.embed_tokens.sparse = rank.rank == 1
    refusal(ValueError, lambda: engine_of(config(holders=1), model), "produces sparse gradients", "[on rank 1]")
    for make in (nullcontext, Init):
        with make():
            tied: Any = llama()
            if rank.rank == 1:
                tied.lm_head.weight.data = tied.model.embed_tokens.weight.data
        refusal(ValueError, partial(engine_of, config(holders=1), tied), "share memory", "[on rank 1]")


def test_models_of_other_sizes(rank: Rank) -> None:
    """Before they are broadcast, which would end processes; with weights and without."""
    for make in (nullcontext, Init):
        with make():
            resized: Any = llama()
            resized.resize_token_embeddings(VOCABULARY + rank.rank, mean_resizing=False)
            deeper = llama(1 + rank.rank)
        words = ("model.embed_tokens.weight [62, 16] torch.float32 on rank 1", "[61, 16] torch.float32 on rank 0")
        refusal(RuntimeError, partial(engine_of, config(holders=1), resized), *words)
        refusal(RuntimeError, partial(engine_of, config(holders=1), deeper), "model.layers.1", "on rank 1")


def test_the_block_on_one_rank(rank: Rank) -> None:
    """The other builds DeepSpeed's engine, which waits in its first collective. Here it only says that it would."""
    if rank.rank == 1:
        assert compare_configs.parse_and_compare({"train_micro_batch_size_per_gpu": 2}, {}) is None
    else:
        with pytest.raises(RuntimeError, match="rank 1 has a config without 'subnetwork_data_parallel'"):
            engine_of(config(holders=1))
    gathered(None)
    train(engine_of(config(holders=1)), num_steps=1)


def test_a_model_that_was_cut_before(rank: Rank) -> None:
    """It is made whole, as the earlier engine left it, and cut anew; a part of it, or a copy, is refused."""
    for first, second in (({"holders": 1}, {"holders": 1, "strategy": "neuron"}), ({"holders": 2}, {"holders": 1})):
        model = llama()
        engine = engine_of(config(**first), model)
        train(engine, num_steps=1)
        whole = dense_state(engine)
        if first["holders"] == 1:
            refusal(ValueError, lambda m=model: engine_of(config(holders=1), deepcopy(m)), "an earlier engine reduced")
        again, fresh = engine_of(config(**second), model), llama()
        assert_identical(dense_state(again), whole)
        fresh.load_state_dict(whole)
        other = engine_of(config(**second), fresh)
        assert train(again, num_steps=2) == train(other, num_steps=2)
        assert_identical(dense_state(again), dense_state(other))


def test_plain_engines_of_what_only_ours_can_train(rank: Rank) -> None:
    """Cut models, what is inside of them or around them, their partial copies, and models without weights."""
    plain = without_block(config())
    words = ("an earlier engine reduced this model", "build a new one", "copy.deepcopy inside")
    for regime, strategy in MODES:
        model: Any = llama()
        engine = engine_of(config(holders=1, regime=regime, strategy=strategy), model)
        with engine.dense():
            whole = deepcopy(model)
        layer = model.model.layers[0]
        others = (model, nn.Sequential(layer), layer.mlp if strategy == "neuron" else model.model)
        for other in (*others, deepcopy(model)) if strategy == "neuron" or regime == "forward" else others:
            refusal(ValueError, partial(engine_of, plain, other), *words)
        refusal(ValueError, partial(engine_of, plain | config(enabled=False, holders=1), model), *words)
        train(engine_of(plain, whole), num_steps=1)
    uncut: Any = llama()
    engine_of(config(holders=2), uncut)
    train(engine_of(plain, uncut), num_steps=1)
    with sdp_deepspeed.Init():
        deferred = llama()
    refusal(NotImplementedError, partial(engine_of, plain, deferred), "meta tensor")


def test_ranks_that_train_nothing(rank: Rank) -> None:
    """Would let the others wait, since their loss has no gradient; also later."""
    model: Any = llama()
    model.requires_grad_(False)
    refusal(ValueError, partial(engine_of, config(holders=1), model), "'attention', 'mlp' are frozen", "unfreeze some")
    model.model.layers[1].mlp.requires_grad_(True)
    words = ("1 units with 1 holders each cannot give each of 2 subnetworks one",)
    for regime in ("forward", "backward"):
        refusal(ValueError, partial(engine_of, config(holders=1, regime=regime), model), *words)
    engine = engine_of(config(holders=2), model)
    train(engine, num_steps=1)
    refusal(ValueError, lambda: engine.replan({"holders": 1}), *words)
    train(engine, num_steps=1)


@pytest.mark.world(3)
def test_process_groups_of_earlier_engines(rank: Rank) -> None:
    """End with them: each takes memory of a GPU."""
    model, numbers = llama(), set[int]()
    for seed in range(3):
        train(engine_of(config(holders=2, seed=seed), model), num_steps=1)
        numbers.add(len(dist.distributed_c10d._world.pg_map))
    assert len(numbers) == 1, numbers


def test_values_as_deepspeed_reads_them(rank: Rank) -> None:
    """It takes text for numbers, and so do we, for what is refused and for what runs."""
    refusal(ValueError, lambda: engine_of(config(holders=1) | {"zero_optimization": {"stage": "3"}}), "stage: got 3")
    for stage, overlap in (("0", "false"), ("1", "false"), ("2", "true")):
        engine = engine_of(config(holders=1) | {"zero_optimization": {"stage": stage, "overlap_comm": overlap}})
        assert engine.zero_optimization_stage() == int(stage)
        assert engine.optimizer.sharded.options.stage == max(1, int(stage)), "stage 0 runs as stage 1"
        assert engine.optimizer.sharded.options.overlap == (overlap == "true")
    wrong = {"zero_optimization": {"stage": 1, "compute_grad_norm": "false"}, "gradient_clipping": 1.0}
    refusal(ValueError, lambda: engine_of(config(holders=1) | wrong), "compute_grad_norm: got False")
    engine_of(config(holders=1) | {"zero_optimization": {"stage": 1, "zero_quantized_weights": "false"}})
    for value in (float("nan"), "1.0", "auto"):
        clipped = config(holders=1) | {"gradient_clipping": value}
        refusal(ValueError, lambda: engine_of(clipped), "gradient_clipping: got")  # noqa: B023 (runs at once)


def test_what_ranks_may_choose(rank: Rank) -> None:
    """What they print; and a plain engine waits for nobody, also beside ours."""
    plain = without_block(config())
    train(engine_of(plain), num_steps=1)
    own = {"steps_per_print": rank.rank + 1, "wall_clock_breakdown": rank.rank == 0}
    train(engine_of(config(holders=1) | own), num_steps=1)
    train(engine_of(plain | {KEY: {"enabled": False}}), num_steps=1)
    train(engine_of(config(holders=1)), num_steps=1)


def test_other_parallelism_is_refused(rank: Rank) -> None:
    """Last, because DeepSpeed never forgets an mpu."""
    refusal(ValueError, lambda: engine_of(config(holders=1), mesh_param=(1, 2)), "mesh_param")
    mpu = Mpu()
    vars(mpu)["_groups"]["data"] = dist.group.WORLD
    refusal(ValueError, lambda: engine_of(config(holders=1), mpu=mpu), "mpu: got 2 data-parallel x 2")
