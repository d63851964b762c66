"""Which plan a subject has in each step, and the floating-point operations of its steps.

Operations are those that `FlopCounter` counts: matrix products and attention, forward and backward, the head included,
per token, mean over workers, without what a worker lacks. Recomputing attention in its backward pass counts, as in
PyTorch's formula: five products where forward has two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.learning.subjects import HEAD_WIDTH, Size, Study, Subject
from benchmarks.learning.text import VOCABULARY
from sdp_deepspeed.config import KEY, SubnetworkConfig, parse
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.planner import plan_model
from sdp_deepspeed.schedule import Schedule

_ATTENTION = 1 + 2.5  # forward and backward, of the forward's


def build(size: Size, seed: int) -> nn.Module:
    """A Llama with the weights of a seed; embeddings are tied to the head."""
    torch.manual_seed(seed)
    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            initializer_range=size.initial_deviation,
            vocab_size=VOCABULARY,
            hidden_size=size.width,
            intermediate_size=size.num_neurons,
            num_hidden_layers=size.depth,
            num_attention_heads=size.width // HEAD_WIDTH,
            num_key_value_heads=size.width // HEAD_WIDTH,
            max_position_embeddings=size.length,
            tie_word_embeddings=True,
            use_cache=False,
            bos_token_id=None,
            eos_token_id=None,
        )
    )
    return model


def dense_flops(size: Size, kept: float = 1.0) -> float:
    """Of a step of data parallelism in which branches count for a share `kept` of the rows."""
    layer_weights = 4 * size.width**2 + 3 * size.width * size.num_neurons
    return kept * size.depth * (6 * layer_weights + _ATTENTION * _scores(size)) + 6 * size.width * VOCABULARY


def plan_flops(model: nn.Module, size: Size, plan: Plan) -> float:
    """Of a step under a plan."""
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    total = dense_flops(size)
    for index, unit in enumerate(plan.units):
        absent = 1 - plan.coverage_of(index)
        weights = sum(p.num_elements(shapes[p.parameter]) for p in unit.pieces if len(shapes[p.parameter]) == 2)
        heads = sum(p.num_elements(shapes[p.parameter]) for p in unit.pieces if "o_proj.weight" in p.parameter)
        scores = _ATTENTION * _scores(size) * heads / size.width**2
        total -= absent * (6 * weights + scores)
    return total


def _scores(size: Size) -> float:
    """Queries by keys and weights by values, all positions as in PyTorch's formula."""
    return 4 * size.length * size.width


@dataclass(frozen=True)
class Planner:
    """The plans of one subject.

    Args:
        seed: of which subnetworks hold what.
    """

    subject: Subject
    study: Study
    seed: int = 0

    def num_steps(self, flops: float) -> int:
        """As many as cost that much, at least one in each phase."""
        phases = (self.subject.block or {}).get("schedule", [{}])
        return max(len(phases), round(flops / (self.study.tokens(self.subject) * self._mean_flops())))

    def step_flops(self, plan: Plan) -> float:
        """Of a step under a plan; without a block of a dense step."""
        if self.subject.block is not None:
            return plan_flops(self._model, self.subject.size, plan)
        return dense_flops(self.subject.size, 1 - self.subject.branch_dropout)

    def plans(self, num_steps: int) -> Iterator[tuple[SubnetworkConfig, Plan]]:
        """What each step has; the same objects where nothing changes."""
        schedule, kept, current = self._schedule(num_steps), None, None
        for step in range(num_steps):
            place = (schedule.phase_after(step), schedule.draw_after(step)) if schedule else None
            if current is None or place != kept:
                config = self._config(schedule.config_after(step)[KEY] if schedule else self._block)
                current, kept = (config, self._plan(config)), place
            yield current

    def _mean_flops(self) -> float:
        """Over a run of any length."""
        schedule = self._schedule(1000)
        if schedule is None:
            return self.step_flops(self._plan(self._config(self._block)))
        ends = [phase.until_step or 1000 for phase in schedule.phases]
        shares = [(end - phase.first_step + 1) / 1000 for phase, end in zip(schedule.phases, ends, strict=True)]
        plans = [self._plan(self._config(schedule.config_after(end - 1)[KEY])) for end in ends]
        return sum(share * self.step_flops(plan) for share, plan in zip(shares, plans, strict=True))

    @property
    def _block(self) -> Mapping[str, Any]:
        """Draws of a seed have the seeds after it, so those of different runs must be far apart."""
        if self.subject.block is None:
            return {"coverage": 1.0}
        is_drawn = "redraw_interval" in self.subject.block
        return {**self.subject.block, "seed": self.seed * 1_000_003 if is_drawn else self.seed}

    def _schedule(self, num_steps: int) -> Schedule | None:
        if self.subject.block is None:
            return None
        block = dict(self._block)
        if any("until" in phase for phase in block.get("schedule", ())):
            block["total_steps"] = num_steps
        self._config(block)
        return Schedule.of({KEY: block})

    def _config(self, block: Mapping[str, Any]) -> SubnetworkConfig:
        config = parse({KEY: dict(block)})
        assert config is not None
        return config

    @cached_property
    def _model(self) -> nn.Module:
        """Shapes only."""
        with torch.device("meta"):
            return build(self.subject.size, seed=0)

    @cached_property
    def _plans(self) -> dict[str, Plan]:
        return {}

    def _plan(self, config: SubnetworkConfig) -> Plan:
        key = repr(config)
        if key not in self._plans:
            self._plans[key] = plan_model(self._model, config, self.study.num_workers)[0]
        return self._plans[key]
