"""The study's tables and plot from cells that were written by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks.learning_study import main
from benchmarks.study.rates import TUNING_SEED, of_one_rate, tuned_rate
from benchmarks.study.subjects import SUBJECTS
from benchmarks.tables.learning import Figures, difference, few_data, learning, mean_and_error, rates
from benchmarks.tables.plot_learning import (
    Point,
    at_budget,
    kind_of,
    over_lengths,
    over_tokens,
    plot_few_data,
    plot_learning,
)

TINY, SMALL, LARGE = {"width": 4, "depth": 0}, {"width": 8, "depth": 1}, {"width": 8, "depth": 2}


def cell(subject: str, seed: int, loss: float, *, size: dict[str, int] = LARGE, **other: Any) -> dict[str, Any]:
    is_dense = subject.startswith("dense")
    facts = {
        "study": "text",
        "subject": subject,
        "seed": seed,
        "budget": 100,
        "rate": 1e-3,
        "described": {"size": size} | ({} if is_dense else {"block": {"coverage": 0.5}}),
        "parameters": 1_000_000 * size["depth"],
        "tokens": 2_000_000,
        "peak_bytes": 3 * 2**20,
        "loss": loss,
        "best_loss": loss - 0.25,
        "cpu_seconds": 30.0,
    }
    return facts | other


CELLS = [
    cell("dense 2", 0, 2.0),
    cell("dense 2", 1, 2.2),
    cell("dense 1", 0, 1.9, size=SMALL),
    cell("dense 1", 1, 2.0, size=SMALL),
    cell("dense 0", 0, 2.5, size=TINY),
    cell("method", 0, 1.8),
    cell("method", 1, 2.1),
    cell("better", 0, 1.7),
    cell("dense 2", TUNING_SEED, 1.0, rate=2e-3),
    cell("dense 2", TUNING_SEED, 1.5, rate=4e-3),
    cell("dense 2", 0, 3.0, study="few data", train_bytes=200_000),
    cell("method", 0, 2.5, study="few data", train_bytes=200_000),
    cell("dense 2", 0, 3.0, study="fewer data", train_bytes=50_000),
]
RESULT = {"what": "learning_study", "cells": CELLS}


def test_means_and_errors() -> None:
    """Of 1, 2, 3: standard deviation 1, so its error is 1 / sqrt(3)."""
    assert mean_and_error([1.0, 2.0, 3.0]) == "2.000 ± 0.577 (3)"
    assert mean_and_error([1.0]) == "1.000"
    assert mean_and_error([]) == ""


def test_differences_are_of_the_same_seed() -> None:
    """-0.2 and -0.1 beside its own size, -0.1 and 0.1 beside the best: means -0.15 and 0, errors 0.05 and 0.1."""
    figures = Figures.of(RESULT, "text")
    assert (figures.of_its_size("method"), figures.best_size(100)) == ("dense 2", "dense 1")
    assert difference(figures, "method", "dense 2", 100) == "-0.150 ± 0.050 (2)"
    assert difference(figures, "method", "dense 1", 100) == "+0.000 ± 0.100 (2)"
    assert difference(figures, "dense 2", "dense 2", 100) == ""


def test_the_best_size_is_between_two_that_lose() -> None:
    for name in ("dense 0", "dense 2"):
        assert Figures.of({"cells": [own for own in CELLS if own["subject"] != name]}, "text").best_size(100) is None
    assert Figures([]).best_size(100) is None


def test_the_best_size_is_best_on_the_same_seeds() -> None:
    """A seed on which everybody is better is of one size alone, and one that everybody has does not decide for a pair
    with several."""
    easy = [cell("dense 2", seed, 0.1) for seed in (5, 6, 7)]
    assert Figures.of({"cells": [*CELLS, *easy]}, "text").best_size(100) == "dense 1"
    other = {"width": 8, "depth": 1, "head_width": 4}
    wider = [cell("dense wide", seed, loss, size=other) for seed, loss in ((0, 1.95), (1, 1.8))]
    assert Figures.of({"cells": [*CELLS, *wider]}, "text").best_size(100) == "dense wide"


def test_no_best_size_where_two_share_no_seed() -> None:
    apart = [cell("dense 3", 8, 2.6, size={"width": 8, "depth": 3})]
    assert Figures.of({"cells": [*CELLS, *apart]}, "text").best_size(100) is None


def test_a_table_of_each_budget() -> None:
    lines = learning(RESULT).splitlines()
    assert lines[0].startswith("8 cells, 2 seeds, 4 CPU minutes;")
    assert lines[2].startswith("| 100 dense steps | parameters |")
    names = [line.split(" | ")[0] for line in lines[4:]]
    assert names == ["| dense 0", "| dense 1", "| dense 2", "| better", "| method"]  # by size, then by loss
    assert lines[6] == "| dense 2 | 2.00M | 2.00 | 3.0 | 0.001 | 2.100 ± 0.100 (2) |  | +0.150 ± 0.050 (2) |"
    assert lines[7] == "| better | 2.00M | 2.00 | 3.0 | 0.001 | 1.700 | -0.300 | -0.200 |"


def test_few_data_by_the_best_length() -> None:
    """The shorter run of data parallelism is lowest on the way, so 2.2 is what the method's 2.25 is beside."""
    shorter = cell("dense 2", 0, 3.5, study="few data", train_bytes=200_000, budget=50, best_loss=2.2)
    lines = few_data({"cells": [*CELLS, shorter]}).splitlines()
    assert lines[2].startswith("| 200 kB | peak, MiB | rate | 50 dense steps | 100 dense steps |")
    assert lines[4:6] == [
        "| dense 2 | 3.0 | 0.001 | 3.500 | 3.000 | 2.200 |  |",
        "| method | 3.0 | 0.001 |  | 2.500 | 2.250 | +0.050 |",
    ]
    assert lines[-1] == "| dense 2 | 3.0 | 0.001 | 3.000 | 2.750 |  |"


def test_a_study_of_rates_alone_has_no_table_of_few_data(tmp_path: Path) -> None:
    tried = {"cells": [cell("dense 2", TUNING_SEED, 1.0, study="few data")]}
    assert few_data(tried) == ""
    with pytest.raises(ValueError, match="no cells with little text"):
        plot_few_data(tried, tmp_path / "few.png")


def test_a_loss_that_is_no_number_is_not_the_best() -> None:
    tried = [cell("dense 2", TUNING_SEED, loss, rate=rate) for loss, rate in ((float("nan"), 1e-3), (1.0, 2e-3))]
    assert tuned_rate(tried, "text", "dense 2") == 2e-3
    assert tuned_rate(tried[:1], "text", "dense 2") is None


def test_rates_that_were_tried() -> None:
    assert rates(RESULT).splitlines()[0] == "2 cells, 1 CPU minutes:"
    assert rates(RESULT).splitlines()[-1] == "| dense 2 | text | 100 | 1.000 | 1.500 |"


def test_a_cell_counts_at_its_tuned_rate() -> None:
    """Whatever else it was done at; without one at that of the most seeds, and never at several."""
    tried = [cell("dense 2", TUNING_SEED, loss, rate=rate) for loss, rate in ((1.5, 1e-3), (1.0, 2e-3), (1.2, 4e-3))]
    shorter = cell("dense 2", TUNING_SEED, 0.5, rate=1e-3, budget=50)
    done = [cell("dense 2", 0, 3.0 - rate, rate=rate) for rate in (1e-3, 2e-3, 4e-3)]
    other = [cell("dense 1", 0, 9.0, rate=8e-3), *(cell("dense 1", seed, 2.0, rate=4e-3) for seed in (0, 1))]
    found = [*tried, shorter, *done, *other]
    assert (tuned_rate(found, "text", "dense 2"), tuned_rate(found, "text", "dense 1")) == (2e-3, None)
    assert tuned_rate(found, "headers", "dense 2") is None
    assert [(own["subject"], own["rate"]) for own in of_one_rate(found)] == [
        ("dense 2", 2e-3),
        ("dense 1", 4e-3),
        ("dense 1", 4e-3),
    ]
    assert Figures.of({"cells": found}, "text").rate("dense 2", 100) == 2e-3


def test_points_of_the_plot(tmp_path: Path) -> None:
    figures = Figures.of(RESULT, "text")
    sizes = at_budget(figures, figures.subjects(dense=True), 100, "parameters")
    assert [point.x for point in sizes] == [0.0, 1e6, 2e6]
    assert [point.loss for point in sizes] == pytest.approx([2.5, 1.95, 2.1])
    assert [point.error for point in sizes] == pytest.approx([0.0, 0.05, 0.1])
    assert at_budget(figures, ["better"], 100, "peak_bytes") == [Point(3.0, 1.7, 0.0)]
    assert at_budget(figures, ["better"], 200, "peak_bytes") == []
    assert [point.x for point in over_tokens(figures, "method")] == [2e6]
    assert [point.x for point in over_lengths(figures, "method")] == [100.0]
    plot_learning(RESULT, tmp_path / "figures" / "learning.png")
    assert (tmp_path / "figures" / "learning.png").stat().st_size > 10_000


def test_every_subject_is_of_a_kind_that_the_plot_has(tmp_path: Path) -> None:
    found = {name: kind_of(subject.described()) for name, subject in SUBJECTS.items()}
    assert found["forward x block, C=0.5, dense tail 50%"] == "dense tail"
    assert found["C=1/2, 3/4, 1 in turn"] == "growing"
    assert found["C=1/2, scaled, drawn every step"] == "static but drawn again"
    assert (found["backward x neuron, C=0.25"], found["C=1/2, whole ends"]) == ("static, backward", "whole ends")
    assert (found["dropout 0.1"], found["dense 64x4, 2 rows"]) == ("regularized", "fewer tokens in a step")
    described = {name: subject.described() for name, subject in SUBJECTS.items()}
    all_of_them = [cell(name, 0, 2.0) | {"described": of} for name, of in described.items()]
    plot_learning({"what": "learning_study", "cells": all_of_them}, tmp_path / "all.png")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "dence"], "error: --only: no subject is named 'dence'"),
        (["--only", "("], "error: --only: '[(]' is no regular expression"),
        (["--seeds", "0", "99"], "error: --seeds: 99 is the seed of --tune"),
        (["--device", "cuda:77"], "error: --device: 'cuda:77' cannot be used"),
        (["--device", "meta"], "error: --device: 'meta' cannot be used"),
    ],
)
def test_a_mistake_is_one_line(arguments: list[str], message: str, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=message):
        main(["--output", str(tmp_path / "study.json"), *arguments])


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--seeds=-1", "argument --seeds: expected a whole number from 0 to 999999999, got '-1'"),
        ("--minutes=nan", "argument --minutes: expected a number above 0, got 'nan'"),
        ("--minutes=-inf", "argument --minutes: expected a number above 0, got '-inf'"),
    ],
)
def test_arguments(argument: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--output", str(tmp_path / "study.json"), argument])
    assert message in capsys.readouterr().err


def test_a_list_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--output", str(tmp_path / "no" / "study.json"), "--list", "--only", "dense 64x[48]"])
    assert capsys.readouterr().out.split("\n")[:2] == ["dense 64x4", "dense 64x8"]
    assert not any(tmp_path.iterdir())
