"""What benchmarks/families.py found, as rows of tables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

WORDS = ("right", "partial", "refused", "wrong")
KINDS = ("blocks", "neurons")
Models = Mapping[str, Mapping[str, Any]]


def counts(models: Models) -> tuple[list[str], list[list[str]]]:
    """Heads and rows: for each mapping the numbers of models, of those without a verdict, and of each verdict."""
    heads = ["", "models", "unknown", *(f"{kind}: {'/'.join(WORDS)}" for kind in KINDS)]
    rows = []
    for mapping in dict.fromkeys(name.partition("/")[0] for name in models):
        found = [model for name, model in models.items() if name.startswith(f"{mapping}/")]
        known = [model for model in found if all(model.get(kind, {}).get("word") in WORDS for kind in KINDS)]
        cells = ["/".join(str(sum(model[kind]["word"] == word for model in known)) for word in WORDS) for kind in KINDS]
        rows.append([mapping, str(len(found)), str(len(found) - len(known)), *cells])
    return heads, rows


def reasons(models: Models) -> list[list[str]]:
    """Why models are not right: verdict, reason, number and names of the models; the most frequent first."""
    names: dict[tuple[str, str], list[str]] = {}
    for name, model in models.items():
        for verdict in _verdicts(model):
            names.setdefault(verdict, []).append("/".join(name.split("/")[:2]))
    rows = sorted(names.items(), key=lambda row: (row[0][0], -len(row[1])))
    return [[word, why.replace("|", "\\|"), str(len(of)), ", ".join(of)] for (word, why), of in rows]


def _verdicts(model: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Verdicts of a model with their reasons; one if they are the same for blocks and for neurons."""
    if "not built" in model:
        return [("not built", model["not built"][:120])]
    blocks, neurons = ((model[kind]["word"], _general(model[kind]["reason"])) for kind in KINDS)
    if blocks == neurons:
        return [] if blocks[0] == "right" else [blocks]
    both = (("blocks", *blocks), ("neurons", *neurons))
    return [(f"{kind} {word}", why) for kind, word, why in both if word != "right"]


def _general(reason: str) -> str:
    """The first clause of a reason, without the names of modules and classes and without sizes."""
    clause = re.split(r"[;.] |\n", reason)[0]
    clause = re.sub(r"'[\w.]+'|\b\w+(\.\w+)+|\b\w*[a-z]\w*[A-Z]\w*|\b\d+(\.\d+)?", "...", clause)
    return re.sub(r"^(T5|[A-Z]+[a-z]+)\w*(?= has no layer)", "...", clause)[:120]
