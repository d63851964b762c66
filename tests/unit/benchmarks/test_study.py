"""The learning study: a resumed cell equals the straight one, FLOPs are those that are counted, texts are apart."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks.learning import cell as cell_module
from benchmarks.learning import text
from benchmarks.learning.cell import Cell, Resources, _Training, run
from benchmarks.learning.dropping import Dropping
from benchmarks.learning.plans import Planner, dense_flops
from benchmarks.learning.subjects import SETS, STUDIES, SUBJECTS, Size, Study, Subject
from benchmarks.learning.text import Corpus
from benchmarks.quality import TUNING_SEED, tuned_rate
from benchmarks.study import Store, cells, parse_arguments, work
from sdp_deepspeed.estimate.flops import FlopCounter

SIZE = Size(width=64, depth=2, length=16)  # as many heads as a quarter of four workers needs
STUDY = Study(num_workers=4, rows=2, num_validation_rows=4, points=2, reference=SIZE)
HALF: dict[str, Any] = {"schedule": [{"until": 0.5, "coverage": 0.5}, {"coverage": 1.0}]}
CORPUS = Corpus(*(torch.arange(length).mul(7).remainder(251).to(torch.uint8) for length in (3000, 900)))


@pytest.fixture(autouse=True)
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiny subjects on a text of the test's own."""
    monkeypatch.setattr(cell_module, "corpus_of", lambda *_: CORPUS)
    monkeypatch.setitem(STUDIES, "tiny", STUDY)
    monkeypatch.setitem(SUBJECTS, "dense", Subject(SIZE))
    monkeypatch.setitem(SUBJECTS, "half", Subject(SIZE, HALF))


@pytest.mark.parametrize("subject", [Subject(SIZE, HALF), Subject(SIZE, dropout=0.1)], ids=["SDP", "dropout"])
def test_a_cell_in_pieces_is_the_straight_one_bit_for_bit(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell("tiny", "any", 0, 6, 1e-3)
    expected = run(cell, STUDY, subject)
    assert expected is not None
    ends = iter([False, True] * 100)  # asked from the second step of a piece on: it has two
    monkeypatch.setattr(Resources, "ends_cells", property(lambda self: self.folder is not None and next(ends)))
    pieces: list[dict[str, Any] | None] = []
    while not pieces or pieces[-1] is None:
        torch.manual_seed(1)  # whatever another process would draw
        pieces.append(run(cell, STUDY, subject, Resources(folder=tmp_path)))
    assert len(pieces) == -(-expected["steps"] // 2) > 1
    for result in (expected, pieces[-1]):
        assert all(result.pop(key) >= 0 for key in ("cpu_seconds", "seconds"))
    assert pieces[-1] == expected
    assert list(tmp_path.iterdir()) == [], "what is over needs no file"


@pytest.mark.parametrize(
    "subject",
    [
        Subject(SIZE),
        Subject(SIZE, {"coverage": 0.5}),
        Subject(SIZE, dropping=Dropping(0.5)),
        Subject(SIZE, dropping=Dropping(0.5, "depth")),
    ],
    ids=["dense", "block", "dropping", "by depth"],
)
def test_a_step_costs_the_operations_that_are_counted(subject: Subject) -> None:
    training = _Training(Cell("tiny", "any", 0, 4, 1e-2), STUDY, subject, Resources())
    _, plan = next(training.planner.plans(training.num_steps))
    with FlopCounter() as counter:
        training.train_step(plan)
    assert counter.total == pytest.approx(STUDY.tokens(subject) * training.planner.step_flops(plan), rel=1e-12)


def assert_equal(model: nn.Module, expected: nn.Module, held: dict[str, torch.Tensor] | None = None) -> None:
    """To rounding of sums in another order."""
    for (name, value), wanted in zip(model.named_parameters(), expected.parameters(), strict=True):
        kept = torch.ones_like(value) if held is None else held[name]
        torch.testing.assert_close(value * kept, wanted * kept, rtol=1e-5, atol=1e-6, msg=name)


def test_a_budget_is_spent_and_not_more() -> None:
    budget = 20 * STUDY.tokens() * dense_flops(SIZE)
    results = [run(Cell("tiny", name, 0, 20, 1e-3), STUDY, SUBJECTS[name]) for name in ("dense", "half")]
    dense, half = (result for result in results if result is not None)
    assert dense["steps"] == 20 < half["steps"]
    for result in (dense, half):
        assert result["flops"] == pytest.approx(budget, rel=0.03)  # whole steps
        assert [point["step"] for point in result["curve"]] == [round(result["steps"] / 2), result["steps"]]


@pytest.mark.slow
def test_all_subjects_have_plans() -> None:
    for subject in SUBJECTS.values():
        next(Planner(subject, STUDIES["text"]).plans(100))
    assert {name for cells in SETS.values() for _, name, _ in cells} <= SUBJECTS.keys()


def done(path: Path, minutes: float, *arguments: str) -> list[dict[str, Any]]:
    """Cells in the file after a run with one thread."""
    options = parse_arguments(["--output", str(path), "--study", "tiny", "--budgets", "2", *arguments])
    store = Store(path)
    with ThreadPoolExecutor(1) as pool:
        end = datetime.now(tz=UTC) + timedelta(minutes=minutes)
        work(list(cells(options, store)), store, pool, num_processes=1, resources=Resources(end=end))
    return Store(path).cells


def test_rates_are_tuned_on_a_seed_that_no_figure_has(tmp_path: Path) -> None:
    path = tmp_path / "study.json"
    tried = done(path, 9, "--only", "dense", "--tune")
    assert [cell["seed"] for cell in tried] == [TUNING_SEED] * 3
    assert sorted(cell["rate"] for cell in tried) == [2e-3, 4e-3, 8e-3]
    best = min(tried, key=lambda cell: cell["loss"])["rate"]
    assert (tuned_rate(tried, "tiny", "dense"), tuned_rate(tried, "tiny", "half")) == (best, None)
    assert [cell["rate"] for cell in done(path, 9, "--only", "dense") if cell["seed"] == 0] == [best]


class FakeFile:
    def __init__(self, content: bytes) -> None:
        self._content = content

    def read_bytes(self) -> bytes:
        return self._content


def test_no_text_is_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even copies of a file."""
    files = [(f"{name}.py", FakeFile(bytes([100 + name % 50]) * 100)) for name in range(100)]  # each content twice
    monkeypatch.setattr(text, "source_files", lambda _: iter(files))
    corpus = text.read_corpus("any")
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
