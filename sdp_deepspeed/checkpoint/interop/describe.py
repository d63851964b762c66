"""What a checkpoint is, for people."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sdp_deepspeed.atomic_files import regular
from sdp_deepspeed.checkpoint.storage.chunk_files import SafetensorsReader
from sdp_deepspeed.checkpoint.storage.manifest import verify
from sdp_deepspeed.checkpoint.storage.names import PLAN, WEIGHT
from sdp_deepspeed.plan.coverage import in_words
from sdp_deepspeed.sizes import bytes_text


def describe(path: Path) -> tuple[list[str], bool]:
    """Lines, and whether all files are as they were written.

    Raises:
        ValueError: it is no checkpoint, or its manifest is damaged.
    """
    manifest, problems = verify(path)
    lines = [f"checkpoint {path}"]
    if not problems:
        size = sum(record["bytes"] for record in manifest["files"].values())
        lines += [
            f"format {manifest['format']}, step {manifest.get('global_steps')}, written by {manifest['ranks']} ranks",
            f"{len(manifest['files'])} files, {bytes_text(size)}",
        ]
        try:
            lines += [*_plan(path), *_tensors(path)]
        except ValueError as problem:
            problems = [str(problem)]
    return [
        *lines,
        *problems,
        "damaged" if problems else "complete: sizes and hashes of all files are right",
    ], not problems


def _plan(path: Path) -> Iterator[str]:
    if (path / PLAN).is_file():
        try:
            plan: dict[str, Any] = json.loads(regular(path / PLAN).read_text(encoding="utf-8"))
            yield (
                f"plan {plan['hash'][:12]}: {plan['regime']} regime, {plan['strategy']} strategy, "
                f"{plan['num_subnetworks']} subnetworks, {len(plan['units'])} units with "
                f"{in_words([len(unit['holders']) for unit in plan['units']])}"
            )
        except (KeyError, TypeError, ValueError, RecursionError) as problem:
            raise ValueError(f"{path / PLAN} is no plan: {problem!r}") from None


def _tensors(path: Path) -> Iterator[str]:
    """Counts and sizes for each kind: weights, masters, moments."""
    kinds: dict[str, list[Any]] = defaultdict(list)
    for key, info in SafetensorsReader(path).read_metadata().state_dict_metadata.items():
        kinds[key.partition("/")[0]].append(info)
    for kind, infos in sorted(kinds.items(), key=lambda item: item[0] != WEIGHT):
        elements = sum(info.size.numel() for info in infos)
        size = sum(info.size.numel() * info.properties.dtype.itemsize for info in infos)
        dtypes = sorted({str(info.properties.dtype).removeprefix("torch.") for info in infos})
        yield f"{kind}: {len(infos)} tensors, {elements:,} elements, {bytes_text(size)}, {' and '.join(dtypes)}"
