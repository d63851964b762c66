"""One cell of the study: a subject that trains until a budget of operations is spent."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from functools import cache
from typing import Any

import torch
from torch import nn

from benchmarks.common.cells import TUNING_SEED
from benchmarks.common.workers import Workers
from benchmarks.learning.dropping import BranchDropout, add_dropout
from benchmarks.learning.plans import Planner, build, dense_flops
from benchmarks.learning.subjects import Study, Subject
from benchmarks.learning.text import Corpus, digest_of, read_corpus, training_rows, validation_rows
from sdp_deepspeed.masking.proof import proven_branches
from sdp_deepspeed.plan.plan import Plan


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


@cache
def corpus_of(train_bytes: int | None) -> Corpus:
    return read_corpus(train_bytes)


def identity(cell: Cell, study: Study, subject: Subject) -> dict[str, Any]:
    """All that decides a cell's figures, but for the code: a cell of another one has to be done again."""
    corpus = corpus_of(study.train_bytes)
    text = {"bytes": len(corpus.train), "sha256": digest_of(corpus)}
    return {**asdict(cell), "described": subject.described(), "settings": study.described(), "text": text}


def run(cell: Cell, study: Study, subject: Subject) -> dict[str, Any]:
    """Train, with validation losses of the dense model on the way, and return the figures as JSON."""
    before = time.process_time()
    training = Training(cell, study, subject)
    text = training.corpus.tuning if cell.seed == TUNING_SEED else training.corpus.validation
    validation = validation_rows(text, study.num_validation_rows, subject.size.length)
    num_steps, num_tokens, flops = training.num_steps, study.tokens(subject), 0.0
    ends = {max(1, round(num_steps * (i + 1) / study.points)) for i in range(study.points)}
    curve = []
    for step, (_, plan) in enumerate(training.planner.plans(num_steps)):
        training.train_step(step, plan)
        flops += num_tokens * training.planner.step_flops(plan)
        if step + 1 in ends:
            loss = dense_loss(training.model, validation)
            curve.append({"step": step + 1, "tokens": (step + 1) * num_tokens, "flops": flops, "loss": loss})
    return identity(cell, study, subject) | {
        "parameters": sum(parameter.numel() for parameter in training.model.parameters()),
        "steps": num_steps,
        "flops": flops,
        "curve": curve,
        "loss": curve[-1]["loss"],
        "best_loss": min(point["loss"] for point in curve),
        "cpu_seconds": round(time.process_time() - before, 1),
    }


class Training:
    """The parts of a run, which `run` puts together."""

    def __init__(self, cell: Cell, study: Study, subject: Subject) -> None:
        self.cell, self.study, self.subject = cell, study, subject
        self.corpus = corpus_of(study.train_bytes)
        self.model = build(subject.size, cell.seed)
        self.planner = Planner(subject, study, cell.seed)
        self.num_steps = self.planner.num_steps(cell.budget * study.tokens() * dense_flops(study.reference))
        config, plan = next(self.planner.plans(self.num_steps))
        if subject.small_outputs:
            scale_outputs(self.model, plan)
        self.workers = Workers(self.model, plan, mean_loss, is_scaled=config.is_scaled)
        self.dropout: BranchDropout | None = None
        if subject.branch_dropout:
            self.dropout = BranchDropout(self.workers.copies, self.workers.branches, subject.branch_dropout)
        if subject.dropout:
            torch.manual_seed(cell.seed)
            add_dropout(self.workers.copies, self.workers.branches, subject.dropout)
        parameters = list(self.model.parameters())
        groups: list[dict[str, Any]] = [
            {"params": [parameter for parameter in parameters if parameter.dim() > 1], "weight_decay": 0.1},
            {"params": [parameter for parameter in parameters if parameter.dim() == 1]},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=cell.rate, betas=study.betas, weight_decay=0.0, foreach=True)

    def train_step(self, step: int, plan: Plan) -> None:
        if plan is not self.workers.plan:
            self.workers.replan(plan)
        for group in self.optimizer.param_groups:
            group["lr"] = self.cell.rate * rate_share(step, self.num_steps, self.study.warm_up)
        seed, num_rows = self.cell.seed, self.study.tokens(self.subject) // self.study.reference.length
        if self.dropout:
            self.dropout.draw(num_rows, seed * 1_000_003 + step)
        rows = training_rows(self.corpus.train, seed, step, num_rows, self.subject.size.length)
        self.workers.backward(rows.chunk(self.study.num_workers))
        nn.utils.clip_grad_norm_(self.model.parameters(), self.study.clip)
        self.optimizer.step()


def scale_outputs(model: nn.Module, plan: Plan) -> None:
    """Multiply the output projections of each unit by its coverage, in place, as `sdp_deepspeed.Init` does."""
    outputs = {name for branch in proven_branches(model, "neuron") for name in branch.outputs}
    for index, unit in enumerate(plan.units):
        for piece in unit.pieces:
            if piece.parameter in outputs:
                piece.narrow(model.get_parameter(piece.parameter).detach()).mul_(plan.coverage_of(index))


def mean_loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """Nats per byte of rows [rows, length + 1]."""
    logits = model(input_ids=rows[:, :-1]).logits
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


@torch.no_grad()
def dense_loss(model: nn.Module, validation: torch.Tensor) -> float:
    model.eval()
    losses = [float(mean_loss(model, rows)) * len(rows) for rows in validation.split(32)]
    model.train()
    return sum(losses) / len(validation)


def rate_share(step: int, num_steps: int, warm_up: float) -> float:
    """Of the highest learning rate: up in a line for the share `warm_up` of the steps, then down to zero in a line."""
    rising = max(1, round(warm_up * num_steps))
    falling = num_steps - rising
    return min((step + 1) / rising, 1.0, (num_steps - step) / max(1, falling))
