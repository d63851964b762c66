"""The engine against `reference/`: one case runs both over a few steps and compares everything.

Of the engine only public calls are used: `deepspeed.initialize`, forward, `backward`, `step`, `plan`, `dense()`,
`get_global_grad_norm`, `get_lr`, `skipped_steps`, the loss scale, the parameters of its module, and DeepSpeed's
`safe_get_full_fp32_param`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from deepspeed.utils import safe_get_full_fp32_param
from torch import nn
from transformers import PreTrainedModel

import sdp_deepspeed  # noqa: F401  (installs the import hook)
from sdp_deepspeed.masking.proof import proven_branches
from tests.helpers import models
from tests.helpers.fp16_runs import fp16_is_supported
from tests.helpers.models import batches, two_groups
from tests.helpers.oracle_grid import KEY, PRECISIONS, Case
from tests.helpers.ranks import Rank
from tests.reference.virtual_workers import LossScale, Reference

# Moments, momentum and what the exchange returned all act from the second step on; test_parity.py takes more.
NUM_STEPS = 3
DTYPES = {"bf16": torch.bfloat16, "bf16+fp32": torch.bfloat16, "fp16": torch.float16}  # of weights, else fp32
# In fp16 the second step overflows, on the last worker, and is left out: there is one more. The scale goes 128, 128,
# 64, 64, 128.
OVERFLOWS, TOO_LARGE = 1, 1e30
Sample = tuple[torch.Tensor, float]  # tokens, and what their loss is multiplied by


def make_optimizer(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """AdamW's epsilon stands far above rounding (1e-9): gradients that are zero in exact arithmetic, such as those of
    GPT-2's key biases, would otherwise be blown up to steps of a size that means nothing."""
    if name == "AdamW":
        return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def optimizer_of(case: Case, named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
    """Of one param group, or two: matrices decay, the rest does not, and has half the learning rate. That of a ResNet
    is small: batch norms of few numbers blow up what rounding makes of a long step."""
    groups = two_groups(named) if case.groups == 2 else [{"params": list(named.values())}]
    optimizer = make_optimizer(case.optimizer, groups)
    for number, group in enumerate(optimizer.param_groups):
        group["lr"] /= (1 + number) * (10 if case.model.startswith("resnet") else 1)
    return optimizer


def scheduler_of(case: Case, optimizer: Any) -> Any:
    """From a third of the learning rate to all of it in the third step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / NUM_STEPS))


def loss_of(case: Case, model: Any, sample: Sample) -> torch.Tensor:
    """As a user computes it; the engine casts by itself, the reference has to be told."""
    tokens, factor = sample
    cast = case.precision == "autocast" and isinstance(model, PreTrainedModel)
    with torch.autocast(model.device.type, torch.bfloat16) if cast else nullcontext():
        loss = models.loss_of(model, tokens)
    return loss if factor == 1 else loss * factor


def steps_of(case: Case) -> Iterator[list[list[Sample]]]:
    """Per step and worker the micro-batches."""
    number = NUM_STEPS + (case.precision == "fp16")
    for index, step in enumerate(itertools.islice(batches(case.num_workers, case.accumulation), number)):
        samples = [[(tokens, 1.0) for tokens in own] for own in step]
        if case.precision == "fp16" and index == OVERFLOWS:
            samples[-1][-1] = samples[-1][-1][0], TOO_LARGE
        yield samples


def start(case: Case, model: nn.Module, *, mpu: Any = None, **block: Any) -> Any:
    """An engine with a client optimizer, and scheduler."""
    optimizer = optimizer_of(case, dict(model.named_parameters()))
    config = case.config
    config[KEY] |= block
    with fp16_is_supported():
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=optimizer,
            config=config,
            lr_scheduler=partial(scheduler_of, case) if case.scheduler != "none" else None,
            mpu=mpu,
        )
    return engine


def reference_of(case: Case, dense: nn.Module, plan: Any) -> Reference:
    scale = None
    if case.precision == "fp16":
        settings = PRECISIONS["fp16"]["fp16"]
        scale = LossScale(2.0 ** settings["initial_scale_power"], settings["loss_scale_window"])
    return Reference(
        dense,
        plan,
        partial(optimizer_of, case),
        partial(loss_of, case),
        case.clip,
        sum_in_fp32=case.precision == "bf16+fp32",
        loss_scale=scale,
        make_scheduler=partial(scheduler_of, case) if case.scheduler != "none" else None,
        is_scaled=case.branch_scale == "training",
    )


def check_case(case: Case, rank: Rank, **block: Any) -> None:
    """Train both; compare losses of each micro-step, norms, and halfway and in the end the dense model.

    Args:
        block: keys of the config block, over the case's own.
    """
    model = case.specimen.build()
    dense = deepcopy(model)
    for built in (model, dense):  # as ranks know it (known_branches.py): casts and checkpointing would be derived anew
        proven_branches(built, "neuron")
    dense.to(DTYPES.get(case.precision, torch.float32))
    checkpoint(case, model)
    engine = start(case, model, **({"check_agreement": True} | block))
    dense.to(engine.device)
    run = Run(case, engine, reference_of(case, dense, engine.plan), rank.rank // case.tensor_parallel)
    for number, step in enumerate(steps_of(case)):
        run.train_step(number, step)
        if number == NUM_STEPS // 2:  # training goes on as if nobody had looked
            run.compare_dense(step)
    run.compare_dense(step)


@dataclass
class Run:
    """An engine and the reference, which runs on rank 0 alone, not on each of few cores again.

    Args:
        worker: this rank's number among the data-parallel ranks; tensor-parallel ones are one worker together.
    """

    case: Case
    engine: Any
    reference: Reference
    worker: int

    def __post_init__(self) -> None:
        self.dense = self.reference.model
        self.expected = deepcopy(self.dense)
        self.initial = {name: p.detach().float().clone() for name, p in self.dense.named_parameters()}

    def train_step(self, number: int, step: Sequence[Sequence[Sample]]) -> None:
        """A step of both, compared loss by loss."""
        case, engine, samples = self.case, self.engine, step[self.worker]
        losses, norm, scale, rates = from_rank_0(lambda: self._step_reference(step))
        for sample, expected in zip(samples, losses[self.worker], strict=True):
            loss = loss_of(case, engine, sample)
            engine.backward(loss)
            if not case.by_caller:
                engine.step()
            close = abs(loss.item() - expected) <= loss_tolerance(case) * sample[1]
            assert close or loss.item() == expected, (loss.item(), expected)
        if case.by_caller:
            engine.step()
        found = float(engine.get_global_grad_norm())
        assert found == norm or abs(found - norm) <= norm_tolerance(case, number) * norm, (number, found, norm)
        assert engine.get_lr() == rates, (number, engine.get_lr(), rates)
        if case.precision == "fp16":
            now = engine.optimizer.cur_scale, engine.skipped_steps
            assert now == (scale, int(number >= OVERFLOWS)), (number, now, scale)

    def _step_reference(self, step: Sequence[Sequence[Sample]]) -> tuple[list[list[float]], float, float, list[float]]:
        """Losses, norm, and of the next step loss scale and learning rates."""
        reference = self.reference
        losses, norm = reference.step(step)
        scale = reference.loss_scale.value if reference.loss_scale else 1.0
        return losses, norm, scale, [group["lr"] for group in reference.optimizer.param_groups]

    def compare_dense(self, step: Sequence[Sequence[Sample]]) -> None:
        """In evaluation the engine is the dense model, whatever this rank holds; then its weights and buffers."""
        case, engine, (tokens, _) = self.case, self.engine, step[self.worker][0]
        weights, buffers, masters = from_rank_0(
            lambda: (dict(self.dense.named_parameters()), self.reference.dense_buffers(), self.reference.masters)
        )
        expected = self.expected
        expected.load_state_dict(weights | buffers, strict=False)
        with engine.dense():
            state = {name: value.detach().clone() for name, value in engine.module.state_dict().items()}
        compare_weights(case, state, expected, self.initial)
        self.compare_statistics(state, buffers)
        if case.precision in DTYPES and case.tensor_parallel == 1:
            self.compare_masters(masters)
        engine.eval()
        expected.eval()
        with torch.no_grad():
            losses = [loss_of(case, model, (tokens, 1.0)).item() for model in (engine, expected)]
        engine.train()
        assert abs(losses[0] - losses[1]) <= loss_tolerance(case), losses

    def compare_masters(self, masters: Mapping[str, torch.Tensor]) -> None:
        """Of weights in 16 bits; they are not rounded to those, so only rounding of gradients tells them apart."""
        differences, moves = [], []
        for name, parameter in self.engine.module.named_parameters():
            found = safe_get_full_fp32_param(parameter)
            differences.append((found - masters[name].detach()).norm())
            moves.append((masters[name].detach() - self.initial[name]).norm())
        found, moved = torch.stack(differences).norm(), torch.stack(moves).norm()
        assert found <= drift(self.case) * moved, (found, moved, found / moved)

    def compare_statistics(self, state: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> None:
        """Of batch norms: means over the ranks that run them, of sums of a few hundred activations in another order."""
        for name in expected.keys() & state.keys():
            difference = (state[name].double() - expected[name].double()).abs().max()
            assert difference <= 1e-5 * expected[name].double().abs().max(), name


def compare_weights(
    case: Case, state: Mapping[str, torch.Tensor], expected: nn.Module, initial: Mapping[str, torch.Tensor]
) -> None:
    """All together within the drift of what they moved (fp32), each tensor within its rounding."""
    assert state.keys() == expected.state_dict().keys()
    differences, moves = [], []
    for name, parameter in expected.named_parameters():
        value = parameter.detach().float()
        assert state[name].shape == value.shape, name
        differences.append((state[name].float() - value).norm())
        moves.append((value - initial[name]).norm())
        assert differences[-1] <= tensor_tolerance(case, value, moves[-1]), (name, differences[-1], moves[-1])
    if case.precision in ("fp32", "autocast"):
        found, moved = torch.stack(differences).norm(), torch.stack(moves).norm()
        assert found <= drift(case) * moved, (found, moved, found / moved)


def checkpoint(case: Case, model: Any) -> None:
    """Have the layers of a model recompute their activations, if the case says so; and, reentrant, its head in two
    halves, whose gradients come one after the other, where that is not refused."""
    if case.checkpointing == "none":
        return
    is_reentrant = case.checkpointing == "reentrant"
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": is_reentrant})
    head = model.get_output_embeddings()
    if is_reentrant and head is not None and case.stage == 1 and not case.overlap:
        run = partial(torch.utils.checkpoint.checkpoint, head.forward, use_reentrant=True)
        head.forward = lambda hidden: torch.cat([run(half) for half in hidden.chunk(2)])


def from_rank_0(work: Callable[[], Any]) -> Any:
    """What `work` returns there, on every rank."""
    result = [work() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(result, src=0)
    return result[0]


def rounding(case: Case) -> float:
    """Of the weights' dtype: one unit in the last place of a value, relative to it."""
    return {"fp16": 2**-11, "fp32": 2**-24}.get(case.precision, 2**-8)


def loss_tolerance(case: Case) -> float:
    """fp32: sums of a few thousand terms in another order. Else weights have 8 significant bits (fp16: 11), so a weight
    that rounds the other way is off by 2**-8 of itself; a loss near log(61) = 4.1 averages over thousands of them, and
    stays within 2**-8 of it. T5 computes it in 16 bits, where two neighbors above 4 are 2**-5 apart."""
    if case.precision == "fp32":
        return 1e-5
    return (8 if case.model == "t5" else 4.1) * rounding(case)


def norm_tolerance(case: Case, step: int) -> float:
    """fp32: sums of a few thousand squares in another order. Else gradients are rounded to 8 bits (fp16: 11) on the
    wire and between micro-steps, at most 2**-8 of each element, thrice with three micro-steps. After the first step
    weights may have rounded the other way as well, which is allowed as much again: fp32 lies between the two."""
    if is_exact(case):
        return 0.1 * rounding(case) if step else 1e-5
    return 1e-5 if case.precision == "fp32" else (6 if step else 3) * rounding(case)


def is_exact(case: Case) -> bool:
    """In 16 bits, whether gradients are the reference's bit for bit while weights are: a worker that has a block has
    all of it, absent ones add exact zeros, and sums are in fp32. A wire of 16 bits (DeepSpeed's default) rounds a
    sum of micro-batches, which stage 2 sends one by one; and where the collective adds up, the sum over the holders."""
    sums_in_fp32 = case.precision in ("bf16+fp32", "autocast") and case.tensor_parallel == 1
    is_sent_exactly = case.precision == "autocast" or case.wire == "fp32" or dist.get_backend() == "gloo"
    sums_in_fp32 = sums_in_fp32 and is_sent_exactly and case.checkpointing != "reentrant"  # it adds up two halves
    if case.model == "t5" and case.checkpointing != "none":
        return False  # gradients of what all layers read (position biases, the encoder's output) add in another order
    is_sent_rounded = case.precision == "bf16+fp32" and case.wire != "fp32" and case.accumulation > 1 and case.stage < 2
    return sums_in_fp32 and not is_sent_rounded and case.regime == "forward" and case.strategy == "block"


def drift(case: Case) -> float:
    """Of fp32 weights, or fp32 masters of others, relative to their way.

    fp32: 1e-5 is 170 roundings of 2**-24. Tensor-parallel ranks add up each activation in another order than the
    reference; under SGD that stays below 1e-5 too (4e-6 seen), but AdamW, for which the size of a gradient hardly
    counts, makes it ten times as much (4e-5 seen). So do branches that are multiplied by 3 and more (4e-5 seen).

    16 bits: a gradient is rounded where it is computed, after each micro-batch, on the wire and where the average is
    kept, so four times at most, by half a unit in the last place; weights that round the other way are allowed as much
    again. T5 does not scale its scores, and its neurons switch off and on: five times as much (2% seen in bf16). Where
    nothing is rounded otherwise a tenth of one rounding is left, for single weights that round the other way later.
    """
    if case.precision == "fp32":
        is_multiplied = case.branch_scale == "training" and 2 * case.holders < case.num_subnetworks
        return 1e-4 if (case.tensor_parallel > 1 or is_multiplied) and case.optimizer == "AdamW" else 1e-5
    return (0.1 if is_exact(case) else 20 if case.model == "t5" else 4) * rounding(case)


def tensor_tolerance(case: Case, expected: torch.Tensor, moved: torch.Tensor) -> float:
    """For one tensor. fp32: the drift of its way, plus half a unit in the last place (2**-24 of the value) for each
    step's rounding of the weight. Else one unit in the last place where master and weight round differently, plus what
    the loss of one wrong unit causes, in bf16 at most 5% of the way, in fp16 with three bits more an eighth."""
    size = float(expected.norm())
    if case.precision == "fp32":
        return drift(case) * float(moved) + NUM_STEPS * rounding(case) * size
    return rounding(case) * (size + 0.05 * 2**8 * float(moved))
