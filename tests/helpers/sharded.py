"""Models under FSDP2 for tests: trained beside the reference, and compared with it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

import sdp_deepspeed
from sdp_deepspeed.batch_norm import tracking_norms
from sdp_deepspeed.fsdp import clip_grad_norm_, full_state_dict, param_groups, sharded_model_of
from tests.helpers.models import batches, inputs_of, loss_of, two_groups
from tests.helpers.oracle import from_rank_0, make_optimizer
from tests.helpers.ranks import Rank
from tests.reference.virtual_workers import Reference

NUM_STEPS = 4
DRIFT = 1e-5  # of fp32 weights, relative to their way (tests/helpers/oracle.py)


def sharded(model: nn.Module, block: Mapping[str, Any], **options: Any) -> Any:
    return sdp_deepspeed.fully_shard(model, None, block, **options)


def optimizer_of(model: nn.Module, kind: str = "AdamW", **options: Any) -> torch.optim.Optimizer:
    """With the groups of the reference, divided by mesh."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    optimizer = make_optimizer(kind, param_groups(two_groups(trained)))
    for group in optimizer.param_groups:
        group.update(options)
    return optimizer


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
    clip: float = 0.5,
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
        dense, plan, lambda named: make_optimizer(optimizer, two_groups(named)), loss_of, clip, is_scaled=is_scaled
    )
    for number, step in enumerate(itertools.islice(batches(size, accumulation), NUM_STEPS)):
        losses, norm = from_rank_0(partial(reference.step, step))
        found = micro_steps(model, step[place])
        torch.testing.assert_close(found, losses[place], rtol=1e-5, atol=1e-5)
        total = (
            clip_grad_norm_(model.parameters(), clip) if number % 2 and mesh is None else clip_grad_norm_(model, clip)
        )
        assert abs(total.item() - norm) <= 1e-4 * norm, (total.item(), norm)
        own_optimizer.step()
        own_optimizer.zero_grad()
        if number in (NUM_STEPS // 2, NUM_STEPS - 1):  # training goes on as if nobody had looked
            dense.load_state_dict(from_rank_0(dense.state_dict))
            if tracking_norms(dense):  # whose running statistics are averaged when an evaluation begins
                evaluated(model, step[place][0])
            compare_statistics(model, from_rank_0(lambda: reference.buffers)[place])
            take_buffers(model, dense)
            compare_evaluation(model, dense, step[place][0])
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


def compare_evaluation(model: Any, dense: nn.Module, batch: torch.Tensor) -> None:
    """In evaluation the model is the dense one, whatever this rank holds."""
    torch.testing.assert_close(evaluated(model, batch), evaluated(dense, batch), rtol=1e-4, atol=1e-4)


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
