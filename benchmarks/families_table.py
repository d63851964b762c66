"""Table of the figures of benchmarks/families.py, and what is refused, with the reasons.

python benchmarks/families_table.py benchmarks/results/families.json
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

WORDS = ("right", "partial", "refused", "wrong", "crashed", "not measured")
KINDS = ("blocks", "neurons")
Models = Mapping[str, Mapping[str, Any]]


def counts(models: Models) -> list[list[str]]:
    """Head and rows: for each mapping the number of models, and of each verdict for blocks and for neurons."""
    heads = ["", "models", "not built", *(f"{kind} {word}" for kind in KINDS for word in WORDS)]
    rows = []
    for mapping in dict.fromkeys(name.partition("/")[0] for name in models):
        found = [model for name, model in models.items() if name.startswith(f"{mapping}/")]
        built = [model for model in found if "not built" not in model]
        cells = [sum(model[kind]["word"] == word for model in built) for kind in KINDS for word in WORDS]
        rows.append([mapping, *map(str, (len(found), len(found) - len(built), *cells))])
    return [heads, *rows]


def reasons(models: Models) -> list[tuple[str, str, list[str]]]:
    """Why models are not right: kind, reason, and their names; the most frequent first."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, model in models.items():
        short = "/".join(name.split("/")[:2])
        if "not built" in model:
            names.setdefault(("not built", model["not built"]), []).append(short)
            continue
        for kind in KINDS:
            verdict = model[kind]
            if verdict["word"] != "right":
                names.setdefault((f"{kind} {verdict['word']}", _general(verdict["reason"])), []).append(short)
    return sorted(((kind, why, of) for (kind, why), of in names.items()), key=lambda row: (row[0], -len(row[2])))


def _general(reason: str) -> str:
    """A reason without the names of a model's modules and its sizes, cut to a sentence."""
    reason = re.sub(r"'[\w.]+'|\b\w+(\.\w+)+\b|\d+(\.\d+)?(e-?\d+)?", "...", reason.partition("\n")[0])
    return re.sub(r"\w*(For\w+|LMHead\w*|Model|Layer|Block)\b", "...", reason)[:160]


def markdown(models: Models) -> str:
    """Both as tables."""
    return f"{_table(counts(models))}\n\n{_table([['', 'why', 'models'], *_rows(models)])}"


def _rows(models: Models) -> list[Sequence[str]]:
    return [
        [kind, why.replace("|", "\\|"), f"{len(names)}: {', '.join(names)}"] for kind, why, names in reasons(models)
    ]


def _table(rows: Sequence[Sequence[str]]) -> str:
    lines = [rows[0], ["---"] * len(rows[0]), *rows[1:]]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


if __name__ == "__main__":
    print(markdown(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))["models"]))
