"""Names of tensors in checkpoints of others, matched to the dense model's.

Pure: knows neither DeepSpeed nor torch.distributed.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from sdp_deepspeed.messages import quoted


@dataclass(frozen=True)
class Match:
    """What of a checkpoint is what of the model.

    Args:
        found: stored name by the dense name that it is loaded to.
        tied: stored names of one tensor under a second name, by dense name: they must have its values.
        missing: dense names that the checkpoint lacks.
        unknown: stored names that the model lacks.
    """

    found: Mapping[str, str]
    tied: Mapping[str, list[str]]
    missing: list[str]
    unknown: list[str]


@dataclass(frozen=True)
class NameMap:
    """What tensors of one model are called, here and in checkpoints of others.

    Args:
        known: dense names, each tensor once.
        aliases: dense name by another name of the same tensor (tied weights).
        prefix: of the model without its head, which checkpoints of that model lack; None if there is none.
        ignored: patterns of stored names that the model computes itself.
    """

    known: frozenset[str]
    aliases: Mapping[str, str] = field(default_factory=dict)
    prefix: str | None = None
    ignored: tuple[str, ...] = ()

    @classmethod
    def of(cls, module: nn.Module, known: Iterable[str]) -> NameMap:
        """Of a live model.

        Args:
            known: its dense names.
        """
        names = frozenset(known)
        first: dict[int, str] = {}
        aliases: dict[str, str] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            known_as = first.setdefault(id(parameter), name)
            if known_as != name and known_as in names:
                aliases[name] = known_as
        model: Any = module
        ignored = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
        prefix = getattr(model, "base_model_prefix", None) or None
        return cls(names, aliases, prefix, tuple(ignored))

    def match(self, stored: Collection[str]) -> Match:
        """Exact names first; then with or without the prefix; then a second name of a tied tensor."""
        found: dict[str, str] = {}
        others: dict[str, list[str]] = {}
        unknown: list[str] = []
        for name in sorted(stored, key=lambda name: (name not in self.known, name)):
            spellings = self._spellings(name)
            dense = next((spelling for spelling in spellings if spelling in self.known), None)
            alias = next((self.aliases[spelling] for spelling in spellings if spelling in self.aliases), None)
            if dense is not None and dense not in found:
                found[dense] = name
            elif dense is None and alias is not None:
                others.setdefault(alias, []).append(name)
            elif not any(re.search(pattern, name) for pattern in self.ignored):
                unknown.append(name)
        for dense, names in others.items():
            if dense not in found:
                found[dense] = names.pop(0)
        tied = {dense: names for dense, names in others.items() if names}
        return Match(found, tied, sorted(self.known - found.keys()), unknown)

    def _spellings(self, name: str) -> list[str]:
        if self.prefix is None:
            return [name]
        return [name, f"{self.prefix}.{name}", name.removeprefix(f"{self.prefix}.")]


def refuse_others(match: Match, where: str) -> None:
    """ValueError if a checkpoint is not of exactly this model."""
    problems = []
    if match.missing:
        problems.append(f"it lacks {quoted(match.missing)}")
    if match.unknown:
        problems.append(f"the model has no {quoted(match.unknown)}")
    if problems:
        raise ValueError(
            f"{where} is of another model: {'; '.join(problems)}. Build the model with the same config as the one that "
            "was saved"
        )
