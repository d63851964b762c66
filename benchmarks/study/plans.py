"""Which plan a subject has in each step, by the product's own reading of its block, and what its steps cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn

from benchmarks.study.flops import kept_flops, plan_flops
from benchmarks.study.model import build, config_of
from benchmarks.study.subjects import Study, Subject
from sdp_deepspeed.config import KEY, SubnetworkConfig, parse
from sdp_deepspeed.estimate.forecast import Forecast, forecast
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.plan.planner import plan_model
from sdp_deepspeed.schedule import Schedule

_DENSE: Mapping[str, Any] = {"coverage": 1.0}
_PARTS = 100  # of a run, over which a rate that changes is averaged


@dataclass(frozen=True)
class Planner:
    """The plans of one subject.

    Args:
        seed: of which subnetworks hold what.
    """

    subject: Subject
    study: Study
    seed: int = 0

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.study.tokens(self.subject)

    @cached_property
    def model(self) -> nn.Module:
        """Shapes only."""
        with torch.device("meta"):
            return build(self.subject.size, seed=0)

    def num_steps(self, flops: float) -> int:
        """As many as cost that much, at least one in each phase."""
        phases = (self.subject.block or {}).get("schedule", [{}])
        return max(len(phases), round(flops / (self.tokens * self._mean_flops())))

    def _mean_flops(self) -> float:
        """Per token, over a run of any length."""
        if self.subject.block is None:
            return sum(self.step_flops(None, (part + 0.5) / _PARTS) for part in range(_PARTS)) / _PARTS
        schedule = self._schedule(1000)
        if schedule is None:
            return self.step_flops(self._plan(self._config(self._block)))
        ends = [phase.until_step or 1000 for phase in schedule.phases]
        shares = [(end - phase.first_step + 1) / 1000 for phase, end in zip(schedule.phases, ends, strict=True)]
        plans = [self._plan(self._config(schedule.config_after(end - 1)[KEY])) for end in ends]
        return sum(share * self.step_flops(plan) for share, plan in zip(shares, plans, strict=True))

    def step_flops(self, plan: Plan | None, progress: float = 0.0) -> float:
        """Per token; without a plan of a dense step at that share of the run."""
        if plan is not None:
            return plan_flops(self.model, self.subject.size, plan)
        dropping = self.subject.dropping
        return kept_flops(self.subject.size, 1 - dropping.mean(self.subject.size.depth, progress) if dropping else 1.0)

    def check(self) -> None:
        """
        Raises:
            ValueError: the block is not of the product's language.
        """
        schedule = self._schedule(1000)
        if schedule is not None:
            for step in schedule.turns:
                self._config(schedule.config_after(step)[KEY])

    def plans(self, num_steps: int) -> Iterator[tuple[SubnetworkConfig, Plan]]:
        """What each step has; the same objects where nothing changes."""
        schedule = self._schedule(num_steps)
        block, kept, current = self._block, None, None
        for step in range(num_steps):
            place = (schedule.phase_after(step), schedule.draw_after(step)) if schedule else None
            if current is None or place != kept:
                config = self._config(schedule.config_after(step)[KEY] if schedule else block)
                current, kept = (config, self._plan(config)), place
            yield current

    @property
    def _block(self) -> Mapping[str, Any]:
        """Draws of a seed have the seeds after it, so those of different runs must be far apart."""
        if self.subject.block is None:
            return _DENSE
        is_drawn = "redraw_interval" in self.subject.block
        return {**self.subject.block, "seed": self.seed * 1_000_003 if is_drawn else self.seed}

    def _schedule(self, num_steps: int) -> Schedule | None:
        if self.subject.block is None:
            return None
        block = dict(self._block)
        if any("until" in phase for phase in block.get("schedule", ())):
            block["total_steps"] = num_steps
        parse({KEY: block})
        return Schedule.of({KEY: block}, KEY)

    def _config(self, block: Mapping[str, Any]) -> SubnetworkConfig:
        config = parse({KEY: block})
        assert config is not None
        return config

    @cached_property
    def _plans(self) -> dict[str, Plan]:
        return {}

    def _plan(self, config: SubnetworkConfig) -> Plan:
        """Searched for once."""
        key = repr(config)
        if key not in self._plans:
            self._plans[key] = plan_model(self.model, config, self.study.num_workers)[0]
        return self._plans[key]

    @cached_property
    def peak_bytes(self) -> int:
        """Of the worker with the most, in the phase with the most, as `sdp estimate` has it: fp32, AdamW, ZeRO-1."""
        schedule = self._schedule(1000)
        turns = [0, *schedule.turns] if schedule else [0]
        blocks = [schedule.config_after(step)[KEY] if schedule else self._block for step in turns]
        return max(self._forecast(block).peak for block in blocks)

    def _forecast(self, block: Mapping[str, Any]) -> Forecast:
        settings = {
            "train_micro_batch_size_per_gpu": self.subject.rows or self.study.rows,
            "optimizer": {"type": "AdamW"},
            "zero_optimization": {"stage": 1},
            KEY: block,
        }
        size = self.subject.size
        shape = config_of(size).to_dict()
        return forecast(shape, settings, num_ranks=self.study.num_workers, sequence_length=size.length)
