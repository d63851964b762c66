"""Coverage over depth and by name: the rules that `coverage` and `holders` of the config block may be.

The first rule that matches a unit decides; a unit that none matches stays whole. Pure data: how many holders the rules
give to the units of a model is in plan/holders.py.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag, field_validator, model_validator

Share = Annotated[float, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
Number = TypeVar("Number", bound=float)


class _Rule(BaseModel, ABC, Generic[Number]):
    """A rule; a field's description is what its error message says was expected.

    Args:
        units: regular expression of unit names (Python's re.search); all units if it is left out.
        profile: "linear": from `first`, of the first layer of the model, to `last`, of the last one.
        first, last: both ends of a profile.
        whole_ends: so many layers at either end of the model stay whole, whatever the numbers say.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    units: str = Field(default="", description="a regular expression of unit names (Python's re)")
    profile: Literal["linear"] | None = Field(default=None, description='"linear"')
    first: Number | None = Field(default=None, description="a number as of all units, of the first layer")
    last: Number | None = Field(default=None, description="a number as of all units, of the last layer")
    whole_ends: int = Field(default=0, ge=0, description="a whole number of layers")

    @property
    @abstractmethod
    def flat(self) -> Number | None:
        """The one number for all units; None with a profile."""

    @property
    def ends(self) -> tuple[Number, Number]:
        """What the first and the last layer of the model have; the same without a profile."""
        first, last = (self.flat, self.flat) if self.profile is None else (self.first, self.last)
        if first is None or last is None:
            raise AssertionError("_says_one_thing refuses such a rule")
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


class CoverageRule(_Rule[Share]):
    """Of a list in `coverage`."""

    coverage: Share | None = Field(default=None, description="a number above 0 and at most 1")

    @property
    def flat(self) -> float | None:
        return self.coverage


class HoldersRule(_Rule[Count]):
    """Of a list in `holders`."""

    holders: Count | None = Field(default=None, description="a whole number of at least 1")

    @property
    def flat(self) -> int | None:
        return self.holders


def _tag(value: Any) -> str:
    return RULES if isinstance(value, tuple) else "number"


def _as_tuple(value: Any) -> Any:
    """JSON has lists; one rule may stand alone."""
    return (value,) if isinstance(value, dict) else tuple(value) if isinstance(value, list) and value else value


RULES = "rules"  # in the location of pydantic's errors
_EITHER = Discriminator(_tag), BeforeValidator(_as_tuple)
Coverage = Annotated[Annotated[Share, Tag("number")] | Annotated[tuple[CoverageRule, ...], Tag(RULES)], *_EITHER]
Holders = Annotated[Annotated[Count, Tag("number")] | Annotated[tuple[HoldersRule, ...], Tag(RULES)], *_EITHER]
