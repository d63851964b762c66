"""Models that run inside the trained one, on both hosts: a frozen teacher, and passes of the student under no_grad."""

from __future__ import annotations

from copy import deepcopy
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import TestCase

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from sdp_deepspeed.fsdp import sharded_model_of
from tests.helpers.models import llama, loss_of
from tests.helpers.ranks import Rank
from tests.helpers.sharded import sharded
from tests.helpers.training import engine_of, own_batches, sgd

pytestmark = pytest.mark.world(3)
CHECKS, WARNINGS = TestCase(), ("sdp_deepspeed", "WARNING")


class Taught(nn.Module):
    """Learns from the logits of another model, or of its own, in a pass under no_grad in the middle of its forward."""

    def __init__(self, teacher: nn.Module | None = None, *, evaluates: bool = False) -> None:
        super().__init__()
        self.student, self.teacher, self.evaluates = llama(), teacher, evaluates
        self.targets: Any = None  # of the last pass; the next one uses them if there are some

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        first = self.student(input_ids=input_ids, labels=labels)
        self.logits = first.logits.detach()
        if self.targets is None:
            teacher: Any = self.teacher or self.student
            with torch.no_grad():
                was_training = teacher.training
                self.targets = teacher.train(was_training and not self.evaluates)(input_ids=input_ids).logits
                teacher.train(was_training)
        second = self.student(input_ids=input_ids.flip(1)).logits
        first.loss = first.loss + (second - self.targets).square().mean()
        return first


def on(host: str, model: nn.Module, **block: Any) -> tuple[Any, Any]:
    """What trains the model, and its plan."""
    if host == "deepspeed":
        engine = engine_of(sgd(**block), model)
        return engine, engine.plan
    model = sharded(model, block)
    return model, sharded_model_of(model).plan


def backward(run: Any, batch: torch.Tensor) -> list[torch.Tensor]:
    """The gradients of a pass, which are dropped."""
    loss = loss_of(run, batch)
    getattr(run, "backward", torch.Tensor.backward)(loss)
    gradients = [p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad for p in run.parameters()]
    result = [gradient.clone() for gradient in gradients if gradient is not None]
    run.zero_grad()
    return result


@pytest.mark.parametrize(("host", "strategy"), [("deepspeed", "neuron"), ("fsdp2", "block")])
def test_a_frozen_teacher_is_whole(rank: Rank, host: str, strategy: str) -> None:
    """In training mode, as `train()` of the model leaves it, and in evaluation mode, where nothing is gathered for it.
    No warning concerns it."""
    teacher: Any = llama(seed=1).requires_grad_(False)
    whole: Any = deepcopy(teacher)
    model = Taught(teacher)
    run, plan = on(host, model, holders=2, strategy=strategy)
    assert all(unit.name.startswith("student.") for unit in plan.units)
    is_subnetwork = []
    if host == "deepspeed":
        teacher.register_forward_hook(lambda *_: is_subnetwork.append(run._core.mask.is_applied))
    else:
        alone = [module for group in sharded_model_of(run).fsdp_groups for module in group]
        assert len({*alone} & {*teacher.modules()}) == 4, "its branches are gathered layer by layer"
    batch = own_batches(rank, 1)[0]
    for evaluates in (False, True):
        model.evaluates, model.targets = evaluates, None
        with CHECKS.assertNoLogs(*WARNINGS):
            backward(run, batch)
        assert all(is_subnetwork)
        assert torch.equal(model.targets, whole(batch).logits)


@pytest.mark.parametrize(("host", "strategy"), [("deepspeed", "block"), ("fsdp2", "neuron")])
def test_evaluation_of_a_part(rank: Rank, host: str, strategy: str) -> None:
    """In a pass of the model in training mode: the dense model's, and the gradients are those of a constant."""
    model = Taught(evaluates=True)
    whole: Any = deepcopy(model.student)
    run, _ = on(host, model, holders=2, strategy=strategy)
    batch = own_batches(rank, 1)[0]
    found = backward(run, batch)
    torch.testing.assert_close(model.targets, whole(batch).logits.detach())
    assert host == "deepspeed" or sharded_model_of(run).has_trained, "batch norms are averaged before an evaluation"
    expected = backward(run, batch)  # with these targets
    assert len(found) == len(expected)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize("host", ["deepspeed", "fsdp2"])
def test_no_gradients_in_training_mode(rank: Rank, host: str) -> None:
    """The subnetwork's, with one warning."""
    model = Taught()
    run, _ = on(host, model, holders=2)
    batch = own_batches(rank, 1)[0]
    with CHECKS.assertLogs(*WARNINGS) as logged:
        for _ in range(2):
            model.targets = None
            backward(run, batch)
            assert torch.equal(model.targets, model.logits)
    assert len(logged.records) == 1


class Checkpointed(nn.Module):
    """Runs the layers of a Llama in reentrant checkpoints, whose first pass is under no_grad."""

    def __init__(self) -> None:
        super().__init__()
        self.inner: Any = llama()
        self.checkpoints = True

    def forward(self, input_ids: torch.Tensor, **_: Any) -> Any:
        model = self.inner.model
        x = model.embed_tokens(input_ids)
        positions = model.rotary_emb(x, torch.arange(x.shape[1])[None])
        for layer in model.layers:
            run = partial(layer, position_embeddings=positions)
            x = checkpoint(run, x, use_reentrant=True) if self.checkpoints else run(x)
        return SimpleNamespace(loss=self.inner.lm_head(x).square().mean())


def test_reentrant_checkpoints_are_no_evaluation(rank: Rank) -> None:
    """Of layers in training mode, without a warning, or in evaluation mode: the gradient is that without them."""
    model: Any = Checkpointed()
    engine, batch = engine_of(sgd(holders=2), model), own_batches(rank, 1)[0]
    for training in (True, False):
        model.inner.train(training)
        gradients = []
        for model.checkpoints in (True, False):
            with CHECKS.assertNoLogs(*WARNINGS):
                gradients.append(backward(engine, batch))
        assert len(gradients[0]) == len(gradients[1])
        assert all(map(torch.equal, *gradients))
