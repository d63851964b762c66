"""The engine against `reference.py`: one case runs both over a few steps and compares everything."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from models import SPECIMENS, batches, config, loss_of, two_groups
from oracle_grid import Case, full_grid, sample
from ranks import Rank
from torch import nn

import sdp_deepspeed  # noqa: F401  (arms the seam)
from sdp_deepspeed.reference import Reference

# Moments, momentum and what the exchange returned all act from the second step on; five keep the suite near a minute,
# and test_parity.py takes ten.
NUM_STEPS = 5


def make_optimizer(name: str, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """AdamW's epsilon stands far above rounding (1e-9): gradients that are zero in exact arithmetic, such as those of
    GPT-2's key biases, would otherwise be blown up to steps of a size that means nothing."""
    if name == "AdamW":
        return torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)
    return torch.optim.SGD(groups, lr=0.1, momentum=0.9)


def deepspeed_config(case: Case, **block: Any) -> dict[str, Any]:
    result = config(**block)
    del result["optimizer"]
    result |= {
        "gradient_accumulation_steps": case.accumulation,
        "zero_optimization": {"stage": case.stage},
        "gradient_clipping": case.clip,
        "zero_allow_untested_optimizer": True,
    }
    if case.precision != "fp32":
        result["bf16"] = {"enabled": True}
    if case.precision == "bf16+fp32":
        result["data_types"] = {"grad_accum_dtype": "fp32"}
    return result


def start(case: Case, model: nn.Module, **block: Any) -> Any:
    """An engine with a client optimizer of two param groups."""
    optimizer = make_optimizer(case.optimizer, two_groups(dict(model.named_parameters())))
    settings = deepspeed_config(case, **block)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine


def check_case(case: Case, rank: Rank, **block: Any) -> None:
    """Train both and compare losses of each micro-step, norms, and halfway and in the end the dense model.

    Args:
        block: keys of the config block, before the case's own.
    """
    model = SPECIMENS[case.model].build()
    dense = deepcopy(model) if case.precision == "fp32" else deepcopy(model).to(torch.bfloat16)
    engine = start(case, model, check_agreement=True, **(case.block | block))
    reference = Reference(
        dense, engine.plan, lambda named: make_optimizer(case.optimizer, two_groups(named)), loss_of, case.clip
    )
    initial = {name: value.detach().float().clone() for name, value in dense.state_dict().items()}
    for number, step in enumerate(itertools.islice(batches(rank.size, case.accumulation), NUM_STEPS)):
        losses, norm = from_rank_0(partial(reference.step, step))
        for batch, expected in zip(step[rank.rank], losses[rank.rank], strict=True):
            loss = loss_of(engine, batch)
            engine.backward(loss)
            engine.step()
            assert abs(loss.item() - expected) <= loss_tolerance(case), (loss.item(), expected)
        found = engine.get_global_grad_norm()
        assert abs(found - norm) <= norm_tolerance(case) * norm, (found, norm)
        if number in (NUM_STEPS // 2, NUM_STEPS - 1):  # halfway: training goes on as if nobody had looked
            dense.load_state_dict(from_rank_0(dense.state_dict))
            compare_evaluation(case, engine, dense, step[rank.rank][0])
            compare_tensors(case, engine, dense, initial)


def from_rank_0(work: Callable[[], Any]) -> Any:
    """What `work` returns there, on every rank: the reference runs once, not on each of few cores again."""
    result = [work() if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(result, src=0)
    return result[0]


def loss_tolerance(case: Case) -> float:
    """fp32: the issue's 1e-5. bf16: weights have 8 significant bits, so a weight that rounds the other way is off by
    2**-8 of itself; a loss near log(61) = 4.1 averages over thousands of such weights, and stays within 2**-8 of it."""
    return 1e-5 if case.precision == "fp32" else 4.1 * 2**-8


def norm_tolerance(case: Case) -> float:
    """fp32: sums of a few thousand squares in another order. bf16: gradients are rounded to 8 bits on the wire and
    between micro-steps, at most 2**-8 of each element, thrice with three micro-steps."""
    return 1e-5 if case.precision == "fp32" else 3 * 2**-8


@torch.no_grad()
def compare_evaluation(case: Case, engine: Any, dense: nn.Module, batch: torch.Tensor) -> None:
    """In evaluation the engine is the dense model, whatever this rank holds."""
    engine.eval()
    loss, expected = loss_of(engine, batch).item(), loss_of(dense, batch).item()
    engine.train()
    assert abs(loss - expected) <= loss_tolerance(case), (loss, expected)


def compare_tensors(case: Case, engine: Any, dense: nn.Module, initial: dict[str, torch.Tensor]) -> None:
    """The dense state: all together within 1e-5 of what it moved (fp32), and each tensor within its own rounding."""
    with engine.dense(resident=True):
        state = {name: value.detach().float().clone() for name, value in engine.module.state_dict().items()}
    assert state.keys() == initial.keys()
    differences, moves = [], []
    for name, value in dense.state_dict().items():
        expected = value.detach().float()
        assert state[name].shape == expected.shape, name
        differences.append((state[name] - expected).norm())
        moves.append((expected - initial[name]).norm())
        assert differences[-1] <= tensor_tolerance(case, expected, moves[-1]), (name, differences[-1], moves[-1])
    if case.precision == "fp32":
        assert torch.stack(differences).norm() <= 1e-5 * torch.stack(moves).norm()


def tensor_tolerance(case: Case, expected: torch.Tensor, moved: torch.Tensor) -> float:
    """For one tensor. fp32: 1e-5 of its way, plus half a unit in the last place (2**-24 of the value) for each step's
    rounding of the weight. bf16: one unit in the last place (2**-8) where master and weight round differently, plus the
    drift that the loss of one wrong unit causes, at most 5% of the way."""
    size = float(expected.norm())
    if case.precision == "fp32":
        return 1e-5 * float(moved) + NUM_STEPS * 2**-24 * size
    return 2**-8 * size + 0.05 * float(moved)


def cases(size: int, *, full: bool) -> Iterator[tuple[str, Any]]:
    """Checks of one world size by name: the whole grid, or its share of the sample."""
    for case in full_grid(size) if full else sample():
        if case.ranks == size:
            yield str(case), CaseCheck(case)


@dataclass(frozen=True)
class CaseCheck:
    """A case as a check that can be sent to a spawned rank."""

    case: Case

    def __call__(self, rank: Rank) -> None:
        check_case(self.case, rank)
