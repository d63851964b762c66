"""The engine against `reference/`: one case runs both over a few steps and compares everything."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

import sdp_deepspeed  # noqa: F401  (installs the import hook)
from sdp_deepspeed.checkpoint.state.boxes import Box
from sdp_deepspeed.reference.virtual_workers import Reference
from tests.helpers.fp16_runs import fp16_is_supported
from tests.helpers.models import batches, loss_of, two_groups
from tests.helpers.oracle_grid import BUCKETS, Case, by_rules, full_grid, other_families, sample
from tests.helpers.ranks import Rank
from tests.helpers.whole_tensors import WHOLE_TENSORS

# Moments, momentum and what the exchange returned all act from the second step on; test_parity.py takes more.
NUM_STEPS = 3
DTYPES = {"bf16": torch.bfloat16, "bf16+fp32": torch.bfloat16, "fp16": torch.float16}  # of weights, else fp32
LOSS_SCALE = 128  # static: gradients near 1e-2 leave the range in which fp16 has 11 bits neither above nor below


def make_optimizer(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """AdamW's epsilon stands far above rounding (1e-9): gradients that are zero in exact arithmetic, such as those of
    GPT-2's key biases, would otherwise be blown up to steps of a size that means nothing."""
    if name == "AdamW":
        return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)
    if name in WHOLE_TENSORS:
        return WHOLE_TENSORS[name](groups)
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def deepspeed_config(case: Case, **block: Any) -> dict[str, Any]:
    """The combination's config with what the case has beside it; `block` comes before the case's own."""
    result = case.combination.config(case.ranks, case.holders)
    result["subnetwork_data_parallel"] = case.block | block
    result["zero_optimization"] |= dict.fromkeys(("reduce_bucket_size", "allgather_bucket_size"), BUCKETS[case.buckets])
    result |= {"gradient_clipping": case.clip, "zero_allow_untested_optimizer": True}
    if case.optimizer == "Momentum8bit":
        result["subnetwork_data_parallel"]["allow_optimizer"] = "whole_tensors"
    if case.offload != "none":
        result["zero_force_ds_cpu_optimizer"] = False  # PyTorch's optimizers step in host memory too
    if case.precision == "fp16":
        result["fp16"]["loss_scale"] = LOSS_SCALE
    if case.model.startswith("resnet") and case.precision == "bf16":  # batch norms take one dtype only
        result.setdefault("data_types", {})["buffer_dtype"] = "bf16"
    if case.wire != "weights":
        result["communication_data_type"] = case.wire
    return result


def start(case: Case, model: nn.Module, **block: Any) -> Any:
    """An engine with a client optimizer of two param groups."""
    optimizer = make_optimizer(case.optimizer, two_groups(dict(model.named_parameters())))
    with fp16_is_supported():
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=deepspeed_config(case, **block))
    return engine


def check_case(case: Case, rank: Rank, **block: Any) -> None:
    """Train both and compare losses of each micro-step, norms, and halfway and in the end the dense model.

    Args:
        block: keys of the config block, before the case's own.
    """
    model = case.specimen.build()
    dense = deepcopy(model).to(DTYPES.get(case.precision, torch.float32))
    engine = start(case, model, check_agreement=True, **block)
    dense.to(engine.device)
    worker = engine.dp_group.rank  # tensor-parallel ranks are one: the same batches, one copy of a subnetwork
    reference = Reference(
        dense,
        engine.plan,
        lambda named: make_optimizer(case.optimizer, two_groups(named)),
        loss_of,
        case.clip,
        lr_by_coverage=case.lr_by_coverage,
    )
    initial = {name: value.detach().float().clone() for name, value in dense.state_dict().items()}
    for number, step in enumerate(itertools.islice(batches(case.num_workers, case.accumulation), NUM_STEPS)):
        losses, norm = from_rank_0(partial(reference.step, step))
        train_step(case, engine, step[worker], losses[worker])
        found = engine.get_global_grad_norm()
        assert abs(found - norm) <= norm_tolerance(case, number) * norm, (found, norm)
        if number in (NUM_STEPS // 2, NUM_STEPS - 1):  # halfway: training goes on as if nobody had looked
            dense.load_state_dict(from_rank_0(dense.state_dict))
            stored = engine.rank_state().weights.stored_weights()
            tolerance = 1e-5 if case.precision == "fp32" else 4 * NUM_STEPS * rounding(case)
            compare_statistics(stored, from_rank_0(lambda: reference.buffers)[worker], tolerance)
            take_buffers(engine, dense)
            compare_evaluation(case, engine, dense, step[worker][0])
            compare_tensors(case, engine, dense, initial)


def train_step(case: Case, engine: Any, micro_batches: Sequence[torch.Tensor], expected: Sequence[float]) -> None:
    """A step of the engine, compared loss by loss."""
    for batch, loss_expected in zip(micro_batches, expected, strict=True):
        loss = loss_of(engine, batch)
        engine.backward(loss)
        if not case.by_caller:
            engine.step()
        assert abs(loss.item() - loss_expected) <= loss_tolerance(case), (loss.item(), loss_expected)
    if case.by_caller:
        engine.step()


def from_rank_0(work: Callable[[], Any]) -> Any:
    """What `work` returns there, on every rank: the reference runs once, not on each of few cores again."""
    result = [work() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(result, src=0)
    return result[0]


def rounding(case: Case) -> float:
    """Of the weights' dtype: one unit in the last place of a value, relative to it."""
    return {"fp16": 2**-11, "fp32": 2**-24}.get(case.precision, 2**-8)


def loss_tolerance(case: Case) -> float:
    """fp32: sums of a few thousand terms in another order. Else weights have 8 significant bits (fp16: 11), so a weight
    that rounds the other way is off by 2**-8 of itself; a loss near log(61) = 4.1 averages over thousands of them, and
    stays within 2**-8 of it."""
    return 1e-5 if case.precision == "fp32" else 4.1 * rounding(case)


def norm_tolerance(case: Case, step: int) -> float:
    """fp32: sums of a few thousand squares in another order. Else gradients are rounded to 8 bits (fp16: 11) on the
    wire and between micro-steps, at most 2**-8 of each element, thrice with three micro-steps. After the first step
    weights may have rounded the other way as well, which is allowed as much again: fp32 lies between the two. Where
    batch norms have few numbers, gradients in bf16 are off by a tenth, in two halves by a fifth (seen beside fp32), and
    their norm by less than a quarter of that."""
    if case.precision != "fp32" and case.model.startswith("resnet"):
        return 0.05
    return 1e-5 if case.precision == "fp32" else (6 if step else 3) * rounding(case)


@torch.no_grad()
def compare_evaluation(case: Case, engine: Any, dense: nn.Module, batch: torch.Tensor) -> None:
    """In evaluation the engine is the dense model, whatever this rank holds."""
    engine.eval()
    loss, expected = loss_of(engine, batch).item(), loss_of(dense.eval(), batch).item()
    engine.train()
    dense.train()
    assert abs(loss - expected) <= loss_tolerance(case), (loss, expected)


def compare_statistics(
    stored: Iterable[tuple[str, Box, torch.Tensor]], expected: Mapping[str, torch.Tensor], tolerance: float
) -> None:
    """Of batch norms, as far as this rank has them: means over the ranks that run them. In fp32 sums of a few hundred
    activations in another order; in 16 bits those may round the other way, as the statistics may in each step, and what
    they are of.

    Args:
        stored: by dense name and place.
    """
    for name, box, values in stored:
        if name in expected:
            whole = expected[name].to(values.device)
            own = whole[box.slices_in(Box.whole(whole.shape))]
            assert (values - own).abs().max() <= tolerance * whole.abs().max(), name


@torch.no_grad()
def take_buffers(engine: Any, dense: nn.Module) -> None:
    """Statistics of the dense model are those of some workers."""
    with engine.dense(resident=True):
        own = dict(engine.module.named_buffers())
        for name, buffer in dense.named_buffers():
            buffer.copy_(own[name])


def compare_tensors(case: Case, engine: Any, dense: nn.Module, initial: dict[str, torch.Tensor]) -> None:
    """The dense weights: all together within the drift of what they moved (fp32), each tensor within its rounding."""
    with engine.dense(resident=True):
        state = {name: value.detach().float().clone() for name, value in engine.module.state_dict().items()}
    assert state.keys() == initial.keys()
    differences, moves = [], []
    for name, value in dense.named_parameters():
        expected = value.detach().float()
        assert state[name].shape == expected.shape, name
        differences.append((state[name] - expected).norm())
        moves.append((expected - initial[name]).norm())
        assert differences[-1] <= tensor_tolerance(case, expected, moves[-1]), (name, differences[-1], moves[-1])
    if case.precision == "fp32":
        assert torch.stack(differences).norm() <= drift(case) * torch.stack(moves).norm()


def drift(case: Case) -> float:
    """Of fp32 weights, relative to their way: 1e-5 is 170 roundings of 2**-24. Tensor-parallel ranks add up each
    activation in another order than the reference; under SGD that stays below 1e-5 too (4e-6 seen), but AdamW, for
    which the size of a gradient hardly counts, makes it ten times as much (4e-5 seen). Nor does it count for optimizers
    of whole tensors: five Newton-Schulz iterations stretch what is small by up to 3.4445**5 = 485."""
    small_counts = (case.tensor_parallel > 1 and case.optimizer == "AdamW") or case.optimizer in WHOLE_TENSORS
    return 1e-4 if small_counts else 1e-5


def tensor_tolerance(case: Case, expected: torch.Tensor, moved: torch.Tensor) -> float:
    """For one tensor. fp32: the drift of its way, plus half a unit in the last place (2**-24 of the value) for each
    step's rounding of the weight. Else one unit in the last place where master and weight round differently, plus what
    the loss of one wrong unit causes, in bf16 at most 5% of the way, in fp16 with three bits more an eighth."""
    size = float(expected.norm())
    if case.precision == "fp32":
        return drift(case) * float(moved) + NUM_STEPS * rounding(case) * size
    return rounding(case) * (size + 0.05 * 2**8 * float(moved))


def cases(size: int, *, full: bool) -> Iterator[tuple[str, Any]]:
    """Checks of one world size by name: the whole grid, or its share of the sample."""
    grid = full_grid(size) if full else sample()
    found = [case for case in (*grid, *other_families(full=full), *by_rules()) if case.ranks == size]
    for case in sorted(found, key=lambda case: case.tensor_parallel):  # DeepSpeed never forgets a group of AutoTP's
        yield str(case), CaseCheck(case)


@dataclass(frozen=True)
class CaseCheck:
    """A case as a check that can be sent to a rank."""

    case: Case

    def __call__(self, rank: Rank) -> None:
        check_case(self.case, rank)
