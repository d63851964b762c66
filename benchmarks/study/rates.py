"""Which learning rate a subject's figures are of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

TUNING_SEED = 99  # learning rates are chosen with it; no figure has it


def tuned_rate(cells: Sequence[Mapping[str, Any]], study: str, subject: str) -> float | None:
    """The best of the longest runs with the tuning seed; None where nothing was tried."""
    tried = [cell for cell in cells if _key(cell) == (study, subject, TUNING_SEED)]
    longest = max((cell["budget"] for cell in tried), default=None)
    last = [cell for cell in tried if cell["budget"] == longest and math.isfinite(cell["loss"])]
    best = min(last, key=lambda cell: cell["loss"], default=None)
    return None if best is None else float(best["rate"])


def _key(cell: Mapping[str, Any]) -> tuple[str, str, int]:
    return cell["study"], cell["subject"], cell["seed"]


def of_one_rate(cells: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Without those of the tuning seed; of a subject at a budget those of one rate: the tuned one, or else that with
    the most seeds."""
    groups: dict[tuple[Any, ...], dict[float | None, list[dict[str, Any]]]] = {}
    for cell in cells:
        if cell["seed"] != TUNING_SEED:
            place = (cell["study"], cell["subject"], cell["budget"])
            groups.setdefault(place, {}).setdefault(cell["rate"], []).append(dict(cell))
    found: list[dict[str, Any]] = []
    for (study, subject, _), by_rate in groups.items():
        most = max(by_rate.values(), key=len)
        found += by_rate.get(tuned_rate(cells, study, subject), most)
    return found
