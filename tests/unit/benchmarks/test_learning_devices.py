"""The learning study elsewhere than on the CPU, in pieces and in bf16: what that changes, and what it must not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks.study import cell as cell_module
from benchmarks.study.cell import Cell, _Training, run
from benchmarks.study.dropping import Dropping
from benchmarks.study.flops import dense_flops
from benchmarks.study.model import Size, build
from benchmarks.study.pause import Resources
from benchmarks.study.subjects import STUDIES, SUBJECTS, Study, Subject
from benchmarks.study.text import Corpus

pytestmark = pytest.mark.slow

SIZE = Size(width=64, depth=2, length=16)
STUDY = Study(num_workers=4, rows=2, num_validation_rows=4, points=2, reference=SIZE)
HALF: dict[str, Any] = {"schedule": [{"until": 0.5, "coverage": 0.5}, {"coverage": 1.0}]}
CELL = Cell("tiny", "any", 0, 6, 1e-3)
CORPUS = Corpus(*(torch.arange(length).mul(7).remainder(251).to(torch.uint8) for length in (3000, 900)))


@pytest.fixture(autouse=True)
def corpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cell_module, "corpus_of", lambda *_: CORPUS)


@pytest.mark.parametrize("subject", [Subject(SIZE, HALF), Subject(SIZE, dropout=0.1)], ids=["method", "dropout"])
def test_a_cell_in_pieces_is_the_same_bit_for_bit(
    subject: Subject, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = run(CELL, STUDY, subject)
    assert expected is not None
    ends = iter([False, True] * 100)  # asked from the second step of a piece on: it has two
    monkeypatch.setattr(Resources, "ends_cells", property(lambda self: self.folder is not None and next(ends)))
    pieces = [run(CELL, STUDY, subject, Resources(folder=tmp_path))]
    assert pieces[0] is None
    assert len(list(tmp_path.iterdir())) == 1
    other = Subject(SIZE, dropout=0.2)
    assert run(CELL, STUDY, other, Resources(folder=tmp_path)) is None  # begins anew, and disturbs nobody
    while pieces[-1] is None:
        torch.manual_seed(1)  # whatever another process would draw
        pieces.append(run(CELL, STUDY, subject, Resources(folder=tmp_path)))
    assert len(pieces) == expected["steps"] // 2 + expected["steps"] % 2
    for result in (expected, pieces[-1]):
        assert all(result.pop(key) >= 0 for key in ("cpu_seconds", "seconds"))
    assert pieces[-1] == expected
    assert len(list(tmp_path.iterdir())) == 1, "what is over needs no file"


def test_time_ends_cells_only_where_they_can_go_on(tmp_path: Path) -> None:
    past, future = (datetime(year, 1, 1, tzinfo=UTC) for year in (2000, 3000))
    ways = [Resources(end=end, folder=folder) for end in (past, future, None) for folder in (tmp_path, None)]
    found = [resources.ends_cells for resources in ways]
    assert found == [True, False, False, False, False, False]


def test_a_larger_study_has_the_same_subjects_at_its_own_sizes() -> None:
    study = STUDIES["text 30M"]
    sizes = {name: study.scaled(SUBJECTS[name]).size for name in ("dense 64x8", "dense 64x4", "dense 128x8")}
    assert sizes["dense 64x8"] == study.scaled(SUBJECTS["C=1/2, scaled"]).size == study.reference
    assert sizes["dense 64x4"] == Size(384, 8, 512, 48)
    assert sizes["dense 128x8"].num_heads == 16
    with torch.device("meta"):
        num_parameters = sum(parameter.numel() for parameter in build(study.reference, seed=0).parameters())
    assert 27e6 < num_parameters < 33e6
    assert 9155 * study.tokens() == pytest.approx(600e6, rel=1e-3)
    for name, subject in SUBJECTS.items():
        assert STUDIES["text"].scaled(subject) is subject, name
        size = study.scaled(subject).size
        assert (size.length, size.width % size.head_width) == (512, 0), name
    assert SUBJECTS["dense 64x4"].described() == {"size": {"width": 64, "depth": 4, "length": 128}}  # as it always was


def test_bf16_is_fp32_but_for_rounding() -> None:
    """In the mode whose gradients are of its own making, and weights stay fp32."""
    block = {"coverage": 0.5, "regime": "backward", "strategy": "neuron"}
    studies = [STUDY, Study(**{**vars(STUDY), "precision": "bf16"})]
    results = [run(CELL, study, Subject(SIZE, block)) for study in studies]
    losses = [[point["loss"] for point in result["curve"]] for result in results if result is not None]
    assert losses[0] != losses[1]
    assert losses[0] == pytest.approx(losses[1], rel=2**-8)


@contextmanager
def values_of_ones() -> Iterator[None]:
    """Whoever asks a tensor without data for a value gets 1."""

    def ones(tensor: torch.Tensor) -> Any:
        return [1.0] * len(tensor) if tensor.dim() else 1.0

    with (
        mock.patch.object(torch.Tensor, "tolist", ones),
        mock.patch.object(torch.Tensor, "__float__", ones),
        mock.patch.object(torch.Tensor, "__bool__", return_value=True),
    ):
        yield


SUBJECTS_THERE = {
    "dense": Subject(SIZE),
    "dropping": Subject(SIZE, dropping=Dropping(0.5)),
    "dropout": Subject(SIZE, dropout=0.1),
    **{
        f"{regime} x neuron": Subject(SIZE, {"coverage": 0.5, "regime": regime, "strategy": "neuron"})
        for regime in ("forward", "backward")
    },
    "scaled": Subject(SIZE, {"coverage": 0.5, "strategy": "neuron", "dense_branch_scale": "coverage"}),
}


@pytest.mark.parametrize("name", SUBJECTS_THERE)
def test_everything_is_on_one_device(name: str) -> None:
    """The meta device computes nothing, and refuses what is of two devices, as a GPU does."""
    subject = SUBJECTS_THERE[name]
    with values_of_ones():
        training = _Training(CELL, STUDY, subject, CORPUS.to(torch.device("meta")), Resources("meta"))
        assert training.train()
    assert {parameter.device.type for parameter in training.model.parameters()} == {"meta"}
    assert training.flops > 0.9 * 6 * STUDY.tokens() * dense_flops(SIZE)
