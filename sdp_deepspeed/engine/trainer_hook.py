"""Patches of Transformers' Trainer: names of losses and norms, number of parameters, `total_steps` of a schedule; with
teams, `evaluate`, `predict` and steps. Patches of Accelerate, below it: the state dict that `save_model` writes."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import wraps
from math import prod
from typing import Any

_LOSSES = {"loss": "subnetwork_loss", "train_loss": "train_subnetwork_loss"}
_NORM = "grad_norm"


def patch_trainer() -> None:
    """For our engines: log the loss of subnetworks under its own name, with coverage and phase, and count the dense
    model's parameters."""
    import transformers.trainer as host

    log, count = host.Trainer.log, getattr(host, "get_model_param_count", None)
    if count is None or hasattr(count, "__wrapped__"):  # renamed in another version, or patched already
        return

    @wraps(log)
    def labelled_log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        engine, team = self.model_wrapped, team_of(self.model_wrapped)
        if "loss" in logs and team is not None:
            logs |= {
                "meetings": team.version,
                "teams": len(team.present),
                "seconds_waiting": team.seconds_waiting,
                "seconds_exchanging": team.seconds_exchanging,
                "bytes_sent": team.bytes_sent,
            }
        elif "loss" in logs and is_ours(engine):
            logs |= {"coverage": engine.coverage, "phase": engine.phase}
        if is_ours(engine) or team is not None:
            names = _LOSSES | {_NORM: f"subnetwork_{_NORM}"}
            logs |= {names[name]: logs.pop(name) for name in _of_subnetworks(self, logs) if name in logs}
        return log(self, logs, *args, **kwargs)

    @wraps(count)
    def dense_count(model: Any, trainable_only: bool = False) -> Any:
        return num_parameters(model, trainable_only) if is_ours(model) else count(model, trainable_only)

    step = host.Trainer.training_step

    @wraps(step)
    def noted_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        note_step(self)
        loss = step(self, *args, **kwargs)
        _follow_team(self)
        return loss

    def with_dense_model(call: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(call)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            is_team = team_of(self.model_wrapped) is not None  # other engines become dense by themselves
            with self.model_wrapped.dense() if is_team else nullcontext():
                return call(self, *args, **kwargs)

        return run

    host.Trainer.evaluate = with_dense_model(host.Trainer.evaluate)
    host.Trainer.predict = with_dense_model(host.Trainer.predict)
    host.Trainer.log, host.get_model_param_count = labelled_log, dense_count
    host.Trainer.training_step = noted_step
    _patch_config()


def note_step(trainer: Any) -> None:
    """Record before a micro-step what of it is a subnetwork's: a schedule may change the plan before logging."""
    if is_ours(trainer.model_wrapped) or team_of(trainer.model_wrapped) is not None:
        noted = vars(trainer).setdefault("sdp_of_subnetworks", set())
        noted.discard(_NORM)
        noted.update(_trained_by_subnetworks(trainer.model_wrapped))


def _trained_by_subnetworks(engine: Any) -> set[str]:
    """Names of the Trainer's logs that are a subnetwork's under the engine's plan. In a team the gradient norm is, too,
    also at C = 1."""
    if team_of(engine) is not None:
        return {*_LOSSES, _NORM}
    return {*_LOSSES} if engine.plan.trains_subnetworks else set()


def _of_subnetworks(trainer: Any, logs: Mapping[str, float]) -> set[str]:
    """Names of logs that include a subnetwork's: losses since they were logged last and over all of training, the last
    norm."""
    noted: set[str] | None = vars(trainer).get("sdp_of_subnetworks")
    if noted is None:  # a custom training step
        return _trained_by_subnetworks(trainer.model_wrapped)
    vars(trainer)["sdp_of_subnetworks"] = noted - ({"loss"} & logs.keys())
    return noted


def _patch_config() -> None:
    """Fill in the Trainer's number of steps for a schedule with shares, before the engine is built."""
    import transformers.integrations.deepspeed as host

    finalize = getattr(getattr(host, "HfTrainerDeepSpeedConfig", None), "trainer_config_finalize", None)
    if finalize is None:
        return

    @wraps(finalize)
    def finalize_phases(self: Any, args: Any, model: Any, num_training_steps: int) -> Any:
        from sdp_deepspeed.config.schedule import fill_total_steps, never_begins
        from sdp_deepspeed.messages import KEY

        block = self.config.get(KEY)
        if isinstance(block, Mapping) and block.get("local_steps") and getattr(args, "load_best_model_at_end", False):
            raise ValueError(
                f"load_best_model_at_end: got True, but with {KEY}.local_steps a checkpoint is loaded before the start "
                "only; set it to False, and load what the best checkpoint's folder has"
            )
        if vars(self).get("sdp_fills_total_steps"):  # a Trainer may train again, with another number of steps
            self.config[KEY].pop("total_steps", None)
        self.sdp_fills_total_steps = fill_total_steps(self.config, num_training_steps)
        text = never_begins(self.config, num_training_steps)
        if text is not None and args.should_log:
            warnings.warn(text, stacklevel=2)
        return finalize(self, args, model, num_training_steps)

    host.HfTrainerDeepSpeedConfig.trainer_config_finalize = finalize_phases


def num_parameters(engine: Any, trainable_only: bool) -> int:
    """Number of parameters of the dense model."""
    mask = engine._core.mask
    names = [name for name in mask.parameters if mask.trainable[name] or not trainable_only]
    return sum(prod(mask.shapes[name]) for name in names)


def _follow_team(trainer: Any) -> None:
    """Go on at the step of a team's engine, if that has taken over weights of a later step than the Trainer's."""
    if team_of(trainer.model_wrapped) is not None:
        ahead = trainer.model_wrapped.global_steps - 1 - trainer.state.global_step  # the Trainer counts this step later
        for counts, name in (
            (trainer.state, "global_step"),
            (trainer, "_globalstep_last_logged"),
            (trainer, "_initial_global_step"),
        ):
            setattr(counts, name, getattr(counts, name) + max(ahead, 0))


def patch_accelerate() -> None:
    """Make `Accelerator.get_state_dict`, which the Trainer uses to save, return the dense model (collective); keep
    Accelerate from filling in "auto" in our block; and make it see all ranks on CPUs."""
    from accelerate.accelerator import Accelerator
    from accelerate.state import PartialState
    from accelerate.utils.dataclasses import DeepSpeedPlugin

    from sdp_deepspeed.messages import KEY

    original = Accelerator.get_state_dict
    if hasattr(original, "__wrapped__"):  # patched already
        return

    @wraps(original)
    def get_state_dict(self: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
        if (team := team_of(model)) is not None:
            return team.dense_state_dict()  # collective in all teams
        if not is_ours(model):
            return original(self, model, *args, **kwargs)
        from deepspeed.checkpoint.utils import clone_tensors_for_torch_save

        with model.dense():  # state dicts are whole, even under tensor parallelism
            return clone_tensors_for_torch_save(model.module.state_dict())

    fill = DeepSpeedPlugin.fill_match

    @wraps(fill)
    def fill_match(self: Any, ds_key_long: str, *args: Any, **kwargs: Any) -> None:
        if not ds_key_long.startswith(f"{KEY}."):
            fill(self, ds_key_long, *args, **kwargs)

    start = PartialState.__init__

    @wraps(start)
    def __init__(self: Any, cpu: bool = False, **kwargs: Any) -> None:
        start(self, cpu or _runs_deepspeed_on_cpus(), **kwargs)

    Accelerator.get_state_dict = get_state_dict
    DeepSpeedPlugin.fill_match = fill_match
    PartialState.__init__ = __init__


def _runs_deepspeed_on_cpus() -> bool:
    """Whether this is a rank of DeepSpeed on CPUs, which Accelerate would take for the only process: all ranks would
    train on the same data, until an evaluation fails."""
    import torch

    uses_deepspeed = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    return (
        uses_deepspeed
        and "LOCAL_RANK" in os.environ
        and (os.environ.get("DS_ACCELERATOR") == "cpu" or not torch.accelerator.is_available())
    )


def team_of(model: Any) -> Any:
    """The team of a `TeamEngine`, or None."""
    if not hasattr(model, "team"):
        return None
    from sdp_deepspeed.engine.team_engine import TeamEngine

    return model.team if isinstance(model, TeamEngine) else None


def is_ours(model: Any) -> bool:
    """Whether a model is a `SubnetworkEngine`; imports nothing."""
    return "SubnetworkEngine" in {base.__name__ for base in type(model).__mro__}
