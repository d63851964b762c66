"""Bytes of the running interpreter's Python files; no file of the validation text is trained on."""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

VOCABULARY = 256
_VALIDATION_IN = 20  # one file in so many


@dataclass(frozen=True, eq=False)
class Corpus:
    """
    Args:
        train, validation: uint8 [bytes], of different files.
        tuning: what learning rates are chosen by: the text that follows the trained one, or the validation text if all
            is trained on.
    """

    train: torch.Tensor
    validation: torch.Tensor
    tuning: torch.Tensor


def source_files() -> Iterator[tuple[str, Path]]:
    """Files of the standard library with their names in it, without packages that were installed."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(folder.rglob("*.py")):
        if not {"site-packages", "dist-packages"} & {*path.parts[len(folder.parts) :]}:
            yield path.relative_to(folder).as_posix(), path


def is_validation(name: str) -> bool:
    """By a hash of the file's name, so that it depends on nothing else."""
    return _digest(name) % _VALIDATION_IN == 0


def read_corpus(train_bytes: int | None = None) -> Corpus:
    """The files in an order that their names' hashes decide.

    Args:
        train_bytes: so many from the start of the training text; None for all.

    Files with the same content count once, by the first name: a copy of one would be on both sides.
    """
    parts: dict[bool, list[bytes]] = {False: [], True: []}
    seen: set[bytes] = set()
    for own, path in sorted(source_files(), key=lambda item: _digest(item[0])):
        content = path.read_bytes()
        known = hashlib.sha256(content).digest()
        if content and known not in seen:
            seen.add(known)
            parts[is_validation(own)].append(content)
    train, validation = (torch.frombuffer(bytearray(b"".join(parts[side])), dtype=torch.uint8) for side in parts)
    if train_bytes is None:
        return Corpus(train, validation, tuning=validation)
    if len(train) < 2 * train_bytes:
        raise ValueError(f"the standard library has {len(train)} bytes to train on, fewer than twice {train_bytes}")
    return Corpus(train[:train_bytes], validation, tuning=train[train_bytes : 2 * train_bytes])


@cache
def digest_of(corpus: Corpus) -> str:
    """Of both sides: another environment has other files."""
    sides = (side.numpy().tobytes() for side in (corpus.train, corpus.validation))
    return hashlib.sha256(b"".join(sides)).hexdigest()


def _digest(name: str) -> int:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big")


def windows(text: torch.Tensor, starts: torch.Tensor, length: int) -> torch.Tensor:
    """Rows of `length` bytes and the one after them, int64 [rows, length + 1]."""
    return text[starts.unsqueeze(1) + torch.arange(length + 1)].long()


def training_rows(text: torch.Tensor, seed: int, step: int, num_rows: int, length: int) -> torch.Tensor:
    """What step number `step` of a run reads: the same for all subjects, and places that depend on nothing else."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    starts = torch.randint(len(text) - length, (num_rows,), generator=generator)
    return windows(text, starts, length)


def validation_rows(text: torch.Tensor, num_rows: int, length: int) -> torch.Tensor:
    """Places at even distances, the same for everybody."""
    last = len(text) - length - 1
    return windows(text, torch.linspace(0, last, num_rows).long().clamp(max=last), length)  # fp32 may round it up
