"""Models that tensor-parallel ranks divide, by AutoTP or by their author: masked, trained on 2 x 2 ranks, and compared
with the reference of the dense model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from functools import partial
from typing import Any

import deepspeed
import pytest
import torch
import torch.distributed as dist
from torch import nn

from sdp_deepspeed.config import parse
from sdp_deepspeed.masking.mask import Mask
from sdp_deepspeed.parallel.groups import Groups
from sdp_deepspeed.parallel.optimizer import ShardedOptimizer
from sdp_deepspeed.parallel.param_groups import param_group_indices
from sdp_deepspeed.parallel.tensor_parallel import TensorParallel, WholeModel, of_author, of_autotp
from sdp_deepspeed.plan.planner import plan_model
from sdp_deepspeed.reference.virtual_workers import Reference
from tests.helpers.models import SPECIMENS, batches, config, loss_of, two_groups
from tests.helpers.more_models import even
from tests.helpers.oracle import from_rank_0, make_optimizer
from tests.helpers.ranks import Rank
from tests.helpers.tensor_parallel_models import TP, Divided, OwnModel, build, describe_own, mpu

CLIP, NUM_STEPS = 0.5, 2


def divided(model: nn.Module, control: Any, settings: dict[str, Any] | None = None) -> tuple[Any, TensorParallel]:
    """DeepSpeed's engine of a model that AutoTP divides, and what this rank has of it."""
    whole = WholeModel.of(model)
    given: dict[str, Any] = {"train_micro_batch_size_per_gpu": 1, "tensor_parallel": {"autotp_size": TP}}
    given["tensor_parallel"] |= settings or {}
    engine, *_ = deepspeed.initialize(model=model, config=given)
    return engine, of_autotp(engine.module, whole, engine.mpu.get_tensor_model_parallel_group(), control)


def trains(rank: Rank, case: Divided) -> None:
    control = dist.new_group(backend="gloo")
    dense = build(case.model)
    if case.model == "own":
        describe_own()
        ranks = mpu()
        module: nn.Module = OwnModel(ranks.get_model_parallel_group())
        parallel = of_author(module, ranks.get_model_parallel_group(), control)
    else:
        engine, parallel = divided(build(case.model), control, case.settings.get("tensor_parallel"))
        module = engine.module
    parallel.check_replicated(dict(module.named_parameters()), control)
    block = parse(config(**case.block))
    assert block is not None
    plan, _ = plan_model(module, block, rank.size // TP, branches=parallel.branches, shards=parallel.shards)
    worker = rank.rank // TP
    mask = Mask(module, parallel.shards.local_plan(plan), worker, branches=parallel.branches)
    client = make_optimizer(case.optimizer, two_groups(mask.parameters))
    indices = param_group_indices(client, mask.parameters, mask.trainable)
    mask.apply()
    parallel.sum_partial_gradients(mask.parameters)
    sets = {holders for pieces in mask.pieces.values() for _, holders in pieces}
    groups = Groups(sets, ranks=[[*range(index, rank.size, TP)] for index in range(TP)], control=control)
    options: dict[str, Any] = {"regime": plan.regime, "stage": case.stage, "clip": CLIP, "bucket_size": 900}
    replicated = parallel.replicated(mask.parameters)
    optimizer = ShardedOptimizer(client, mask, groups, indices, replicated=replicated, **options)
    reference = Reference(
        dense, plan, lambda named: make_optimizer(case.optimizer, two_groups(named)), loss_of, clip=CLIP
    )
    for step in itertools.islice(batches(rank.size // TP, case.accumulation), NUM_STEPS):
        losses, norm = from_rank_0(partial(reference.step, step))
        for number, (batch, expected) in enumerate(zip(step[worker], losses[worker], strict=True)):
            optimizer.is_last_micro_step = number == case.accumulation - 1
            loss = loss_of(module, batch)
            (loss / case.accumulation).backward()
            optimizer.finish_backward()
            assert abs(loss.item() - expected) <= 1e-5, (loss.item(), expected)
        assert optimizer.step()
        assert float(optimizer.norm) == pytest.approx(norm, rel=1e-5)  # type: ignore[arg-type]
    dense.load_state_dict(from_rank_0(dense.state_dict))
    start = dict(build(case.model).named_parameters())
    for name, value in dense.named_parameters():
        for piece, _ in mask.pieces[name]:
            if mask.stored(piece):
                expected, first = (piece.narrow(own_part(parallel, name, p.detach())) for p in (value, start[name]))
                # 1e-5 of the way, and half a unit in the last place for each step's rounding
                limit = 1e-5 * (expected - first).norm() + NUM_STEPS * 2**-24 * expected.norm() + 1e-9
                assert (mask.view(piece) - expected).norm() <= limit, name
    parallel.check_replicated({n: mask.parameters[n] for n in replicated if mask.parameters[n].numel()}, control)
    optimizer.close()
    groups.close()


def own_part(parallel: TensorParallel, name: str, dense: torch.Tensor) -> torch.Tensor:
    division, index = parallel.shards.divisions.get(name), parallel.shards.index
    if division is None:
        return dense
    return dense.narrow(division.dim, sum(division.lengths[:index]), division.lengths[index])


def what_cannot_be_divided(rank: Rank) -> None:
    control = dist.new_group(backend="gloo")
    own = build("llama")
    with torch.no_grad():
        own.get_parameter("model.norm.weight").add_(float(rank.rank))
    _, parallel = divided(own, control)
    with pytest.raises(ValueError, match=r"different values of the replicated model\.norm\.weight"):
        parallel.check_replicated(dict(own.named_parameters()), control)
    with pytest.raises(ValueError, match="an earlier engine divided this model"):
        WholeModel.of(own)
    for model, words in (
        (SPECIMENS["llama_odd"].build(), "the 3 key/value heads of 'model.layers.0.attention'"),
        (SPECIMENS["gpt_neox"].build(), r"the 27 neurons of .*\(14, 13\)"),
        (even("falcon_multi_query").build(), "all its heads use one key/value head"),
        (even("stablelm_head_norms").build(), "a norm for each head"),  # DeepSpeed trains it, and its ranks drift apart
    ):
        with pytest.raises(ValueError, match=words):
            divided(model, control)


TOGETHER = {
    "partition_config": {
        "use_default_specs": False,
        "layer_specs": [
            {"patterns": [r".*\.(o|down)_proj\.weight$"], "partition_type": "row"},
            {"patterns": [r".*\.(q|k|v|gate|up)_proj\.weight$"], "partition_type": "column"},
        ],
    }
}
FORWARD: dict[str, Any] = {"regime": "forward", "holders": 1}
BACKWARD: dict[str, Any] = {"regime": "backward", "holders": 1}
CASES = (
    Divided("llama", {**FORWARD, "strategy": "block"}, stage=1, optimizer="AdamW"),
    Divided("qwen3", {**FORWARD, "strategy": "neuron"}, stage=0),
    # its plan does not say that gradients of the norms inside heads are summed
    Divided("qwen3", {**BACKWARD, "strategy": "neuron"}, stage=1, settings={"tensor_parallel": TOGETHER}),
    Divided("llama_biases", {**BACKWARD, "strategy": "neuron"}, stage=2, accumulation=2),
    Divided("llama_tied_61", {**FORWARD, "strategy": "neuron", "holders": 2}, stage=1),
    Divided("own", {**FORWARD, "strategy": "neuron"}, stage=1),
    Divided("own", {**BACKWARD, "strategy": "block"}, stage=2),
)


def _checks(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    for case in CASES if options.getoption("--full") else CASES[:3]:
        yield str(case), partial(trains, case=case)
    yield "what_cannot_be_divided", what_cannot_be_divided


@pytest.mark.checks(4, _checks)
def test_two_workers_of_two_ranks(outcome: str | None) -> None:
    assert outcome is None, outcome
