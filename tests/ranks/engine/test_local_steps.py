"""Local steps on the engine, beside the oracle's cases: what is sent, the dense model between two synchronizations,
checkpoints, re-planning, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from itertools import islice
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_fp32_param, safe_set_full_fp32_param
from torch import nn
from torch.distributed import distributed_c10d

from benchmarks.common.traffic_counter import TrafficCounter
from sdp_deepspeed.engine import engine as engine_module
from sdp_deepspeed.parallel import consistency, local_optimizer
from sdp_deepspeed.parallel.groups import default_store
from sdp_deepspeed.reference.local_steps import LocalReference, LocalSteps
from sdp_deepspeed.reference.virtual_workers import Reference
from tests.helpers.models import batches, config, llama, loss_of, muon
from tests.helpers.more_models import ALL_SPECIMENS
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical, dense_state, engine_of, gathered, micro_step, refusal, train

KEY = "subnetwork_data_parallel"
CONTROL_BYTES = 2000  # at most, of small objects that ranks exchange
EVERY, CLIP = 2, 0.5  # of `Diloco`


def local(*, every: int = 3, stage: int = 1, **block: Any) -> dict[str, Any]:
    settings = config(**{"holders": 2, "local_steps": {"every": every, "outer_lr": 0.8, "outer_momentum": 0.5}} | block)
    settings["zero_optimization"] = {"stage": stage}
    return settings


@contextmanager
def communication() -> Iterator[set[tuple[int, ...]]]:
    """Ranks of each process group that communicates inside; and nobody for a message to the store."""
    found: set[tuple[int, ...]] = set()
    store = type(default_store())

    def noted(*_: Any) -> int:
        found.add(())
        return 0

    with mock.patch.object(store, "set", noted), mock.patch.object(store, "add", noted), TrafficCounter() as traffic:
        yield found
    for group in distributed_c10d._world.pg_map:
        if group.group_name in traffic.groups:
            found.add(tuple(dist.get_process_group_ranks(group)))


class Diloco:
    """DiLoCo (arXiv 2311.08105) in one process, by torch's optimizers alone.

    Args:
        dtype: of the weights; each team steps fp32 copies.
        rate, momentum: of the outer SGD.
    """

    def __init__(self, num_teams: int, dtype: torch.dtype, rate: float, momentum: float) -> None:
        self.num_steps = 0
        self.models = [llama().to(dtype) for _ in range(num_teams)]
        self.masters = [self._masters() for _ in range(num_teams)]
        self.inner = [torch.optim.SGD(masters, lr=0.1, momentum=0.9) for masters in self.masters]
        self.anchors = self._masters()
        self.outer = torch.optim.SGD(self.anchors, lr=rate, momentum=momentum, nesterov=momentum > 0)

    def _masters(self) -> list[nn.Parameter]:
        return [nn.Parameter(parameter.detach().float().clone()) for parameter in self.models[0].parameters()]

    def step(self, step: Sequence[Sequence[torch.Tensor]]) -> tuple[list[list[float]], list[float]]:
        """Losses of each rank's micro-batches, and the norm of each team's gradient."""
        ranks_per_team = len(step) // len(self.models)
        losses: list[list[float]] = []
        norms = []
        for team, model in enumerate(self.models):
            of_team = step[team * ranks_per_team : (team + 1) * ranks_per_team]
            num = sum(map(len, of_team))
            for master in self.masters[team]:
                master.grad = torch.zeros_like(master)
            for of_rank in of_team:
                losses.append([])
                for batch in of_rank:
                    loss = loss_of(model, batch)
                    losses[-1].append(loss.item())
                    gradients = torch.autograd.grad(loss, list(model.parameters()))
                    for master, gradient in zip(self.masters[team], gradients, strict=True):
                        assert master.grad is not None
                        master.grad += gradient.float() / num
            norms.append(float(nn.utils.clip_grad_norm_(self.masters[team], CLIP)))
            self.inner[team].step()
        self.num_steps += 1
        if self.num_steps % EVERY == 0:
            self.synchronize()
        for model, masters in zip(self.models, self.masters, strict=True):
            for parameter, master in zip(model.parameters(), masters, strict=True):
                parameter.data.copy_(master.detach())
        return losses, norms

    @torch.no_grad()
    def synchronize(self) -> None:
        for number, anchor in enumerate(self.anchors):
            anchor.grad = torch.stack([anchor - masters[number] for masters in self.masters]).mean(0)
        self.outer.step()
        for masters in self.masters:
            for master, anchor in zip(masters, self.anchors, strict=True):
                master.copy_(anchor)


@pytest.mark.world(2, 4)
@pytest.mark.parametrize(
    ("dtype", "stage", "accumulation", "rate", "momentum"),
    [
        (torch.float32, 0, 3, 1.0, 0.0),
        (torch.float32, 2, 2, 0.7, 0.9),
        (torch.bfloat16, 1, 2, 0.7, 0.9),
        (torch.bfloat16, 2, 1, 1.0, 0.0),
    ],
)
def test_diloco(dtype: torch.dtype, stage: int, accumulation: int, rate: float, momentum: float, rank: Rank) -> None:
    """With two teams at C = 1 the engine is DiLoCo. bf16 rounds gradients where they are computed, added and sent."""
    outer = {"every": EVERY, "outer_lr": rate, "outer_momentum": momentum}
    settings = local(stage=stage, subnetworks=2, local_steps=outer)
    settings |= {"optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}}
    settings |= {"gradient_clipping": CLIP, "gradient_accumulation_steps": accumulation}
    settings |= {"bf16": {"enabled": dtype == torch.bfloat16}}
    expected = Diloco(2, dtype, rate, momentum)
    engine = engine_of(settings)
    start = {name: value.float() for name, value in llama().state_dict().items()}
    team = rank.rank * 2 // rank.size
    tolerance = 1e-5 if dtype == torch.float32 else 4 * 2**-8
    for step in islice(batches(rank.size, accumulation), 7):
        losses, norms = expected.step(step)
        for batch, loss in zip(step[rank.rank], losses[rank.rank], strict=True):
            actual = loss_of(engine, batch)
            engine.backward(actual)
            engine.step()
            assert actual.item() == pytest.approx(loss, rel=tolerance)
        assert engine.get_global_grad_norm() == pytest.approx(norms[team], rel=tolerance)
        assert norms[0] != norms[1]
    engine.synchronize()
    expected.synchronize()
    state = dense_state(engine)
    difference, moved = 0.0, 0.0
    for (name, _), anchor in zip(llama().named_parameters(), expected.anchors, strict=True):
        difference += float((state[name].float() - anchor.detach().to(dtype).float()).square().sum())
        moved += float((anchor.detach() - start[name]).square().sum())
    assert difference <= tolerance**2 * moved, (difference, moved)


@pytest.mark.world(4)
def test_a_step_waits_for_its_team_alone(rank: Rank) -> None:
    """In each stage and regime: between two synchronizations a rank sends nothing outside its team, and nothing to the
    store."""
    team = (0, 1) if rank.rank < 2 else (2, 3)
    for stage, regime in ((1, "forward"), (2, "backward")):
        engine = engine_of(local(stage=stage, regime=regime, subnetworks=2, holders=1, strategy="neuron"))
        with communication() as found:
            train(engine, num_steps=2)
        assert found == {team}, found


@pytest.mark.world(4)
def test_two_process_groups_more(rank: Rank) -> None:
    """At most: the team, and its position in all teams."""
    blocks: list[dict[str, Any]] = [
        {"holders": 4},
        {"holders": 2},
        {"holders": 1, "subnetworks": 2},
        {"holders": 2, "subnetworks": 2},
        {"holders": 2, "strategy": "neuron", "regime": "backward"},
        {"holders": [{"units": "mlp", "holders": 1}, {"holders": 2}], "subnetworks": 2, "strategy": "neuron"},
    ]
    for block in blocks:
        without = engine_of(config(**block)).groups.num_groups
        assert engine_of(local(**block)).groups.num_groups <= without + 2, block


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("precision", "difference_bytes", "weight_bytes"),
    [
        ({}, 4, 4),
        ({"bf16": {"enabled": True}}, 2, 2),
        ({"bf16": {"enabled": True}, "communication_data_type": "fp32"}, 4, 2),
    ],
)
def test_a_synchronization_sends_the_least(
    precision: dict[str, Any], difference_bytes: int, weight_bytes: int, rank: Rank
) -> None:
    """Two teams of one: a step sends nothing. Of N parameters that both teams train an all-reduce of differences sends
    N per rank; in the backward regime of those that one team trains it sends the weights, to the other."""
    blocks: list[dict[str, Any]] = [{}, {"regime": "backward"}, {"regime": "backward", "holders": 1}]
    for block in blocks:
        engine = engine_of(local(every=2, strategy="neuron", **block) | precision)
        by_one = 0
        if "holders" in block:
            of_units = {piece for unit in engine.plan.units for piece in unit.pieces}
            by_one = sum(piece.num_elements(engine.mask.shapes[piece.parameter]) for piece in of_units)
        by_both = sum(parameter.numel() for parameter in llama().parameters()) - by_one
        least = difference_bytes * by_both + weight_bytes * by_one // 2
        sent = []
        with TrafficCounter() as traffic:
            for step in range(4):
                before = traffic.total
                train(engine, num_steps=1, first=step)
                sent.append(traffic.total - before)
        assert sent[0] == sent[2] == 0
        assert least <= sent[1] <= least + CONTROL_BYTES, (block, sent, least)
        assert least <= engine.optimizer.sharded.bytes_per_synchronization <= sent[1]


@pytest.mark.world(4)
def test_who_saves_alone_is_told_who_synchronizes(rank: Rank) -> None:
    """Without waiting for ranks that may come later; the interval then ends as planned."""
    engine = engine_of(local(every=2))
    train(engine, num_steps=1)
    word = torch.zeros(1)
    if rank.rank == 0:
        with pytest.raises(RuntimeError, match="rank 1 continued training"):
            engine.save_checkpoint(str(rank.folder))
        for other in (2, 3):
            dist.send(word, other)
    elif rank.rank != 1:
        dist.recv(word, 0)
    train(engine, num_steps=1, first=1)
    assert engine.num_synchronizations == 1


@pytest.mark.world(2)
def test_anchors_and_momentum_move_to_the_host(rank: Rank) -> None:
    """With the masters; on the CPU they are there already."""
    engine = engine_of(local())
    sharded = engine.optimizer.sharded
    expected = {id(tensor) for tensor in (*sharded.local.anchors, *sharded.local.momenta)}
    with mock.patch.object(local_optimizer, "move_to_host", return_value=[]) as move:
        engine.offload_states()
    assert len(expected) > 0
    assert {id(tensor) for call in move.call_args_list for tensor in call.args[0]} == expected


@pytest.mark.world(2)
def test_the_dense_model_is_that_of_the_anchors(rank: Rank) -> None:
    """Looking at it between two synchronizations changes nothing; outside changes there are refused."""
    blocks: list[dict[str, Any]] = [{}, {"holders": 1, "regime": "backward"}, {"holders": 1, "strategy": "neuron"}]
    for block in blocks:
        for precision in ({}, {"bf16": {"enabled": True}}):
            looking, other = (engine_of(local(**block) | precision) for _ in range(2))
            train(looking, num_steps=3)
            anchors = dense_state(looking)
            train(looking, num_steps=2, first=3)
            assert_identical(dense_state(looking), anchors)
            looking.eval()
            with torch.no_grad():
                looking(input_ids=torch.ones(1, 4, dtype=torch.long))
                seen = looking.module.lm_head.weight.detach().clone()
            looking.train()
            assert torch.equal(seen, anchors["lm_head.weight"])
            refusal(RuntimeError, looking.module.state_dict, "engine.synchronize()")
            train(looking, num_steps=2, first=5)
            train(other, num_steps=7)
            assert looking.num_synchronizations == 2
            looking.synchronize()
            other.synchronize()
            assert looking.num_synchronizations == 3
            assert_identical(dense_state(looking), dense_state(other))
            train(looking, num_steps=1, first=7)
            train(other, num_steps=1, first=7)
            for name in ("lm_head.weight", "model.layers.1.mlp.up_proj.weight"):  # the second may be one team's

                def change(engine: Any = looking, name: str = name) -> None:
                    with engine.dense(), torch.no_grad():
                        engine.module.get_parameter(name).neg_()

                refusal(RuntimeError, change, "weights were changed", "engine.synchronize()")
            refusal(RuntimeError, looking.optimizer.refresh_fp32_params, "engine.synchronize()")
            train(looking, num_steps=1, first=8)
            train(other, num_steps=1, first=8)
            assert_identical(dense_state(looking), dense_state(other))


@pytest.mark.world(2)
def test_an_export_without_the_last_steps_says_so(rank: Rank) -> None:
    engine = engine_of(local())
    for num_steps in (1, 2):  # then it synchronizes
        train(engine, num_steps=num_steps)
        with mock.patch.object(engine_module, "log_dist") as log:
            engine.save_pretrained(rank.folder / "hf")
            engine.save_16bit_model(str(rank.folder / "hf"))
        texts = [str(call.args[0]) for call in log.call_args_list]
        assert len(texts) == (2 if num_steps == 1 else 0)
        assert all("call engine.synchronize() first" in text for text in texts), texts


@pytest.mark.world(2)
def test_who_ends_an_evaluation_waits_for_all_and_names_them(rank: Rank) -> None:
    engine = engine_of(local())
    train(engine, num_steps=1)
    engine.eval()
    with torch.no_grad():
        engine(input_ids=torch.ones(1, 4, dtype=torch.long))
    store: Any = default_store()
    warnings: list[str] = []

    def record(message: str, *values: object) -> None:
        warnings.append(message % values)
        store.set("the end of an evaluation", "")

    with mock.patch.multiple(consistency, PATIENCE=0.0), mock.patch.object(consistency.logger, "warning", record):
        if rank.rank == 1:
            store.wait(["the end of an evaluation"])
        engine.train()
    assert gathered(warnings) == [["leaving the dense model: waiting for rank 1; call it on all ranks"], []]


@pytest.mark.world(2)
def test_a_copy_gives_its_state_dict_at_any_time(rank: Rank) -> None:
    engine = engine_of(local())
    with engine.dense():
        copied = deepcopy(engine.module)
    train(engine, num_steps=1)
    assert_identical(copied.state_dict(), dense_state(engine))
    refusal(RuntimeError, engine.module.model.state_dict, "engine.synchronize()")


@pytest.mark.world(2)
def test_a_load_ends_the_interval(rank: Rank) -> None:
    """Of a checkpoint without outer momentum, and without one of the parameters, which has its anchor's values then; if
    nothing can be loaded, the interval goes on."""
    folder = f"{rank.folder}/plain"
    plain = engine_of(config(holders=2))
    train(plain, num_steps=2)
    plain.save_checkpoint(folder)
    saved = dense_state(plain)
    engine = engine_of(local())
    train(engine, num_steps=4)
    running = engine.module.lm_head.weight.detach().clone()
    anchors = dense_state(engine)
    assert engine.load_checkpoint(f"{rank.folder}/nothing") == (None, None)
    assert torch.equal(engine.module.lm_head.weight, running)
    with engine.optimizer.sharded.loading():
        engine.optimizer.sharded.gather_weights()  # a load of nothing
    assert torch.equal(engine.module.lm_head.weight, anchors["lm_head.weight"])
    assert not torch.equal(running, anchors["lm_head.weight"])
    momenta = [momentum.clone() for momentum in engine.optimizer.sharded.local.momenta]
    engine.load_checkpoint(folder, load_optimizer_states=False)
    assert_identical(dense_state(engine), saved)
    assert any(bool(momentum.any()) for momentum in momenta)
    assert all(map(torch.equal, momenta, engine.optimizer.sharded.local.momenta)), "without optimizer state they stay"
    train(engine, num_steps=1, first=4)
    engine.load_checkpoint(folder)
    assert_identical(dense_state(engine), saved)
    assert not any(bool(momentum.any()) for momentum in engine.optimizer.sharded.local.momenta)


@pytest.mark.world(2)
def test_teams_never_skip_a_step(rank: Rank) -> None:
    """Learning rates of teams would differ then, and checkpoints have one."""
    engine = engine_of(local())
    for parameter in engine.module.parameters():
        if rank.rank == 1:
            parameter.register_hook(lambda gradient: gradient * float("inf"))
    train(engine, num_steps=1)
    assert engine.skipped_steps == 0
    refusal(RuntimeError, engine.synchronize, "subnetwork 1", "infinite or NaN")


@pytest.mark.world(2)
@pytest.mark.parametrize("precision", [{}, {"bf16": {"enabled": True}}])
def test_changes_from_outside_set_the_anchors(precision: dict[str, Any], rank: Rank) -> None:
    engine = engine_of(local(holders=1) | precision)
    train(engine, num_steps=3)
    with engine.dense(), torch.no_grad():
        engine.module.model.norm.weight.fill_(0.5)
    train(engine, num_steps=1, first=3)
    weight = engine.module.lm_head.weight
    anchor = safe_get_full_fp32_param(weight)
    assert torch.equal(anchor.to(weight.dtype), dense_state(engine)["lm_head.weight"])
    safe_set_full_fp32_param(weight, torch.full_like(safe_get_full_fp32_param(weight), 0.25))
    state = dense_state(engine)
    assert bool((state["lm_head.weight"] == 0.25).all())
    assert bool((state["model.norm.weight"] == 0.5).all())
    assert bool((weight == 0.25).all())
    train(engine, num_steps=1, first=4)
    assert bool((weight - 0.25).abs().max() < 0.1), "the team goes on from the new values"


@pytest.mark.world(4)
def test_resume_within_an_interval(rank: Rank) -> None:
    """On the same layout a run goes on bit for bit, with its momentum; on another one with the same model."""
    replicas: dict[str, Any] = {"subnetworks": 2, "holders": 1}
    for stage, block in ((1, replicas), (2, {"regime": "backward", "strategy": "neuron"})):
        folder = f"{rank.folder}/{stage}"
        engine = engine_of(local(stage=stage, **block))
        train(engine, num_steps=7)
        engine.save_checkpoint(folder)
        saved = dense_state(engine)
        train(engine, num_steps=3, first=7)
        again = engine_of(local(stage=stage, **block))
        again.load_checkpoint(folder)
        assert_identical(dense_state(again), saved)
        train(again, num_steps=3, first=7)
        assert_identical(dense_state(again), dense_state(engine))
        assert not torch.equal(dense_state(again)["lm_head.weight"], saved["lm_head.weight"])
        other = engine_of(local(stage=1, holders=4))
        other.load_checkpoint(folder)
        assert_identical(dense_state(other), saved)
        assert any(bool(momentum.any()) for momentum in other.optimizer.sharded.local.momenta)
        plain = engine_of(config(holders=2))
        plain.load_checkpoint(folder)
        assert_identical(dense_state(plain), saved)
        assert not any("outer_momentum" in state for state in plain.optimizer.state.values())
        train(plain, num_steps=1, first=7)


@pytest.mark.world(4)
@pytest.mark.parametrize(("regime", "holders"), [("forward", 2), ("forward", 1), ("backward", 1)])
def test_muon(regime: str, holders: int, rank: Rank) -> None:
    """In each team one rank steps the whole of a matrix, the same position in all teams. Its iteration is in
    fp32, as in test_optimizers.py."""
    settings = local(every=2, stage=0, subnetworks=2, holders=holders, regime=regime)
    del settings["optimizer"]
    make = partial(muon, is_matrix=lambda name, parameter: "layers" in name and parameter.dim() == 2)

    def started() -> Any:
        model = llama(3)
        return engine_of(settings, model, optimizer=make(dict(model.named_parameters())))

    def assert_near(state: dict[str, torch.Tensor]) -> None:
        for name, anchor in reference.anchors.items():
            moved = (anchor - start[name]).norm()
            assert (state[name] - anchor).norm() <= 1e-3 * moved + 1e-6 * anchor.norm(), (name, moved)

    engine, dense = started(), llama(3)
    start = {name: parameter.detach().clone() for name, parameter in dense.named_parameters()}
    reference = LocalReference(
        dense,
        engine.plan,
        LocalSteps(2, 0.8, 0.5),
        lambda model, ranks: Reference(model, engine.plan, make, loss_of, clip=engine.gradient_clipping(), ranks=ranks),
    )
    in_fp32 = mock.patch("deepspeed.runtime.zero.muon.original_muon.ns_compute_dtype", return_value=torch.float32)
    with torch.compiler.set_stance("force_eager"), in_fp32:
        for number, step in enumerate(islice(batches(rank.size, 1), 5)):
            losses, _ = reference.step(step)
            assert micro_step(engine, step[rank.rank][0]) == pytest.approx(losses[rank.rank][0], abs=1e-4)
            if number % 2:
                assert_near(dense_state(engine))
        anchor = safe_get_full_fp32_param(engine.module.get_parameter("model.layers.0.mlp.up_proj.weight"))
        torch.testing.assert_close(anchor, reference.anchors["model.layers.0.mlp.up_proj.weight"], rtol=0, atol=1e-4)
        engine.save_checkpoint(f"{rank.folder}")
        reference.synchronize()
        assert_near(dense_state(engine))
        resumed = started()
        resumed.load_checkpoint(f"{rank.folder}")
        for each in (engine, resumed):
            train(each, num_steps=3, first=5)
    assert_identical(dense_state(resumed), dense_state(engine))
    stepped = [id(p) for p in engine.optimizer.param_groups[0]["params"]]
    assert 0 < len(stepped) < sum("layers" in name and p.dim() == 2 for name, p in dense.named_parameters())


@pytest.mark.world(2)
def test_a_checkpoint_of_before_the_first_step(rank: Rank) -> None:
    """Has outer momentum, but no state of the optimizer; it loads with and without local steps."""
    engine = engine_of(local(every=2))
    engine.save_checkpoint(str(rank.folder))
    train(engine, num_steps=3)
    again = engine_of(local(every=2), llama(seed=1))
    again.load_checkpoint(str(rank.folder))
    train(again, num_steps=3)
    assert_identical(dense_state(again), dense_state(engine))
    plain = engine_of(config(holders=2), llama(seed=1))
    plain.load_checkpoint(str(rank.folder))
    train(plain, num_steps=1)


@pytest.mark.world(2)
def test_moments_are_averaged_in_fp32(rank: Rank) -> None:
    """Also where differences of weights are sent in 16 bits."""
    engine = engine_of(local() | {"bf16": {"enabled": True}})
    train(engine, num_steps=1)
    states = list(engine.optimizer.state.values())
    means = [state["exp_avg_sq"].clone() for state in states]
    for mean in means:
        dist.all_reduce(mean)
        mean /= rank.size
    engine.save_checkpoint(str(rank.folder))
    for state, mean in zip(states, means, strict=True):
        torch.testing.assert_close(state["exp_avg_sq"], mean, rtol=1e-6, atol=0)


@pytest.mark.world(2)
def test_agreement_is_checked_at_synchronizations(rank: Rank) -> None:
    engine = engine_of(local(every=2, check_agreement=True))
    train(engine, num_steps=3)
    if rank.rank == 1:
        engine.optimizer.sharded.local.anchors[0] += 1
    refusal(RuntimeError, partial(train, engine, num_steps=1, first=3), "training has diverged")


@pytest.mark.world(2)
def test_data_that_was_replaced_is_synchronized(rank: Rank) -> None:
    engines = [engine_of(local()) for _ in range(2)]
    for engine in engines:
        train(engine, num_steps=1)
        for parameter in engine.module.parameters() if engine is engines[0] else ():
            parameter.data = parameter.data.clone()
        engine.synchronize()
    assert_identical(*(engine.module.state_dict() for engine in engines))


@pytest.mark.world(2)
def test_running_statistics_are_averaged_at_synchronizations(rank: Rank) -> None:
    engine = engine_of(local(every=2), ALL_SPECIMENS["resnet_bottleneck"].build())
    for is_synchronized in (False, True):
        train(engine, num_steps=1)
        means = [buffer.tolist() for name, buffer in engine.module.named_buffers() if name.endswith("running_mean")]
        first, second = gathered(means)
        assert (first == second) == is_synchronized


@pytest.mark.world(2)
def test_an_unfinished_step_is_not_synchronized(rank: Rank) -> None:
    engine = engine_of(local() | {"gradient_accumulation_steps": 2})
    train(engine, num_steps=3, accumulation=1)
    refusal(RuntimeError, engine.synchronize, "engine.synchronize: gradients of an unfinished step")
    refusal(RuntimeError, partial(engine.save_checkpoint, f"{rank.folder}"), "save_checkpoint: gradients of an")
    engine.zero_grad()
    engine.synchronize()
    assert engine.num_synchronizations == 1


@pytest.mark.world(2)
def test_the_store_does_not_grow_with_the_number_of_calls(rank: Rank) -> None:
    barrier = consistency.CallBarrier("counted")
    store: Any = default_store()
    counts = []
    for _ in range(4):
        with barrier.wait_and_name("synchronize"):
            pass
        dist.barrier()
        counts.append(store.num_keys())
        dist.barrier()
    assert counts[1] == counts[2] == counts[3], counts


@pytest.mark.world(2)
def test_a_rank_with_an_error_is_named_by_the_others(rank: Rank) -> None:
    barrier = consistency.CallBarrier("failing")

    def synchronize() -> None:
        with barrier.wait_and_name("synchronize"):
            raise torch.OutOfMemoryError("here") if rank.rank == 1 else RuntimeError("gloo: Connection closed by peer")

    with mock.patch.object(consistency, "_GRACE", 0.1):
        if rank.rank == 1:
            refusal(torch.OutOfMemoryError, synchronize, "here")
        else:
            refusal(RuntimeError, synchronize, "synchronize: communication failed; rank 1 has ended or still waits")


@pytest.mark.world(2)
def test_a_schedule_ends_local_steps(rank: Rank) -> None:
    """As a checkpoint that is saved after the last local step, and loaded by a run without."""
    phases: list[dict[str, Any]] = [
        {"until_step": 4, "local_steps": {"every": 3, "outer_momentum": 0.5}},
        {"holders": 2, "stage": 2},
    ]
    engine = engine_of(config(holders=1, schedule=phases))
    first = engine_of(config(holders=1, local_steps=phases[0]["local_steps"]))
    train(engine, num_steps=6)
    train(first, num_steps=4)
    first.save_checkpoint(f"{rank.folder}/phase")
    second = engine_of(config(holders=2) | {"zero_optimization": {"stage": 2}})
    second.load_checkpoint(f"{rank.folder}/phase")
    train(second, num_steps=2, first=4)
    assert_identical(dense_state(engine), dense_state(second))
    second.replan({"local_steps": {"every": 2}})
    train(second, num_steps=2, first=6)
    assert second.num_synchronizations == 1


@pytest.mark.world(2)
def test_weights_that_are_not_finite_are_not_averaged(rank: Rank) -> None:
    for is_shared in (True, False):  # else this team alone trains it
        engine = engine_of(local(every=2, holders=1))
        train(engine, num_steps=1)
        unit = engine.plan.units[engine.plan.units_of(1)[0]]
        name = "lm_head.weight" if is_shared else unit.pieces[0].parameter
        if rank.rank == 1:
            engine.module.get_parameter(name).data.view(-1)[0] = float("nan")
        refusal(RuntimeError, engine.synchronize, "subnetwork 1", "infinite or NaN", "[on rank 1]")
    step = partial(train, engine, num_steps=1, first=1)
    refusal(RuntimeError, step, "subnetwork 1", "infinite or NaN", "[on rank 1]")


@pytest.mark.world(2)
def test_refusals(rank: Rank) -> None:
    class Averaging(torch.optim.SGD):
        """Evaluates other weights than it trains."""

        def train(self) -> None: ...

        def eval(self) -> None: ...

    def averaging(settings: dict[str, Any]) -> Any:
        model = llama()
        del settings["optimizer"]
        return engine_of(
            settings | {"zero_allow_untested_optimizer": True}, model, optimizer=Averaging(model.parameters(), lr=0.1)
        )

    refusal(ValueError, partial(averaging, local()), "local_steps", "evaluates other weights")
    refusal(ValueError, partial(engine_of, local() | {"fp16": {"enabled": True}}), "local_steps", "fp16")
    refusal(ValueError, partial(engine_of, local() | {"communication_data_type": "fp16"}), "communication_data_type")
    checked = {"stage": 1, "offload_optimizer": {"device": "cpu"}, "ignore_unused_parameters": False}
    refusal(ValueError, partial(engine_of, local() | {"zero_optimization": checked}), "ignore_unused_parameters")
    engine = averaging(config(holders=2))
    refusal(ValueError, partial(engine.replan, {"local_steps": {"every": 2}}), "local_steps", "evaluates other weights")
