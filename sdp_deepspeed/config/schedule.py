"""Coverage over time: the config of each step, from `schedule` and `redraw_interval` of the block.

A phase overrides keys of the block. Pure data: the engine re-plans when the next step has another config.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from sdp_deepspeed.config.errors import explain
from sdp_deepspeed.messages import KEY, quoted

# Keys that the engine reads only at construction.
FIXED = ("enabled", "allow_optimizer", "checkpoint")
# Other keys that a phase cannot have.
OF_SCHEDULE = ("schedule", "redraw_interval", "total_steps")
_EITHER = ("coverage", "holders")  # alternatives
_ZERO = "zero_optimization"


class PhaseEnd(BaseModel):
    """Keys of a phase, apart from those of the block. A field's title is the expected value in error messages."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    until_step: int | None = Field(
        default=None,
        ge=1,
        title="the number of the phase's last step, at least 1",
        description="Last step of the phase.",
    )
    until: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        title="a fraction of all steps, above 0 and below 1",
        description="The same, as a fraction of `total_steps`.",
    )
    stage: Literal[0, 1, 2] | None = Field(
        default=None, title="one of ZeRO's stages 0, 1 and 2", description="ZeRO stage of the phase."
    )


@dataclass(frozen=True)
class Phase:
    """A phase of a schedule.

    Args:
        until_step: last step; None for the last phase.
        block: keys of the block that it overrides.
        stage: ZeRO stage; None for the config's.
    """

    first_step: int
    until_step: int | None
    block: Mapping[str, Any]
    stage: int | None = None


@dataclass(frozen=True)
class Schedule:
    """The configs of a run over time.

    Args:
        redraw_interval: number of steps after which a new assignment is drawn; None for never.
    """

    config: Mapping[str, Any]
    phases: tuple[Phase, ...]
    redraw_interval: int | None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Schedule | None:
        """Read the schedule of a config with a valid block; None if nothing changes over time.

        Raises:
            ValueError: a fraction of an unknown number of steps, or a phase without steps.
        """
        block = config[KEY]
        given, interval = block.get("schedule"), block.get("redraw_interval")
        if given is None and interval is None:
            return None
        phases = [{}] if given is None else given
        total = _total_steps(config, block)
        ends = _ends(phases, total)
        last_end = max((end for end in ends if end is not None), default=0)
        if total is not None and total <= last_end and has_shares(phases):
            is_given = type(block.get("total_steps")) is int
            where = f"{KEY}.total_steps" if is_given else "scheduler.params.total_num_steps"
            raise ValueError(
                f"{KEY}.schedule: the run has {total} steps ({where}), but the last phase would "
                f"begin after step {last_end}; end earlier phases sooner"
            )
        starts = [1, *(end + 1 for end in ends[:-1] if end is not None)]
        pieces = zip(phases, starts, ends, strict=True)
        return cls(config, tuple(_phase(phase, first, last) for phase, first, last in pieces), interval)

    def check_first(self, stage: int) -> None:
        """Raise ValueError if the first phase has a different ZeRO stage than the config."""
        first = self.phases[0].stage
        if first not in (None, stage):
            raise ValueError(
                f"{KEY}.schedule[0].stage: got {first}, but zero_optimization.stage is {stage}; set the first "
                "stage there"
            )

    def path_of(self, phase: int) -> str:
        """Path in the config of a phase."""
        given = self.config[KEY].get("schedule")
        return f"{KEY}.redraw_interval" if given is None else f"{KEY}.schedule[{phase}]"

    def phase_after(self, steps: int) -> int:
        """Index of the phase of the step after `steps` steps."""
        return sum(phase.first_step <= steps + 1 for phase in self.phases) - 1

    def draw_after(self, steps: int) -> int:
        """Number of re-drawn assignments before the step after `steps` steps."""
        return 0 if self.redraw_interval is None else steps // self.redraw_interval

    @property
    def turns(self) -> list[int]:
        """Numbers of steps after which a phase begins, or the assignment is first redrawn."""
        first_draw = [] if self.redraw_interval is None else [self.redraw_interval]
        return sorted({*(phase.first_step - 1 for phase in self.phases), *first_draw})

    def config_after(self, steps: int) -> dict[str, Any]:
        """DeepSpeed config of the step after `steps` steps; its block has no schedule."""
        phase, draw = self.phases[self.phase_after(steps)], self.draw_after(steps)
        block = merge_blocks(_without_schedule(self.config[KEY]), phase.block)
        if draw:
            block["seed"] = block.get("seed", 0) + draw
        return with_stage({**self.config, KEY: block}, phase.stage)


def merge_blocks(block: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A block with changed keys; `coverage` and `holders` replace each other."""
    dropped = _EITHER if any(changes.get(name) is not None for name in _EITHER) else ()
    return {name: value for name, value in block.items() if name not in dropped} | dict(changes)


def with_stage(config: Mapping[str, Any], stage: int | None) -> dict[str, Any]:
    """DeepSpeed config with another ZeRO stage; None keeps it."""
    if stage is None:
        return dict(config)
    zero = config.get(_ZERO)
    return {**config, _ZERO: {**(zero if isinstance(zero, Mapping) else {}), "stage": stage}}


def blocks_of_phases(block: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    """The path, for messages, and the effective block of each phase; of a block without schedule, its own.

    Args:
        block: block with keys of valid types.

    Raises:
        ValueError: problems of phases, one line each.
    """
    base, phases = _without_schedule(block), block.get("schedule")
    problems = list(_problems(phases or ()))
    if type(block.get("total_steps")) is int and not has_shares(phases or ()):
        problems.append(f"{KEY}.total_steps: got {block['total_steps']}, but no phase uses until; remove it")
    if problems:
        raise ValueError("\n".join(problems))
    if phases is None:
        return [(KEY, base)]
    blocks = [merge_blocks(base, _phase(phase, 1, None).block) for phase in phases]
    return [(f"{KEY}.schedule[{index}]", phase) for index, phase in enumerate(blocks)]


def has_shares(phases: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a phase ends at a fraction of all steps."""
    return any(phase.get("until") is not None for phase in phases)


def _without_schedule(block: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in block.items() if name not in ("schedule", "total_steps")}


def _phase(given: Mapping[str, Any], first: int, last: int | None) -> Phase:
    block = {name: value for name, value in given.items() if name not in PhaseEnd.model_fields}
    return Phase(first, last, block, given.get("stage"))


def _problems(phases: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for index, phase in enumerate(phases):
        where = f"{KEY}.schedule[{index}]"
        try:
            ends = PhaseEnd.model_validate(dict(phase))
        except ValidationError as error:
            yield explain(error, phase, where, {"": PhaseEnd})
            continue
        fixed = [name for name in (*FIXED, *OF_SCHEDULE) if name in phase]
        if fixed:
            yield f"{where}: {quoted(fixed)} cannot change in a run; set it outside of the schedule"
        said = [name for name in ("until_step", "until") if getattr(ends, name) is not None]
        if index == len(phases) - 1 and said:
            yield f"{where}.{said[0]}: the last phase lasts until the end of the run; remove it, or add a phase"
        if index < len(phases) - 1 and len(said) != 1:
            yield f"{where}: expected either until_step (last step) or until (fraction of all steps), got {len(said)}"


def _ends(phases: Sequence[Mapping[str, Any]], total: int | None) -> list[int | None]:
    """Last step of each phase."""
    ends = [_end(phase, total, f"{KEY}.schedule[{index}]") for index, phase in enumerate(phases[:-1])]
    for index, (before, end) in enumerate(zip([0, *ends], ends, strict=False)):
        if end <= before:
            raise ValueError(
                f"{KEY}.schedule[{index}]: ends with step {end}, but the phase before it with step {before}; end "
                "it later"
            )
    return [*ends, None]


def _end(phase: Mapping[str, Any], total: int | None, where: str) -> int:
    if phase.get("until") is None:
        return int(phase["until_step"])
    if total is None:
        raise ValueError(
            f"{where}.until: got {phase['until']}, but the number of steps is unknown; set total_steps or "
            "scheduler.params.total_num_steps, or use until_step"
        )
    return max(1, round(phase["until"] * total))


def _total_steps(config: Mapping[str, Any], block: Mapping[str, Any]) -> int | None:
    """Number of steps of the run, from the block or else from the LR scheduler."""
    scheduler = config.get("scheduler")
    params = scheduler.get("params") if isinstance(scheduler, Mapping) else None
    known = params.get("total_num_steps") if isinstance(params, Mapping) else None
    return next((value for value in (block.get("total_steps"), known) if type(value) is int), None)


# ---- the number of steps, from the host -----------------------------------------------------------------------------


def phases_of(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The phases of the schedule in a DeepSpeed config that has not been validated."""
    block = config.get(KEY)
    if not isinstance(block, Mapping) or block.get("enabled") is False:
        return []
    schedule = block.get("schedule")
    return [phase for phase in schedule if isinstance(phase, Mapping)] if isinstance(schedule, list) else []


def never_begins(config: Mapping[str, Any], steps: int) -> str | None:
    """A warning if the last phase would begin after the end of the run."""
    ends = [phase["until_step"] for phase in phases_of(config) if type(phase.get("until_step")) is int]
    if not ends or not 0 < steps <= max(ends):  # 0: the Trainer only evaluates
        return None
    return (
        f"{KEY}.schedule: the run ends with step {steps}, but the last phase would begin after step {max(ends)}; it is "
        "not reached"
    )


def fill_total_steps(config: dict[str, Any], steps: int) -> bool:
    """Set `total_steps` if a phase ends at a fraction of it and the block lacks it. Returns whether it was set."""
    if not has_shares(phases_of(config)) or config[KEY].get("total_steps") not in (None, "auto"):
        return False
    config[KEY] = {**config[KEY], "total_steps": steps}  # a copy: do not change the user's
    return True
