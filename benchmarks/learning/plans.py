"""Which plan a subject has in each step, and the floating-point operations of its steps.

Operations are those that `FlopCounter` counts: matrix products and attention, forward and backward, the head included,
per token, mean over workers, without what a worker lacks. Recomputing attention in its backward pass counts, as in
PyTorch's formula: five products where forward has two.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.common.workers import plans_of_steps
from benchmarks.learning.subjects import HEAD_WIDTH, Size, Study, Subject
from benchmarks.learning.text import VOCABULARY
from sdp_deepspeed.config import SubnetworkConfig
from sdp_deepspeed.plan.plan import Plan

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


class Planner:
    """The plans of one subject.

    Args:
        seed: of which subnetworks hold what.
    """

    def __init__(self, subject: Subject, study: Study, seed: int = 0) -> None:
        self.subject, self.study, self.seed = subject, study, seed
        with torch.device("meta"):
            self._model = build(subject.size, seed=0)

    def num_steps(self, flops: float) -> int:
        """As many as cost that much, at least one in each phase."""
        block = dict(self.subject.block or {"coverage": 1.0})
        begin = mean = 0.0
        for phase in (of_phases := block.pop("schedule", [{}])):
            end = phase.get("until", 1.0)
            of_phase = block | {key: value for key, value in phase.items() if key != "until"}
            _, plan = next(plans_of_steps(self._model, of_phase, self.study.num_workers))
            mean += (end - begin) * self.step_flops(plan)
            begin = end
        return max(len(of_phases), round(flops / (self.study.tokens(self.subject) * mean)))

    def step_flops(self, plan: Plan) -> float:
        """Of a step under a plan; without a block of a dense step."""
        if self.subject.block is not None:
            return plan_flops(self._model, self.subject.size, plan)
        return dense_flops(self.subject.size, 1 - self.subject.branch_dropout)

    def plans(self, num_steps: int) -> Iterator[tuple[SubnetworkConfig, Plan]]:
        """What each step has; the same objects where nothing changes."""
        block = {**(self.subject.block or {"coverage": 1.0}), "seed": self.seed}
        if "redraw_interval" in block:
            block["seed"] *= 1_000_003  # draws have the seeds after it: those of different runs must be far apart
        if "schedule" in block:
            block["total_steps"] = num_steps
        return islice(plans_of_steps(self._model, block, self.study.num_workers), num_steps)
