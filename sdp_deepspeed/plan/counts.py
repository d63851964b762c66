"""From the block and the number of ranks to whole counts: subnetworks, holders, replicas."""

from __future__ import annotations

from dataclasses import dataclass

from sdp_deepspeed.config import KEY, SubnetworkConfig, nothing_to_place
from sdp_deepspeed.plan.holders import common_number
from sdp_deepspeed.plan.plan import Plan


@dataclass(frozen=True)
class PlanCounts:
    """Counts that follow from the block and the number of data-parallel ranks.

    Args:
        num_subnetworks: k.
        num_holders: p, the subnetworks that hold a unit; coverage is p / k. None if units may have different numbers.
        num_replicas: r, the data-parallel ranks that train one subnetwork.
    """

    num_subnetworks: int
    num_holders: int | None
    num_replicas: int = 1


def resolve(config: SubnetworkConfig, data_parallel_size: int) -> PlanCounts:
    """Turn coverage or holders into whole counts for a number of ranks.

    Args:
        config: the block; when `assignment` is a path and counts are absent, the plan's are taken.
        data_parallel_size: D, the number of data-parallel ranks.

    Raises:
        ValueError: counts that do not fit D, with the nearest that do; or a placement where no subnetwork has replicas.
    """
    plan = Plan.load(config.plan_path) if config.plan_path is not None else None
    k = _num_subnetworks(config, plan, data_parallel_size)
    p = common_number(config, k)
    if p is None and plan is not None:
        p = plan.num_holders
    if k == data_parallel_size and config.placement != "auto":
        raise ValueError(nothing_to_place(config, f"{k} subnetworks on {k} data-parallel ranks"))
    return PlanCounts(num_subnetworks=k, num_holders=p, num_replicas=data_parallel_size // k)


def _num_subnetworks(config: SubnetworkConfig, plan: Plan | None, data_parallel_size: int) -> int:
    if plan is not None and config.subnetworks in ("auto", plan.num_subnetworks):
        k, where = plan.num_subnetworks, f"{KEY}.assignment: the plan {config.plan_path!r} has"
    elif config.subnetworks == "auto":
        return data_parallel_size
    else:
        k, where = int(config.subnetworks), f"{KEY}.subnetworks: got"
    if data_parallel_size % k:
        divisors = [str(d) for d in range(1, data_parallel_size + 1) if data_parallel_size % d == 0]
        raise ValueError(
            f"{where} {k} subnetworks, which do not divide the {data_parallel_size} data-parallel ranks; "
            f"possible here: {', '.join(divisors)}"
        )
    return k
