"""Raise errors on all ranks, and compare their models, plans and weights."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from sdp_deepspeed.messages import listed

if TYPE_CHECKING:
    from sdp_deepspeed.masking.mask import Mask
    from sdp_deepspeed.parallel.groups import Groups
    from sdp_deepspeed.plan.plan import Plan

T = TypeVar("T")

_KINDS = (ValueError, RuntimeError, OSError, AssertionError)  # types that are kept; all others become RuntimeErrors


def gather_objects(value: object, group: dist.ProcessGroup | None = None) -> list[Any]:
    """All-gather a small picklable object over a group with a CPU backend, in rank order."""
    if not dist.is_initialized():
        return [value]
    of_ranks: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(of_ranks, value, group=group)
    return of_ranks


def raise_on_all_ranks(error: Exception | None, group: dist.ProcessGroup | None = None) -> None:
    """Raise the first rank's error on every rank, if any rank has one; collective. The message names the ranks with an
    error unless all have one; then only the first has the paragraphs after its problem."""
    _raise_first(gather_objects(_report(error), group), error, group)


def run_on_all_ranks(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> T:
    """Run `work` on every rank of a group; an error on some of them is raised on all."""
    result, error = _attempt(work)
    raise_on_all_ranks(error, group)
    return result


def gather_results(work: Callable[[], T], group: dist.ProcessGroup | None = None) -> list[T]:
    """As `run_on_all_ranks`, but returns the results of all ranks in rank order; they must be small and picklable."""
    result, error = _attempt(work)
    of_ranks = gather_objects((_report(error), result), group)
    _raise_first([report for report, _ in of_ranks], error, group)
    return [result for _, result in of_ranks]


def _attempt(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # of any kind, since other ranks wait
        return None, error


def _report(error: Exception | None) -> tuple[str, str] | None:
    if error is None:
        return None
    kind = next((known for known in _KINDS if isinstance(error, known)), None)
    return (kind.__name__, f"{error}") if kind else ("RuntimeError", f"{type(error).__name__}: {error}")


def _raise_first(
    reports: Sequence[tuple[str, str] | None], error: Exception | None, group: dist.ProcessGroup | None
) -> None:
    failed = {rank: report for rank, report in enumerate(reports) if report is not None}
    if not failed:
        return
    first = min(failed)
    name, text = failed[first]
    if len(failed) < len(reports):
        text = f"{text} [on rank {listed(failed)}]"
    elif "\n\n" in text and len(reports) > 1 and dist.get_rank(group) != first:
        problem, _, _ = text.partition("\n\n")
        text = f"{problem} (see the error of rank {first})"
    kind = next(known for known in _KINDS if known.__name__ == name)
    # With the traceback of the error, not chained to it: its text would be printed twice.
    raise kind(text).with_traceback(None if error is None else error.__traceback__) from None


def describe_different_settings(values: Sequence[Mapping[str, str]]) -> str:
    """An error message that names the settings that differ, from the settings of each rank."""
    lines = []
    for name in sorted(set().union(*values)):
        ranks: dict[str, list[int]] = {}
        for rank, settings in enumerate(values):
            ranks.setdefault(settings.get(name, "absent"), []).append(rank)
        if len(ranks) > 1:
            texts = [f"{value} on rank {listed(with_value)}" for value, with_value in ranks.items()]
            lines.append(f"{name} is {' and '.join(texts[:5])}")
    return (
        f"ranks have different settings: {listed(lines, separator='; ')}. Pass the same config and arguments on all "
        "ranks"
    )


def refuse_difference(what: str, facts: Mapping[int, Sequence[str]]) -> None:
    """Raise RuntimeError with the first fact in which a rank differs from the first rank."""
    first = min(facts)
    for rank, others in facts.items():
        pairs = itertools.zip_longest(facts[first], others, fillvalue="nothing")
        if differing := next((pair for pair in pairs if pair[0] != pair[1]), None):
            raise RuntimeError(
                f"{what}: {differing[1]} on rank {rank}, {differing[0]} on rank {first}; use the same model, "
                "optimizer and requires_grad on all ranks"
            )


def check_same_parameters(
    model: nn.Module, members: Collection[Sequence[int]], group: dist.ProcessGroup | None
) -> None:
    """Compare names, shapes and dtypes of parameters; collective. Run it before collectives whose sizes depend on
    these, which would otherwise crash or hang.

    Args:
        members: ranks that must have the same parameters; tensor-parallel ranks need not.

    Raises:
        RuntimeError: on all ranks.
    """
    facts = [f"{name} {list(parameter.shape)} {parameter.dtype}" for name, parameter in model.named_parameters()]
    sums = gather_objects(zlib.crc32("\n".join(facts).encode()), group)
    if all(len({sums[rank] for rank in ranks}) == 1 for ranks in members):
        return
    every = gather_objects(facts, group)
    for ranks in members:
        refuse_difference("model", {rank: every[rank] for rank in ranks})


def check_same_plan(plan: Plan, group: dist.ProcessGroup | None) -> None:
    """Compare the plan's hash, and the subnetwork of each rank, which the hash does not cover; collective.

    Raises:
        RuntimeError: on all ranks, naming those with a different plan.
    """
    plans = gather_objects((plan.hash, plan.subnetwork_of_rank), group)
    if different := [rank for rank, other in enumerate(plans) if other != plans[0]]:
        raise RuntimeError(
            f"rank {listed(different)} computed a different plan from rank 0; use the same model, config and versions "
            "on all ranks"
        )


def check_agreement(mask: Mask, groups: Groups) -> None:
    """Compare the slices of parameters that data-parallel ranks store, bit by bit. Slow; for `check_agreement`.

    Raises:
        RuntimeError: two ranks have different values of a slice.
    """
    sums_here = {
        piece: zlib.crc32(mask.view(piece).contiguous().flatten().view(torch.uint8).cpu().numpy().data)
        for name in mask.pieces
        for piece in mask.stored_pieces(name)
    }
    gathered = gather_objects((groups.tensor_parallel_rank, groups.rank, sums_here), groups.control)
    global_ranks = groups.ranks[groups.tensor_parallel_rank]
    sums_of = {global_ranks[index]: sums for number, index, sums in gathered if number == groups.tensor_parallel_rank}
    for piece in dict.fromkeys(piece for sums in sums_of.values() for piece in sums):
        ranks = [rank for rank, sums in sums_of.items() if piece in sums]
        if len({sums_of[rank][piece] for rank in ranks}) > 1:
            where = "" if piece.dim is None else f" [dim {piece.dim}, {piece.start}:{piece.start + piece.length}]"
            raise RuntimeError(
                f"ranks {listed(ranks)} have different values of {piece.parameter}{where}: training has diverged"
            )
