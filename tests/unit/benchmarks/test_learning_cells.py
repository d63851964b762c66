"""What a cell of the learning study does: that each thing that a subject says is done, and what it costs is booked."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import get_total_norm

from benchmarks.study import cell as cell_module
from benchmarks.study.cell import Cell, _Training, identity, rate_share
from benchmarks.study.dropping import Dropping, dropped
from benchmarks.study.model import Size, losses_of_rows
from benchmarks.study.pause import Resources
from benchmarks.study.plans import Planner
from benchmarks.study.subjects import SUBJECTS, Study, Subject
from benchmarks.study.text import Corpus
from sdp_deepspeed.estimate.flops import FlopCounter

pytestmark = pytest.mark.slow

SIZE = Size(width=64, depth=2, length=16)
STUDY = Study(num_workers=4, rows=2, num_validation_rows=4, points=2, reference=SIZE)
HALF: dict[str, Any] = {"coverage": 0.5}
TAIL: dict[str, Any] = {"schedule": [{"until": 0.5, **HALF}, {"coverage": 1.0}]}
CELL = Cell("tiny", "any", 0, 4, 1e-2)
CORPUS = Corpus(*(torch.arange(3000).mul(7).remainder(100).add(first).to(torch.uint8) for first in (0, 100)))


def training(subject: Subject, seed: int = 0) -> _Training:
    return _Training(replace(CELL, seed=seed), STUDY, subject, CORPUS, Resources())


def trained(subject: Subject, seed: int = 0) -> _Training:
    made = training(subject, seed)
    assert made.train()
    return made


def weights(subject: Subject, seed: int = 0) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in trained(subject, seed).model.parameters()])


def test_it_trains_on_one_side_of_the_text_and_validates_on_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    sides: list[tuple[bool, set[bool]]] = []

    def spied(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
        sides.append((torch.is_grad_enabled(), set((rows < 100).flatten().tolist())))
        return losses_of_rows(model, rows)

    monkeypatch.setattr(cell_module, "losses_of_rows", spied)
    trained(Subject(SIZE))
    assert [is_train for is_train, _ in sides].count(True) == 4
    assert [is_train for is_train, _ in sides].count(False) == 2
    assert all(side == {is_train} for is_train, side in sides)


@pytest.mark.parametrize(
    "subject",
    [
        Subject(SIZE),
        Subject(SIZE, rows=1),
        Subject(SIZE, HALF),
        Subject(SIZE, {**HALF, "regime": "backward"}),
        Subject(SIZE, dropping=Dropping(0.5)),
        Subject(SIZE, dropping=Dropping(0.5, "depth")),
        Subject(SIZE, dropping=Dropping(0.5, until=0.0)),
    ],
    ids=["dense", "one row", "half", "backward", "dropping", "by depth", "no longer dropping"],
)
def test_a_step_costs_what_is_booked(subject: Subject) -> None:
    """Counted while it runs."""
    made = training(subject)
    _, plan = next(made.planner.plans(made.num_steps))
    with FlopCounter() as counter:
        made._train_step(0.0)
    booked = made.planner.tokens * made.planner.step_flops(plan if subject.block else None)
    assert counter.total == pytest.approx(booked, rel=1e-12)


CHANGES = {
    "seed": (Subject(SIZE), 1),
    "weight decay": (Subject(SIZE, weight_decay=1.0), 0),
    "dropping": (Subject(SIZE, dropping=Dropping(0.5)), 0),
    "dropping at first": (Subject(SIZE, dropping=Dropping(0.5, until=0.5)), 0),
    "dropout": (Subject(SIZE, dropout=0.2), 0),
    "rows": (Subject(SIZE, rows=1), 0),
    "half": (Subject(SIZE, HALF), 0),
    "half, another seed": (Subject(SIZE, HALF), 1),
    "backward": (Subject(SIZE, {**HALF, "regime": "backward"}), 0),
    "neurons": (Subject(SIZE, {**HALF, "strategy": "neuron"}), 0),
    "tail": (Subject(SIZE, TAIL), 0),
    "drawn": (Subject(SIZE, {**HALF, "redraw_interval": 1}), 0),
}


def test_whatever_a_subject_says_makes_another_model() -> None:
    found = {"plain": weights(Subject(SIZE))} | {name: weights(*change) for name, change in CHANGES.items()}
    names = list(found)
    same = [(a, b) for a in names for b in names if a < b and torch.equal(found[a], found[b])]
    assert same == []


def test_scaled_branches_are_validated_scaled() -> None:
    """Training is the same: a subnetwork's own branches are not scaled."""
    plain, scaled = (trained(Subject(SIZE, {**HALF, **more})) for more in ({}, {"dense_branch_scale": "coverage"}))
    for one, other in zip(plain.model.parameters(), scaled.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert plain.curve[-1]["loss"] != scaled.curve[-1]["loss"]


def test_rates_of_the_steps_and_what_is_decayed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = training(Subject(SIZE, weight_decay=0.3))
    optimizer = made._reference.optimizer
    rates = []
    monkeypatch.setattr(
        optimizer, "step", lambda *_: rates.append({group["lr"] for group in optimizer.param_groups}), raising=True
    )
    made.train()
    assert rates == [{1e-2 * rate_share(step, 4, 0.05)} for step in range(4)]
    decays = {p.dim(): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decays == {2: 0.3, 1: 0.0}


def test_gradients_are_clipped_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a loss a thousand times as steep."""
    monkeypatch.setattr(cell_module, "losses_of_rows", lambda *given: 1000 * losses_of_rows(*given))
    made, norms = training(Subject(SIZE)), []
    optimizer = made._reference.optimizer
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    monkeypatch.setattr(optimizer, "step", lambda *_: norms.append(get_total_norm([p.grad for p in held])))
    made.train()
    assert torch.stack(norms).tolist() == pytest.approx([1.0] * 4, rel=1e-3)


def test_other_rows_are_dropped_in_each_step_and_with_each_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    draws: list[int] = []

    def spied(model: nn.Module, dropping: Dropping, progress: float, num_rows: int, seed: int) -> Any:
        draws.append(seed)
        return dropped(model, dropping, progress, num_rows, seed)

    monkeypatch.setattr(cell_module, "dropped", spied)
    for seed in range(3):
        trained(Subject(SIZE, dropping=Dropping(0.5)), seed)
    assert len(set(draws)) == len(draws) >= 12


def test_progressive_dropping_is_booked_as_it_grows() -> None:
    """It starts with none, so a step costs less than one without on average, and more than one that always drops."""
    kinds = (Dropping(0.5, "depth"), Dropping(0.5, "progressive"), None)
    runs = [trained(Subject(SIZE, dropping=kind)) for kind in kinds]
    always, progressive, never = (run.flops / run.num_steps for run in runs)
    assert always < progressive < never


def test_subjects_are_what_their_names_say() -> None:
    for name, subject in SUBJECTS.items():
        block = subject.block or {}
        phases = block.get("schedule", [])
        if found := re.search(r"dense tail (\d+)%", name):
            assert phases[0]["until"] == pytest.approx(1 - int(found[1]) / 100)
            assert phases[1] == {"coverage": 1.0}
        if found := re.search(r"C=(0[.]\d+|\d/\d)(?!, \d/\d)", name):
            coverage = (phases[0] if phases else block)["coverage"]
            assert (coverage if isinstance(coverage, float) else coverage[0]["coverage"]) == float(Fraction(found[1]))
        if found := re.search(r"drawn every (10 )?step", name):
            assert block["redraw_interval"] == (10 if found[1] else 1)
        if found := re.search(r"(\d) rows?$", name):
            assert subject.rows == int(found[1])
        if found := re.search(r"(\d+)x(\d+)", name):
            assert (subject.size.width, subject.size.depth) == (int(found[1]), int(found[2]))
        if found := re.match(r"(\w+) x (\w+)", name):
            assert (block.get("regime", "forward"), block.get("strategy", "block")) == found.groups()
        assert ("scaled" in name) == ("dense_branch_scale" in block)
        assert ("whole ends" in name) == ("whole_ends" in str(block))


def test_draws_of_different_seeds_are_different_assignments() -> None:
    """Also one draw later, where that of the next seed would be if seeds were neighbors."""
    subject = Subject(block={**HALF, "redraw_interval": 1})
    plans = [[plan.hash for _, plan in Planner(subject, Study(), seed).plans(3)] for seed in range(3)]
    assert len({found for several in plans for found in several}) == 9


def test_the_peak_is_of_the_phase_with_the_most() -> None:
    dense, half, tail = (Planner(Subject(SIZE, block), STUDY).peak_bytes for block in (None, HALF, TAIL))
    assert half < dense == tail
    assert Planner(Subject(SIZE, rows=16), STUDY).peak_bytes > dense


def test_assignments_go_with_the_seed() -> None:
    hashes = {next(Planner(Subject(block=HALF), Study(), seed).plans(1))[1].hash for seed in range(3)}
    assert len(hashes) == 3


def test_cells_of_another_text_or_study_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [identity(CELL, STUDY, Subject(SIZE))]
    found.append(identity(CELL, replace(STUDY, num_validation_rows=5), Subject(SIZE)))
    for other_study in (replace(STUDY, warm_up=0.1), replace(STUDY, betas=(0.9, 0.99)), replace(STUDY, clip=0.5)):
        found.append(identity(CELL, other_study, Subject(SIZE)))
    found.append(identity(CELL, STUDY, Subject(SIZE, rows=1)))
    monkeypatch.setattr(cell_module, "corpus_of", lambda *_: CORPUS)
    found.append(identity(CELL, STUDY, Subject(SIZE)))
    other = Corpus(CORPUS.train, CORPUS.validation.flip(0))
    monkeypatch.setattr(cell_module, "corpus_of", lambda *_: other)
    found.append(identity(CELL, STUDY, Subject(SIZE)))
    assert all(one != other for index, one in enumerate(found) for other in found[:index])
    assert identity(CELL, replace(STUDY, learning_rate=1.0), Subject(SIZE)) == found[-1]
