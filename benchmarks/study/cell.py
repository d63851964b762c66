"""One cell of the study: a subject that trains until a budget of operations is spent."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import nn

from benchmarks.study.dropping import dropped, with_dropout
from benchmarks.study.flops import dense_flops
from benchmarks.study.model import build, losses_of_rows, validation_loss
from benchmarks.study.pause import Resources
from benchmarks.study.plans import Planner
from benchmarks.study.subjects import Study, Subject
from benchmarks.study.text import Corpus, digest_of, read_corpus, training_rows, validation_rows
from sdp_deepspeed.config import SubnetworkConfig
from sdp_deepspeed.plan.plan import Plan
from sdp_deepspeed.reference.batched_workers import BatchedReference
from sdp_deepspeed.reference.held_rows import scaled_branches

_ON_THE_CPU = Resources()


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


@cache
def corpus_of(name: str, train_bytes: int | None, device: str = "cpu") -> Corpus:
    return read_corpus(name, train_bytes).to(torch.device(device))


def identity(cell: Cell, study: Study, subject: Subject) -> dict[str, Any]:
    """All that decides a cell's figures, but for the code: a cell of another one has to be done again."""
    corpus = corpus_of(study.corpus, study.train_bytes)
    text = {"bytes": len(corpus.train), "sha256": digest_of(corpus)}
    described = subject.described()
    described["size"]["initial_deviation"] = round(subject.size.initial_deviation, 6)
    return {**cell.to_dict(), "described": described, "settings": study.described(), "text": text}


def run(cell: Cell, study: Study, subject: Subject, resources: Resources = _ON_THE_CPU) -> dict[str, Any] | None:
    """What came of a cell, with what it took; None if its time is over before it is."""
    corpus = corpus_of(study.corpus, study.train_bytes, resources.device)
    facts = identity(cell, study, subject) | {"device": resources.name}
    pause = resources.pause_of(facts)
    training = _Training(cell, study, subject, corpus, resources)
    kept = pause.load()
    training.restore(kept)
    cpu, wall = (kept["cpu_seconds"], kept["seconds"]) if kept else (0.0, 0.0)
    before, began = time.process_time(), datetime.now(tz=UTC)
    is_over = training.train()
    cpu += time.process_time() - before
    wall += (datetime.now(tz=UTC) - began).total_seconds()
    if not is_over:
        pause.save({**training.state(), "cpu_seconds": cpu, "seconds": wall})
        return None
    pause.forget()
    curve = training.curve
    return facts | {
        "train_bytes": study.train_bytes,
        "parameters": sum(parameter.numel() for parameter in training.model.parameters()),
        "steps": training.num_steps,
        "tokens": curve[-1]["tokens"],
        "flops": curve[-1]["flops"],
        "peak_bytes": training.planner.peak_bytes,
        "curve": curve,
        "loss": curve[-1]["loss"],
        "best_loss": min(point["loss"] for point in curve),
        "cpu_seconds": round(cpu, 1),
        "seconds": round(wall, 1),
    }


class _Training:
    def __init__(self, cell: Cell, study: Study, subject: Subject, corpus: Corpus, resources: Resources) -> None:
        self.cell, self.study, self.subject, self.corpus = cell, study, subject, corpus
        self.resources = resources
        self.model = build(subject.size, cell.seed).to(resources.device)
        self.planner = Planner(subject, study, cell.seed)
        self.num_steps = self.planner.num_steps(cell.budget * study.tokens() * dense_flops(study.reference))
        self.step, self.flops = 0, 0.0
        self.curve: list[dict[str, float]] = []
        self._validation = validation_rows(corpus.validation, study.num_validation_rows, subject.size.length)
        self._reference = self._make_reference()
        torch.manual_seed(self.cell.seed)  # of dropout

    def state(self) -> dict[str, Any]:
        """All that a step changes, but for random numbers."""
        return {
            "step": self.step,
            "flops": self.flops,
            "curve": self.curve,
            "weights": self.model.state_dict(),
            "optimizer": self._reference.optimizer.state_dict(),
        }

    def restore(self, state: Mapping[str, Any] | None) -> None:
        """From what `state` gave, if anything."""
        if state is None:
            return
        self.step, self.flops = state["step"], state["flops"]
        self.curve = state["curve"]
        self.model.load_state_dict(state["weights"])
        self._reference = self._make_reference()
        self._reference.optimizer.load_state_dict(state["optimizer"])

    def train(self) -> bool:
        """To the end, with validation losses of the dense model on the way; False if the time is over before."""
        ends = {max(1, round(self.num_steps * (i + 1) / self.study.points)) for i in range(self.study.points)}
        known, reference, first = None, self._reference, self.step
        for config, plan in islice(self.planner.plans(self.num_steps), self.step, None):
            if self.step > first and self.resources.ends_cells:  # each piece gets on
                return False
            if plan is not known:
                known = plan
                step_flops = self.planner.step_flops(plan) if self.subject.block else 0.0
            progress = self.step / self.num_steps
            reference.plan = plan
            self._train_step(progress)
            self.flops += self.planner.tokens * (step_flops or self.planner.step_flops(None, progress))
            self.step += 1
            if self.step in ends:
                tokens, loss = self.step * self.planner.tokens, self._validate(config, plan)
                self.curve.append({"step": self.step, "tokens": tokens, "flops": self.flops, "loss": loss})
        return True

    def _make_reference(self) -> BatchedReference:
        _, plan = next(self.planner.plans(self.num_steps))
        return BatchedReference(self.model, plan, self._optimizer, self._losses, clip=self.study.clip)

    def _losses(self, model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        in_bf16 = self.study.precision == "bf16"
        with torch.autocast(rows.device.type, torch.bfloat16) if in_bf16 else nullcontext():
            return losses_of_rows(model, rows)

    def _optimizer(self, named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        matrices = [parameter for parameter in named.values() if parameter.dim() > 1]
        vectors = [parameter for parameter in named.values() if parameter.dim() == 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": self.subject.weight_decay},
            {"params": vectors},
        ]
        return torch.optim.AdamW(groups, lr=self.cell.rate, betas=self.study.betas, weight_decay=0.0, foreach=True)

    def _train_step(self, progress: float) -> None:
        reference, step = self._reference, self.step
        for group in reference.optimizer.param_groups:
            group["lr"] = self.cell.rate * rate_share(step, self.num_steps, self.study.warm_up)
        num_rows = self.planner.tokens // self.study.reference.length
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
            return validation_loss(self.model, self._validation, self._losses)


def rate_share(step: int, num_steps: int, warm_up: float) -> float:
    """Of the highest learning rate: up in a line for the share `warm_up` of the steps, then down to zero in a line."""
    rising = max(1, round(warm_up * num_steps))
    return min((step + 1) / rising, (num_steps - step) / max(1, num_steps - rising))
