"""Under the Trainer of Transformers the plan changes: by a callback, and by a schedule."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.helpers.ranks import Rank
from tests.helpers.trainers import trainer_of
from tests.helpers.training import assert_identical, dense_state

BACKWARD: dict[str, Any] = {"regime": "backward", "strategy": "neuron"}
OPTIONS: dict[str, Any] = {"lr_scheduler_type": "linear", "learning_rate": 5e-3}
SCHEDULE: list[dict[str, Any]] = [
    {"until": 0.5, "coverage": 0.5},
    {"until_step": 5, "coverage": 0.5, **BACKWARD},
    {"coverage": 1.0},
]


def another_plan_on_the_way(rank: Rank) -> None:
    """A callback asks for it after a step, and after a save: as if the run had been resumed under it."""
    from transformers import TrainerCallback

    class Replans(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 1:
                trainer.model_wrapped.replan({"seed": 5})

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 2:
                trainer.model_wrapped.replan(BACKWARD)

    options = OPTIONS | {"gradient_checkpointing": True, "gradient_accumulation_steps": 2}
    trainer = trainer_of(rank.folder / "whole", {}, config={}, callbacks=[Replans()], **options)
    trainer.train()
    again = trainer_of(rank.folder / "again", BACKWARD | {"seed": 5}, config={}, **options)
    again.train(resume_from_checkpoint=str(rank.folder / "whole" / "checkpoint-2"))
    engine, other = trainer.model_wrapped, again.model_wrapped
    assert engine.plan == other.plan
    assert_identical(dense_state(engine), dense_state(other))
    assert [logs.get("learning_rate") for logs in trainer.state.log_history[-3:]] == [
        logs.get("learning_rate") for logs in again.state.log_history[-3:]
    ]
    assert trainer.evaluate()["eval_loss"] == again.evaluate()["eval_loss"]


def a_schedule_ends_dense(rank: Rank) -> None:
    """Fractions of the Trainer's own steps; a run that is resumed inside a phase is the one without an interruption."""
    from transformers import TrainerCallback

    class Watches(TrainerCallback):
        def __init__(self) -> None:
            self.phases: list[int] = []

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.phases.append(of_run[-1].model_wrapped.phase)

    options = OPTIONS | {"max_steps": 6, "gradient_accumulation_steps": 2, "save_steps": 2, "eval_steps": 3}
    of_run: list[Any] = []
    seen = []
    for name, resumed in (("whole", None), ("again", str(rank.folder / "whole" / "checkpoint-4"))):
        watches = Watches()
        of_run.append(trainer_of(rank.folder / name, {"schedule": SCHEDULE}, callbacks=[watches], **options))
        of_run[-1].train(resume_from_checkpoint=resumed)
        seen.append(watches.phases)
    whole, again = of_run
    assert seen == [[0, 0, 1, 1, 2, 2], [2, 2]], "after each step that of the next one"
    engine, other = whole.model_wrapped, again.model_wrapped
    assert engine.plan.is_whole
    assert engine.plan == other.plan
    assert_identical(dense_state(engine), dense_state(other))
    logged = [[logs for logs in each.state.log_history if "phase" in logs] for each in of_run]
    assert logged[0] == logged[1], "those of before come with the checkpoint"
    assert ["subnetwork_loss" in logs for logs in logged[0]] == [True, True, True, False, False, False]
    last = [each.state.log_history[-1] for each in of_run]
    assert ["train_subnetwork_loss" in logs for logs in last] == [True, False], "the mean of a process's own steps"
    assert whole.evaluate()["eval_loss"] == again.evaluate()["eval_loss"]


def _cases(size: int, options: pytest.Config) -> Iterator[tuple[str, Any]]:
    for check in (another_plan_on_the_way, a_schedule_ends_dense):
        yield check.__name__, check


@pytest.mark.checks(2, _cases)
def test_trainer_plans(outcome: str | None) -> None:
    assert outcome is None, outcome
