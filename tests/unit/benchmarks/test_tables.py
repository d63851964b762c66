"""docs/results.md and the figures of docs/ are current with the raw JSON; tables are made from it alone."""

from __future__ import annotations

from typing import Any

from benchmarks import tables
from tests.helpers.repository import ROOT


def test_the_documents_are_current() -> None:
    """After a change of raw figures: python benchmarks/tables.py."""
    made = tables.outputs(ROOT)
    stale = [path.name for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    assert stale == [], "run python benchmarks/tables.py"


def row_of(text: str, start: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {start} |"))
    return [cell.strip() for cell in line.split("|")[2:-1]]


def cell(subject: str, seed: int, loss: float, budget: int = 500, **more: Any) -> dict[str, Any]:
    size = {"width": 64, "depth": 8}
    facts = {"described": {"size": size} | ({} if subject.startswith("dense") else {"block": {}}), "parameters": 3}
    return (
        {"study": "text", "subject": subject, "seed": seed, "budget": budget, "rate": 1e-3, "loss": loss} | facts | more
    )


def test_quality_is_compared_seed_by_seed() -> None:
    """Without the tuning seed, at the tuned rate."""
    own = [cell("dense 64x8", seed, 1.0 + seed) for seed in (0, 1, 2)]
    half = [cell("C=1/4, whole ends", seed, 1.1 + seed) for seed in (0, 1)]
    other = [cell("C=1/4, whole ends", seed, 5.0, rate=1e-2) for seed in (0, 1, 2)]
    tuned = [cell("C=1/4, whole ends", 99, 0.5), cell("C=1/4, whole ends", 99, 0.9, rate=1e-2)]
    steps = {"dense 64x8": 500, "C=1/4, whole ends": 1000}
    result = {"cells": [each | {"steps": steps[each["subject"]]} for each in (*own, *half, *other, *tuned)]}
    costs = {"subjects": {"dense 64x8": {"peak": 100, "sent": 10}, "C=1/4, whole ends": {"peak": 50, "sent": 3}}}
    text = tables.quality(steps, 250, result, costs)
    assert row_of(text, "data parallelism") == ["2.000 ± 0.577", "1.00", "1.00"]
    assert row_of(text, "SDP, C = 1/4, unscaled") == ["1.600 (+0.100 ± 0.000)", "0.50", "0.60"]


def image_cell(subject: str, seed: int, loss: float, epochs: int = 120, **more: Any) -> dict[str, Any]:
    figures = {
        "diverged": False,
        "curve": [{"test_loss": 9.0, "test_error": 0.9}, {"test_loss": loss, "test_error": 0.1}],
    }
    facts = {"subject": subject, "images": 4000, "epochs": epochs, "seed": seed, "steps": 10}
    return facts | figures | {"costs": {"peak": 100, "sent": 10}} | more


def test_images_are_compared_seed_by_seed() -> None:
    """Without the tuning seed and what diverged."""
    dense = [image_cell("18 blocks", seed, 0.3 + seed) for seed in (0, 1)]
    half = [image_cell("C = 1/2", seed, 0.2 + seed, steps=20, costs={"peak": 60, "sent": 4}) for seed in (0, 1)]
    others = [image_cell("C = 1/2", 99, 0.1), image_cell("C = 1/2", 2, 7.0, diverged=True)]
    text = tables.images({"cells": [*dense, *half, *others, image_cell("18 blocks", 0, 0.5, epochs=30)]})
    assert row_of(text, "18 blocks") == ["0.500; 10.0%", "0.800 ± 0.500; 10.0%", "1.00", "1.00"]
    assert row_of(text, "C = 1/2") == ["", "0.700 (-0.100 ± 0.000); 10.0%", "0.60", "0.80"]


def test_a_run_that_ended_early_is_continued_with_its_own_seconds() -> None:
    """ZeRO-1's goal is 1.0 + 0.01, halfway between its last evaluations at both rates; SDP's after 20 steps."""
    fast = [
        run_on_links("ZeRO-1", [[10, 1.0, 2.0], [20, 2.0, 1.02], [30, 3.0, 1.0]]),
        run_on_links("SDP", [[10, 1.0, 1.51], [30, 3.0, 0.51]]),
    ]
    slow = [
        run_on_links("ZeRO-1", [[10, 50.0, 2.0]]),
        run_on_links("SDP", [[10, 6.0, 1.51], [30, 18.0, 0.51]], synchronizing=9.0),
    ]
    facts: dict[str, Any] = {"ranks": 4, "nodes": 2, "link": "", "model": {"num_parameters": 1}}
    facts["provenance"] = {"cores": 2, "processor": "", "commit": ""}
    text = tables.time_to_loss(facts | {"results": fast}, facts | {"results": slow})
    assert row_of(text, "ZeRO-1")[-2:] == ["2", "~125"]
    assert row_of(text, "SDP")[-2:] == ["2", "12 (50%)"]


def run_on_links(name: str, curve: list[list[float]], synchronizing: float = 0.0) -> dict[str, Any]:
    figures = {"peak": [1], "link_bytes": [1], "seconds_synchronizing": [synchronizing], "load": 0.0}
    return {"name": name, "steps": 30, "curve": curve} | figures
