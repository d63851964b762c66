"""Checkpoints of sharded models on other layouts; a resumed run is the uninterrupted, bit for bit."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import sdp_deepspeed
from sdp_deepspeed.fsdp import CheckpointManager, full_state_dict, param_groups, save_pretrained
from tests.helpers.checkpointed_runs import outcomes_of
from tests.helpers.models import TOKENS, llama, two_groups
from tests.helpers.oracle import make_optimizer
from tests.helpers.ranks import Rank
from tests.helpers.sharded import ShardedRun, assert_same_run, check_resumed, evaluated
from tests.helpers.training import assert_identical, engine_of, refusal, train

NEURON: dict[str, Any] = {"strategy": "neuron"}
BY_RULES = {"holders": [{"units": "mlp", "holders": 1}, {"holders": 2}]}


class KeepsRows(torch.optim.SGD):
    """Something for each tensor that is not for each of its elements."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["rows"] = torch.zeros(3)
        return super().step(closure)


# Number of ranks, and settings.
RUNS: dict[str, tuple[int, dict[str, Any]]] = {
    "layers": (2, {"granularity": "layer"}),
    "by_rules": (4, BY_RULES),
    "neuron": (2, NEURON),
    "neuron_of_three": (4, NEURON | {"holders": 3}),
}
PAIRS = [("layers", "neuron_of_three"), ("neuron_of_three", "neuron"), ("neuron", "by_rules"), ("by_rules", "layers")]


def write(name: str, folder: Path, rank: Rank) -> None:
    run = ShardedRun(**RUNS[name][1])
    run.train(rank, 3)
    run.checkpoints.save_checkpoint(folder / name, client_state={"position": 3})


def go_on(source: str, name: str, folder: Path, rank: Rank) -> None:
    """What was loaded is what is saved again; then it trains, and saves that."""
    run = ShardedRun(**RUNS[name][1])
    run.train(rank, 1, seed=7)
    path, client_state = run.checkpoints.load_checkpoint(folder / source)
    assert (path, client_state) == (str(folder / source / "global_step3"), {"position": 3})
    again = folder / f"{source}-{name}"
    run.checkpoints.save_checkpoint(again, client_state={"position": 4})
    if rank.rank == 0:
        assert_same_run(folder / source / "global_step3", again / "global_step3")
    run.train(rank, 1, first=3)
    run.checkpoints.save_checkpoint(again)
    assert run.checkpoints.global_steps == 4


@pytest.mark.world(2)
def test_resumed_is_uninterrupted(rank: Rank) -> None:
    blocks: list[dict[str, Any]] = [{}, {"holders": 2}, NEURON | {"checkpoint": {"asynchronous": True, "keep_last": 2}}]
    for number, block in enumerate(blocks):
        folder = rank.folder / f"resumed{number}"
        check_resumed(rank, folder, ShardedRun(**block), ShardedRun(llama(tied=True, seed=5), **block))
        if rank.rank == 0:
            assert (folder / "latest").read_text().strip() == "resumed"
            assert (folder / "global_step2").exists() == ("checkpoint" not in block)


@pytest.mark.world(2)
def test_schedule_under_another_plan(rank: Rank) -> None:
    """Param groups are divided otherwise there: each parameter goes on at its own rate."""
    run, other = ShardedRun(), ShardedRun(holders=2)
    assert len(run.optimizer.param_groups) > len(other.optimizer.param_groups)

    def rates(of: ShardedRun) -> dict[str, float]:
        names = {parameter: name for name, parameter in of.model.named_parameters()}
        return {names[p]: group["lr"] for group in of.optimizer.param_groups for p in group["params"]}

    for number, group in enumerate(run.optimizer.param_groups):
        assert group["initial_lr"] == 1e-2
        if group["weight_decay"]:
            group["initial_lr"] = run.scheduler.base_lrs[number] = 2e-2
    run.train(rank, 2)
    run.checkpoints.save_checkpoint(rank.folder / "schedule")
    other.checkpoints.load_checkpoint(rank.folder / "schedule")
    for one in (run, other):
        one.train(rank, 1, first=2)
    assert len(set(rates(run).values())) == 2
    assert rates(run).items() <= rates(other).items()
    assert other.scheduler.get_last_lr() == [group["lr"] for group in other.optimizer.param_groups]


@pytest.mark.world(2)
def test_equal_groups(rank: Rank) -> None:
    """Two groups of the user's with the same options are two, and go on at their rate, here and in DeepSpeed."""

    def groups(model: Any) -> list[dict[str, Any]]:
        trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        return [{**group, "weight_decay": 0.0} for group in two_groups(trained)]

    def started() -> tuple[Any, torch.optim.Optimizer, CheckpointManager]:
        model = sdp_deepspeed.fully_shard(llama(tied=True), None, {"holders": 1})
        optimizer = torch.optim.AdamW(param_groups(groups(model)), lr=1e-2)
        return model, optimizer, CheckpointManager(model, optimizer)

    _, optimizer, checkpoints = started()
    for group in optimizer.param_groups:
        group["lr"] = 1e-3 / (1 + group["sdp_group"])
    checkpoints.save_checkpoint(rank.folder / "equal", "tag")
    _, other, loading = started()
    loading.load_checkpoint(rank.folder / "equal")
    assert [group["lr"] for group in other.param_groups] == [group["lr"] for group in optimizer.param_groups]
    model = llama(tied=True, seed=5)
    settings = {"train_micro_batch_size_per_gpu": 2, "subnetwork_data_parallel": {"holders": 1}}
    engine = engine_of(settings, model, optimizer=torch.optim.AdamW(groups(model), lr=1e-2))
    engine.load_checkpoint(rank.folder / "equal")
    assert engine.get_lr() == [1e-3, 5e-4]


@pytest.mark.world(2)
def test_after_an_evaluation(rank: Rank) -> None:
    """Forward passes leave parameters gathered; a load is seen by the next one, also one from Hugging Face's format."""
    run, other = ShardedRun(), ShardedRun(llama(tied=True, seed=5), holders=2)
    run.train(rank, 1)
    run.checkpoints.save_checkpoint(rank.folder / "evaluated", "tag")
    before = evaluated(run.model, TOKENS)
    run.train(rank, 1, first=1)
    assert not torch.equal(evaluated(run.model, TOKENS), before)
    run.checkpoints.load_checkpoint(rank.folder / "evaluated", "tag")
    assert torch.equal(evaluated(run.model, TOKENS), before)
    assert not torch.equal(evaluated(other.model, TOKENS), before)
    save_pretrained(run.model, rank.folder / "hf")
    other.checkpoints.load_pretrained(rank.folder / "hf")
    assert_identical(full_state_dict(other.model), full_state_dict(run.model))
    torch.testing.assert_close(evaluated(other.model, TOKENS), before)


@pytest.mark.world(2)
def test_across_hosts(rank: Rank) -> None:
    """A run of the DeepSpeed host goes on here under another plan, and one of this host there."""

    def engine(**block: Any) -> Any:
        model = llama(tied=True, seed=5)
        groups = make_optimizer("AdamW", two_groups(dict(model.named_parameters())))
        settings = {"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}
        return engine_of(settings | {"subnetwork_data_parallel": {"holders": 1} | block}, model, optimizer=groups)

    here, there, folder = ShardedRun(**NEURON), engine(), rank.folder / "hosts"
    train(there, num_steps=2)
    there.save_checkpoint(folder / "there", "tag", client_state={"position": 2})
    path, client_state = here.checkpoints.load_checkpoint(folder / "there")
    assert (path, client_state, here.checkpoints.global_steps) == (str(folder / "there/tag"), {"position": 2}, 2)
    here.checkpoints.save_checkpoint(folder / "here", "tag")
    if rank.rank == 0:
        assert_same_run(folder / "there/tag", folder / "here/tag")
    here.train(rank, 1, first=2)
    here.checkpoints.save_checkpoint(folder / "on", "tag")
    back = engine(regime="backward")
    back.load_checkpoint(folder / "on", load_lr_scheduler_states=False)
    assert back.global_steps == 3
    back.save_checkpoint(folder / "back", "tag")
    if rank.rank == 0:
        assert_same_run(folder / "on/tag", folder / "back/tag")


@pytest.mark.world(2)
def test_what_is_refused(rank: Rank) -> None:
    """On all ranks, before anything is changed, and training goes on."""
    run, folder = ShardedRun(), rank.folder / "refused"
    run.train(rank, 1)
    run.checkpoints.save_checkpoint(folder)
    other = ShardedRun(llama(3, tied=True))
    refusal(ValueError, lambda: other.checkpoints.load_checkpoint(folder), "of another model", "layers.2")
    sgd = ShardedRun(kind=torch.optim.SGD)
    refusal(ValueError, lambda: sgd.checkpoints.load_checkpoint(folder), "is of Adam, the optimizer is SGD")
    warmer = CheckpointManager(other.model, other.optimizer, torch.optim.lr_scheduler.ConstantLR(other.optimizer))
    refusal(ValueError, lambda: warmer.load_checkpoint(folder), "LR scheduler", "'lr_lambdas'", "'total_iters'")
    assert warmer.load_checkpoint(rank.folder / "nothing") == (None, None)
    rows = ShardedRun(kind=KeepsRows)
    refusal(ValueError, lambda: rows.train(rank, 1), "KeepsRows keeps 'rows' of shape (3,)")
    refusal(ValueError, lambda: rows.checkpoints.save_checkpoint(folder), "KeepsRows keeps 'rows' of shape (3,)")
    neurons = sdp_deepspeed.fully_shard(llama(), None, {"holders": 1, "strategy": "neuron"})
    matrices = torch.optim.Muon([p for p in neurons.parameters() if p.dim() == 2])
    refusal(ValueError, lambda: CheckpointManager(neurons, matrices), "Muon updates whole matrices")
    early = torch.optim.AdamW(llama().parameters())
    refusal(ValueError, lambda: CheckpointManager(rows.model, early), "not the sharded model's")
    refusal(ValueError, lambda: CheckpointManager(llama(), early), "was not sharded by sdp_deepspeed.fully_shard")
    assert [path.name for path in folder.glob("global_step*")] == ["global_step1"]
    run.train(rank, 1, first=1)
    call = run.checkpoints.save_checkpoint if rank.rank == 0 else run.checkpoints.load_checkpoint
    refusal(RuntimeError, partial(call, folder), "made different calls")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str | None]:
    folder = tmp_path_factory.mktemp("checkpoints")
    return outcomes_of(
        [(size, name, partial(write, name, folder)) for name, (size, _) in RUNS.items()],
        [(RUNS[b][0], f"{a}-{b}", partial(go_on, a, b, folder)) for a, b in PAIRS],
    )


@pytest.mark.parametrize("name", [*RUNS, *(f"{a}-{b}" for a, b in PAIRS)])
def test_another_layout(name: str, outcomes: Mapping[str, str | None]) -> None:
    assert outcomes[name] is None, outcomes[name]
