"""The learning study: gradients are the reference's, FLOPs are those that are counted, texts are apart."""

from __future__ import annotations

from copy import deepcopy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.common.cells import TUNING_SEED, Store
from benchmarks.learning import cell as cell_module
from benchmarks.learning import text
from benchmarks.learning.cell import Cell, Training, mean_loss, run, scale_outputs
from benchmarks.learning.plans import Planner, dense_flops
from benchmarks.learning.subjects import STUDIES, SUBJECTS, Size, Study, Subject
from benchmarks.learning.text import Corpus
from benchmarks.quality import LABELS, tuned_rate
from benchmarks.study import cells, parse_arguments, run_cell
from sdp_deepspeed.estimate.flop_counter import FlopCounter
from tests.helpers.models import two_groups
from tests.reference.virtual_workers import Reference

SIZE = Size(width=64, depth=2, length=16)  # as many heads as a quarter of four workers needs
STUDY = Study(num_workers=4, rows=2, num_validation_rows=4, points=2, reference=SIZE)
HALF: dict[str, Any] = {"schedule": [{"until": 0.5, "coverage": 0.5}, {"coverage": 1.0}]}
CORPUS = Corpus(*(torch.arange(length).mul(7).remainder(251).to(torch.uint8) for length in (3000, 900, 300)))


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny subjects on a text of the test's own."""
    monkeypatch.setattr(cell_module, "corpus_of", lambda *_: CORPUS)
    monkeypatch.setitem(STUDIES, "tiny", STUDY)
    monkeypatch.setitem(SUBJECTS, "dense", Subject(SIZE))
    monkeypatch.setitem(SUBJECTS, "half", Subject(SIZE, HALF))


def training_of(block: dict[str, Any] | None, **options: Any) -> Training:
    return Training(Cell("tiny", "any", 0, 4, 1e-2), STUDY, Subject(SIZE, block, **options))


@pytest.mark.parametrize(
    "block",
    [None, {"coverage": 0.5, "branch_scale": "none"}, {"strategy": "neuron", "coverage": 0.5, "subnetworks": 2}],
    ids=["dense", "block", "neuron"],
)
def test_a_step_is_that_of_the_reference_and_costs_what_is_counted(block: dict[str, Any] | None) -> None:
    training = training_of(block)
    config, plan = next(training.planner.plans(training.num_steps))
    model = deepcopy(training.model).requires_grad_(True)
    reference = Reference(
        model,
        plan,
        lambda named: torch.optim.AdamW(two_groups(named), betas=STUDY.betas),
        mean_loss,
        clip=STUDY.clip,
        is_scaled=config.is_scaled,
    )
    reference.model.zero_grad()
    for group in reference.optimizer.param_groups:
        group["lr"] = 1e-2
    rows = text.training_rows(CORPUS.train, 0, 0, 8, SIZE.length)
    reference.step([[own] for own in rows.chunk(4)])
    with FlopCounter() as counter:
        training.train_step(0, plan)
    assert counter.total == pytest.approx(STUDY.tokens() * training.planner.step_flops(plan), rel=1e-12)
    for name, parameter in training.model.named_parameters():
        torch.testing.assert_close(parameter, model.get_parameter(name), rtol=1e-5, atol=1e-5, msg=name)


def test_dropped_rows_add_nothing_and_the_others_more() -> None:
    """The same as a model whose branches are multiplied by hand."""
    training = training_of(None, branch_dropout=0.5)
    assert training.dropout is not None
    training.dropout.draw(8, seed=3)
    factors = torch.stack([torch.cat(of_branch) for of_branch in training.dropout.factors])
    assert sorted({*factors.flatten().tolist()}) == [0.0, 2.0]
    assert factors.count_nonzero(1).tolist() == [4] * 4
    rows = text.training_rows(CORPUS.train, 0, 0, 8, SIZE.length)
    losses = training.workers.backward(rows.chunk(4))
    model = deepcopy(training.model).requires_grad_(False)
    for worker, of_worker in enumerate(rows.chunk(4)):
        expected = 0.0
        for row in range(2):
            single = deepcopy(model)
            for index, branch in enumerate(training.workers.branches):
                for name in branch.outputs:
                    single.get_parameter(name).mul_(factors[index, 2 * worker + row])
            expected += float(mean_loss(single, of_worker[row : row + 1])) / 2
        assert losses[worker] == pytest.approx(expected, rel=1e-5)


def test_dropout_of_everything_leaves_the_stream() -> None:
    training = training_of(None, dropout=1.0)
    rows = text.training_rows(CORPUS.train, 0, 0, 8, SIZE.length)
    losses = training.workers.backward(rows.chunk(4))
    model = deepcopy(training.model).requires_grad_(False)
    for branch in training.workers.branches:
        for name in branch.outputs:
            model.get_parameter(name).zero_()
    assert losses == pytest.approx([float(mean_loss(model, own)) for own in rows.chunk(4)], rel=1e-5)


def test_outputs_are_scaled_by_their_coverage() -> None:
    """As a Llama's have names."""
    training = training_of({"coverage": [{"profile": "linear", "first": 1.0, "last": 0.25}], "strategy": "neuron"})
    _, plan = next(training.planner.plans(training.num_steps))
    model = training.model
    expected = {name: value.detach().clone() for name, value in model.named_parameters()}
    for index, unit in enumerate(plan.units):
        for piece in unit.pieces:
            if ".o_proj." in piece.parameter or ".down_proj." in piece.parameter:
                piece.narrow(expected[piece.parameter]).mul_(plan.coverage_of(index))
    scale_outputs(model, plan)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected[name]), name


def test_a_budget_is_spent_and_not_more() -> None:
    budget = 20 * STUDY.tokens() * dense_flops(SIZE)
    dense, half = (run_cell(Cell("tiny", name, 0, 20, 1e-3))[1] for name in ("dense", "half"))
    assert dense["steps"] == 20 < half["steps"]
    for result in (dense, half):
        assert result["flops"] == pytest.approx(budget, rel=0.03)  # whole steps
        assert [point["step"] for point in result["curve"]] == [round(result["steps"] / 2), result["steps"]]


@pytest.mark.slow
def test_all_subjects_have_plans() -> None:
    for subject in SUBJECTS.values():
        next(Planner(subject, STUDIES["text"]).plans(100))
    assert LABELS.keys() <= SUBJECTS.keys()


def test_rates_are_tuned_on_a_seed_that_no_figure_has(tmp_path: Path) -> None:
    arguments = ["--output", str(tmp_path / "study.json"), "--study", "tiny", "--budgets", "2", "--only", "dense"]
    store = Store(tmp_path / "study.json", "learning_study")
    for cell in cells(parse_arguments([*arguments, "--tune"]), store):
        store.add(asdict(cell), run(cell, STUDY, Subject(SIZE)))
    tried = Store(tmp_path / "study.json", "learning_study").cells
    assert [cell["seed"] for cell in tried] == [TUNING_SEED] * 3
    assert sorted(cell["rate"] for cell in tried) == [2e-3, 4e-3, 8e-3]
    best = min(tried, key=lambda cell: cell["loss"])["rate"]
    assert tuple(tuned_rate(tried, "tiny", name, 2) for name in ("dense", "half")) == (best, None)
    assert [(cell.seed, cell.rate) for cell in cells(parse_arguments(arguments), store)] == [(0, best)]


class FakeFile:
    def __init__(self, content: bytes) -> None:
        self._content = content

    def read_bytes(self) -> bytes:
        return self._content


def test_no_text_is_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even copies of a file."""
    files = [(f"{name}.py", FakeFile(bytes([100 + name % 50]) * 100)) for name in range(100)]  # each content twice
    monkeypatch.setattr(text, "source_files", lambda: iter(files))
    corpus = text.read_corpus()
    trained, validated = ({*side.tolist()} for side in (corpus.train, corpus.validation))
    assert trained
    assert validated
    assert not trained & validated
    assert len(corpus.train) + len(corpus.validation) == 50 * 100


def test_rows_depend_on_step_and_seed_alone() -> None:
    content = torch.arange(200, dtype=torch.uint8)
    rows = text.training_rows(content, 1, 5, 3, 8)
    assert rows.shape == (3, 9)
    assert (rows[:, 1:] - rows[:, :-1] == 1).all()
    assert torch.equal(rows, text.training_rows(content, 1, 5, 3, 8))
    assert not torch.equal(rows, text.training_rows(content, 1, 6, 3, 8))
    assert not torch.equal(rows, text.training_rows(content, 2, 5, 3, 8))
