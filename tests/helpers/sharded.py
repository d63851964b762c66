"""Models under FSDP2 for tests: trained beside the reference, and runs with optimizer, schedule and checkpoints."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import sdp_deepspeed
from sdp_deepspeed.architectures import Branch, register
from sdp_deepspeed.batch_norm import tracking_norms
from sdp_deepspeed.checkpoint.files import Reader
from sdp_deepspeed.checkpoint.save_and_load import COMMON, read_bytes
from sdp_deepspeed.fsdp import CheckpointManager, clip_grad_norm_, full_state_dict, param_groups, sharded_model_of
from tests.helpers.checkpointed_runs import dense_tensors
from tests.helpers.models import batches, inputs_of, llama, loss_of, two_groups
from tests.helpers.oracle import from_rank_0, make_optimizer
from tests.helpers.ranks import Rank
from tests.helpers.training import assert_identical
from tests.reference.virtual_workers import Reference

NUM_STEPS, CLIP = 4, 0.5
DRIFT = 1e-5  # of fp32 weights, relative to their way (tests/helpers/oracle.py)


def sharded(model: nn.Module, block: Mapping[str, Any], **options: Any) -> Any:
    return sdp_deepspeed.fully_shard(model, None, block, **options)


def optimizer_of(model: nn.Module, kind: str = "AdamW") -> torch.optim.Optimizer:
    """With the groups of the reference, divided by mesh."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return make_optimizer(kind, param_groups(two_groups(trained)))


def micro_steps(model: Any, own: Sequence[torch.Tensor]) -> list[float]:
    """Forward and backward of each micro-batch, averaged in the last; their losses."""
    losses = []
    for number, batch in enumerate(own):
        model.set_requires_gradient_sync(number == len(own) - 1)
        loss = loss_of(model, batch)
        (loss / len(own)).backward()
        losses.append(loss.item())
    return losses


def check_against_reference(
    rank: Rank,
    model: Any,
    block: Mapping[str, Any],
    *,
    optimizer: str = "AdamW",
    accumulation: int = 1,
    prepare: Callable[[Any], None] = lambda model: None,
    parallelize: Callable[[nn.Module], DeviceMesh | None] | None = None,
    **options: Any,
) -> Any:
    """Train beside the reference, and compare losses, norms, evaluation, and every dense parameter.

    Args:
        prepare: changes the sharded model before it trains.
        parallelize: over another axis, first; gives the data-parallel one. None if it did something else to the model.
        options: of `fully_shard`.

    Returns:
        The sharded model.
    """
    dense = deepcopy(model)
    mesh = parallelize(model) if parallelize is not None else None
    model = sdp_deepspeed.fully_shard(model, mesh, block, **options)
    prepare(model)
    dense.to(sharded_model_of(model).device)
    initial = {name: value.clone() for name, value in dense.state_dict().items()}
    size, place = sharded_model_of(model).mesh.size(), sharded_model_of(model).rank
    plan = sharded_model_of(model).plan
    own_optimizer = optimizer_of(model, optimizer)
    is_scaled = block.get("branch_scale") != "none"
    reference = Reference(
        dense, plan, lambda named: make_optimizer(optimizer, two_groups(named)), loss_of, CLIP, is_scaled=is_scaled
    )
    for number, step in enumerate(itertools.islice(batches(size, accumulation), NUM_STEPS)):
        losses, norm = from_rank_0(partial(reference.step, step))
        torch.testing.assert_close(micro_steps(model, step[place]), losses[place], rtol=1e-5, atol=1e-5)
        total = clip_grad_norm_(model.parameters() if number % 2 and mesh is None else model, CLIP)
        assert abs(total.item() - norm) <= 1e-4 * norm, (total.item(), norm)
        own_optimizer.step()
        own_optimizer.zero_grad()
        if number in (NUM_STEPS // 2, NUM_STEPS - 1):  # training goes on as if nobody had looked
            dense.load_state_dict(from_rank_0(dense.state_dict))
            if tracking_norms(dense):  # whose running statistics are averaged when an evaluation begins
                evaluated(model, step[place][0])
            compare_statistics(model, from_rank_0(lambda: reference.buffers)[place])
            take_buffers(model, dense)
            # In evaluation the model is the dense one, whatever this rank holds.
            found, expected = (evaluated(each, step[place][0]) for each in (model, dense))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    compare_state(full_state_dict(model), dense, initial)
    return model


def compare_statistics(model: Any, expected: Mapping[str, torch.Tensor]) -> None:
    """Of batch norms, as far as this rank has them: means over the ranks that run them, of sums of a few hundred
    activations in another order."""
    mask = sharded_model_of(model).mask
    for name, values in own_buffers(model).items():
        if name not in expected:  # no statistic
            continue
        for piece in (piece for piece, _ in mask.buffer_pieces[name] if mask.is_held(piece)):
            whole = expected[name].to(values.device)
            assert (mask.view(piece, values) - piece.narrow(whole)).abs().max() <= 1e-5 * whole.abs().max(), name


def own_buffers(model: Any) -> dict[str, torch.Tensor]:
    """Those that this rank has."""
    return {name: buffer for name, buffer in model.named_buffers() if buffer.numel()}


@torch.no_grad()
def evaluated(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """Logits in evaluation mode; training mode after it."""
    batch = batch.to(getattr(model, "device", batch.device))
    logits: torch.Tensor = model.eval()(**inputs_of(model, batch)).logits
    model.train()
    return logits


def compare_state(state: Mapping[str, torch.Tensor], dense: nn.Module, initial: Mapping[str, torch.Tensor]) -> None:
    """Every tensor, within the drift of its way and the rounding of each step; nothing on ranks other than 0."""
    if dist.get_rank() != 0:
        assert not state
        return
    assert list(state) == list(initial)
    for name, expected in dense.named_parameters():
        moved, size = (expected - initial[name]).norm(), expected.norm()
        difference = (state[name].to(expected.device) - expected).norm()
        assert difference <= DRIFT * moved + NUM_STEPS * 2.0**-24 * size, (name, difference, moved)


@torch.no_grad()
def take_buffers(model: Any, dense: nn.Module) -> None:
    """Statistics with which this rank evaluates: its own where it has some, else those of a holder."""
    own = own_buffers(model)
    if persistent := dict(dense.named_buffers()).keys() & dense.state_dict().keys():
        state = gathered_state(model)
        for name in persistent:
            found = own.get(name, state[name])
            dense.get_buffer(name).copy_(found if found.shape == state[name].shape else state[name])


def gathered_state(model: Any) -> dict[str, torch.Tensor]:
    """The dense model on every rank."""
    states = [full_state_dict(model)]
    dist.broadcast_object_list(states)
    return states[0]


class ShardedRun:
    """A run with optimizer, schedule and checkpoints.

    Args:
        mesh: the data-parallel ranks; None for all.
    """

    def __init__(
        self,
        model: Any = None,
        mesh: DeviceMesh | None = None,
        *,
        kind: type[Any] = torch.optim.AdamW,
        **block: Any,
    ) -> None:
        self.model: Any = sdp_deepspeed.fully_shard(model or llama(tied=True), mesh, {"holders": 1} | block)
        trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        self.optimizer = kind(param_groups(two_groups(trained)), lr=1e-2)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: 0.9**step)
        self.checkpoints = CheckpointManager(self.model, self.optimizer, self.scheduler)

    def train(self, rank: Rank, num_steps: int, *, first: int = 0, seed: int = 1) -> list[float]:
        losses, sharded = [], sharded_model_of(self.model)
        for step in itertools.islice(batches(sharded.mesh.size(), 1, seed), first, first + num_steps):
            loss = loss_of(self.model, step[sharded.rank][0])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            losses.append(loss.item())
        return losses


HOW = ("fused", "foreach", "capturable", "differentiable")  # options that change no result


def optimizer_in(folder: Path) -> dict[str, Any]:
    """What a checkpoint says of its optimizer, but for how it steps: options and scalars by parameter."""
    found = read_bytes(Reader(folder), COMMON)["optimizer"]
    options = [{k: v for k, v in group.items() if k not in (*HOW, "initial_lr")} for group in found["options"]]
    by_name = {name: (options[group], found["scalars"][group]) for name, group in found["groups"].items()}
    return {"kind": found["kind"]} | by_name


def assert_same_run(one: Path, other: Path) -> None:
    """Dense weights, moments, counts and options."""
    assert_identical(dense_tensors(one), dense_tensors(other))
    assert optimizer_in(one) == optimizer_in(other)


def seen_buffers(run: ShardedRun) -> dict[str, torch.Tensor]:
    """Those that this rank has, without tables that a model computes itself."""
    return {name: value for name, value in own_buffers(run.model).items() if "rotary" not in name}


def check_resumed(rank: Rank, folder: Path, run: ShardedRun, resumed: ShardedRun) -> None:
    """Train, save, and resume in another run: losses, weights, moments, schedule, buffers and random numbers are those
    of the uninterrupted run, bit for bit."""
    run.train(rank, 2)
    run.checkpoints.save_checkpoint(folder)
    run.checkpoints.wait_for_checkpoint()
    drawn = torch.rand(3)
    resumed.train(rank, 1, seed=7)
    resumed.checkpoints.load_checkpoint(folder)
    assert torch.equal(torch.rand(3), drawn)
    assert_identical(seen_buffers(resumed), seen_buffers(run))
    assert resumed.scheduler.state_dict() == run.scheduler.state_dict()
    assert resumed.train(rank, 2, first=2) == run.train(rank, 2, first=2)
    for name, each in (("uninterrupted", run), ("resumed", resumed)):
        each.checkpoints.save_checkpoint(folder, name)
        each.checkpoints.wait_for_checkpoint()
    if rank.rank == 0:
        assert_same_run(folder / "uninterrupted", folder / "resumed")


class Layer(nn.Module):
    """Two branches of their own widths; `parallel` runs both norms first, so that units run into each other."""

    def __init__(self, *widths: int, parallel: bool = False) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(4), nn.LayerNorm(4)
        bodies = [nn.Sequential(nn.Linear(4, width), nn.GELU(), nn.Linear(width, 4)) for width in widths]
        self.one, self.two = bodies
        self.parallel = parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.parallel:
            first, second = self.norm_1(x), self.norm_2(x)
            return x + self.one(first) + self.two(second)
        x = x + self.one(self.norm_1(x))
        return x + self.two(self.norm_2(x))


register(Layer, Branch("one", norm="norm_1", body="one"), Branch("two", norm="norm_2", body="two"))
