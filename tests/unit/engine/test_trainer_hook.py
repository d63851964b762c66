"""What is patched of the Trainer, where that is still there."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import transformers.trainer
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

import sdp_deepspeed  # noqa: F401  patches both
from sdp_deepspeed.config import KEY
from sdp_deepspeed.engine.trainer_hook import note_step, patch_trainer

FRACTIONS = [{"until": 0.5, "coverage": 0.5}, {"coverage": 1.0}]


def test_a_trainer_of_another_version_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hook runs in programs that have nothing to do with this package."""
    log = transformers.trainer.Trainer.log
    monkeypatch.delattr(transformers.trainer, "get_model_param_count")
    patch_trainer()
    assert transformers.trainer.Trainer.log is log


def config_of(block: Any) -> Any:
    """As the Trainer has it when it knows its number of steps."""
    return HfTrainerDeepSpeedConfig({"train_micro_batch_size_per_gpu": 1, KEY: block})


def finalized(config: Any, steps: int, *, logs: bool = True) -> dict[str, Any]:
    args = SimpleNamespace(get_warmup_steps=lambda steps: 0, should_log=logs)
    config.trainer_config_finalize(args, None, steps)
    return config.config[KEY]


def test_the_trainer_says_what_fractions_are_of() -> None:
    """Also when it trains again for other steps."""
    config = config_of({"schedule": FRACTIONS})
    assert finalized(config, 7) == {"schedule": FRACTIONS, "total_steps": 7}
    assert finalized(config, 9) == {"schedule": FRACTIONS, "total_steps": 9}
    own = config_of({"schedule": FRACTIONS, "total_steps": 30})
    assert [finalized(own, steps)["total_steps"] for steps in (7, 9)] == [30, 30]
    for steps in (7, 0):  # 0: it evaluates
        assert finalized(config_of({"coverage": 0.5}), steps) == {"coverage": 0.5}


def test_a_phase_that_the_trainer_never_reaches_is_told_once() -> None:
    block = {"schedule": [{"until_step": 7, "coverage": 0.5}, {"coverage": 1.0}]}
    with pytest.warns(UserWarning, match="ends with step 7, but the last phase would begin after step 7"):
        finalized(config_of(block), 7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        finalized(config_of(block), 7, logs=False)
        finalized(config_of(block), 8)


def test_teams_cannot_go_back_to_the_best_checkpoint() -> None:
    config = config_of({"coverage": 0.5, "local_steps": {"teams": 2, "every": 2}})
    with pytest.raises(ValueError, match="load_best_model_at_end: got True"):
        config.trainer_config_finalize(SimpleNamespace(load_best_model_at_end=True), None, 7)


class SubnetworkEngine:
    """The name is what it is known by."""

    def __init__(self, trains: bool) -> None:
        self.plan = SimpleNamespace(trains_subnetworks=trains)
        self.coverage, self.phase = 0.5, 0


def labelled(trainer: Any, *, before: bool | None, after: bool, name: str = "loss") -> bool:
    """Whether the Trainer says that a loss is a subnetwork's: of a step under one plan, logged under another."""
    if before is not None:
        trainer.model_wrapped = SubnetworkEngine(before)
        note_step(trainer)
    trainer.model_wrapped, logs = SubnetworkEngine(after), {name: 1.0}
    transformers.trainer.Trainer.log(trainer, logs)
    return f"{name.removesuffix('loss')}subnetwork_loss" in logs


def a_trainer() -> Any:
    """As far as its `log` needs it."""
    control = SimpleNamespace()
    callbacks = SimpleNamespace(on_log=lambda *_: control)
    state = SimpleNamespace(epoch=None, num_input_tokens_seen=0, global_step=1, log_history=[])
    arguments = SimpleNamespace(include_num_input_tokens_seen="no")
    return SimpleNamespace(args=arguments, state=state, callback_handler=callbacks, control=control)


def test_a_loss_is_a_subnetworks_if_that_of_a_step_since_the_last_log_was() -> None:
    """A step that ends with another plan was made under the one before."""
    trainer = a_trainer()
    assert labelled(trainer, before=True, after=True)
    assert labelled(trainer, before=True, after=False)
    assert not labelled(trainer, before=False, after=False)
    assert labelled(trainer, before=False, after=False, name="train_loss"), "the mean of all steps"
    assert not labelled(trainer, before=False, after=True)
    for trains in (True, False):
        assert labelled(a_trainer(), before=None, after=trains) == trains, "a Trainer with steps of its own"
