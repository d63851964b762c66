"""The config block `subnetwork_data_parallel`: its fields and their validation."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from sdp_deepspeed.config.errors import explain, refuse_near_misses
from sdp_deepspeed.config.schedule import blocks_of_phases
from sdp_deepspeed.messages import KEY
from sdp_deepspeed.plan.coverage import CoverageRule, CoverageSetting, HoldersRule, HoldersSetting
from sdp_deepspeed.units import Regime, StrategyName


class Mode(NamedTuple):
    """A regime and a strategy."""

    regime: Regime
    strategy: StrategyName

    def __str__(self) -> str:
        return f"{self.regime} x {self.strategy}"


MODES = tuple(Mode(*names) for names in itertools.product(get_args(Regime), get_args(StrategyName)))


class CheckpointOptions(BaseModel):
    """`checkpoint` in the block. Titles of fields are in error messages, descriptions in docs/config.md."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    asynchronous: bool = Field(
        default=False,
        title="true or false",
        description="Copy the state to host memory, and write the files in the background.",
    )
    keep_last: int | None = Field(
        default=None,
        ge=1,
        title="an integer, at least 1",
        description="Delete older checkpoints. By default all are kept.",
    )
    verify: bool = Field(
        default=True,
        title="true or false",
        description="Compare checksums before loading, which reads each file twice.",
    )


class LocalSteps(BaseModel):
    """`local_steps` in the block: each team trains its subnetwork by itself, and they average weights every H steps."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    teams: int = Field(
        ge=2,
        title="an integer, at least 2",
        description="Number K of teams, jobs of their own that may come and go. The plan is that of K workers.",
    )
    every: int = Field(
        ge=2,
        title="an integer, at least 2",
        description="Optimizer steps between two meetings, H.",
    )
    outer_lr: float = Field(
        default=1.0,
        gt=0,
        allow_inf_nan=False,
        title="a number above 0",
        description="Learning rate of the outer SGD, whose gradient is the mean difference from the last meeting. 1 "
        "without momentum: weights become the mean.",
    )
    outer_momentum: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        title="a number from 0 to below 1",
        description="Nesterov momentum of the outer SGD.",
    )
    wait_timeout: float = Field(
        default=1800.0,
        gt=0,
        allow_inf_nan=False,
        title="seconds above 0",
        description="How long a team waits for all at the start, then starting without them, or for the last holder of "
        "a unit, then ending.",
    )
    exchange_timeout: float = Field(
        default=60.0,
        gt=0,
        allow_inf_nan=False,
        title="seconds above 0",
        description="How long an exchange of 16 MB may take, before it is repeated with the teams that are still here.",
    )


class SubnetworkConfig(BaseModel):
    """The parsed block. Titles of fields are in error messages, descriptions in docs/config.md."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    coverage: CoverageSetting | None = Field(
        default=None,
        title='a number above 0 and at most 1, or rules such as [{"units": "mlp", "coverage": 0.5}]',
        description="Fraction C of the subnetworks that hold each unit: one number, or [rules](#rules) by depth and "
        "name. C times the number of subnetworks must be an integer. Required without `holders` or a plan.",
    )
    holders: HoldersSetting | None = Field(
        default=None,
        title='an integer, at least 1, or rules such as [{"units": "mlp", "holders": 2}]',
        description="Instead of `coverage`: number of subnetworks that hold each unit.",
    )
    regime: Regime = Field(
        default="forward",
        title='"forward" or "backward"',
        description="`forward`: a rank runs only its own units. `backward`: it runs the whole model, but computes "
        "weight gradients of its own units only.",
    )
    strategy: StrategyName | dict[str, StrategyName] = Field(
        default="block",
        title='"block", "neuron", or a mapping by branch type such as {"attention": "neuron", "mlp": "block"}',
        description="A unit is a residual branch (`block`), or a group of neurons, heads or channels (`neuron`). "
        "Branch types missing from a mapping are replicated.",
    )
    subnetworks: Literal["auto"] | int = Field(
        default="auto",
        title='"auto" or an integer, at least 1',
        description="Number k of subnetworks, a divisor of the number D of data-parallel ranks; D / k ranks train each "
        "one. `auto`: one per rank, or fewer if a unit would have more than eight holders.",
    )
    granularity: Literal["sublayer", "layer"] = Field(
        default="sublayer",
        title='"sublayer" or "layer"',
        description="Strategy `block`: a unit is a residual branch (`sublayer`), or all branches of a layer (`layer`).",
    )
    neuron_groups: int | None = Field(
        default=None,
        ge=1,
        title="an integer, at least 1",
        description="Strategy `neuron`: groups of neurons in each MLP. By default one per subnetwork.",
    )
    shared: tuple[str, ...] = Field(
        default=(),
        strict=False,
        title="a list of regular expressions of parameter names (Python's re)",
        description="Every rank holds units whose name, or all of whose parameters, match one of these.",
    )
    assignment: str = Field(
        default="auto",
        title='"auto" or the path of a plan ending in .json',
        description="`auto` computes a balanced plan. A path loads one that `engine.plan.save` or your program wrote.",
    )
    seed: int = Field(
        default=0,
        ge=0,
        title="an integer, at least 0",
        description="Chooses among equally good plans.",
    )
    redraw_interval: int | None = Field(
        default=None,
        ge=1,
        title="an integer, at least 1",
        description="Number of steps after which the plan is computed again, with the next seed.",
    )
    schedule: tuple[dict[str, Any], ...] | None = Field(
        default=None,
        strict=False,
        min_length=1,
        title='a list of phases such as [{"until_step": 1000, "coverage": 0.5}, {"coverage": 1.0}]',
        description="[Phases](#phases) that change keys of the block, each until a step or a fraction of all steps.",
    )
    total_steps: Literal["auto"] | int | None = Field(
        default=None,
        title='the number of steps of the whole run, or "auto" where the host fills it in',
        description="Needed by phases that end at a fraction of all steps. By default the Trainer's number, or "
        "`scheduler.params.total_num_steps`.",
    )
    branch_scale: Literal["training", "none"] = Field(
        default="training",
        title='"training" or "none"',
        description="Regime `forward`: `training` multiplies what a unit adds by 1 / C, so that a subnetwork adds as "
        "much as the dense model; all groups of a branch then need the same coverage. `none`: the paper's method.",
    )
    local_steps: LocalSteps | None = Field(
        default=None,
        title='a mapping such as {"teams": 4, "every": 10}',
        description="For slow links: teams, jobs of their own, average their weights every H steps. "
        "[Options](#local-steps).",
    )
    allow_optimizer: bool = Field(
        default=False,
        title="true or false",
        description="Allow an unknown optimizer. It must update each element independently of the others.",
    )
    checkpoint: CheckpointOptions = Field(
        default=CheckpointOptions(),
        title='a mapping such as {"asynchronous": true, "keep_last": 3}',
        description="[Checkpoint options](#checkpoint).",
    )
    check_agreement: bool = Field(
        default=False,
        title="true or false",
        description="For debugging: compare the weights of all holders bit by bit after each step.",
    )
    enabled: bool = Field(
        default=True, title="true or false", description="`false` trains as if the block were absent."
    )

    @field_validator("subnetworks", "total_steps")
    @classmethod
    def _at_least_one(cls, value: str | int | None) -> str | int | None:
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
        if self.enabled and self.schedule is None:  # with a schedule, each phase is checked
            problems = _contradictions(self)
            if problems:
                raise ValueError("\n".join(problems))
        return self

    @property
    def is_scaled(self) -> bool:
        """Whether subnetworks multiply what their units add by 1 / C (`branch_scale`)."""
        return self.branch_scale == "training"

    @property
    def plan_path(self) -> str | None:
        """Path of the plan in `assignment`, or None."""
        return self.assignment if self.assignment.endswith(".json") else None

    def comparable(self) -> dict[str, Any]:
        """The settings that must be equal on all ranks. The path of a plan may differ between nodes; the plan itself is
        compared later."""
        return self.model_dump() | ({} if self.plan_path is None else {"assignment": "<a plan>"})


class Combination(NamedTuple):
    """A refused combination of keys; docs/config.md lists all of them."""

    key: str
    is_refused: Callable[[SubnetworkConfig], bool]
    problem: str
    action: str


_MODELS: Mapping[str | int, type[BaseModel]] = {
    "": SubnetworkConfig,
    "checkpoint": CheckpointOptions,
    "local_steps": LocalSteps,
    "coverage": CoverageRule,
    "holders": HoldersRule,
}


def parse(ds_config: Mapping[str, Any]) -> SubnetworkConfig | None:
    """Parse the block of a DeepSpeed config.

    Returns:
        The block; with a schedule, that of its first phase. None if it is absent or not enabled.

    Raises:
        ValueError: all problems of the block, or a top-level key whose name resembles the block's (DeepSpeed ignores
            unknown top-level keys, so the run would silently train without subnetworks).
    """
    refuse_near_misses(ds_config)
    if KEY not in ds_config:
        return None
    block = ds_config[KEY]
    if not isinstance(block, Mapping):
        raise ValueError(f'{KEY}: got {block!r}, expected an object such as {{"coverage": 0.5}}')
    config = _validated(block, KEY)
    if not config.enabled:
        return None
    phases = {path: _validated(phase, path) for path, phase in blocks_of_phases(block)}
    of_teams = [path for path, phase in phases.items() if phase.local_steps is not None]
    if config.schedule is not None and of_teams:
        raise ValueError(f"{of_teams[0]}.local_steps: teams have one plan for the whole run; remove {KEY}.schedule")
    return next(iter(phases.values()))


def parse_block(block: Any, call: str) -> SubnetworkConfig:
    """Parse a block without a DeepSpeed config, the argument of a call whose plan never changes.

    Raises:
        ValueError: the block is invalid, has a schedule, or is not enabled.
    """
    if not isinstance(block, Mapping) or KEY in block:
        example = '{"coverage": 0.5}, not the enclosing config'
        raise ValueError(f"{call}: block: got {block!r}, expected the contents of {KEY!r}, such as {example}")
    if block.get("schedule") is not None:
        raise ValueError(f"{KEY}.schedule: the plan of {call} never changes; remove it")
    config = parse({KEY: dict(block)})
    if config is None:
        raise ValueError(f"{KEY}.enabled: got false, expected true for {call}")
    return config


def _validated(block: Mapping[str, Any], path: str) -> SubnetworkConfig:
    try:
        return SubnetworkConfig.model_validate(dict(block))
    except ValidationError as error:
        raise ValueError(explain(error, block, KEY, _MODELS).replace(KEY, path)) from None


def _contradictions(config: SubnetworkConfig) -> list[str]:
    """Refused combinations of keys, one line each."""
    problems = []
    for key, is_refused, problem, action in REFUSED_COMBINATIONS:
        if is_refused(config):
            value = getattr(config, key)
            text = "rules" if key in ("coverage", "holders") and isinstance(value, tuple) else f"{value!r}"
            problems.append(f"{KEY}.{key}: got {text}, which {problem}; {action}")
    if config.plan_path is None and config.coverage is None and config.holders is None:
        problems.append(f"{KEY}: neither coverage nor holders is given; add one, such as {KEY}.coverage: 0.5")
    return problems


def _is_set(config: SubnetworkConfig, key: str) -> bool:
    return bool(getattr(config, key) != SubnetworkConfig.model_fields[key].default)


def _without_strategy(key: str, strategy: StrategyName) -> Combination:
    def is_refused(config: SubnetworkConfig) -> bool:
        chosen = [config.strategy] if isinstance(config.strategy, str) else list(config.strategy.values())
        return _is_set(config, key) and config.plan_path is None and strategy not in chosen

    problem = f'has no effect without the strategy "{strategy}"'
    return Combination(key, is_refused, problem, f'remove it, or choose "{strategy}" for a branch type')


def _with_plan(key: str) -> Combination:
    def is_refused(config: SubnetworkConfig) -> bool:
        are_rules = isinstance(getattr(config, key), tuple) or key not in ("coverage", "holders")
        return config.plan_path is not None and _is_set(config, key) and are_rules

    return Combination(key, is_refused, "has no effect with a plan file, which decides it", "remove it")


def _with_teams(key: str) -> Combination:
    def is_refused(config: SubnetworkConfig) -> bool:
        return config.local_steps is not None and _is_set(config, key)

    return Combination(key, is_refused, "cannot be combined with local_steps", "remove it")


REFUSED_COMBINATIONS = (
    Combination(
        "coverage",
        lambda config: config.coverage is not None and config.holders is not None,
        "cannot be combined with holders",
        "remove one of them",
    ),
    Combination(
        "redraw_interval",
        lambda config: config.redraw_interval is not None and config.plan_path is not None,
        "has no effect with a plan file, which cannot change",
        'use assignment "auto"',
    ),
    *map(_with_teams, ("subnetworks", "redraw_interval", "checkpoint", "check_agreement")),
    _without_strategy("granularity", "block"),
    _without_strategy("neuron_groups", "neuron"),
    *map(_with_plan, ("granularity", "shared", "neuron_groups", "seed", "coverage", "holders")),
)
