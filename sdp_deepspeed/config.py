"""The JSON block `subnetwork_data_parallel`: parse it, and explain what is wrong in it."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sdp_deepspeed.config_errors import explain, normalized
from sdp_deepspeed.plan.coverage import Coverage, CoverageRule, Holders, HoldersRule
from sdp_deepspeed.schedule import blocks_of_phases

KEY = "subnetwork_data_parallel"

Regime = Literal["forward", "backward"]
StrategyName = Literal["block", "neuron"]


class Mode(NamedTuple):
    """What a worker computes of the model (regime), and what a unit is (strategy)."""

    regime: Regime
    strategy: StrategyName

    def __str__(self) -> str:
        return f"{self.regime} x {self.strategy}"


MODES = tuple(Mode(*names) for names in itertools.product(get_args(Regime), get_args(StrategyName)))

# Shorter names that users of the method may try; difflib finds the misspellings of KEY itself.
_OTHER_NAMES = frozenset(
    {"sdp", "sdpconfig", "subnetwork", "subnetworks", "subnetworkparallel", "subnetworkparallelism", "sdpdeepspeed"}
)
_NEAR_MISS_RATIO = 0.8  # every top-level key of DeepSpeed stays below 0.7 (tests/unit/test_config.py)


class CheckpointOptions(BaseModel):
    """`checkpoint` in the block; a field's description is what its error message says was expected."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    asynchronous: bool = Field(default=False, description="true or false")
    keep_last: int | None = Field(default=None, ge=1, description="a whole number of checkpoints to keep, at least 1")
    verify: bool = Field(default=True, description="true or false")


class SubnetworkConfig(BaseModel):
    """The parsed block. A field's description is what its error message says was expected."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    enabled: bool = Field(default=True, description="true or false")
    regime: Regime = Field(default="forward", description='"forward" or "backward"')
    strategy: StrategyName | dict[str, StrategyName] = Field(
        default="block",
        description='"block", "neuron", or a mapping by part such as {"attention": "neuron", "mlp": "block"}',
    )
    coverage: Coverage | None = Field(
        default=None, description='a number above 0 and at most 1, or rules such as [{"units": "mlp", "coverage": 0.5}]'
    )
    holders: Holders | None = Field(
        default=None,
        description='a whole number of holders per unit, at least 1, or rules such as [{"units": "mlp", "holders": 2}]',
    )
    subnetworks: Literal["auto"] | int = Field(
        default="auto",
        description='"auto" (one per data-parallel rank, fewer above eight holders) or a whole number of at least 1',
    )
    granularity: Literal["sublayer", "layer"] = Field(default="sublayer", description='"sublayer" or "layer"')
    assignment: str = Field(default="auto", description='"auto" or the path of a plan ending in .json')
    shared: tuple[str, ...] = Field(
        default=(), strict=False, description="a list of regular expressions of parameter names (Python's re)"
    )
    neuron_groups: int | None = Field(default=None, ge=1, description="a whole number of groups, at least 1")
    dense_branch_scale: Literal["none", "coverage"] = Field(default="none", description='"none" or "coverage"')
    seed: int = Field(default=0, ge=0, description="a whole number of at least 0")
    allow_optimizer: bool = Field(default=False, description="true or false")
    schedule: tuple[dict[str, Any], ...] | None = Field(
        default=None,
        strict=False,
        min_length=1,
        description='a list of phases such as [{"until_step": 1000, "coverage": 0.5}, {"coverage": 1.0}]',
    )
    redraw_interval: int | None = Field(default=None, ge=1, description="a whole number of steps, at least 1")
    total_steps: Literal["auto"] | int | None = Field(
        default=None, description='the number of steps of the whole run, or "auto" where the host fills it in'
    )
    check_agreement: bool = Field(default=False, description="true or false")
    checkpoint: CheckpointOptions = Field(
        default=CheckpointOptions(), description='a mapping such as {"asynchronous": true, "keep_last": 3}'
    )

    @field_validator("subnetworks", "total_steps")
    @classmethod
    def _at_least_one(cls, value: Literal["auto"] | int | None) -> Literal["auto"] | int | None:
        if isinstance(value, int) and value < 1:
            raise ValueError
        return value

    @field_validator("strategy")
    @classmethod
    def _no_empty_mapping(cls, value: StrategyName | dict[str, StrategyName]) -> StrategyName | dict[str, StrategyName]:
        if not value:
            raise ValueError
        return value

    @field_validator("assignment")
    @classmethod
    def _known_assignment(cls, value: str) -> str:
        if value != "auto" and not value.endswith(".json"):
            raise ValueError
        return value

    @field_validator("shared")
    @classmethod
    def _compiles(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for pattern in value:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} does not compile: {error}") from None
        return value

    @model_validator(mode="after")
    def _consistent(self) -> SubnetworkConfig:
        if self.enabled and self.schedule is None:  # of a schedule each phase is looked at
            problems = _contradictions(self)
            if problems:
                raise ValueError("\n".join(problems))
        return self

    @property
    def plan_path(self) -> str | None:
        """Path of the plan that `assignment` names, or None."""
        return self.assignment if self.assignment.endswith(".json") else None


_MODELS: Mapping[str | int, type[BaseModel]] = {
    "": SubnetworkConfig,
    "checkpoint": CheckpointOptions,
    "coverage": CoverageRule,
    "holders": HoldersRule,
}


def parse(ds_config: Mapping[str, Any]) -> SubnetworkConfig | None:
    """Read the block out of a DeepSpeed config.

    Args:
        ds_config: the whole DeepSpeed config, loaded.

    Returns:
        The block, of its first phase if it has a schedule; None if it is absent or not enabled.

    Raises:
        ValueError: a top-level key that is a near-miss of the block's name (DeepSpeed ignores unknown
            top-level keys, so the run would train without SDP), or problems inside the block, all in one message.
    """
    _refuse_near_misses(ds_config)
    if KEY not in ds_config:
        return None
    block = ds_config[KEY]
    if not isinstance(block, Mapping):
        raise ValueError(f'{KEY}: got {block!r}, expected an object such as {{"coverage": 0.5}}')
    config = _validated(block, KEY)
    if not config.enabled:
        return None
    first, *_ = [_validated(own, path) for path, own in blocks_of_phases(block, KEY)]
    return first


def _validated(block: Mapping[str, Any], path: str) -> SubnetworkConfig:
    try:
        return SubnetworkConfig.model_validate(dict(block))
    except ValidationError as error:
        raise ValueError(explain(error, block, KEY, _MODELS).replace(KEY, path)) from None


def _contradictions(config: SubnetworkConfig) -> list[str]:
    """Settings that contradict each other or would have no effect."""
    problems = []
    if config.coverage is not None and config.holders is not None:
        got = f"{_words(config.coverage)} and {_words(config.holders)}"
        problems.append(f"{KEY}.coverage and {KEY}.holders: got {got}, expected one of both")
    if config.redraw_interval is not None and config.plan_path is not None:
        problems.append(
            f"{KEY}.redraw_interval: got {config.redraw_interval}, but the plan {config.plan_path!r} never changes; "
            'use assignment "auto"'
        )
    rules = next((name for name in ("coverage", "holders") if isinstance(getattr(config, name), tuple)), None)
    if config.plan_path is None:
        if config.coverage is None and config.holders is None:
            problems.append(f"{KEY}: neither coverage nor holders is given; add one, such as {KEY}.coverage: 0.5")
        return problems + _without_effect(config)
    for name in ("granularity", "shared", "neuron_groups", "seed", *([rules] if rules else [])):
        if getattr(config, name) != SubnetworkConfig.model_fields[name].default:
            value = getattr(config, name)
            problems.append(f"{KEY}.{name}: got {value!r}, but the plan {config.plan_path!r} decides that; remove it")
    return problems


def _words(value: Coverage | Holders) -> str:
    return "rules" if isinstance(value, tuple) else f"{value:g}"


def _without_effect(config: SubnetworkConfig) -> list[str]:
    """Settings of one strategy where only the other is chosen."""
    chosen = {config.strategy} if isinstance(config.strategy, str) else set(config.strategy.values())
    problems = []
    for name, strategy in (("granularity", "block"), ("neuron_groups", "neuron")):
        value = getattr(config, name)
        if strategy not in chosen and value != SubnetworkConfig.model_fields[name].default:
            problems.append(
                f'{KEY}.{name}: got {value!r}, which has an effect on the strategy "{strategy}" only; remove it, or '
                f'choose "{strategy}" for a part of the model'
            )
    return problems


def _refuse_near_misses(ds_config: Mapping[str, Any]) -> None:
    target = normalized(KEY)
    for name in ds_config:
        if name == KEY or not isinstance(name, str):
            continue
        plain = normalized(name)
        if plain in _OTHER_NAMES or difflib.get_close_matches(target, [plain], cutoff=_NEAR_MISS_RATIO):
            raise ValueError(
                f"unknown top-level key {name!r}: DeepSpeed would ignore it and train without subnetworks. "
                f"If you mean subnetwork data parallelism, write {KEY!r}; if not, rename or remove the key"
            )
