"""Coverage by name and depth: the rules in `coverage` and `holders`, and the number of holders of each unit.

The first rule that matches a unit decides. Units that no rule matches are held by every subnetwork.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from fractions import Fraction
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

from sdp_deepspeed.messages import listed

Coverage = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Number = TypeVar("Number", bound=float)
_TOLERANCE = 1e-4  # 0.3333 means 1/3
_STEPS = 8  # of a profile, since each number of holders has its own holder sets


class _Rule(BaseModel, ABC, Generic[Number]):
    """A rule. A field's title is the expected value in error messages; its description is for the docs."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    units: str = Field(
        default="",
        title="a regular expression of unit names (Python's re)",
        description="Units to which the rule applies, found with `re.search`. By default all.",
    )
    profile: Literal["linear"] | None = Field(
        default=None,
        title='"linear"',
        description="Instead of one number: a linear change over the depth, from `first` to `last`.",
    )
    first: Number | None = Field(
        default=None, title="a number as in `coverage` or `holders`", description="Value of the first layer."
    )
    last: Number | None = Field(
        default=None, title="a number as in `coverage` or `holders`", description="Value of the last layer."
    )
    whole_ends: int = Field(
        default=0,
        ge=0,
        title="an integer, at least 0",
        description="Layers at each end of the model that every rank holds.",
    )

    @property
    @abstractmethod
    def flat(self) -> Number | None:
        """The number for all units; None with a profile."""

    @property
    def ends(self) -> tuple[Number, Number]:
        """Values of the first and the last layer; equal without a profile."""
        first, last = (self.flat, self.flat) if self.profile is None else (self.first, self.last)
        assert first is not None, "_says_one_thing refuses such a rule"
        assert last is not None, "_says_one_thing refuses such a rule"
        return first, last

    @field_validator("units")
    @classmethod
    def _compiles(cls, value: str) -> str:
        try:
            re.compile(value)
        except re.error:
            raise ValueError from None
        return value

    @model_validator(mode="after")
    def _says_one_thing(self) -> _Rule[Number]:
        given = [self.flat is not None, self.profile is not None, self.first is not None, self.last is not None]
        if given not in ([True, False, False, False], [False, True, True, True]):
            raise ValueError
        return self


class CoverageRule(_Rule[Coverage]):
    """A rule of `coverage`."""

    coverage: Coverage | None = Field(
        default=None, title="a number above 0 and at most 1", description="Coverage of the units that match."
    )

    @property
    def flat(self) -> float | None:
        return self.coverage


class HoldersRule(_Rule[Count]):
    """A rule of `holders`."""

    holders: Count | None = Field(
        default=None, title="an integer, at least 1", description="Number of holders of the units that match."
    )

    @property
    def flat(self) -> int | None:
        return self.holders


def _tag(value: Any) -> str:
    return RULES if isinstance(value, tuple) else "number"


def _as_tuple(value: Any) -> Any:
    """Convert lists of JSON, and single rules, to tuples."""
    return (value,) if isinstance(value, dict) else tuple(value) if isinstance(value, list) and value else value


RULES = "rules"  # tag in the locations of pydantic's errors
_EITHER = Discriminator(_tag), BeforeValidator(_as_tuple)
CoverageSetting = Annotated[
    Annotated[Coverage, Tag("number")] | Annotated[tuple[CoverageRule, ...], Tag(RULES)], *_EITHER
]
HoldersSetting = Annotated[Annotated[Count, Tag("number")] | Annotated[tuple[HoldersRule, ...], Tag(RULES)], *_EITHER]
Given = float | tuple[CoverageRule, ...] | tuple[HoldersRule, ...]
"""A fraction (float), a count (int), or rules of either."""


def holders_of_units(
    given: Given, path: str, k: int, names: Sequence[str], layers: Sequence[int], num_layers: int
) -> tuple[int, ...]:
    """Number of holders p of each unit.

    Args:
        given: `coverage` or `holders` of the block.
        path: path of `given`, for messages.
        num_layers: number of layers of the model, including layers without units.

    Raises:
        ValueError: more than k holders, a fractional number of holders, or a rule without an effect.
    """
    if not isinstance(given, tuple):
        return (whole_holders(given, k, path),) * len(names)
    numbers = [k] * len(names)
    last = num_layers - 1
    undecided = set(range(len(names)))
    rules: tuple[CoverageRule | HoldersRule, ...] = given
    for index, rule in enumerate(rules):
        where = f"{path}[{index}]"
        matched = [unit for unit, name in enumerate(names) if re.search(rule.units, name)]
        mine = [unit for unit in matched if unit in undecided]
        undecided.difference_update(mine)
        cut = [unit for unit in mine if min(layers[unit], last - layers[unit]) >= rule.whole_ends]
        if not matched:
            raise ValueError(f"{where}.units: {rule.units!r} matches no unit; names are like {listed(names, limit=3)}")
        if not mine:
            raise ValueError(f"{where}: earlier rules match all units that {rule.units!r} matches; the first decides")
        if not cut:
            raise ValueError(
                f"{where}.whole_ends: got {rule.whole_ends}, but then every rank holds all units of the rule; the "
                f"model has {num_layers} layers"
            )
        for unit in cut:
            numbers[unit] = _holders_by_rule(rule, k, layers[unit], last, where)
    return tuple(numbers)


def _holders_by_rule(rule: CoverageRule | HoldersRule, k: int, layer: int, last: int, path: str) -> int:
    """p at a layer. For a profile: the nearest of k / 8, 2 k / 8, ..., k; the larger one if two are equally near."""
    if rule.profile is None:
        return whole_holders(rule.ends[0], k, path)
    if isinstance(rule, HoldersRule):
        first, final = (Fraction(whole_holders(number, k, path), k) for number in rule.ends)
    else:
        first, final = (Fraction(repr(number)) for number in rule.ends)
    share = first + (final - first) * Fraction(layer, max(1, last))
    steps = min(k, _STEPS)
    return min((k * i // steps for i in range(steps, 0, -1)), key=lambda p: abs(Fraction(p, k) - share))


def whole_holders(given: float, k: int, path: str) -> int:
    """p from a share of k subnetworks (float) or a count (int).

    Raises:
        ValueError: a share that is not an integer number of holders, or a count above k.
    """
    if isinstance(given, int):
        if given > k:
            raise ValueError(f"{path}: got {given}, but there are only {k} subnetworks; choose 1 to {k}")
        return given
    p = round(given * k)
    if p >= 1 and abs(given - p / k) <= _TOLERANCE:
        return p
    nearest = sorted(sorted(range(1, k + 1), key=lambda n: abs(n / k - given))[:4])
    raise ValueError(
        f"{path}: {given:g} of {k} subnetworks is {given * k:g} holders per unit, not an integer; use "
        f"{', '.join(f'{round(n / k, 4):g} (holders {n})' for n in nearest)}"
    )


def default_subnetworks(given: Given, num_ranks: int, most: int) -> int:
    """k for "auto": one per rank, or fewer if units would have more than `most` holders.

    Args:
        given: `coverage` or `holders` of the block; counts are not limited.
        num_ranks: D; k is a divisor of it.
        most: maximum number of holders, if a divisor allows that.
    """
    limited: list[float] = []  # shares below 1, whose numbers of holders grow with k
    exact: list[float] = []  # shares that must be an integer number of holders; those of a profile are rounded
    for rule in given if isinstance(given, tuple) else (given,):
        if isinstance(rule, float):
            limited.append(rule)
            exact.append(rule)
        elif isinstance(rule, CoverageRule):
            limited += rule.ends
            if rule.coverage is not None:
                exact.append(rule.coverage)
    limited = [share for share in limited if share < 1]
    smallest = num_ranks
    for k in range(num_ranks, 0, -1):
        if num_ranks % k == 0 and all(_is_integer(share, k) for share in exact):
            smallest = k
            if all(round(share * k) <= most for share in limited):
                return k
    return smallest


def _is_integer(share: float, k: int) -> bool:
    """Whether a share of k subnetworks is an integer number of holders, at least 1."""
    return round(share * k) >= 1 and abs(share - round(share * k) / k) <= _TOLERANCE


def describe_holders(numbers: Sequence[int]) -> str:
    """Text for the numbers of holders of units."""
    if not numbers:
        return "no holders"
    if min(numbers) == max(numbers):
        return f"{numbers[0]} holders each"
    return f"{min(numbers)} to {max(numbers)} holders, {sum(numbers)} in all"
