"""docs/results.md and the figures of docs/ are current with the raw JSON; tables are made from it alone."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from benchmarks import tables
from benchmarks.figures import overview
from benchmarks.quality import LABELS, Figures
from tests.helpers.repository import ROOT

CONTESTANTS = (
    "DDP",
    "ZeRO-1",
    "FSDP2",
    "forward x block + ZeRO-1 C=1",
    "forward x block + ZeRO-1 C=0.5",
    "forward x neuron + ZeRO-1 C=0.5",
    "backward x block + ZeRO-1 C=0.5",
    "forward x block + FSDP2 C=0.5",
    "forward x neuron + FSDP2 C=0.5",
)


def compared(**of_sdp: float) -> dict[str, Any]:
    """A raw result; `of_sdp` are figures of SDP's C = 1/2 with ZeRO-1."""
    same = {"weights": 2**20, "gradients": 2**20, "optimizer": 2**21, "peak": 2**23, "sent": 4e6, "bound": 2e6}
    rank = same | {"collectives": 3, "process_groups": 2}
    part = {"forward": 0.001, "backward": 0.002, "exchange": 0.003, "optimizer": 0.004, "host": 0.005}
    rows = {
        name: {"seconds": [0.1, 0.2, 0.4], "splits": [[part, part]], "ranks": [dict(rank), dict(rank)]}
        for name in CONTESTANTS
    }
    sdp: Any = rows["forward x block + ZeRO-1 C=0.5"]
    sdp["ranks"][1] |= of_sdp
    sdp["seconds"] = [0.05, 0.1, 0.3]
    return {
        "ranks": 2,
        "device": "CPU",
        "model": {"num_parameters": 6_600_000},
        "arguments": {"precision": "fp32", "micro_batch": 1, "sequence": 128, "repeats": 3},
        "groups": {"main": {"load": 0.5, "contestants": rows}},
        "provenance": {"commit": "0123456789", "cores": 2, "processor": "any"},
    }


def row_of(text: str, start: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def test_the_documents_are_current() -> None:
    """After a change of raw figures: python benchmarks/tables.py."""
    made = tables.outputs(ROOT)
    stale = [path.name for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    assert stale == [], "run python benchmarks/tables.py"


def test_the_comparison_takes_the_rank_with_the_most_and_pairs_times() -> None:
    text = tables.compare(compared(peak=2**24, sent=3e6))
    found = row_of(text, "SDP block C = 1/2, ZeRO-1")
    assert found[:6] == ["4.0", "16.0", "4.0", "1.75", "3", "2"]
    assert found[6] == "0.50 (0.50-0.75)", "of 0.5, 0.5 and 0.75"
    assert found[7] == "1 / 2 / 3 / 4 / 5"


def test_goals_that_are_missed_are_said_to_be() -> None:
    text = tables.targets(compared(peak=2**24))
    assert row_of(text, "peak of SDP block C = 1/2, ZeRO-1, relative to DDP") == ["0.55", "2.00", "no"]
    assert row_of(text, "step of SDP block C = 1/2, ZeRO-1, relative to ZeRO-1") == ["0.48", "0.50 (0.50-0.75)", "no"]
    better = compared()
    better["groups"]["main"]["contestants"]["DDP"]["ranks"][0]["peak"] = 2**24
    found = row_of(tables.targets(better), "peak of SDP block C = 1/2, ZeRO-1, relative to DDP")
    assert found == ["0.55", "0.50", "yes"]
    better["groups"]["main"]["contestants"]["forward x block + ZeRO-1 C=0.5"]["seconds"] = [0.0484, 0.0968, 0.1936]
    found = row_of(tables.targets(better), "step of SDP block C = 1/2, ZeRO-1, relative to ZeRO-1")
    assert found == ["0.48", "0.48 (0.48-0.48)", "yes"]


def test_a_figure_is_made_of_the_same_figures() -> None:
    drawn = overview(compared(peak=2**24))
    words = [part.text for part in ElementTree.fromstring(drawn).iter("{http://www.w3.org/2000/svg}text")]
    assert "2.00x" in words, "peak of DDP's"
    assert "0.50x" in words, "step of DDP's"
    assert overview(copy.deepcopy(compared(peak=2**24))) == drawn


def cell(subject: str, seed: int, loss: float, budget: int = 500, **more: Any) -> dict[str, Any]:
    size = {"width": 64, "depth": 8}
    facts = {"described": {"size": size} | ({} if subject.startswith("dense") else {"block": {}}), "parameters": 3}
    return (
        {"study": "text", "subject": subject, "seed": seed, "budget": budget, "rate": 1e-3, "loss": loss} | facts | more
    )


def test_quality_is_compared_seed_by_seed() -> None:
    """Without the tuning seed, at the tuned rate."""
    own = [cell("dense 64x8", seed, 1.0 + seed) for seed in (0, 1, 2)]
    half = [cell("C=1/2, whole ends", seed, 1.1 + seed) for seed in (0, 1)]
    other = [cell("C=1/2, whole ends", seed, 5.0, rate=1e-2) for seed in (0, 1, 2)]
    tuned = [cell("C=1/2, whole ends", 99, 0.5), cell("C=1/2, whole ends", 99, 0.9, rate=1e-2)]
    steps = {"dense 64x8": 500, "C=1/2, whole ends": 1000}
    result = {"cells": [each | {"steps": steps[each["subject"]]} for each in (*own, *half, *other, *tuned)]}
    dense, ends = {"share": 1.0, "peak": 100, "sent": 10}, {"share": 0.5, "peak": 20, "sent": 2}
    costs = {"subjects": {"dense 64x8": [dense], "C=1/2, whole ends": [ends, ends | {"peak": 50, "sent": 4}]}}
    text = tables.quality(LABELS, result, costs)
    assert row_of(text, "data parallelism") == ["2.000 ± 0.577", "1.00", "1.00"]
    assert row_of(text, "C = 1/2, whole ends, unscaled") == ["1.600 ± 0.500 (+0.100 ± 0.000)", "0.50", "0.60"]
    assert Figures.of(result, "text").losses("C=1/2, whole ends", 500) == {0: 1.1, 1: 2.1}


def test_times_to_a_loss_are_of_the_line_between_evaluations() -> None:
    runs = {"ZeRO-1": [[1, 2.0, 3.0], [2, 4.0, 2.0]], "DDP": [[1, 1.0, 2.5], [2, 2.0, 1.5]], "half": [[1, 1.0, 9.0]]}
    facts = {"link": "1gbit", "ranks": 4, "model": {"num_parameters": 1}, "provenance": compared()["provenance"]}
    result = facts | {"results": [{"name": name, "seed": 0, "curve": curve} for name, curve in runs.items()]}
    text = tables.time_to_loss(result)
    assert (row_of(text, "ZeRO-1"), row_of(text, "half")) == (["4"], ["-"])
    assert tables._reached(runs["DDP"], 2.0) == 1.5


def test_a_table_without_figures_says_so(tmp_path: Path) -> None:
    document = "a\n<!-- compare -->\nold\n<!-- /compare -->\nb"
    assert "*Not measured yet: compare_4_ranks.*" in tables.filled(document, {})
    again = tables.filled(tables.filled(document, {}), {"compare_4_ranks": compared()})
    assert again.startswith("a\n<!-- compare -->\n2 CPU ranks")
    assert again.endswith("<!-- /compare -->\nb")
    with pytest.raises(ValueError, match="no table is named 'other'"):
        tables.filled("<!-- other -->\n<!-- /other -->", {})
    for folder in ("docs", "benchmarks/results"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "docs/results.md").write_text(document)
    (tmp_path / "benchmarks/results/compare_4_ranks.json").write_text(json.dumps(compared()))
    made = {path.name: text for path, text in tables.outputs(tmp_path).items()}
    assert sorted(made) == ["figure.svg", "memory.svg", "results.md"]
