"""One cell of the study: a subject that trains until a budget of operations is spent; it can go on in pieces."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.learning.batched_workers import BatchedReference
from benchmarks.learning.dropping import dropped, with_dropout
from benchmarks.learning.held_rows import scale_outputs
from benchmarks.learning.plans import Planner, build, dense_flops
from benchmarks.learning.subjects import Study, Subject
from benchmarks.learning.text import Corpus, digest_of, read_corpus, training_rows, validation_rows
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


@dataclass(frozen=True)
class Resources:
    """For how long cells run.

    Args:
        end: no cell begins later, and no step but a first one if there is a folder; a time of UTC, None for any.
        folder: of cells that are not over; None finishes each that has begun.
    """

    end: datetime | None = None
    folder: Path | None = None

    @property
    def is_time_over(self) -> bool:
        return self.end is not None and datetime.now(tz=UTC) >= self.end

    @property
    def ends_cells(self) -> bool:
        """Whether a cell is to stop before its next step."""
        return self.folder is not None and self.is_time_over


@cache
def corpus_of(train_bytes: int | None) -> Corpus:
    return read_corpus("stdlib", train_bytes)


def identity(cell: Cell, study: Study, subject: Subject) -> dict[str, Any]:
    """All that decides a cell's figures, but for the code: a cell of another one has to be done again."""
    corpus = corpus_of(study.train_bytes)
    text = {"bytes": len(corpus.train), "sha256": digest_of(corpus)}
    return {**asdict(cell), "described": subject.described(), "settings": study.described(), "text": text}


def run(cell: Cell, study: Study, subject: Subject, resources: Resources = Resources()) -> dict[str, Any] | None:
    """What came of a cell; None if its time is over before it is. Pieces give the same bits as one run."""
    facts = identity(cell, study, subject) | {"device": "CPU"}
    training = _Training(cell, study, subject, resources)
    path = None
    if resources.folder is not None:
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        path = resources.folder / f"{digest}.pt"
    cpu, wall = training.restore(path) if path is not None and path.exists() else (0.0, 0.0)
    before, began = time.process_time(), time.monotonic()
    is_over = training.train()
    cpu, wall = cpu + time.process_time() - before, wall + time.monotonic() - began
    if not is_over:
        assert path is not None
        training.save(path, cpu, wall)
        return None
    if path is not None:
        path.unlink(missing_ok=True)
    curve = training.curve
    return facts | {
        "train_bytes": study.train_bytes,
        "parameters": sum(parameter.numel() for parameter in training.model.parameters()),
        "steps": training.num_steps,
        "tokens": curve[-1]["tokens"],
        "flops": curve[-1]["flops"],
        "curve": curve,
        "loss": curve[-1]["loss"],
        "best_loss": min(point["loss"] for point in curve),
        "cpu_seconds": round(cpu, 1),
        "seconds": round(wall, 1),
    }


class _Training:
    def __init__(self, cell: Cell, study: Study, subject: Subject, resources: Resources) -> None:
        self.cell, self.study, self.subject, self.resources = cell, study, subject, resources
        self.corpus = corpus_of(study.train_bytes)
        self.model = build(subject.size, cell.seed)
        self.planner = Planner(subject, study, cell.seed)
        self.num_steps = self.planner.num_steps(cell.budget * study.tokens() * dense_flops(study.reference))
        self.step, self.flops = 0, 0.0
        self.curve: list[dict[str, float]] = []
        self._validation = validation_rows(self.corpus.validation, study.num_validation_rows, subject.size.length)
        if subject.small_outputs:
            _, plan = next(self.planner.plans(self.num_steps))
            scale_outputs(self.model, plan)
        self.reference = self._make_reference()
        torch.manual_seed(cell.seed)  # of dropout

    def save(self, path: Path, cpu_seconds: float, seconds: float) -> None:
        """All that a step changes; the file is whole at any moment."""
        state = {
            "step": self.step,
            "flops": self.flops,
            "curve": self.curve,
            "weights": self.model.state_dict(),
            "optimizer": self.reference.optimizer.state_dict(),
            "cpu_seconds": cpu_seconds,
            "seconds": seconds,
            "random": torch.get_rng_state(),
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        staging = path.with_suffix(".writing")
        torch.save(state, staging)
        os.replace(staging, path)

    def restore(self, path: Path) -> tuple[float, float]:
        """From what `save` wrote.

        Returns:
            CPU seconds and seconds so far.
        """
        state: Mapping[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        self.step, self.flops, self.curve = state["step"], state["flops"], state["curve"]
        self.model.load_state_dict(state["weights"])
        self.reference.reset_masters()
        self.reference.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["random"])
        return state["cpu_seconds"], state["seconds"]

    def train(self) -> bool:
        """To the end, with validation losses of the dense model on the way; False if the time is over before."""
        ends = {max(1, round(self.num_steps * (i + 1) / self.study.points)) for i in range(self.study.points)}
        known, first, num_tokens = None, self.step, self.study.tokens(self.subject)
        for _, plan in islice(self.planner.plans(self.num_steps), self.step, None):
            if self.step > first and self.resources.ends_cells:  # each piece gets on
                return False
            if plan is not known:
                known, step_flops = plan, self.planner.step_flops(plan)
            self.train_step(plan)
            self.flops += num_tokens * step_flops
            self.step += 1
            if self.step in ends:
                tokens, loss = self.step * num_tokens, self._dense_loss()
                self.curve.append({"step": self.step, "tokens": tokens, "flops": self.flops, "loss": loss})
        return True

    def train_step(self, plan: Plan) -> None:
        step, seed = self.step, self.cell.seed
        self.reference.plan = plan
        for group in self.reference.optimizer.param_groups:
            group["lr"] = self.cell.rate * rate_share(step, self.num_steps, self.study.warm_up)
        num_rows = self.study.tokens(self.subject) // self.study.reference.length
        rows = training_rows(self.corpus.train, seed, step, num_rows, self.subject.size.length)
        with ExitStack() as stack:
            if self.subject.dropping:
                draw = seed * 1_000_003 + step
                stack.enter_context(dropped(self.model, self.subject.dropping, num_rows, draw))
            if self.subject.dropout:
                stack.enter_context(with_dropout(self.model, self.subject.dropout))
            self.reference.step([[own] for own in rows.chunk(self.study.num_workers)])

    def _make_reference(self) -> BatchedReference:
        config, plan = next(self.planner.plans(self.num_steps))
        is_scaled = config.branch_scale == "training"
        return BatchedReference(self.model, plan, self._optimizer, self._losses, self.study.clip, is_scaled=is_scaled)

    def _optimizer(self, named: dict[str, nn.Parameter]) -> torch.optim.Optimizer:
        matrices = [parameter for parameter in named.values() if parameter.dim() > 1]
        vectors = [parameter for parameter in named.values() if parameter.dim() == 1]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": self.subject.weight_decay},
            {"params": vectors},
        ]
        return torch.optim.AdamW(groups, lr=self.cell.rate, betas=self.study.betas, weight_decay=0.0, foreach=True)

    def _losses(self, model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        """Nats per byte of each row [rows, length + 1], [rows]."""
        logits = model(input_ids=rows[:, :-1]).logits
        losses = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="none")
        return losses.view(len(rows), -1).mean(1)

    @torch.no_grad()
    def _dense_loss(self) -> float:
        self.model.eval()
        losses = torch.cat([self._losses(self.model, own) for own in self._validation.split(32)])
        self.model.train()
        return float(losses.double().mean())


def rate_share(step: int, num_steps: int, warm_up: float) -> float:
    """Of the highest learning rate: up in a line for the share `warm_up` of the steps, then down to zero in a line."""
    rising = max(1, round(warm_up * num_steps))
    falling = num_steps - rising
    return min((step + 1) / rising, 1.0, (num_steps - step) / max(1, falling))
