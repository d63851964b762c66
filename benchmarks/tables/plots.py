"""The plots of benchmarks/README.md: which raw figures each is drawn from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from benchmarks.tables.plot_learning import plot_few_data, plot_learning
from benchmarks.tables.plot_systems import plot_growth, plot_scaling, plot_side_by_side
from benchmarks.tables.readme import BLOCKS, RESULTS, read

PLOTS: dict[str, tuple[Callable[..., None], tuple[str, ...]]] = {
    "side_by_side": (plot_side_by_side, BLOCKS["systems-time"].files),
    "scaling": (plot_scaling, BLOCKS["scaling"].files),
    "growth": (plot_growth, BLOCKS["growth"].files),
    "learning": (plot_learning, BLOCKS["learning"].files),
    "few_data": (plot_few_data, BLOCKS["learning-few-data"].files),
}


def draw_all(folder: Path = RESULTS) -> None:
    """
    Raises:
        ValueError: matplotlib is not installed.
    """
    for name, (draw, files) in PLOTS.items():
        draw(*(read(RESULTS / f"{file}.json") for file in files), path=folder / f"{name}.png")
