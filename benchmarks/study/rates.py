"""Which learning rate a subject's figures are of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

TUNING_SEED = 99  # learning rates are chosen with it; no figure has it


def tuned_rate(cells: Iterable[Mapping[str, Any]], study: str, subject: str) -> float | None:
    """The best of the longest runs with the tuning seed; None where nothing was tried."""
    tried = [cell for cell in cells if _key(cell) == (study, subject, TUNING_SEED)]
    longest = max((cell["budget"] for cell in tried), default=None)
    best = min((cell for cell in tried if cell["budget"] == longest), key=lambda cell: cell["best_loss"], default=None)
    return None if best is None else float(best["rate"])


def _key(cell: Mapping[str, Any]) -> tuple[str, str, int]:
    return cell["study"], cell["subject"], cell["seed"]


def of_one_rate(cells: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without those of the tuning seed, and one where a cell was done with several rates: that of the tuned rate."""
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    for cell in cells:
        if cell["seed"] == TUNING_SEED:
            continue
        place = (*_key(cell), cell["budget"])
        if place not in kept or cell["rate"] == tuned_rate(cells, cell["study"], cell["subject"]):
            kept[place] = cell
    return [*kept.values()]
