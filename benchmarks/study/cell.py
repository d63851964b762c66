"""One cell of the study: a subject that trains until a budget of operations is spent."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from benchmarks.study.dropping import dropped, with_dropout
from benchmarks.study.flops import dense_flops
from benchmarks.study.model import build, losses_of_rows, validation_loss
from benchmarks.study.plans import Planner
from benchmarks.study.subjects import Study, Subject
from benchmarks.study.text import Corpus, read_corpus, training_rows, validation_rows
from sdp_deepspeed.config import SubnetworkConfig
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.reference.batched_workers import BatchedReference
from sdp_deepspeed.reference.held_rows import scaled_branches

_WARM_UP = 0.05  # of all steps
_CLIP = 1.0


@dataclass(frozen=True)
class Cell:
    """
    Args:
        study, subject: by their names in the tables.
        seed: of weights and data.
        budget: all operations of the run, as a number of steps of data parallelism at the reference size.
        rate: the highest learning rate.
    """

    study: str
    subject: str
    seed: int
    budget: int
    rate: float

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


corpus_of = cache(read_corpus)


def run(cell: Cell, study: Study, subject: Subject) -> dict[str, Any]:
    """What came of a cell, with what it took."""
    before = time.process_time()
    training = _Training(cell, study, subject, corpus_of(study.corpus, study.train_bytes))
    curve = list(training.curve())
    return cell.to_dict() | {
        "described": subject.described(),
        "train_bytes": study.train_bytes,
        "parameters": sum(parameter.numel() for parameter in training.model.parameters()),
        "steps": training.num_steps,
        "tokens": curve[-1]["tokens"],
        "flops": curve[-1]["flops"],
        "state_bytes": training.state_bytes,
        "curve": curve,
        "loss": curve[-1]["loss"],
        "best_loss": min(point["loss"] for point in curve),
        "cpu_seconds": round(time.process_time() - before, 1),
    }


class _Training:
    def __init__(self, cell: Cell, study: Study, subject: Subject, corpus: Corpus) -> None:
        self.cell, self.study, self.subject, self.corpus = cell, study, subject, corpus
        self.model = build(subject.size, cell.seed)
        self.planner = Planner(subject, study)
        self.num_steps = self.planner.num_steps(cell.budget * study.tokens * dense_flops(study.reference))
        self.state_bytes = 0
        self._validation = validation_rows(corpus.validation, study.num_validation_rows, subject.size.length)

    def curve(self) -> Iterator[dict[str, float]]:
        """Train; validation losses of the dense model."""
        ends = {max(1, round(self.num_steps * (i + 1) / self.study.points)) for i in range(self.study.points)}
        flops, known = 0.0, None
        reference = self._reference()
        torch.manual_seed(self.cell.seed)  # of dropout
        for step, (config, plan) in enumerate(self.planner.plans(self.num_steps)):
            if plan is not known:
                known = plan
                self.state_bytes = max(self.state_bytes, self.planner.state_bytes(plan))
                step_flops = self.planner.step_flops(plan) if self.subject.block else 0.0
            progress = step / self.num_steps
            reference.plan, reference.lr_by_coverage = plan, config.lr_by_coverage
            self._step(reference, step, progress)
            flops += self.study.tokens * (step_flops or self.planner.step_flops(None, progress))
            if step + 1 in ends:
                tokens = (step + 1) * self.study.tokens
                yield {"step": step + 1, "tokens": tokens, "flops": flops, "loss": self._validate(config, plan)}

    def _reference(self) -> BatchedReference:
        _, plan = next(self.planner.plans(self.num_steps))
        return BatchedReference(self.model, plan, self._optimizer, losses_of_rows, clip=_CLIP)

    def _optimizer(self, named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        matrices = [parameter for parameter in named.values() if parameter.dim() > 1]
        vectors = [parameter for parameter in named.values() if parameter.dim() == 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": self.subject.weight_decay},
            {"params": vectors},
        ]
        return torch.optim.AdamW(groups, lr=self.cell.rate, betas=(0.9, 0.95), weight_decay=0.0, foreach=True)

    def _step(self, reference: BatchedReference, step: int, progress: float) -> None:
        for group in reference.optimizer.param_groups:
            group["lr"] = self.cell.rate * rate_share(step, self.num_steps)
        num_rows = self.study.num_workers * self.study.rows
        seed, length = self.cell.seed, self.subject.size.length
        rows = training_rows(self.corpus.train, seed, step, num_rows, length)
        dropping = self.subject.dropping
        draw = seed * 1_000_003 + step
        with ExitStack() as stack:
            if dropping:
                stack.enter_context(dropped(self.model, dropping, progress, num_rows, draw))
            if self.subject.dropout:
                stack.enter_context(with_dropout(self.model, self.subject.dropout))
            reference.step([[own] for own in rows.chunk(self.study.num_workers)])

    def _validate(self, config: SubnetworkConfig, plan: Plan) -> float:
        scaled = config.dense_branch_scale == "coverage"
        with scaled_branches(self.model, plan) if scaled else nullcontext():
            return validation_loss(self.model, self._validation)


def rate_share(step: int, num_steps: int) -> float:
    """Of the highest learning rate: up in a line, then down to zero in a line."""
    warm_up = max(1, round(_WARM_UP * num_steps))
    return min((step + 1) / warm_up, (num_steps - step) / max(1, num_steps - warm_up))
